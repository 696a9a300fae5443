"""`pad_token_id` only says which tokens are padding: it can change at any time, for all classes and in folders.

`test_contract.py` changes it to a token that the model does not have.
"""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, DataCollatorForSeq2Seq

from tests.modeling import contract, decoders, luna
from tests.modeling.contract import CLASSES, Batch
from tests.modeling.decoders import make_plain, source

LABELS = torch.tensor([[9, 12, 10, 2], [11, 2, -100, -100], [-100, 13, 14, 2]])
ENCODED = pytest.mark.parametrize("family", decoders.TRANSLATING)


@pytest.mark.parametrize("name", CLASSES)
def test_every_embedding_is_trained(name):
    """The row of the padding token has a gradient where it is a token, and exactly 0 where the mask drops it."""
    member = CLASSES[name]
    fields = {} if member.head == "Model" else {"tie_word_embeddings": False}
    model, (inputs, kept) = member.make(**fields), contract.collate(member, Batch("right", (9, 4, 6)))
    inputs |= {key: x.clamp(max=2) for key, x in inputs.items() if key == "labels"}
    model.config.pad_token_id = 3
    for dropped in (True, False):
        for key in [key for key in inputs if key.endswith("input_ids")]:
            mask = inputs[key.replace("input_ids", "attention_mask")]
            inputs[key] = inputs[key].masked_fill(mask == 0, 3)
            mask.fill_(1) if not dropped else None
        contract.run(model, inputs, kept)
        assert model.get_input_embeddings().weight.grad[3].any() != dropped


@pytest.mark.parametrize("stored", ["absent", None, 0, 6])
def test_first_position_of_a_folder(stored, tmp_path):
    """It belongs to the stored padding token, whichever way another one is passed."""
    expected = 5 if stored in ("absent", None) else stored
    model, ids = luna.make("Model", pad_token_id=4, first_position=expected), torch.tensor([[5, 6, 7]])
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content.pop("first_position") == expected
    content |= {} if stored == "absent" else {"first_position": stored}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    config.update_from_string("pad_token_id=0")
    default = {} if stored in (0, 6) else {"first_position": None}
    for given in ({"pad_token_id": 0}, {"pad_token_id": None} | default, {"config": config}):
        other = AutoModel.from_pretrained(tmp_path, **given)
        assert other.config.first_position == other.config.position_offset == expected and not other.config.pad_token_id
        assert torch.equal(other(ids).last_hidden_state, model(ids).last_hidden_state)
    again = type(config).from_dict(config.to_dict())
    assert type(model)(again).embeddings.position_embeddings.weight.shape[0] == 48 + expected


@torch.no_grad()
@ENCODED
def test_targets_that_start_with_padding(family):
    """The start token of T5 and Marian is the padding token; an inferred mask keeps it."""
    model = make_plain(family, is_encoder_decoder=True, pad_token_id=1, decoder_start_token_id=2, eos_token_id=None)
    for side in (model.get_encoder(), model.get_decoder()):
        side.get_input_embeddings().weight[1] = side.get_input_embeddings().weight[2]
    other = copy.deepcopy(model)
    other.config.decoder_start_token_id = other.generation_config.decoder_start_token_id = 1
    given, counted = source(model, 3), LABELS != -100
    expected = model(**given, labels=LABELS)
    ids = DataCollatorForSeq2Seq(None, model=other).model.prepare_decoder_input_ids_from_labels(LABELS)
    for target in ({}, {"decoder_input_ids": ids}):
        found = other(**given, **target, labels=LABELS)
        torch.testing.assert_close(found.logits[counted], expected.logits[counted])
        torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(other(**given, decoder_input_ids=ids).logits[counted], expected.logits[counted])
    options = {"do_sample": False, "max_new_tokens": 5}
    prompts = torch.tensor([[1, 2, 9, 10], [2, 11, 12, 13], [1, 1, 1, 2]])
    for options["num_beams"] in (1, 2):
        for begun, prompt in ((1, {}), (4, {"decoder_input_ids": prompts})):
            started = {name: ids.masked_fill(ids == 2, 1) for name, ids in prompt.items()}
            one = model.generate(**given, **prompt, **options)
            two = other.generate(**given, **started, **options)
            assert torch.equal(one[:, begun:], two[:, begun:])
    # After the first call the token is padding again, and its label is not counted.
    steps = torch.tensor([[1, 9, 1, 10]]).expand(3, -1)
    cache, later = other(**given, decoder_input_ids=steps[:, :1], use_cache=True).cache, steps[:, 2:]
    labels = later, later.masked_fill(later == 1, -100)
    inputs = [given | {"decoder_input_ids": later, "labels": x, "cache": copy.deepcopy(cache)} for x in labels]
    torch.testing.assert_close(*(other(**x).loss for x in inputs))


@ENCODED
def test_sides_follow_the_model(family):
    """Token ids are those of the model, also if they are changed in one side; copies have sides of their own."""
    model = make_plain(family, is_encoder_decoder=True, decoder_vocab_size=35)
    copied = copy.deepcopy(model)
    model.get_encoder().config.eos_token_id = [7, 8]
    text = model.config.get_text_config()
    assert (text.vocab_size, model.config.vocab_size) == (35, 30)
    text.bos_token_id = 3  # as Trainer does
    copied.config.pad_token_id = 9
    for network, expected in ((model, (1, 3, [7, 8])), (copied, (9, 0, 2))):
        for config in (network.config, network.get_encoder().config, network.get_decoder().config):
            assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == expected
    with pytest.raises(ValueError, match="`config.pad_token_id` is None; set it, or pass `labels`"):
        model.config.pad_token_id = None
        model.prepare_decoder_input_ids_from_labels(LABELS)


@pytest.mark.parametrize("end", [1, [7, 1]])
@pytest.mark.parametrize("family", decoders.FAMILIES)
def test_end_tokens_are_not_masked(family, end, messages):
    """Without a mask the result equals that with a mask of ones, and one message is logged."""
    model = make_plain(family, pad_token_id=1, eos_token_id=end, tie_word_embeddings=False)
    ids = torch.tensor([[4, 1, 5, 6, 1, 7], [1, 8, 9, 1, 1, 4]])
    expected = model(ids, torch.ones_like(ids), labels=ids)
    for _ in range(2):
        actual = model(ids, labels=ids)
        assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.loss, expected.loss)
    assert len(messages) == 1 and "does not infer an attention mask" in messages[0]
    actual.loss.backward()
    assert model.get_input_embeddings().weight.grad[1].any()
    assert type(model)(model.config).get_input_embeddings().weight[1].any()


@torch.no_grad()
@ENCODED
def test_targets_with_end_tokens(family):
    """Targets made from labels keep their end tokens and mask left padding."""
    model = make_plain(family, is_encoder_decoder=True, eos_token_id=1, decoder_start_token_id=2)
    labels, first = torch.tensor([[5, 1, 6, 1, -100, -100], [-100, -100, 5, 1, 6, 1]]), source(model, 1)
    output = model(**{name: value.expand(2, -1) for name, value in first.items()}, labels=labels)
    separate = model(**first, labels=labels[:1, :4])
    for logits in (output.logits[0, :4], output.logits[1, 2:]):
        torch.testing.assert_close(logits, separate.logits[0])
    torch.testing.assert_close(output.loss, separate.loss)
    target = torch.tensor([[2, 5, 1, 6]])
    chosen = model.generate(**first, decoder_input_ids=target, max_new_tokens=1, do_sample=False)[0, -1]
    assert chosen == model(**first, decoder_input_ids=target).logits[0, -1].argmax()
