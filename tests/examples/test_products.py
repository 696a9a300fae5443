"""Scripts compute float32 products with oneDNN on processors that need it, and only if the products stay accurate."""

from functools import partial

import pytest
import torch

from luna_mega.training.products import product_error, use_onednn

AMD = {"cpu_name": "AMD EPYC 9B45", "avx512_bw": True}
SETTING = torch.backends.mkldnn.matmul
EMPTY = ["--model_name_or_path", "{folder}", "--output_dir", "{folder}/out"]


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


def in_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()


def others() -> list:
    """Return the settings of CUDA, and of other operators on the CPU."""
    parts = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends)
    parts += (torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn)
    return [torch.backends.cuda.matmul.allow_tf32, *(part.fp32_precision for part in parts)]


@pytest.mark.parametrize(
    ("device", "cpu", "product", "chosen"),
    [
        ("cpu", AMD, exact, True),
        ("cpu", AMD, in_bfloat16, False),
        ("cpu", AMD, lambda a, b: exact(a, b) * torch.nan, False),
        ("cpu", AMD | {"avx512_bw": False}, exact, False),
        ("cpu", AMD | {"cpu_name": "Intel Xeon"}, exact, False),
        ("cpu", {"sve": True}, exact, False),
        ("cuda", AMD, exact, False),
    ],
    ids=["amd", "bfloat16", "nan", "amd without avx512", "intel", "arm", "gpu"],
)
def test_choice(device, cpu, product, chosen, capsys):
    legacy, before, state = torch.get_float32_matmul_precision(), others(), torch.get_rng_state()
    use_onednn(device, cpu=cpu, product=product)
    assert SETTING.fp32_precision == ("bf16" if chosen else "none") and others() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out.count("\n") == chosen
    SETTING.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == legacy


def test_setting_of_the_user_is_kept():
    SETTING.fp32_precision = "ieee"
    use_onednn("cpu", cpu=AMD, product=exact)
    assert SETTING.fp32_precision == "ieee"


def test_error_of_products():
    assert product_error(exact) < 1e-7 < product_error(torch.matmul) < 5e-6 < 1e-3 < product_error(in_bfloat16)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("run_glue", [*EMPTY, "--task_name=sst2", "--do_eval", "--use_cpu"]),
        ("eval_lm", [*EMPTY, "--device=cpu"]),
        ("demo", []),
    ],
)
def test_scripts(script, monkeypatch, tmp_path, name, options):
    """The script ends with an error after the choice, because there are no models."""
    module, threads = script(name), torch.get_num_threads()
    choose = partial(use_onednn, cpu=AMD, product=exact)
    for place in ("luna_mega.training.use_onednn", "luna_mega.training.runs.use_onednn"):
        monkeypatch.setattr(place, choose)
    if name == "demo":
        monkeypatch.setattr(module, "FIXTURES", tmp_path)
        monkeypatch.setattr(module, "disable_progress_bars", lambda: None)
        monkeypatch.setattr(module, "disable_progress_bar", lambda: None)
        options = ["--output_dir", "{folder}/out"]
    with pytest.raises((SystemExit, OSError)):
        module.main([option.format(folder=tmp_path) for option in options])
    torch.set_num_threads(threads)
    assert SETTING.fp32_precision == "bf16"
