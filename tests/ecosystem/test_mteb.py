"""mteb evaluates encoders on a task with local rows."""

import pytest
import torch
from datasets import Dataset, DatasetDict

from tests.modeling import luna, mega

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
    """Replace the data of STSBenchmark by local rows."""

    def load(self, *args, **kwargs):
        self.dataset, self.data_loaded = DatasetDict(test=Dataset.from_dict(ROWS)), True

    monkeypatch.setattr(type(mteb.get_task("STSBenchmark")), "load_data", load)


@pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
def test_score_is_the_correlation_of_the_cosines(family, task, tokenizer, tmp_path):
    family.make("ForMaskedLM").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    (result,) = mteb.evaluate(model, mteb.get_tasks(tasks=["STSBenchmark"]), cache=None).task_results
    first, second = (torch.as_tensor(model.encode(ROWS[f"sentence{side}"])) for side in (1, 2))
    expected = spearmanr(torch.cosine_similarity(first, second), ROWS["score"]).statistic
    assert result.get_score() == pytest.approx(expected, abs=1e-4) and abs(expected) > 1e-3
