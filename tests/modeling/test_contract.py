"""Every class in every layout and in every way: see `contract.py`."""

import pytest
import torch
from hypothesis import example, given, strategies as st

from luna_mega.kernels.api import use_backend
from tests.marks import diagonal, slow_but
from tests.modeling import contract, decoders
from tests.modeling.contract import MEMBERS, Batch, Member

FAST = [name for name in MEMBERS if name not in decoders.DECODERS or name in decoders.SOME]
TOKENS = [name for name, member in MEMBERS.items() if member.has_token_results]


@pytest.mark.parametrize("name, layout, way", decoders.with_each(MEMBERS, contract.PADDED, contract.WAYS, fast=FAST))
def test_padded(name, layout, way):
    contract.check_batch(MEMBERS[name], Batch(layout), way)


@pytest.mark.parametrize("name, layout", decoders.with_each(TOKENS, contract.PADDING_FREE, slow=1, fast=TOKENS[::3]))
def test_padding_free(name, layout):
    contract.check_batch(MEMBERS[name], Batch(layout))


@given(contract.encoders(), contract.batches(contract.PADDED), st.sampled_from(contract.WAYS))
@example(MEMBERS["luna sparse"], Batch("left"), "checkpointed")
@example(Member("luna", "ForSequenceClassification", {"pooling": "packed_max"}), Batch("gaps"), "dense")
@example(Member("luna", "ForMaskedLM", {"chunk_size_feed_forward": 1}), Batch("right"), "dense")
@example(MEMBERS["luna Model"], Batch("inferred", (4, 4), 0), "unpadded")
@example(Member("mega", "Model", {"max_positions": 9}), Batch("right", (0, 0)), "unpadded")
def test_random_encoders(member, batch, way):
    contract.check_batch(member, batch, way)


@given(contract.encoders(contract.TOKEN_HEADS), contract.batches(contract.PADDING_FREE))
def test_random_padding_free_batches(member, batch):
    contract.check_batch(member, batch)


# One member for each kernel, of which the first is fast.
KERNELS = ["mega rotary scalenorm", "luna tied", "luna: elu, untied", "mega: laplace chunks", "megalodon: heads"]
KERNELS += ["luna packed_attention", "mega batchnorm, norms around", "luna seq2seq", "mega seq2seq"]
TRITON = diagonal(KERNELS, contract.PADDED)


@pytest.mark.parametrize("name, layout", slow_but(TRITON[:1], TRITON))
def test_triton(name, layout, triton_device):
    """Triton kernels compute in float32."""
    member, batch = MEMBERS[name], Batch(layout)
    inputs, kept = contract.collate(member, batch)
    model = contract.prepare(member, batch, "dense", num_hidden_layers=1).float().to(triton_device)
    with use_backend("triton"):
        found = contract.run(model, {name: x.to(triton_device) for name, x in inputs.items()}, kept)
    reference = contract.expected(member, batch, contract.prepare(member, batch, "dense", num_hidden_layers=1))
    contract.compare(found, reference, scale=1e3)


@pytest.mark.parametrize("name, layout", diagonal(["mega adaptive", *decoders.DECODER_ONLY][::3], ["left", "gaps"]))
def test_no_gradient_flows_through_padding(name, layout):
    """Logits at padding, which label smoothing of Trainer counts, have no gradients in the layers."""
    member, batch = MEMBERS[name], Batch(layout)
    model, (inputs, kept) = contract.prepare(member, batch, "dense"), contract.collate(member, batch)
    del inputs["labels"]
    model(**inputs, use_cache=False).logits[~kept].square().sum().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if "layers." in name and x.grad is not None}
    assert not [name for name, gradient in gradients.items() if gradient.any()]


@pytest.mark.parametrize("name", decoders.a_third(["mega batchnorm, norms around", *contract.CLASSES]))
def test_results_do_not_require_the_precision(name):
    """In float32 a class has the results of float64, and in bfloat16 a training step is finite."""
    member, batch = MEMBERS[name], Batch("gaps")
    inputs, kept = contract.collate(member, batch)
    models = [member.make(dtype) for dtype in (torch.float32, torch.float64)]
    assert {x.dtype for x in models[0].state_dict().values() if x.is_floating_point()} == {torch.float32}
    contract.compare(*(contract.run(model, inputs, kept) for model in models), scale=1e3)
    loss, gradients, results = contract.run(member.make(torch.bfloat16).train(), inputs, kept)
    assert all(x.isfinite().all() for x in (loss, *gradients.values(), *results.values()))
