"""Features of Mega without a row: norms, adaptive vocabularies, dropout of features, and recorded weights."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from luna_mega import MegaForCausalLM
from luna_mega.modeling_mega.modeling_mega import MegaDropout, build_norm
from tests.modeling import mega, mega_decoders
from tests.modeling.luna import tokens

NORMS = ("layernorm", "scalenorm", "rmsnorm", "batchnorm", "syncbatchnorm")


def make_norm(norm_type, width=5, **options):
    """Return a norm whose parameters and running statistics affect the result."""
    norm = build_norm(norm_type, width, **options)
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return norm


@pytest.mark.parametrize("norm_type", NORMS)
def test_half_precision(norm_type):
    """Norms are accurate although squares of 1000, and sums of 4096 such numbers, exceed the range of float16."""
    x = 1000.0 + 100.0 * torch.randn(2, 2048, 5)
    norm = make_norm(norm_type)
    for dtype, tolerance in ((torch.float16, 4e-3), (torch.bfloat16, 3e-2)):
        rounded = x.to(dtype)
        expected = norm(rounded.float())
        copy = build_norm(norm_type, 5).to(dtype)
        copy.load_state_dict(norm.state_dict())
        actual = copy(rounded.requires_grad_())
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
        actual.float().square().sum().backward()
        assert torch.isfinite(rounded.grad).all()


def test_legacy_rms_norm():
    x, norm = torch.randn(2, 7, 5), make_norm("rmsnorm", legacy_rms_norm=True)
    assert torch.equal(norm(x), x * norm.weight)
    assert torch.equal(build_norm("rmsnorm", 5, affine=False, legacy_rms_norm=True)(x), x)


def pair(x, norm_type="batchnorm", **options):
    """Return a batch norm, and that of PyTorch with its weights."""
    norm, plain = make_norm(norm_type, **options).to(x.dtype), nn.BatchNorm1d(5).to(x.dtype)
    plain.load_state_dict(norm.state_dict())
    return norm, plain


@pytest.mark.parametrize("norm_type", ("batchnorm", "syncbatchnorm"))
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_equals_pytorch(norm_type, momentum):
    """Results, gradients and statistics are those of the tokens; with `padded_statistics`, those of all positions."""
    x, mask = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True), torch.rand(3, 7) < 0.7
    for kept, options in ((None, {}), (mask, {}), (mask, {"padded_statistics": True})):
        norm, plain = pair(x, norm_type, **options)
        norm.momentum = plain.momentum = momentum
        chosen = torch.ones_like(mask) if kept is None or options else kept
        weight = torch.randn_like(x)[chosen]
        for _ in range(2):
            actual, expected = norm(x, kept)[chosen], plain(x[chosen])
            torch.testing.assert_close(actual, expected)
            gradients = (
                torch.autograd.grad(y, (x, *module.parameters()), weight)
                for y, module in ((actual, norm), (expected, plain))
            )
            torch.testing.assert_close(*gradients)
        torch.testing.assert_close(norm.state_dict(), plain.state_dict())


def test_batch_of_padding_and_batch_of_one():
    """A batch of padding is not counted, and a single token is normalized to 0."""
    norm = make_norm("batchnorm")
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    assert torch.isfinite(norm(torch.randn(1, 3, 5), torch.zeros(1, 3, dtype=torch.bool))).all()
    assert norm.state_dict().keys() == before.keys()
    assert all(torch.equal(norm.state_dict()[name], tensor) for name, tensor in before.items())
    torch.testing.assert_close(norm(torch.randn(1, 1, 5))[0, 0], norm.bias)
    assert torch.isfinite(norm.running_var).all() and norm.num_batches_tracked == before["num_batches_tracked"] + 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_step_once(reentrant):
    x = torch.randn(2, 4, 5, requires_grad=True)
    norm, plain = pair(x)
    checkpoint(norm, x, use_reentrant=reentrant).square().sum().backward()
    plain(x.flatten(0, 1)).square().sum().backward()
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)


def test_converted_sync_batch_norm():
    """`convert_sync_batchnorm` keeps masks."""
    model, inputs = mega.make("ForSequenceClassification", normalization_type="batchnorm"), tokens([12, 5])
    expected = model(**inputs).logits
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    norms = [module for module in converted.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norms and all(module.synchronized for module in norms)
    assert torch.equal(converted(**inputs).logits, expected)


BANDS = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
KINDS = {
    "tied": BANDS,
    "tied with projections": BANDS | {"tie_adaptive_projections": True, "adaptive_input_factor": 2},
    "tied, wider embedding": BANDS | {"embedding_size": 24},
    "untied": {"adaptive_input_cutoffs": [10], "adaptive_softmax_cutoffs": [15, 25], "adaptive_softmax_factor": 2}
    | {"tie_word_embeddings": False},
    "only softmax": {"adaptive_softmax_cutoffs": [15], "tie_word_embeddings": False},
}


DECODER = {"hidden_size": 16, "initializer_range": 0.3, "scale_embedding": True, "add_lm_hidden_dense_layer": False}


@pytest.mark.parametrize("kind", KINDS)
def test_adaptive_vocabularies(kind, tmp_path):
    """Logits are log-probabilities, the loss equals theirs at the labels, and tied words share their weights."""
    model, ids = mega_decoders.make(vocab_size=40, **DECODER | KINDS[kind]), torch.randint(3, 40, (2, 12))
    labels = ids.clone()
    labels[0, 3:6] = -100
    log_probabilities = model(ids).logits
    torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(2, 12).double())
    assert model.get_output_embeddings() is None  # it has several layers
    output = model(ids, labels=labels)
    assert output.logits is None
    counted = labels[:, 1:] != -100
    chosen = log_probabilities[:, :-1].gather(2, ids[:, 1:, None])[..., 0][counted]
    torch.testing.assert_close(output.loss, -chosen.mean())
    halved = model(ids, labels=labels, num_items_in_batch=2 * counted.sum()).loss
    torch.testing.assert_close(2 * halved, output.loss)
    names = [name for name, _ in model.named_parameters() if "lm_head" in name]
    assert any("words" in name for name in names) == (not model.config.tie_word_embeddings)
    model.save_pretrained(tmp_path)
    again, report = MegaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(again.eval()(ids).logits, log_probabilities)


def test_feature_dropout_drops_channels():
    """It drops other channels in each sequence, also of a padding-free batch."""
    dropout = MegaDropout(0.5, features=True).train()
    dropped = dropout(torch.ones(3, 7, 50))
    assert ((dropped == 0).all(dim=1) | (dropped == 2).all(dim=1)).all()
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert torch.equal(dropout.eval()(torch.ones(3, 7, 50)), torch.ones(3, 7, 50))
    model = mega.make("Model", **mega.NO_DROPOUT | {"hidden_dropout_prob": 0.5, "use_feature_dropout": True}).train()
    states = model(tokens([9])["input_ids"].repeat(1, 2), position_ids=torch.arange(9).repeat(1, 2)).last_hidden_state
    assert not torch.allclose(*states[0].chunk(2))
