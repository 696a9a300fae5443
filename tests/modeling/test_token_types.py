"""Models without type embeddings accept only token types of 0, which BERT's tokenizer returns.

Types of Luna are embeddings, and embeddings of both families may be narrower than the model.
"""

import pytest
import torch
from transformers import BertTokenizer, pipeline

import luna_mega
from tests.marks import diagonal
from tests.modeling.contract import FACTORIES

from . import decoders, luna, mega

CLASSES = FACTORIES
TYPED = {"luna": {"type_vocab_size": 2}, "mega": {"add_token_type_embeddings": True}}


def inputs_of(name):
    inputs = luna.head_inputs(name.split()[1], [9, 4])
    inputs = {key: x % 30 if "ids" in key else x for key, x in inputs.items()}
    return inputs | ({"decoder_input_ids": inputs["input_ids"]} if "seq2seq" in name else {})


def result(model, **inputs):
    output = model(**inputs)
    return [x for x in output.to_tuple() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(("number", "name"), decoders.a_third(enumerate(CLASSES)))
@torch.no_grad()
def test_only_zeros(number, name):
    model, inputs = CLASSES[name](unpad_inputs=bool(number % 2)), inputs_of(name)
    expected, types = result(model, **inputs), torch.zeros_like(inputs["input_ids"])
    padding = types.masked_fill(inputs["attention_mask"] == 0, 1)
    for zeros in (types, types.int(), padding):
        for one, other in zip(result(model, **inputs, token_type_ids=zeros), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    for ones in (types + 1, types - 1, (inputs["input_ids"] > 9).long()):
        with pytest.raises(ValueError, match="no type embeddings; omit them"):
            model(**inputs, token_type_ids=ones)
    with pytest.raises(ValueError, match="`token_type_ids` must have the shape"):
        model(**inputs, token_type_ids=types[..., :-1])


@pytest.mark.parametrize(
    "name", [name for name in FACTORIES if "For" in name and name.split()[0] in TYPED][::2] + ["luna decoder"]
)
@torch.no_grad()
def test_types_below_the_number_of_embeddings(name):
    model, inputs = CLASSES[name](**TYPED[name.split()[0]]), inputs_of(name)
    expected, types = result(model, **inputs), torch.zeros_like(inputs["input_ids"])
    assert torch.equal(result(model, **inputs, token_type_ids=types)[0], expected[0])
    assert not torch.equal(result(model, **inputs, token_type_ids=types + 1)[0], expected[0])
    padding = types.masked_fill(inputs["attention_mask"] == 0, 9)
    torch.testing.assert_close(result(model, **inputs, token_type_ids=padding)[0], expected[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match="from [02] to 2; they must be .* the `type_vocab_size` 2 of"):
        model(**inputs, token_type_ids=types + 2)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "typed"), [("luna", True), ("mega", False)])
@torch.no_grad()
def test_programs_do_not_read_values(family, typed):
    """Exported programs do not branch on the values of token types."""
    fields = TYPED[family] if typed else {}
    model = CLASSES[f"{family} ForSequenceClassification"](num_hidden_layers=1, **fields).requires_grad_(False)
    inputs = luna.tokens([9, 4])
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    ones = inputs | {"token_type_ids": inputs["attention_mask"]}
    expected = model(**ones if typed else inputs).logits
    program = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(program(**ones).logits, expected, rtol=0, atol=1e-5)


@pytest.fixture
def tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{number}" for number in range(25)]]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)}, model_max_length=32)


# Task -> class without its family, and options of a call.
PIPELINES = {
    "text-classification": ("ForSequenceClassification", {"top_k": None}),
    "token-classification": ("ForTokenClassification", {"ignore_labels": []}),
    "fill-mask": ("ForMaskedLM", {}),
    "feature-extraction": ("Model", {}),
    "zero-shot-classification": ("ForSequenceClassification", {"candidate_labels": ["w1", "w2"]}),
}


@pytest.mark.parametrize(
    ("family", "task"), diagonal(["luna", "mega"], PIPELINES) + [("megalodon", "feature-extraction")]
)
def test_pipelines(family, task, tokenizer, tmp_path):
    """A pipeline needs only the folder; a single text has the same result as in a padded batch."""
    head, options = PIPELINES[task]
    labels = (
        {"label2id": {"contradiction": 0, "neutral": 1, "entailment": 2}, **TYPED["luna"]} if "zero" in task else {}
    )
    CLASSES[f"{family} {head}"](pad_token_id=0, vocab_size=len(tokenizer), **labels).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe, texts = pipeline(task, model=str(tmp_path)), ["w1 w2 [MASK] w3 w4 w5 w6 w7 w8", "w5 [MASK]"]
    for text, together in zip(texts, pipe(texts, batch_size=2, **options), strict=True):
        separate = pipe(text, **options)
        if task == "feature-extraction":
            torch.testing.assert_close(together[0][: len(separate[0])], separate[0], atol=1e-5, rtol=1e-5)
        elif task == "zero-shot-classification":
            assert sum(separate["scores"]) == pytest.approx(1) and together["scores"] == pytest.approx(
                separate["scores"]
            )
        else:
            first, second = ([entry["score"] for entry in found] for found in (separate, together))
            assert len(first) == {"text": 3, "token": len(text.split()), "fill": 5}[task.partition("-")[0]]
            torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "encoder"), [("luna", True), ("megalodon", False)])
def test_generate(family, encoder, tokenizer):
    model = decoders.make_plain(family, **({"is_encoder_decoder": True} if encoder else {}))
    ids, mask = decoders.padded([5, 3], 5, "left")
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    for other in ({}, {"num_beams": 2}, {"use_cache": False}):
        got = model.generate(**options, **other, token_type_ids=torch.zeros_like(ids))
        assert torch.equal(got, model.generate(**options, **other))
    with pytest.raises(ValueError, match="no type embeddings"):
        model.generate(**options, token_type_ids=torch.ones_like(ids))


FIELDS = {"type_vocab_size": 3, "embedding_size": 10}


def typed(inputs):
    ids = inputs["input_ids"]
    return inputs | {"token_type_ids": ((ids * 7) % 3).masked_fill(inputs["attention_mask"] == 0, 9)}


def test_types_are_embeddings():
    model, inputs = luna.make("Model", **FIELDS), luna.tokens([9, 9])
    plain = model(**inputs).last_hidden_state
    types = torch.zeros_like(inputs["input_ids"])
    torch.testing.assert_close(model(**inputs, token_type_ids=types).last_hidden_state, plain)
    other = model(**inputs, token_type_ids=types + 1).last_hidden_state
    assert (other - plain).abs().max() > 1e-3
    table = model.embeddings.token_type_embeddings.weight
    embeds = model.embeddings.word_embeddings(inputs["input_ids"]) + table[1] - table[0]
    torch.testing.assert_close(model(inputs_embeds=embeds).last_hidden_state, other, rtol=0, atol=1e-5)


def test_head_writes_narrow_vectors_and_comes_back(tmp_path):
    model, inputs = luna.make("ForMaskedLM", **FIELDS), typed(luna.tokens([9, 9]))
    assert model.lm_head.decoder.weight is model.luna.embeddings.word_embeddings.weight
    assert model.luna.embeddings.word_embeddings.weight.shape == (40, 10)
    model.save_pretrained(tmp_path)
    again = luna_mega.LunaForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("family", [luna, mega])
def test_inputs_embeds_are_narrow(family):
    """`inputs_embeds` are outputs of the token embedding, before the projection to the model width."""
    with pytest.raises(ValueError, match=r"inputs_embeds \[B, T, 16\], .*got \[2, 9, 24\]"):
        family.make("Model", embedding_size=16)(inputs_embeds=torch.zeros(2, 9, 24))


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForCausalLM"])
def test_tied_mega_heads_need_complete_vectors(name):
    fields = {"embedding_size": 16, "is_decoder": name == "ForCausalLM"}
    model_class = getattr(luna_mega, f"Mega{name}")
    with pytest.raises(ValueError, match="embedding_size=24, .* got 16; or pass tie_word_embeddings=False"):
        model_class(mega.tiny_config(**fields))
    model = model_class(mega.tiny_config(tie_word_embeddings=False, **fields))
    assert torch.isfinite(model(**luna.tokens([9, 4])).logits).all()
