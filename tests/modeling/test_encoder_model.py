"""Features of transformers with the encoders: recorded states, compiling, checkpointing, saving, resizing."""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from . import luna, mega
from .decoders import a_third
from .luna import labels, tokens

FAMILIES = {"luna": luna, "mega": mega}
VARIANTS = [(name, variant) for name, family in FAMILIES.items() for variant in family.VARIANTS]


def make(family, head, variant=None, **fields):
    return FAMILIES[family].make(head, **({} if variant is None else FAMILIES[family].VARIANTS[variant]) | fields)


def loss_of(model, **options):
    """Run forward and backward passes on a padded batch and return the output."""
    inputs = tokens([21, 5])
    output = model(**inputs, **labels("ForMaskedLM", inputs), **options)
    output.loss.backward()
    return output


def state(model):
    """Return all gradients (zero if a parameter has none) and all buffers."""
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return gradients | dict(model.named_buffers())


@pytest.mark.parametrize("family, variant", a_third(VARIANTS))
def test_recorded_states(family, variant):
    """Recorded states have their shapes; `test_contract.py` compares results with and without them."""
    model = make(family, "ForMaskedLM", variant)
    recorded = model(**tokens([21, 5]), output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in recorded.hidden_states] == [(2, 21, 24)] * 3
    if family == "mega":
        chunk = model.config.attention_chunk or 21
        assert [x.shape for x in recorded.attentions] == [(2, -(-21 // chunk), chunk, chunk)] * 2
        if model.config.attention_activation == "softmax":
            torch.testing.assert_close(recorded.attentions[0][0].sum(dim=-1).flatten()[:21], torch.ones(21))
        return
    assert [x.shape for x in recorded.packed_hidden_states] == [(2, 6, 24)] * 3
    assert [x.shape for x in recorded.attentions] == [(2, 4, 21, 6)] * 2
    base = model.luna(**tokens([21, 5]), output_packed_attentions=True)
    heads = model.config.num_pack_attention_heads
    assert [x.shape for x in base.packed_attentions] == [(2, heads, 6, 21)] * 2
    torch.testing.assert_close(base.packed_attentions[0].sum(-1), torch.ones(2, heads, 6))
    assert (base.packed_attentions[0][1, :, :, 5:] == 0).all()
    torch.testing.assert_close(recorded.hidden_states[-1], base.last_hidden_state)
    torch.testing.assert_close(recorded.packed_hidden_states[-1], base.packed_last_hidden_state)
    assert model(**tokens([21, 5])).packed_hidden_states is None


@pytest.mark.slow
@pytest.mark.parametrize("family, variant", [("luna", "tied"), ("mega", "batchnorm, norms around")])
def test_compile_trains(family, variant):
    """A compiled training step has the outputs, gradients and batch statistics of an eager one."""
    torch.compiler.reset()  # avoids the recompile limit, which earlier tests in this process may have reached
    states = []
    for compiling in (False, True):
        model = make(family, "ForMaskedLM", variant, num_hidden_layers=1, **FAMILIES[family].NO_DROPOUT).train()
        loss_of(torch.compile(model, fullgraph=True, backend="aot_eager") if compiling else model)
        states.append(state(model))
    torch.testing.assert_close(*states)


@pytest.mark.parametrize(
    "family, variant, reentrant",
    [
        *(("luna", "pre-norm", False), ("luna", "shared layers", True), ("luna", "P not contextual", False)),
        *(("mega", "laplace chunks", True), ("mega", "batchnorm, norms around", False)),
    ],
)
def test_gradient_checkpointing(family, variant, reentrant):
    """Checkpointing changes neither dropout nor gradients nor batch statistics."""
    states, fields = [], {"use_feature_dropout": True} if family == "mega" else {}
    for checkpointing in (False, True):
        model = make(family, "ForMaskedLM", variant, **fields).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(1)
        loss_of(model)
        states.append(state(model))
    torch.testing.assert_close(*states)


SAVED = [
    ("luna", "untied, other pack heads", {"pooling": "packed_attention"}),
    ("luna", "shared layers", {"pooling": "packed_max"}),
    ("luna", None, {"pooling": "mean"}),
    ("mega", "batchnorm, norms around", {"classifier_num_layers": 2}),
    ("mega", "simple chunks, shift, no ffn", {"classifier_num_layers": 1}),
    ("mega", None, {}),
]


@pytest.mark.parametrize("family, variant, fields", SAVED)
def test_save_and_load(tmp_path, family, variant, fields):
    """An Auto class loads a sharded classifier with equal configuration and, up to rounding, equal logits.

    If `variant` is None, the model has real values as inputs.
    """
    model = make(family, "ForSequenceClassification", variant, **({} if variant else FAMILIES[family].VALUES) | fields)
    inputs = tokens([9, 4]) if variant else {"input_values": torch.randn(2, 9)}
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(loaded) is type(model) and loaded.config.to_json_string() == model.config.to_json_string()
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "family, names",
    [
        ("luna", ("luna.embeddings.word_embeddings.weight", "lm_head.decoder.weight")),
        ("mega", ("mega.embedding_layer.word_embeddings.weight", "mlm_head.weight")),
    ],
)
def test_masked_lm_weights(tmp_path, family, names, tied):
    """The model and its encoder can be loaded and resized; input and output weights are identical if tied."""
    model, inputs = make(family, "ForMaskedLM", tie_word_embeddings=tied), tokens([9, 4])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, device_map="auto")
    assert (loaded.get_parameter(names[0]) is loaded.get_parameter(names[1])) == tied
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    encoder = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(encoder(**inputs).last_hidden_state, model.base_model(**inputs).last_hidden_state)
    loaded.resize_token_embeddings(50)
    assert loaded(**inputs).logits.shape == (2, 9, 50) and loaded.config.vocab_size == 50
    torch.testing.assert_close(loaded(**inputs).logits[..., :40], model(**inputs).logits)
