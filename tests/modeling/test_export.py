"""Exported encoders as AOTInductor packages; export itself is tested with each model."""

import shutil
import warnings

import pytest
import torch

from . import luna, mega

COMPILER = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
MAKERS = {
    "luna": lambda: luna.make("ForMaskedLM", num_hidden_layers=1),
    "mega": lambda: mega.make("ForMaskedLM", num_hidden_layers=1, use_chunking=True, chunk_size=8),
}


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="AOTInductor needs a C++ compiler")
def test_ahead_of_time_package(tmp_path):
    """One package serves every batch and length."""
    for name, make in MAKERS.items():  # sequentially, because the second reuses the precompiled torch headers
        check_package(make(), str(tmp_path / f"{name}.pt2"))


def check_package(model, path):
    inputs = luna.tokens([21, 9])
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, shape), strict=False)
        quickly = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # C++ compilation dominates the run time
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=quickly)
        package = torch._inductor.aoti_load_package(path)
        for lengths in ([21, 9], [3, 2], [30, 17, 8]):
            inputs = luna.tokens(lengths)
            kept = inputs["attention_mask"].bool()
            torch.testing.assert_close(package(**inputs)[0][kept], model(**inputs)[0][kept], atol=1e-5, rtol=1e-5)
