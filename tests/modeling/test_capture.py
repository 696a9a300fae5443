"""CUDA graphs, checked without a GPU: supported calls read no tensor values, other calls raise an error."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import luna_mega
from luna_mega.kernels import _custom_operator, _export, api
from tests.marks import diagonal
from tests.modeling import decoders
from tests.modeling.decoders import (
    DECODER_ONLY,
    SOME,
    make,
    make_plain,
    padded,
)

pytestmark = pytest.mark.triton
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
LUNA = {"num_attention_heads": 2, "dropout": 0.1, "attention_dropout": 0.1}
SHARED = {"shared_representation_size": 16, "dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
MEGA, MEGALODON = SHARED, SHARED | {"value_size": 64, "chunk_size": 32}
CAUSAL = {"is_decoder": True}
MODELS = {
    "LunaForMaskedLM": LUNA,
    "LunaForSequenceClassification": LUNA,
    "LunaForCausalLM": LUNA | CAUSAL,
    "LunaForConditionalGeneration": LUNA,
    "MegaForMaskedLM": MEGA,
    "MegaForSequenceClassification": MEGA,
    "MegaForCausalLM": MEGA | CAUSAL | {"bidirectional": False, "use_chunking": True, "chunk_size": 32},
    "MegaForConditionalGeneration": MEGA,
    "MegalodonForCausalLM": MEGALODON,
}


class OnlyOnDevice(TorchDispatchMode):
    """Fail if an operator reads or writes a device other than `meta`, on which reading a value fails as well."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        results = operator(*arguments, **(options or {}))
        tensors = [x for x in tree_leaves((arguments, options, results)) if isinstance(x, torch.Tensor)]
        assert all(x.is_meta for x in tensors), f"{operator} uses the memory of the host"
        return results


@pytest.fixture
def on_meta(monkeypatch, triton_device):
    """Run operators on the meta device as eager mode does on a GPU, and record the launches."""
    from luna_mega.kernels.common import triton_launch

    monkeypatch.setattr(_custom_operator, "is_plain", lambda arguments: True)
    with api.use_backend("triton"), triton_launch.recording(triton_launch.Target()) as launches:
        yield launches


def build(name, **fields):
    model = getattr(luna_mega, name)
    with torch.device("meta"):
        return model(model.config_class(**SIZES | MODELS[name] | fields))


def tokens(*shape):
    return torch.empty(shape, dtype=torch.long, device="meta")


@pytest.mark.parametrize("name, masked", diagonal(MODELS, [False, True]))
def test_training_steps(name, masked, on_meta):
    model, ids = build(name).train(), tokens(2, 64)
    labels = tokens(2) if "Classification" in name else ids
    inputs = {"input_ids": ids, "labels": labels} | ({"attention_mask": tokens(2, 64)} if masked else {})
    with OnlyOnDevice():
        model(**inputs).loss.backward()
    assert len(on_meta) > 5


@pytest.mark.parametrize("name", [name for name in MODELS if "Conditional" not in name and "Classif" not in name])
def test_training_steps_of_padding_free_batches(name, on_meta):
    model, ids = build(name).train(), tokens(1, 64)
    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    with OnlyOnDevice():
        model(input_ids=ids, labels=ids, cu_seq_lens_q=bounds, max_length_q=40).loss.backward()


@torch.no_grad()
@pytest.mark.parametrize("name", ["LunaForMaskedLM", "MegaForMaskedLM", "LunaForSequenceClassification"])
def test_inference_of_encoders(name, on_meta):
    model = build(name).eval()
    with OnlyOnDevice():
        model(input_ids=tokens(2, 64), attention_mask=tokens(2, 64))


NAMES = [name for name in DECODER_ONLY if name in SOME]


@pytest.fixture
def decoder(name):
    return make(name).float()


def static_cache(model, ids, mask, length=None):
    cache = model(ids, attention_mask=mask, use_cache=True).cache
    cache.make_static(length)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_decoding_steps(decoder, on_meta):
    with api.use_backend("torch"):
        ids, mask = padded([7, 3], 7, "left")
        cache = static_cache(decoder, ids, mask, 80)
    model = decoder.to("meta")
    for layer in cache.layers:
        for field, tensor in layer.tensors.items():
            setattr(layer, field, tensor.to("meta"))
    with OnlyOnDevice():
        model(tokens(2, 1), cache=cache)
    assert on_meta


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", decoders.weekly_but(["mega: laplace chunks"], NAMES))
def test_compiled_steps(name):
    """Compiled steps need at most two graphs: one, and one with a dynamic number of positions."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model, (ids, mask) = make(name), padded([7, 7], 7, "right")
    caches = [static_cache(model, ids, mask, 20) for _ in range(2)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for token in torch.randint(3, 23, (5, 2, 1), generator=torch.Generator().manual_seed(0)):
        expected, actual = (
            run(token, cache=cache).logits for run, cache in zip((model, compiled), caches, strict=True)
        )
        torch.testing.assert_close(actual, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@torch.no_grad()
def test_errors_of_static_caches():
    model, (ids, mask) = make_plain("mega"), padded([5, 5], 5, "right")
    with pytest.raises(ValueError, match="an empty cache cannot be static"):
        luna_mega.MegaCache(model.config).make_static(9)
    for length in (0, "9", 9.0):
        with pytest.raises(ValueError, match=f"max_length must be an integer of at least 1, got {length!r}"):
            static_cache(model, ids, mask, length)
    for length in (None, 4):
        with pytest.raises(ValueError, match="requires max_length of at least the 5 positions so far"):
            static_cache(model, ids, mask, length)
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


def encode(*names, **fields):
    """Return a function that runs a training step with the inputs of these names."""
    ids = torch.arange(3, 11).expand(2, 8)

    def run():
        model = luna_mega.LunaForMaskedLM(luna_mega.LunaConfig(**SIZES | LUNA | fields)).train()
        model(ids, labels=ids, **{name: ids > 4 if name == "attention_mask" else ids for name in names})

    return run


def step():
    model = make("luna: elu, untied").eval()
    with torch.no_grad():
        model(torch.full((2, 1), 5), cache=model(torch.full((2, 4), 5), use_cache=True).cache)


def attend(**options):
    x = torch.randn(1, 8, 4)
    return lambda: api.gated_attention(x, x, x, None, function="softmax", backend="torch", **options)


BOUNDS = torch.tensor([0, 3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (encode(sparse_prediction=True), "sparse_prediction"),
        (encode(layerdrop=0.1), "layerdrop"),
        (encode("attention_mask", unpad_inputs=True), "unpad_inputs"),
        (encode("position_ids"), "`position_ids`"),
        (encode("seq_idx"), "`seq_idx`"),
        (encode(max_position_embeddings=6), "learned 6"),
        (attend(dropout=0.1), "dropout of attention weights in PyTorch"),
        (attend(cu_seqlens=BOUNDS), "without max_seqlen"),
        (step, "a cache whose tensors are replaced"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_calls_are_rejected(run, what, monkeypatch):
    monkeypatch.setattr(_export, "is_capturing", lambda x: True)
    with pytest.raises(RuntimeError, match=f"a CUDA graph cannot contain .*{what}"):
        run()
