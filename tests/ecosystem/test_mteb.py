"""`luna-mega eval --mteb`: a task of mteb for encoders, with local rows instead of the Hub's."""

import json

import pytest
import torch
from datasets import Dataset, DatasetDict

from luna_mega import cli
from tests.modeling import luna, luna_decoders, mega

mteb = pytest.importorskip("mteb", reason="mteb is not installed")
sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from scipy.stats import spearmanr  # noqa: E402

ROWS = {
    "sentence1": [f"w{row} w1 w2" for row in range(5, 21)],
    "sentence2": [f"w{(3 * row) % 35} w{row} w4 w9" for row in range(5, 21)],
    "score": [float(row % 6) for row in range(16)],
}


@pytest.fixture
def task(monkeypatch):
    """STSBenchmark, offline."""

    def load(self, *args, **kwargs):
        self.dataset, self.data_loaded = DatasetDict(test=Dataset.from_dict(ROWS)), True

    monkeypatch.setattr(type(mteb.get_task("STSBenchmark")), "load_data", load)


@pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
def test_score_is_the_correlation_of_the_cosines(family, task, tokenizer, tmp_path, capsys):
    family.make("ForMaskedLM").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert cli.main(["eval", "--json", "--mteb", "STSBenchmark", str(tmp_path / "model")]) == 0
    (score,) = json.loads(capsys.readouterr().out).values()
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    first, second = (torch.as_tensor(model.encode(ROWS[f"sentence{side}"])) for side in (1, 2))
    expected = spearmanr(torch.cosine_similarity(first, second), ROWS["score"]).statistic
    assert score == pytest.approx(expected, abs=1e-4) and abs(expected) > 1e-3


def test_unsupported_inputs_raise(task, tokenizer, tmp_path, capsys):
    """A decoder, an unknown task and arguments of lm-eval raise errors of one line."""

    def error(*arguments, status=1):
        assert cli.main(["eval", "--mteb", *map(str, arguments)]) == status
        return capsys.readouterr().err

    luna_decoders.make().save_pretrained(tmp_path / "decoder")
    luna.make("ForMaskedLM").save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    assert "contains a LunaForCausalLM; mteb evaluates" in error("STSBenchmark", tmp_path / "decoder")
    assert "mteb: " in (text := error("NoSuchTask", tmp_path / "encoder")) and "NoSuchTask" in text
    with pytest.raises(SystemExit, match="2"):
        cli.main(["eval", "--mteb", "STSBenchmark", str(tmp_path / "encoder"), "--tasks", "a"])
    assert "omit all arguments after FOLDER with --mteb" in capsys.readouterr().err
