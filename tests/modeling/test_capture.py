"""CUDA graphs, checked without a GPU: supported calls read no tensor values, other calls raise an error."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import luna_mega
from luna_mega.kernels import _custom_operator, _mode, api
from tests.marks import diagonal
from tests.modeling.contract import CLASSES, Batch, collate, pack
from tests.modeling.decoders import DECODER_ONLY, SOME, make, make_plain, padded

pytestmark = pytest.mark.triton
NAMES = [name for name in CLASSES if name.endswith(("MaskedLM", "SequenceClassification", "decoder", "seq2seq"))]


class OnlyOnDevice(TorchDispatchMode):
    """Fail if an operator reads or writes a device other than `meta`, on which reading a value fails as well.

    Kernels take numbers of the host as arguments, but a graph cannot copy them to the device.
    """

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        results = operator(*arguments, **(options or {}))
        tensors = [x for x in tree_leaves((arguments, options, results)) if isinstance(x, torch.Tensor)]
        numbers = "copy" not in operator._schema.name
        assert all(x.is_meta or (numbers and not x.dim()) for x in tensors), f"{operator} uses the memory of the host"
        return results


@pytest.fixture
def on_meta(monkeypatch, triton_device):
    """Run operators on the meta device as eager mode does on a GPU, and record the launches."""
    from luna_mega.kernels.common import triton_launch

    monkeypatch.setattr(_custom_operator, "is_plain", lambda arguments: True)
    with api.use_backend("triton"), triton_launch.recording(triton_launch.Target()) as launches:
        yield launches


@pytest.mark.parametrize(
    "name, layout",
    diagonal(NAMES, ["inferred", "left"])
    + [(name, "cu_seq_lens") for name in NAMES if name.endswith(("MaskedLM", "decoder"))],
)
def test_training_steps_and_inference(name, layout, on_meta):
    member, batch = CLASSES[name], Batch(layout)
    inputs, _ = (pack if layout == "cu_seq_lens" else collate)(member, batch)
    inputs = {name: x.to("meta") if torch.is_tensor(x) else x for name, x in inputs.items()}
    model = member.make(torch.float32, **member.tables(max(batch.lengths) + batch.extra)).to("meta").train()
    if layout == "inferred":  # targets are made from the labels
        inputs.pop("decoder_input_ids", None)
    with OnlyOnDevice():
        model(**inputs).loss.backward()
        assert len(on_meta) > 5
        if layout == "left":
            with torch.no_grad():
                del inputs["labels"]
                model.eval()(**inputs)


def static_cache(model, ids, mask, length=None):
    cache = model(ids, attention_mask=mask, use_cache=True).cache
    cache.make_static(length)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in DECODER_ONLY if name in SOME])
def test_decoding_steps(name, on_meta):
    model = make(name).float()
    with api.use_backend("torch"):
        cache = static_cache(model, *padded([7, 3], 7, "left"), 80)
    model = model.to("meta")
    for layer in cache.layers:
        for field, tensor in layer.tensors.items():
            setattr(layer, field, tensor.to("meta"))
    with OnlyOnDevice():
        model(torch.empty(2, 1, dtype=torch.long, device="meta"), cache=cache)
    assert on_meta


@torch.no_grad()
def test_errors_of_static_caches():
    model, (ids, mask) = make_plain("mega"), padded([5, 5], 5, "right")
    with pytest.raises(ValueError, match="an empty cache cannot be static"):
        luna_mega.MegaCache(model.config).make_static(9)
    with pytest.raises(ValueError, match="max_length must be an integer of at least 1, got 9.0"):
        static_cache(model, ids, mask, 9.0)
    with pytest.raises(ValueError, match="requires max_length of at least the 5 positions so far"):
        static_cache(model, ids, mask, 4)
    assert static_cache(model, ids[:, :1], mask[:, :1], 1).is_static
    cache = static_cache(model, ids, mask, 6)
    with pytest.raises(ValueError, match="supports one position per call"):
        model(ids[:, :2], cache=cache)
    with torch.enable_grad(), pytest.raises(ValueError, match="without gradients"):
        model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="has a fixed batch size, 2, got 1"):
        cache.batch_select_indices(torch.tensor([0]))
    model(ids[:, :1], cache=cache)
    with pytest.raises(ValueError, match="has max_length=6, and is full"):
        model(ids[:, :1], cache=cache)


IDS = torch.arange(3, 11).expand(2, 8)


def encode(fields, **inputs):
    model = CLASSES["luna ForMaskedLM"].make(torch.float32, **fields).train()
    model(IDS, labels=IDS, **inputs)


@torch.no_grad()
def step():
    model = make("luna: elu, untied")
    model(IDS[:, :1], cache=model(IDS, use_cache=True).cache)


def attend(**options):
    x = torch.randn(1, 8, 4)
    api.gated_attention(x, x, x, None, function="softmax", backend="torch", **options)


REJECTED = {
    "sparse_prediction": lambda: encode({"sparse_prediction": True}),
    "layerdrop": lambda: encode({"layerdrop": 0.1}),
    "unpad_inputs": lambda: encode({"unpad_inputs": True}, attention_mask=IDS > 4),
    "`position_ids`": lambda: encode({}, position_ids=IDS),
    "`seq_idx`": lambda: encode({}, seq_idx=IDS),
    "learned 6": lambda: encode({"max_position_embeddings": 6}),
    "dropout of attention weights in PyTorch": lambda: attend(dropout=0.1),
    "without max_seqlen": lambda: attend(cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32)),
    "a cache whose tensors are replaced": step,
}


@pytest.mark.parametrize("what", REJECTED)
def test_other_calls_are_rejected(what, monkeypatch):
    monkeypatch.setattr(_mode, "is_capturing", lambda x: True)
    with pytest.raises(RuntimeError, match=f"a CUDA graph cannot contain .*{what}"):
        REJECTED[what]()
