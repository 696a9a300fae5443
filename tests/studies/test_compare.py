"""The table that compares runs, checked against figures computed by hand."""

import json
from pathlib import Path

import pytest

from tests.examples.runs import assert_error


@pytest.fixture
def write(tmp_path):
    """Write the files of a run: its summary and, for pretraining, evaluations (tokens, seconds, loss, accuracy)."""

    def files(name: str, summary: dict, points: tuple = ()) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "all_results.json").write_text(json.dumps(summary))
        names = ("num_input_tokens_seen", "train_seconds", "eval_loss", "eval_accuracy")
        history = [{"loss": 9.0, "step": 1}, *(dict(zip(names, point, strict=False)) for point in points)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        return folder

    return files


def pretrained(loss: float, speed: float = 1000.0) -> dict:
    summary = {"task": "masked language model", "metric": "eval_perplexity", "eval_perplexity": 1.0, "eval_loss": loss}
    return summary | {"model": "luna from scratch", "parameters": 1234, "tokens_per_second": speed}


def test_table(script, write, tmp_path, capsys):
    main = script("report").main
    write("pretrained/luna-0", pretrained(4.0), ((0, 0, 8.0, 0.0), (2000, 60, 4.0, 0.4)))
    write("pretrained/luna-1", pretrained(5.0, 3000.0), ((0, 0, 8.0, 0.0), (2000, 60, 5.0, 0.2)))
    write("pretrained/mega-0", pretrained(3.0), ((0, 0, 8.0, 0.0), (1000, 120, 3.0, 0.5)))  # half the tokens
    for name, model, score in (
        ("a-0", "runs/luna-0", 0.8),
        ("a-1", "runs/luna-1/", 0.9),
        ("b-0", "mega from scratch", 0.5),
    ):
        tuned = {"task": "sst2", "metric": "eval_accuracy", "eval_accuracy": score, "model": model, "parameters": 1234}
        write(f"tuned/{name}", tuned)
    write("tuned/unfinished-0", {"task": "rte", "metric": "eval_accuracy", "model": "runs/luna-0"})

    folders = [str(tmp_path / name) for name in ("pretrained", "tuned")]
    paths = main(["models", *folders, "--output_dir", str(tmp_path / "report")])
    assert "skipped, because it has no evaluation at the end: " in capsys.readouterr().out
    lines = Path(paths["report"]).read_text().splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines[:5]}
    assert cells["model"] == [
        "parameters", "tokens/s in training", "masked tokens after 1,000 tokens", "after 1.0 minutes", "sst2",
    ]  # fmt: skip
    # luna: equal tokens after half of its training, equal time at its end; std of two values = difference / sqrt(2).
    assert cells["luna"] == ["1,234", "2,000", "6.25 ± 0.35, 15.0 ± 7.1 %", "4.50 ± 0.71, 30.0 ± 14.1 %", "85.0 ± 7.1"]
    assert cells["mega"] == ["1,234", "1,000", "3.00, 50.0 %", "5.50, 25.0 %", "–"]
    assert cells["mega from scratch"] == ["1,234", "–", "–", "–", "50.0"]
    assert Path(paths["plot"]).read_bytes().startswith(b"\x89PNG")

    separate = main(["models", folders[1], "--output_dir", str(tmp_path / "tasks")])
    assert "plot" not in separate and "masked" not in Path(separate["report"]).read_text()


def test_causal_models_have_only_losses(script, write, tmp_path):
    main, causal = script("report").main, pretrained(4.0) | {"task": "causal language model"}
    write("runs/llama-0", causal, ((0, 0, 8.0), (2000, 60, 4.0)))
    write("runs/mega-0", causal, ((0, 0, 7.0), (1000, 30, 3.0)))
    paths = main(["models", str(tmp_path / "runs"), "--output_dir", str(tmp_path / "report")])
    header, _, *rows = Path(paths["report"]).read_text().splitlines()[:4]
    assert header.split(" | ")[3:] == ["next tokens after 1,000 tokens", "after 0.5 minutes |"]
    assert [row.split(" | ")[3:] for row in rows] == [["6.00", "6.00 |"], ["3.00", "3.00 |"]]

    write("runs/roberta-0", pretrained(4.0), ((0, 0, 8.0, 0.0), (2000, 60, 4.0, 0.4)))
    assert_error(lambda: main(["models", str(tmp_path / "runs")]), "masked and of causal language models cannot be")


def test_unsupported_inputs_raise(script, write, tmp_path):
    main = script("report").main
    folder = write("luna-0", pretrained(4.0))
    for content, message in (("[]", "contains no names"), ("{", "cannot be read"), ("{}", "no run was evaluated")):
        (folder / "all_results.json").write_text(content)
        assert_error(lambda: main(["models", str(folder)]), message)
    (folder / "all_results.json").write_text(json.dumps(pretrained(4.0)))
    assert_error(lambda: main(["models", str(folder)]), "has no evaluations; pretrain with --eval_strategy steps")
    assert_error(lambda: main(["models", str(tmp_path / "nowhere")]), "there is no all_results.json of a run")
