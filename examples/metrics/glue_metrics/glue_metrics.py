"""GLUE's metrics as an `evaluate` module that is loaded by path, so nothing is downloaded.

    metric = evaluate.load("examples/metrics/glue_metrics", "mrpc", keep_in_memory=True)
    metric.compute(predictions=[0, 1], references=[0, 1])

The configuration name is the GLUE task, or "accuracy" for any other single-label task.
"""

import datasets
import evaluate
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_DESCRIPTION = "The metrics of the General Language Understanding Evaluation benchmark (Wang et al., 2019)."
_CITATION = """\
@inproceedings{wang2019glue,
  title={GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle={ICLR},
  year={2019}
}"""
_INPUTS = """\
Args:
    predictions: predicted class ids, or scores for stsb, `[N]`.
    references: true class ids, or scores for stsb, `[N]`.
Returns:
    accuracy (sst2, mnli, qnli, rte, wnli, accuracy); accuracy, f1 of class 1 and their mean combined_score (mrpc, qqp);
    matthews_correlation (cola); pearson, spearmanr and their mean combined_score (stsb).
"""


def _correlation(function, references, predictions) -> float:
    # A constant has no correlation; 0 keeps best-model selection alive where NaN would win or lose every comparison.
    if min(predictions) == max(predictions) or min(references) == max(references):
        return 0.0
    return float(function(references, predictions)[0])


def _accuracy(references, predictions) -> dict[str, float]:
    return {"accuracy": float(accuracy_score(references, predictions))}


def _accuracy_and_f1(references, predictions) -> dict[str, float]:
    scores = {**_accuracy(references, predictions), "f1": float(f1_score(references, predictions))}
    return {**scores, "combined_score": sum(scores.values()) / 2}


def _matthews(references, predictions) -> dict[str, float]:
    return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


def _correlations(references, predictions) -> dict[str, float]:
    scores = {
        "pearson": _correlation(pearsonr, references, predictions),
        "spearmanr": _correlation(spearmanr, references, predictions),
    }
    return {**scores, "combined_score": sum(scores.values()) / 2}


_SCORES = {
    "cola": _matthews,
    "mnli": _accuracy,
    "mrpc": _accuracy_and_f1,
    "qnli": _accuracy,
    "qqp": _accuracy_and_f1,
    "rte": _accuracy,
    "sst2": _accuracy,
    "stsb": _correlations,
    "wnli": _accuracy,
    "accuracy": _accuracy,
}


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _INPUTS)
class GlueMetrics(evaluate.Metric):
    def _info(self):
        if self.config_name not in _SCORES:
            raise ValueError(f"no metric for task {self.config_name!r}: choose one of {', '.join(_SCORES)}")
        value = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions, references):
        return _SCORES[self.config_name](references, predictions)
