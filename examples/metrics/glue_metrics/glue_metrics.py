"""Metric `glue` of `evaluate` as a local module, the default of run_glue.py, which needs no network access."""

import datasets
import evaluate
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_CORRELATIONS = {
    "pearson": lambda truth, guess: pearsonr(truth, guess).statistic,
    "spearmanr": lambda truth, guess: spearmanr(truth, guess).statistic,
}
_ACCURACY = {"accuracy": accuracy_score}
_SCORES = dict.fromkeys(("sst2", "mnli", "qnli", "rte", "wnli"), _ACCURACY) | {
    "cola": {"matthews_correlation": matthews_corrcoef},
    "mrpc": _ACCURACY | {"f1": f1_score},
    "qqp": _ACCURACY | {"f1": f1_score},
    "stsb": _CORRELATIONS,
}


class GlueMetrics(evaluate.Metric):
    def _info(self):
        if self.config_name not in _SCORES:
            raise ValueError(f"no metric for task {self.config_name!r}; choose one of {', '.join(_SCORES)}")
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions and references: class ids, or scores for stsb, [N]",
            features=datasets.Features({"predictions": value, "references": value}),
        )

    def _compute(self, predictions, references):
        return {name: float(score(references, predictions)) for name, score in _SCORES[self.config_name].items()}
