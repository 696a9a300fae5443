"""`luna-mega info` and `luna-mega verify` for Megalodon; formulas against PyTorch's counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from luna_mega import MegalodonConfig, MegalodonForCausalLM, MegalodonModel
from luna_mega.inspection import costs
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from luna_mega.kernels.api import use_backend
from luna_mega_cli import main
from tests.inspection.counting import Peak, numbers_kept, padded

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "shared_representation_size": 16,
    "value_size": 56,
    "intermediate_size": 40,
    "ema_projection_size": 4,
    "norm_num_groups": 4,
    "chunk_size": 32,
}
ALL = {"swiglu": True, "rescale_nffn": True, "scale_embedding": True, "tie_word_embeddings": True}
DROPOUT = {"dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
VARIANTS = {
    "plain": {},
    "all options": ALL,
    "no affine norms": {"norm_affine": False},
    "dropout": DROPOUT,
    "many heads": {"num_attention_heads": 4},
    "long chunks": {"chunk_size": 160},
    "many states": {"ema_projection_size": 16, "norm_num_groups": 16},
    "few scores": {"vocab_size": 400, "output_size": 30},
    "many scores": {"vocab_size": 2000},
}


def make(model_class=MegalodonForCausalLM, **fields):
    return model_class(MegalodonConfig(**SIZES | fields))


def inputs(length):
    ids = torch.randint(4, 30, (1, length))
    return {"input_ids": ids, "attention_mask": padded(ids)}


@pytest.mark.parametrize("fields", [{}, ALL, {"output_size": 30}])
def test_flops_equal_the_count_of_pytorch(fields):
    """Except for the moving average, whose operations the counter ignores; over one chunk."""
    model = make(**fields).eval()
    with torch.no_grad(), use_backend("reference"), FlopCounterMode(display=False) as counter:
        model(**inputs(32), use_cache=False)
    average = sum(sum(count.values()) for name, count in counter.get_flop_counts().items() if name.endswith("cema"))
    flops = costs.flops_per_token(model, 32)
    expected = (flops["total"] - flops["moving_average"]) * 32
    assert expected == pytest.approx(counter.get_total_flops() - average, rel=1e-9)
    assert flops["moving_average"] == 2 * 14 * 4 * 32


def test_attention_is_within_chunks():
    model = make()
    attention = {length: costs.flops_per_token(model, length)["attention"] for length in (32, 64, 72)}
    assert attention[32] == attention[64]
    assert attention[72] / attention[64] == pytest.approx((2 * 32**2 + 8**2) / (72 * 32))


@pytest.mark.parametrize(("model_class", "length"), [(MegalodonModel, 640), (MegalodonForCausalLM, 320)])
@pytest.mark.parametrize("name", VARIANTS)
def test_training_activations_equal_tensors_saved_by_autograd(name, model_class, length):
    model, given = make(model_class, **VARIANTS[name]).train(), inputs(length)
    labels = {} if model_class is MegalodonModel else {"labels": given["input_ids"]}
    assert costs.training_activations(model, length) == pytest.approx(numbers_kept(model, given | labels), rel=0.02)


@pytest.mark.parametrize("fields", [{}, ALL, {"hidden_size": 256}, {"intermediate_size": 600}, {"vocab_size": 4000}])
def test_inference_peak(fields):
    model = make(**fields).eval()
    with torch.no_grad(), Peak() as peak:
        model(**inputs(330), use_cache=False)
    assert costs.inference_activations(model, 330) == pytest.approx(peak.peak / 4, rel=0.03)


@pytest.mark.parametrize("length", [1, 32, 103])
def test_cache_size_equals_the_cached_tensors(length, tmp_path):
    model = make().eval()
    with torch.no_grad():
        layers = model(torch.randint(4, 30, (1, length)), use_cache=True).past_key_values.layers
    tensors = [x for layer in layers for x in (vars(layer) | getattr(layer, "tensors", {})).values()]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()]
    kept = sum({x.data_ptr(): x.nbytes for x in tensors}.values())
    model.save_pretrained(tmp_path)
    assert describe(tmp_path, length).activation_bytes["cache"] == kept


def test_info_and_verify_of_a_folder(tmp_path, capsys):
    for name in "ab":
        make(**ALL).save_pretrained(tmp_path / name)
    info = describe(tmp_path / "a")
    model = MegalodonForCausalLM.from_pretrained(tmp_path / "a")
    assert info.parameters["total"] == model.num_parameters() and info.heads == ["causal LM"] and info.length == 32
    assert info.parameters["embeddings"] == 40 * 32 and info.parameters["head"] == 0
    assert info.config["chunk_size"] == 32 and "max_position_embeddings" not in info.config
    assert main(["info", str(tmp_path / "a"), "--length", "500", "--explain"]) == 0
    assert "14 N d" in capsys.readouterr().out
    assert compare(tmp_path / "a", tmp_path / "a", length=70, tolerance=0.0).largest == 0
    other = compare(tmp_path / "a", tmp_path / "b", length=70)
    assert not other.within and [row["layer"] for row in other.layers] == [0, 1, 2]
