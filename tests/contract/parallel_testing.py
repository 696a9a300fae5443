"""transformers' tensor parallelism tests for all families; `run_contract.py` copies this file next to them."""

from . import test_tensor_parallel_mixin as original

original.TP_DISTRIBUTED_TEST_MODEL_TYPES = None


class TensorParallelTests(original.TensorParallelTesterMixin):
    """The tests of a language model on two processes, and of the plans of `all_model_classes`.

    `model_tester_class` is a tester without dropout.
    """

    @property
    def model_tester(self):
        return self.model_tester_class(self)
