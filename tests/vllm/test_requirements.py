"""The packages that `make test-vllm` installs match the requirements of vLLM's wheel, without CUDA."""

import re
from importlib import metadata

import pytest

WITHOUT = {  # packages that need CUDA, or that only other kinds of models need
    "apache-tvm-ffi", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor",
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvtx", "pynvvideocodec", "quack-kernels", "setuptools", "six",
    "tilelang", "tokenspeed-mla", "torchaudio", "torchcodec", "torchvision",
}  # fmt: skip


def name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_requirements_match_the_wheel(repo_root):
    pytest.importorskip("vllm", reason="vllm is not installed; make test-vllm has an environment with it")
    lines = (repo_root / "requirements/ci-vllm.txt").read_text(encoding="utf-8").splitlines()
    ours = {name(line) for line in lines if line and line[0] not in "#-"}
    theirs = [line for line in metadata.requires("vllm") if "extra ==" not in line]
    assert {name(line) for line in theirs} - WITHOUT == ours - {"pytest"}
