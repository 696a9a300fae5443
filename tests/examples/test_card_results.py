"""Results of fine-tuned models in the card of the model that they began from."""

import json

from huggingface_hub import ModelCard

from tests.examples.runs import assert_refused

CARD = "---\nlicense: mit\ntags:\n- luna\n---\n\n# luna\n\n## Use\n\ntext\n\n## Training\n\n```sh\npython x\n```\n"


def write(folder, **summary):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_section_with_results(script, tmp_path, monkeypatch):
    main, model = script("card_results").main, tmp_path / "luna"
    model.mkdir()
    (model / "README.md").write_text(CARD)
    monkeypatch.chdir(tmp_path)
    for seed, score in ((2, 0.75), (1, 0.25)):
        scores = {"metric": "eval_accuracy", "eval_accuracy": score, "task": "sst2"}
        write(tmp_path / f"runs/sst2-{seed}", model="luna", seed=seed, **scores)
    sts = write(tmp_path / "stsb", model=str(model), seed=1, task="stsb", metric="eval_pearson", eval_pearson=0.5)
    main(["--model", "luna", "--runs", "runs"])
    main(["--model", str(model), "--runs", "runs", str(sts)])
    card = ModelCard.load(model / "README.md")
    assert card.data.license == "mit" and card.data.tags == ["luna"]
    before, _, rest = card.text.partition("## Fine-tuned\n")
    section, _, after = rest.partition("## ")
    assert before.endswith("## Use\n\ntext\n\n") and after == "Training\n\n```sh\npython x\n```\n"
    assert section.strip().splitlines()[-2:] == [
        "| sst2 | accuracy | 0.5000 ± 0.3536 | 1, 2 |",
        "| stsb | pearson | 0.5000 | 1 |",
    ]


def test_refusals(script, tmp_path):
    main = script("card_results").main
    run = write(tmp_path / "run", model="other", seed=1, task="sst2", metric="eval_accuracy", eval_accuracy=0.5)
    assert_refused(lambda: main(["--model", str(tmp_path), "--runs", str(run)]), "README.md is not there")
    (tmp_path / "README.md").write_text(CARD)
    assert_refused(lambda: main(["--model", str(tmp_path), "--runs", str(run)]), "did not begin from .* but from other")
    write(tmp_path / "unscored", model=str(tmp_path), seed=1, task="sst2", metric="eval_accuracy")
    message = "has no evaluation at its end"
    assert_refused(lambda: main(["--model", str(tmp_path), "--runs", str(tmp_path / "unscored")]), message)
    assert (tmp_path / "README.md").read_text() == CARD
