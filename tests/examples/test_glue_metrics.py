import evaluate
import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction

EXPECTED = {
    "cola": {"matthews_correlation": matthews_corrcoef},
    "mnli": {"accuracy": accuracy_score},
    "mrpc": {"accuracy": accuracy_score, "f1": f1_score},
    "qnli": {"accuracy": accuracy_score},
    "qqp": {"accuracy": accuracy_score, "f1": f1_score},
    "rte": {"accuracy": accuracy_score},
    "sst2": {"accuracy": accuracy_score},
    "stsb": {
        "pearson": lambda references, predictions: pearsonr(references, predictions).statistic,
        "spearmanr": lambda references, predictions: spearmanr(references, predictions).statistic,
    },
    "wnli": {"accuracy": accuracy_score},
}
CLASSES = {"mnli": 3}


@pytest.fixture
def load(examples_dir):
    return lambda task: evaluate.load(str(examples_dir / "metrics" / "glue_metrics"), task, keep_in_memory=True)


@pytest.mark.parametrize("task", EXPECTED)
def test_equals_scikit_learn_and_scipy(task, load):
    draw = np.random.default_rng(0)
    if task == "stsb":
        references, predictions = draw.uniform(0, 5, 200), draw.normal(2, 2, 200)
    else:
        references, predictions = draw.integers(0, CLASSES.get(task, 2), (2, 200))
    expected = {name: function(references, predictions) for name, function in EXPECTED[task].items()}
    assert load(task).compute(predictions=predictions, references=references) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("predictions", [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]])
def test_correlation_with_a_constant_is_zero_and_not_nan(predictions, script):
    references = [1.0, 2.0, 3.0] if predictions[0] else [2.5, 2.5, 2.5]
    module = script("run_glue")
    compute = module.make_metrics(module.DataArguments(task_name="stsb"), [])
    result = compute(EvalPrediction(np.array(predictions)[:, None], np.array(references)))
    assert result == {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}


def test_the_metric_of_the_hub_without_network(script):
    module = script("run_glue")
    with pytest.raises(SystemExit, match="--metric_path glue .*doesn't exist on the Hugging Face Hub"):
        module.make_metrics(module.DataArguments(task_name="sst2", metric_path="glue"), [0, 1])


def test_unknown_task(load):
    with pytest.raises(ValueError, match="no metric for task 'squad'.*cola"):
        load("squad")
