"""transformers' tensor parallelism tests for all model types; `run_contract.py` copies this file next to them."""

from . import test_tensor_parallel_mixin as original
from .distributed_testing_utils import run_distributed

original.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
original._init_distributed = lambda tp: run_distributed(tp)  # transformers 5.20 starts processes for every test


class TensorParallelTests(original.TensorParallelTesterMixin):
    """The tests of a language model on two processes. `model_tester_class`: a tester without dropout.

    The plans of `all_model_classes` are checked.
    """

    @property
    def model_tester(self):
        return self.model_tester_class(self)
