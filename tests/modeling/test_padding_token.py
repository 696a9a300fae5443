"""`pad_token_id` only says which tokens are padding: it can change at any time, for all classes and in folders."""

import copy
import json
import pickle
import random

import pytest
import torch
from transformers import AutoConfig, AutoModel, DataCollatorForSeq2Seq

import luna_mega
from tests.modeling.contract import FACTORIES

from . import decoders, luna

CLASSES = FACTORIES
SMALL = 22  # the smallest vocabulary; tokens of the texts are from 9 to 21
LENGTHS = [(9, "right"), (5, "right"), (6, "left")]
LABELS = torch.tensor([[9, 12, 10, 2], [11, 2, -100, -100], [-100, 13, 14, 2]])


def make(name, rng, **fields):
    """Return a model of a class, of Luna with learned or sinusoidal positions."""
    if name.startswith("luna"):
        fields |= {"position_embedding_type": rng.choice(["learned", "sinusoidal"])}
    return CLASSES[name](**fields)


def inputs_of(model, pad):
    """Return the inputs of a model, padded with `pad`, and the mask."""
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, (length, side) in enumerate(LENGTHS):
        mask[row, 9 - length if side == "left" else 0 : 9 if side == "left" else length] = 1
        ids[row] = torch.randint(9, SMALL, (9,), generator=torch.Generator().manual_seed(row))
    inputs = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
    if "Choice" in type(model).__name__:
        return {name: torch.stack([value, value.flip(0)], 1) for name, value in inputs.items()}, mask
    if "Pair" in type(model).__name__:
        inputs |= {f"pair_{name}": value.flip(0) for name, value in inputs.items()}
    if model.config.is_encoder_decoder:
        return inputs | {"labels": LABELS}, (LABELS != -100).long()
    return inputs, mask


def results(model, inputs, mask):
    """Return the results at the tokens, without scores of other tokens than those of the smallest vocabulary."""
    output = model(**inputs)
    found = next(output[name] for name in ("logits", "start_logits", "last_hidden_state") if name in output)
    return found[mask.bool()][..., :SMALL] if found.shape[:2] == mask.shape else found


def change(model, kind):
    """Change the padding token as Trainer or a user does, and return a token with which a tokenizer pads now."""
    config = model.config
    if kind == "added":
        config.pad_token_id = config.vocab_size
        model.resize_token_embeddings(config.vocab_size + 1)
    elif kind == "outside":  # the tokenizer has a token more than the model, or the vocabulary has been cut
        config.pad_token_id = config.vocab_size + 3
    elif kind == "cut":
        config.pad_token_id = SMALL
        model.resize_token_embeddings(SMALL)
    elif kind == "end":
        config.pad_token_id = config.eos_token_id = 2
    else:
        config.pad_token_id = kind
    return 0 if config.pad_token_id is None else config.pad_token_id


@torch.no_grad()
@pytest.mark.parametrize("name", decoders.a_third(CLASSES))
def test_it_may_change_at_any_time(name, tmp_path):
    """Results do not depend on the token, and equal those of the saved model and of one that is loaded with it."""
    rng = random.Random(name)
    model = make(name, rng)
    expected = results(model, *inputs_of(model, 1))
    kinds = rng.sample([0, 1, 7, None, "end", "added", "outside"], 3) + ["cut"] * rng.randrange(2)
    for kind in kinds:
        other = model = copy.deepcopy(model) if rng.random() < 0.5 else pickle.loads(pickle.dumps(model))
        inputs, mask = inputs_of(model, change(model, kind))
        torch.testing.assert_close(results(model, inputs, mask), expected, msg=str(kinds))
        if model.config.is_encoder_decoder:
            assert {side.config.pad_token_id for side in (model.get_encoder(), model.get_decoder())} == {
                model.config.pad_token_id
            }
        unmasked = {key: value for key, value in inputs.items() if "mask" not in key}
        if kind is not None and not (kind == "end" and model.config.is_decoder):
            torch.testing.assert_close(results(model, unmasked, mask), expected, msg=str(kinds))
    other.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(results(loaded, unmasked, mask), results(model, unmasked, mask), rtol=0, atol=0)
    overridden = type(model).from_pretrained(tmp_path, pad_token_id=8)
    torch.testing.assert_close(results(overridden, *inputs_of(model, 8)), expected)


@pytest.mark.parametrize("name", CLASSES)
def test_every_embedding_is_trained(name):
    """The row of the padding token has a gradient where it is a token, and exactly 0 where the mask drops it."""
    rng = random.Random(name)
    model = make(name, rng, **({} if name.endswith("Model") else {"tie_word_embeddings": False}))
    pad = rng.choice((0, 1))
    model.config.pad_token_id = rng.choice((0, 1))
    inputs, mask = inputs_of(model, pad)
    for mask_is_given in (True, False):
        if not mask_is_given:
            inputs |= {key: torch.ones_like(value) for key, value in inputs.items() if "mask" in key}
        model.zero_grad()
        output = model(**inputs)
        sum((x * torch.randn_like(x)).sum() for x in output.values() if getattr(x, "requires_grad", False)).backward()
        assert model.get_input_embeddings().weight.grad[pad].any() != mask_is_given


@pytest.mark.parametrize("stored", ["absent", None, 0, 6])
def test_first_position_of_a_folder(stored, tmp_path):
    """It belongs to the stored padding token, whichever way another one is passed."""
    expected = 5 if stored in ("absent", None) else stored
    model = luna.make("Model", pad_token_id=4, first_position=expected)
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content.pop("first_position") == expected
    content |= {} if stored == "absent" else {"first_position": stored}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    config.update_from_string("pad_token_id=0")
    others = [AutoModel.from_config(config), type(model)(type(config).from_dict(config.to_dict()))]
    for loader in (AutoModel, luna_mega.LunaModel):
        default = {} if stored in (0, 6) else {"first_position": None}
        options = {"pad_token_id": 0}, {"pad_token_id": None} | default, {"config": config}
        others += [loader.from_pretrained(tmp_path, **given) for given in options]
    config = AutoConfig.from_pretrained(tmp_path, pad_token_id=0)
    others.append(AutoModel.from_pretrained(tmp_path, config=config))
    for other in others:
        assert other.config.first_position == other.config.position_offset == expected and not other.config.pad_token_id
        assert other.embeddings.position_embeddings.weight.shape == model.embeddings.position_embeddings.weight.shape
    ids = torch.tensor([[5, 6, 7]])
    for other in others[2:]:
        assert torch.equal(other(ids).last_hidden_state, model(ids).last_hidden_state)


def start_with_padding(model):
    """Return a copy whose targets start with its padding token; both start tokens have the same embedding."""
    with torch.no_grad():
        for weight in {
            id(side.get_input_embeddings()): side.get_input_embeddings().weight
            for side in (model.get_encoder(), model.get_decoder())
        }.values():
            weight[1] = weight[2]
    other = copy.deepcopy(model)
    other.config.decoder_start_token_id = other.generation_config.decoder_start_token_id = 1
    return other


@torch.no_grad()
@pytest.mark.parametrize("family", decoders.TRANSLATING)
def test_targets_that_start_with_padding(family, tmp_path):
    """As those of T5 and Marian: the start token is no padding, wherever the mask is inferred."""
    model = decoders.make_plain(family, is_encoder_decoder=True, pad_token_id=1, decoder_start_token_id=2)
    model.generation_config.eos_token_id = None
    other = start_with_padding(model)
    assert type(other)(other.config).get_input_embeddings().weight[1].all()
    other.save_pretrained(tmp_path)
    loaded = type(other).from_pretrained(tmp_path, dtype=torch.float64)
    source, counted = inputs_of(model, 1)[0], LABELS != -100
    expected, given = model(**source), {key: value for key, value in source.items() if key != "labels"}
    for kind in (other, loaded):
        ids = DataCollatorForSeq2Seq(None, model=kind).model.prepare_decoder_input_ids_from_labels(LABELS)
        for target in ({}, {"decoder_input_ids": ids}):
            found = kind(**source, **target)
            torch.testing.assert_close(found.logits[counted], expected.logits[counted])
            torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(kind(**given, decoder_input_ids=ids).logits[counted], expected.logits[counted])
    options = {"do_sample": False, "max_new_tokens": 5}
    prompts = torch.tensor([[1, 2, 9, 10], [2, 11, 12, 13], [1, 1, 1, 2]])
    for beams in (1, 2):
        for prompt in ({}, {"decoder_input_ids": prompts}):
            started = {name: ids.masked_fill(ids == 2, 1) for name, ids in prompt.items()}
            one, two = (
                network.generate(**given, **target, **options, num_beams=beams)
                for network, target in ((model, prompt), (other, started))
            )
            assert torch.equal(one[:, 4 if prompt else 1 :], two[:, 4 if prompt else 1 :])
    steps, caches = torch.tensor([[1, 9, 1, 10]]).expand(3, -1), []
    for network, ids in ((model, steps.index_fill(1, torch.tensor([0]), 2)), (other, steps)):
        whole, cache, logits = network(**given, decoder_input_ids=ids).logits, None, []
        for column in ids.split([1, 2, 1], dim=1):
            output = network(**given, decoder_input_ids=column, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
        kept = torch.tensor([0, 1, 3])
        torch.testing.assert_close(torch.cat(logits, 1)[:, kept], whole[:, kept])
        caches.append(whole[:, kept])
    torch.testing.assert_close(*caches)
    # After the first call the token is padding again, and its label is not counted.
    cache, later = other(**given, decoder_input_ids=steps[:, :1], use_cache=True).cache, steps[:, 2:]
    labels = later, later.masked_fill(later == 1, -100)
    inputs = [given | {"decoder_input_ids": later, "labels": x, "cache": copy.deepcopy(cache)} for x in labels]
    torch.testing.assert_close(*(other(**x).loss for x in inputs))


@pytest.mark.parametrize("family", decoders.TRANSLATING)
def test_sides_follow_the_model(family):
    """Token ids are those of the model, also if they are changed in one side; copies have sides of their own."""
    model = decoders.make_plain(family, is_encoder_decoder=True, decoder_vocab_size=35)
    copied, shallow = copy.deepcopy(model), copy.copy(model.config)
    model.get_encoder().config.eos_token_id = [7, 8]
    model.config.get_text_config().bos_token_id = 3  # as Trainer does
    copied.config.pad_token_id = shallow.pad_token_id = 9
    for network, expected in ((model, (1, 3, [7, 8])), (copied, (9, 0, 2))):
        for config in (network.config, network.get_encoder().config, network.get_decoder().config):
            assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == expected
            assert not {"_sides", "_whole"} & {*config.to_dict()}
    with pytest.raises(ValueError, match="`config.pad_token_id` is None; set it, or pass `labels`"):
        model.config.pad_token_id = None
        model.prepare_decoder_input_ids_from_labels(LABELS)


FAMILIES = pytest.mark.parametrize("family", decoders.FAMILIES)
ENCODED = pytest.mark.parametrize("family", decoders.TRANSLATING)


@torch.no_grad()
@FAMILIES
@pytest.mark.parametrize("end", [1, [7, 1]])
def test_end_tokens_are_not_masked(family, end, messages):
    """Without a mask the result equals that with a mask of ones, and one message is logged."""
    model = decoders.make_plain(family, pad_token_id=1, eos_token_id=end)
    ids = torch.tensor([[4, 1, 5, 6, 1, 7], [1, 8, 9, 1, 1, 4]])
    expected = model(ids, torch.ones_like(ids), labels=ids)
    for _ in range(2):
        actual = model(ids, labels=ids)
        assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.loss, expected.loss)
    assert len(messages) == 1 and "does not infer an attention mask" in messages[0]


@FAMILIES
def test_embeddings_of_end_tokens_are_trained(family):
    model = decoders.make_plain(family, pad_token_id=1, eos_token_id=[7, 1], tie_word_embeddings=False)
    ids = torch.tensor([[4, 1, 5, 6, 1, 7]])
    model(ids, torch.ones_like(ids), labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[1].any()
    assert type(model)(model.config).get_input_embeddings().weight[1].any()


@torch.no_grad()
def test_encoders_and_other_padding_tokens(messages):
    ids, mask = luna.tokens([6, 3]).values()
    for model in (luna.make("ForMaskedLM", eos_token_id=1), decoders.make_plain("luna", vocab_size=40)):
        assert torch.equal(model(ids).logits, model(ids, mask).logits) and not messages


@torch.no_grad()
@ENCODED
def test_targets_with_end_tokens(family):
    """Targets made from labels keep their end tokens and mask left padding."""
    model = decoders.make_plain(family, is_encoder_decoder=True, eos_token_id=1, decoder_start_token_id=2)
    labels = torch.tensor([[5, 1, 6, 1, -100, -100], [-100, -100, 5, 1, 6, 1]])
    source = {name: value[:1].expand(2, -1) for name, value in decoders.source(model, 1).items()}
    output = model(**source, labels=labels)
    torch.testing.assert_close(output.logits[1, 2:], output.logits[0, :4])
    separate = model(**{name: value[:1] for name, value in source.items()}, labels=labels[:1, :4])
    torch.testing.assert_close(output.logits[0, :4], separate.logits[0])
    torch.testing.assert_close(output.loss, separate.loss)
    target = torch.tensor([[2, 5, 1, 6]])
    first = {name: value[:1] for name, value in source.items()}
    chosen = model.generate(**first, decoder_input_ids=target, max_new_tokens=1, do_sample=False)[0, -1]
    assert chosen == model(**first, decoder_input_ids=target).logits[0, -1].argmax()
