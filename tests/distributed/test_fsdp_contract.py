"""transformers' own FSDP2 tests (`tests/test_fsdp_mixin.py` of the installed version) with causal language models.

The tests run on existing ranks; the mixin itself starts new processes for each test. It supports only causal models.
Two tests are not run: expert parallelism, because there are no experts, and the comparison with a single device, which
`test_fsdp.py` covers more thoroughly.
"""

import importlib
import importlib.metadata
import sys
import types

import pytest
import torch
import torch.distributed as dist
from transformers.testing_utils import _run_fsdp_tests

from tests.contract.run_contract import SourceUnavailableError, common_tests
from tests.distributed import cases

PACKAGE = "tests_of_transformers"
# Newer versions import these names from a file that the source distribution lacks.
HELPERS = {
    "_get_distributed_backend": lambda: "gloo",
    "_get_distributed_device_type": lambda: "cpu",
    "_get_rank_device": lambda rank: torch.device("cpu"),
    "_set_rank_device": lambda rank: None,
    "_start_rank_processes": None,
}
BODIES = {
    "sharding structure, untied": ("_test_fsdp2_sharding_structure_impl", False),
    "sharding structure, tied": ("_test_fsdp2_sharding_structure_impl", True),
    "save and load": ("_test_fsdp2_save_load_impl",),
    "save and load distributed": ("_test_fsdp2_save_load_dcp_impl",),
    "bfloat16": ("_test_fsdp2_bf16_training_impl",),
    "like DDP, untied": ("_test_fsdp2_plan_vs_ddp_impl", False),
    "like DDP, tied": ("_test_fsdp2_plan_vs_ddp_impl", True),
}


def run_bodies(folder: str, config_class: type, fields: dict) -> dict[str, bool]:
    """Run the tests that this version provides; return for each name whether it exists."""
    package, helpers = types.ModuleType(PACKAGE), types.ModuleType(f"{PACKAGE}.distributed_testing_utils")
    package.__path__ = [folder]
    vars(helpers).update(HELPERS)
    sys.modules |= {PACKAGE: package, helpers.__name__: helpers}
    mixin = importlib.import_module(f"{PACKAGE}.test_fsdp_mixin")
    ran = {}
    try:
        for name, (body, *arguments) in BODIES.items():
            if hasattr(mixin, body):
                getattr(mixin, body)(dist.get_rank(), config_class, fields, *arguments)
            ran[name] = hasattr(mixin, body)
    finally:
        torch.use_deterministic_algorithms(False)
    return ran


@pytest.mark.slow
@pytest.mark.skipif(not _run_fsdp_tests, reason="RUN_FSDP_TESTS is off")
@pytest.mark.parametrize("family", ["luna", pytest.param("mega", marks=pytest.mark.exhaustive)])
def test_fsdp_tests_of_transformers(ranks, family):
    try:
        folder = common_tests(importlib.metadata.version("transformers"))
    except SourceUnavailableError as error:
        pytest.skip(str(error))
    sizes = {"hidden_size": 32, "vocab_size": 101, "max_position_embeddings": 64}
    config = cases.FAMILIES[family].tiny_config(is_decoder=True, **sizes)
    ran = ranks(2, run_bodies, str(folder), type(config), config.to_diff_dict())[0]
    assert sum(ran.values()) >= 5, ran
