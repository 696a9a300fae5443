"""`make demo`: every step works, and each comparison can fail."""

import re

import pytest
import torch


@pytest.fixture
def demo(script, monkeypatch):
    """Return the demo with few sentences; it sets the number of threads and progress bars of the process."""
    module, threads = script("demo"), torch.get_num_threads()
    load = module.load_sentences
    monkeypatch.setattr(module, "load_sentences", lambda seed: {k: v.select(range(64)) for k, v in load(seed).items()})
    monkeypatch.setattr(module, "disable_progress_bars", lambda: None)
    monkeypatch.setattr(module, "disable_progress_bar", lambda: None)
    yield module
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_step_in_the_folder_of_an_earlier_run(demo, with_code, tmp_path, capsys):
    torch.set_num_threads(2)
    (tmp_path / "models" / "converted" / "old").mkdir(parents=True)
    results = demo.main(["--num_train_epochs=1", "--output_dir", str(tmp_path)])
    assert torch.get_num_threads() == 1
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d)\. ", printed, re.MULTILINE) == list("123456")
    assert len(re.findall(r"^  \d+ s$", printed, re.MULTILINE)) == 6
    assert "within 1e-05 of the largest value" in printed
    assert all(f"{name} {value:.3f}" in printed for name, value in results.items())
    assert not (tmp_path / "models" / "converted" / "old").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"accuracy.png", "models"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_models_learn(script, tmp_path):
    results = script("demo").main(["--output_dir", str(tmp_path)])
    assert min(results.values()) > 0.85, results


def test_sentences_have_no_duplicates_and_both_parts_have_every_class(script):
    data = script("demo").load_sentences(0)
    texts = [text for rows in data.values() for text in rows["text"]]
    assert len(texts) > 2000
    assert set(data["test"]["labels"]) == {0, 1, 2} == set(data["train"]["labels"])
    assert data["test"]["text"][:] != script("demo").load_sentences(1)["test"]["text"][:]


def test_other_logits_are_an_error(demo, monkeypatch):
    saved = demo.load_file

    def changed(file):
        tensors = saved(file)
        return tensors | {"logits": tensors["logits"] + 1e-3}

    monkeypatch.setattr(demo, "load_file", changed)
    with pytest.raises(SystemExit, match="the logits differ from those of transformers 4.46"):
        demo.load_folder_of_transformers_4()


def test_other_outputs_of_fairseq_are_an_error(demo, monkeypatch, tmp_path, capsys):
    saved = demo.load_file
    monkeypatch.setattr(
        demo,
        "load_file",
        lambda file: (
            {name: 1.001 * x for name, x in saved(file).items()} | {"A.src_tokens": saved(file)["A.src_tokens"]}
        ),
    )
    with pytest.raises(SystemExit) as stop:
        demo.convert_checkpoint_of_fairseq(tmp_path / "models" / "converted")
    assert stop.value.code == 1 and "MORE THAN 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(("program", "message"), [("print(0.5)", "the scores differ"), ("1 / 0", "ZeroDivisionError")])
def test_another_result_without_the_package_is_an_error(demo, program, message, monkeypatch, tmp_path):
    demo.train("luna", demo.load_sentences(0), demo.Arguments(num_train_epochs=0.1), tmp_path)
    monkeypatch.setattr(demo, "WITHOUT_PACKAGE", program)
    with pytest.raises(SystemExit, match=message):
        demo.load_without_package(tmp_path, "a message without parts")


@pytest.mark.parametrize(
    ("option", "message"),
    [("--learning_rate=nan", "nan must be a finite number"), ("--num_train_epochs=-1", "must be at least 0")],
)
def test_options_are_checked_first(demo, option, message):
    with pytest.raises(SystemExit, match=message):
        demo.main([option])
