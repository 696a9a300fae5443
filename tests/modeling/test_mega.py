"""What only Mega has: norms, relative biases, chunks, adaptive vocabularies, and dropout of features."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.modeling_mega.modeling_mega import (
    MegaDropout,
    MegaRotaryRelativeBias,
    MegaSimpleRelativeBias,
    build_norm,
)
from tests.modeling import decoders, mega, mega_decoders
from tests.modeling.contract import on_device
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
    x = torch.randn(2, 7, 5)
    norm = make_norm("rmsnorm", legacy_rms_norm=True)
    assert torch.equal(norm(x), x * norm.weight)
    assert torch.equal(build_norm("rmsnorm", 5, affine=False, legacy_rms_norm=True)(x), x)


@pytest.mark.parametrize("norm_type", ("batchnorm", "syncbatchnorm"))
def test_batch_norm_equals_pytorch(norm_type):
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    norm = make_norm(norm_type).double()
    plain = nn.BatchNorm1d(5).double()
    plain.load_state_dict(norm.state_dict())
    weight = torch.randn_like(x)
    for _ in range(2):
        actual, expected = norm(x), plain(x.flatten(0, 1)).view_as(x)
        torch.testing.assert_close(actual, expected)
        for a, b in zip(
            torch.autograd.grad(actual, (x, *norm.parameters()), weight),
            torch.autograd.grad(expected, (x, *plain.parameters()), weight),
            strict=True,
        ):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    assert not norm.running_mean.requires_grad and not norm.running_var.requires_grad


def test_batch_statistics_of_real_tokens():
    x, mask = torch.randn(2, 9, 5, dtype=torch.float64), torch.arange(9) < torch.tensor([[9], [4]])
    norm, packed = make_norm("batchnorm").double(), make_norm("batchnorm").double()
    packed.load_state_dict(norm.state_dict())
    actual = norm(x, mask)
    torch.testing.assert_close(actual[mask], packed(x[mask][None])[0])
    torch.testing.assert_close(norm.state_dict(), packed.state_dict())
    padded = make_norm("batchnorm", padded_statistics=True).double()
    complete = make_norm("batchnorm").double()
    complete.load_state_dict(padded.state_dict())
    torch.testing.assert_close(padded(x, mask), complete(x))
    assert (actual - padded(x, mask)).abs().max() > 1e-2


def test_batch_of_padding_and_batch_of_one():
    norm = make_norm("batchnorm")
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    assert torch.isfinite(norm(torch.randn(1, 3, 5), torch.zeros(1, 3, dtype=torch.bool))).all()
    assert torch.equal(norm.running_mean, before["running_mean"])
    assert torch.equal(norm.running_var, before["running_var"])
    assert torch.isfinite(norm(torch.randn(1, 1, 5))).all()
    assert torch.isfinite(norm.running_var).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_step_once(reentrant):
    norm, plain = make_norm("batchnorm"), make_norm("batchnorm")
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(2, 4, 5, requires_grad=True)
    checkpoint(norm, x, use_reentrant=reentrant).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)


def test_simple_bias():
    bias = MegaSimpleRelativeBias(6)
    nn.init.normal_(bias.rel_pos_bias)
    table = bias.rel_pos_bias.detach()
    assert torch.equal(bias(6), table) and torch.equal(bias(2), table[4:7])
    shifted = MegaSimpleRelativeBias(6, center=3)
    shifted.load_state_dict(bias.state_dict())
    assert torch.equal(shifted(3), table[1:6])
    with pytest.raises(ValueError, match="11 entries.* at most 6 positions, got 7"):
        bias(7)
    with pytest.raises(ValueError, match="entry 3, supports at most 4 positions, got 5"):
        shifted(5)
    assert bias.bfloat16()(4).dtype == torch.float32
    assert list(bias.state_dict()) == ["rel_pos_bias"]


def test_rotary_bias():
    """The bias at each distance is the product of the two rotated vectors."""
    bias = MegaRotaryRelativeBias(8).double()
    for parameter in bias.parameters():
        nn.init.normal_(parameter)
    frequency = torch.exp(torch.arange(4, dtype=torch.float64) * -(math.log(10000.0) / 4))
    angle = torch.arange(9, dtype=torch.float64)[:, None] * frequency

    def rotate(vector):
        first, second = vector.expand(9, 8).chunk(2, dim=1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    matrix = rotate(bias.alpha) @ rotate(bias.b_param).T
    vector = bias(9)
    for i in range(9):
        torch.testing.assert_close(vector[8 - i : 17 - i], matrix[i])
    torch.testing.assert_close(bias(4), vector[5:12])
    assert sorted(bias.state_dict()) == ["alpha", "b_param"]
    assert bias.half()(5).dtype == torch.float32
    with pytest.raises(ValueError, match="even width, got 7"):
        MegaRotaryRelativeBias(7)


def test_a_decoder_has_one_direction(tmp_path):
    """`is_decoder` determines `bidirectional`; loading an encoder with inconsistent values raises an error."""
    for decoder in (True, False):
        config = mega.tiny_config(is_decoder=decoder)
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["bidirectional"]
        assert config.bidirectional is saved is MegaConfig.from_pretrained(tmp_path).bidirectional is not decoder
    with pytest.raises(Exception, match="is_decoder=True requires bidirectional=False"):
        MegaConfig.from_pretrained(tmp_path, is_decoder=True)
    assert MegaConfig.from_pretrained(tmp_path, is_decoder=True, bidirectional=False).is_decoder


def test_odd_widths_and_lengths_of_the_bias_table():
    """The simple bias supports odd widths; its table limits the length, and the legacy table the chunk size."""
    model = mega.make("Model", shared_representation_size=13, relative_positional_bias="simple")
    assert torch.isfinite(model(**tokens([9, 4])).last_hidden_state).all()
    model = mega.make("Model", relative_positional_bias="simple", legacy_bias_table=True, chunk_size=24)
    assert torch.isfinite(model(**tokens([24])).last_hidden_state).all()
    with pytest.raises(ValueError, match="24 positions, got 25"):
        model(**tokens([25]))
    for fields in ({}, {"relative_positional_bias": "simple", "use_chunking": True, "chunk_size": 24}):
        mega.make("Model", **fields)(**tokens([49]))


def test_chunk_size_of_a_loaded_model_can_be_changed():
    """As in the evaluation of the language models, with longer chunks than in training."""
    fields = {"is_decoder": True, "bidirectional": False, "use_chunking": True, "relative_positional_bias": "rotary"}
    model, expected = (mega.make("Model", chunk_size=chunk, **fields).eval() for chunk in (4, 8))
    expected.load_state_dict(model.state_dict())
    inputs = tokens([19, 19])
    before = model(**inputs)[0]
    model.config.chunk_size = 8
    after = model(**inputs)[0]
    torch.testing.assert_close(after, expected(**inputs)[0])
    assert not torch.allclose(after, before)


BANDS = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
KINDS = {
    "tied": BANDS,
    "tied with projections": BANDS | {"tie_adaptive_projections": True, "adaptive_input_factor": 2},
    "tied, wider embedding": BANDS | {"embedding_size": 24},
    "untied": {
        "adaptive_input_cutoffs": [10],
        "adaptive_softmax_cutoffs": [15, 25],
        "tie_word_embeddings": False,
        "adaptive_softmax_factor": 2,
    },
    "only softmax": {"adaptive_softmax_cutoffs": [15], "tie_word_embeddings": False},
}


def make_adaptive(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 20}
    decoder = {"bidirectional": False, "is_decoder": True, "initializer_range": 0.3, "scale_embedding": True}
    decoder |= {"add_lm_hidden_dense_layer": False}
    return MegaForCausalLM(MegaConfig(**sizes, **decoder, **fields)).double().eval()


@pytest.fixture(params=KINDS)
def model(request):
    return make_adaptive(**KINDS[request.param])


def test_probabilities_and_loss(model):
    ids = torch.randint(3, 40, (2, 12))
    labels = ids.clone()
    labels[0, 3:6] = -100
    log_probabilities = model(ids).logits
    torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(2, 12).double())
    output = model(ids, labels=labels)
    assert output.logits is None
    counted = labels[:, 1:] != -100
    chosen = log_probabilities[:, :-1].gather(2, ids[:, 1:, None])[..., 0][counted]
    torch.testing.assert_close(output.loss, -chosen.mean())
    halved = model(ids, labels=labels, num_items_in_batch=2 * counted.sum()).loss
    torch.testing.assert_close(2 * halved, output.loss)


def test_original_omits_one_word_of_a_tail():
    model, legacy = make_adaptive(**BANDS), make_adaptive(**BANDS, legacy_adaptive_loss=True)
    legacy.load_state_dict(model.state_dict())
    # 11 and 21 are entry 1 of their bands. The original omits entry 1 of each band, because the padding token is 1.
    ids = torch.tensor([[5, 11, 12, 21, 22, 7]])
    log_probabilities = model(ids).logits
    head = model.lm_head.score_head(model.mega(ids).last_hidden_state[0], model.mega.get_input_embeddings())
    classes = head.log_softmax(-1)
    left_out = sum(log_probabilities[0, t, word] - classes[t, 10 + tail] for t, word, tail in ((0, 11, 0), (2, 21, 1)))
    difference = 5 * (model(ids, labels=ids).loss - legacy(ids, labels=ids).loss)
    torch.testing.assert_close(difference, -left_out)


def test_tied_words_have_one_set_of_weights(model, tmp_path):
    names = [name for name, _ in model.named_parameters() if "lm_head" in name]
    assert any("words" in name for name in names) == (not model.config.tie_word_embeddings)
    model.save_pretrained(tmp_path)
    again, report = MegaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.randint(3, 40, (2, 5))
    torch.testing.assert_close(again.eval()(ids).logits, model(ids).logits)
    ids, words = ids[:, :3], again.generate(ids[:, :3], max_new_tokens=4, do_sample=False)
    assert torch.equal(words[:, :3], ids)


def test_no_resizing():
    with pytest.raises(NotImplementedError, match="cannot be resized"):
        make_adaptive(**BANDS).resize_token_embeddings(50)


@torch.no_grad()
@pytest.mark.parametrize("token", [-1, 30])
def test_tokens_outside_adaptive_bands(token):
    """Every token of the vocabulary has an embedding, and tokens outside the bands raise an error."""
    model = mega_decoders.make(**BANDS, adaptive_input_factor=2, adaptive_softmax_factor=2)
    vocabulary = torch.arange(30)[None]
    assert model.get_input_embeddings()(vocabulary).abs().sum(dim=-1).gt(0).sum() >= 29  # all except the padding token
    with pytest.raises(ValueError, match="the vocabulary of this model has 30 tokens"):
        model(torch.cat([vocabulary, torch.tensor([[token]])], dim=1))


ABSENT = mega.VARIANTS["no average, no bias"]


def encode(model, embeddings):
    with torch.no_grad():
        return model(inputs_embeds=embeddings).last_hidden_state


@pytest.mark.parametrize("function", ["softmax", "laplace", "relu2"])
def test_order_matters_only_with_a_part(function):
    """Without both parts, permuted inputs have permuted outputs; an average or a bias makes the order matter."""
    order, embeddings = torch.randperm(11), torch.randn(2, 11, 24, dtype=torch.float64)
    for kept in ((), ("ema_projection_size",), ("relative_positional_bias",)):
        fields = {field: value for field, value in ABSENT.items() if field not in kept}
        model = mega.make("Model", **fields, attention_activation=function, hidden_size=24).double()
        states, permuted = encode(model, embeddings), encode(model, embeddings[:, order])
        if kept:
            assert (permuted - states[:, order]).abs().max() > 1e-3
        else:
            torch.testing.assert_close(permuted, states[:, order])


MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)


@torch.no_grad()
@pytest.mark.parametrize("chunks, device", [(False, True), (True, False), (True, True)])
def test_recorded_states_and_weights_are_in_the_order_of_the_batch(chunks, device):
    fields = {"use_chunking": True, "chunk_size": 4} if chunks else {}
    model = mega.make("Model", **fields).double()
    ids = torch.randint(3, 23, MASK.shape, generator=torch.Generator().manual_seed(0))
    options = {"output_hidden_states": True, "output_attentions": True}
    with on_device(device):
        output = model(ids, attention_mask=MASK, **options)
    for row in range(len(MASK) - 1):
        kept = MASK[row].bool()
        separate = model(ids[row, kept][None], **options)
        for got, reference in zip(output.hidden_states, separate.hidden_states, strict=True):
            torch.testing.assert_close(got[row, kept], reference[0])
        for got, reference in zip(output.attentions, separate.attentions, strict=True):
            if chunks:  # within chunks, weights are indexed by the position in the sequence
                size = min(reference.shape[-1], int(kept.sum()))
                torch.testing.assert_close(got[row, 0, :size, :size], reference[0, 0, :size, :size])
            else:
                torch.testing.assert_close(got[row, 0][kept][:, kept], reference[0, 0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mega seq2seq: softmax", "mega seq2seq: relu2 chunks"])
def test_recorded_states_of_mega(name):
    """`output_attentions=True`, which uses another code path of cross-attention, does not change results."""
    model = decoders.make(name)
    ids, mask = decoders.padded([11, 17, 6], 17, "left")
    inputs = decoders.source(model, 3, "left") | decoders.target(model, ids, mask)
    recorded = model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(model(**inputs).logits[mask.bool()], recorded.logits[mask.bool()])
    decoder, layers = model.config.decoder_config, model.config.num_hidden_layers
    counts = {"cross_attentions": 0, "decoder_attentions": 0, "decoder_hidden_states": 1}
    assert {name: len(recorded[name]) - decoder.num_hidden_layers for name in counts} == counts
    assert (len(recorded.encoder_attentions), len(recorded.encoder_hidden_states)) == (layers, layers + 1)
    for weights in recorded.cross_attentions:
        assert weights.shape == (3, 1, 17, 13)
        assert (weights.permute(0, 3, 1, 2)[inputs["attention_mask"] == 0] == 0).all()
        if decoder.attention_activation == "softmax":
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 17).double())


CHUNK = 8
FUNCTIONS = ("softmax", "laplace", "relu2")


@torch.no_grad()
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_chunk_is_full_attention(function):
    """Chunks only affect sequences that are longer than a chunk."""
    full, inputs, longer = mega.make("Model", attention_activation=function), tokens([CHUNK, 3]), tokens([CHUNK + 1])
    for chunk in (CHUNK, 3 * CHUNK):
        chunked = mega.make("Model", attention_activation=function, use_chunking=True, chunk_size=chunk)
        torch.testing.assert_close(chunked(**inputs).last_hidden_state, full(**inputs).last_hidden_state)
        difference = (chunked(**longer).last_hidden_state - full(**longer).last_hidden_state).abs().max()
        assert difference > 1e-3 if chunk == CHUNK else difference < 1e-5


def test_feature_dropout_drops_channels():
    dropout = MegaDropout(0.5, features=True).train()
    dropped = dropout(torch.ones(3, 7, 50))
    assert ((dropped == 0).all(dim=1) | (dropped == 2).all(dim=1)).all()
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert torch.equal(dropout.eval()(torch.ones(3, 7, 50)), torch.ones(3, 7, 50))


@pytest.mark.parametrize("features", [False, True])
def test_places_of_dropout(features):
    """Every dropout of the configuration is active only in training and differs between two equal sequences."""
    inputs = {name: value.expand(2, -1) for name, value in tokens([9]).items()}
    fields = {"use_feature_dropout": features, "use_chunking": True, "chunk_size": 4}
    for field in mega.NO_DROPOUT:
        model = mega.make("Model", **mega.NO_DROPOUT | {field: 0.5} | fields)
        first, second = model(**inputs).last_hidden_state
        torch.testing.assert_close(first, second)
        dropped, other = model.train()(**inputs).last_hidden_state
        assert not torch.allclose(dropped, other) and not torch.allclose(dropped, first), field
    model = mega.make("ForTokenClassification", **mega.NO_DROPOUT, classifier_dropout=0.5)
    expected = model(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    assert not torch.allclose(model.train()(**inputs).logits, expected)


def test_evaluation_does_not_use_old_weights():
    """Evaluation uses new weights; the original code keeps the old kernel of the moving average."""
    model, inputs = mega.make("Model"), tokens([21])
    model(**inputs).last_hidden_state.sum().backward()
    changed = {name: 0.5 * value for name, value in model.state_dict().items()}
    fresh = mega.HEADS["Model"](model.config).eval()
    for each in (model, fresh):
        each.load_state_dict(changed)
    output = model(**inputs).last_hidden_state
    torch.testing.assert_close(output, fresh(**inputs).last_hidden_state)
    output.sum().backward()
