"""Further ways to pass inputs; `test_contract.py` has all layouts, and `test_errors.py` wrong arguments."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM

from tests.modeling import decoders, luna, mega
from tests.modeling.contract import CLASSES, MEMBERS, Batch, collate, on_device, soil

FAMILIES = {"luna": luna, "mega": mega}
family = pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])


@family
def test_attention_implementations(family, tmp_path):
    """A folder is loaded with the kernels ("sdpa") or with the reference ("eager"); other values are errors."""
    model, inputs = family.make("ForMaskedLM"), luna.tokens([9, 4])
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    for name in ("sdpa", "eager"):
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.config._attn_implementation == name
        torch.testing.assert_close(loaded(**inputs).logits, expected)
    for name in ("flash_attention_2", "kernels-community/flash-attn3", "paged|eager"):
        for make in (
            model.set_attn_implementation,
            lambda name: AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name),
            lambda name: AutoModelForMaskedLM.from_config(family.tiny_config(), attn_implementation=name),
        ):
            with pytest.raises(ValueError, match="is not supported: \\w+ has its own kernels; omit .* or pass .eager"):
                make(name)


PADDED = {"normalization_type": "batchnorm", "padded_batch_statistics": True, "embedding_norm": True, **mega.NO_DROPOUT}


def test_nan_in_training():
    """NaN at padding changes nothing if padding counts in statistics."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 1, 1]])
    values, found = torch.randn(2, 9, 24) * mask[..., None], []
    for x in (values, soil(values, mask)):
        model = mega.make("Model", **PADDED)
        x = x.detach().requires_grad_()
        output = model.train()(inputs_embeds=x, attention_mask=mask).last_hidden_state[mask.bool()]
        output.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([output.detach(), x.grad, *gradients, *model.buffers()])
    assert all(map(torch.equal, *found)) and found[0][0].isfinite().all()
    assert not found[1][1][mask == 0].any() and found[1][1][mask == 1].any()


@pytest.mark.parametrize("bounds", [[0, 4, 14], [0, 7, 14]])
def test_a_padding_free_batch_has_no_pooler_output(bounds):
    """This holds even if it has as many sequences as rows."""
    model, inputs = mega.make("Model"), luna.tokens([7, 7])["input_ids"]
    assert model(inputs).pooler_output is not None
    assert model(inputs, cu_seq_lens_q=torch.tensor(bounds), max_length_q=10).pooler_output is None


@family
def test_padding_adds_no_computation(family):
    """Unpadding a batch that is three quarters padding removes more than half of the multiplications."""
    inputs, flops = luna.tokens([40, 4, 3, 2, 1]), []
    for unpad in (False, True):
        model = family.make("Model", unpad_inputs=unpad)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**inputs)
        linear = [count for op, count in counter.get_flop_counts()["Global"].items() if op.__name__ in ("addmm", "mm")]
        flops.append(sum(linear))
    assert flops[1] < 0.45 * flops[0]  # Luna's P still has one entry per row


def test_positions_of_padding_have_no_effect():
    """`position_ids` may be `[T]`, as in BERT."""
    model, inputs = luna.make("Model"), luna.tokens([9, 4], "left")
    expected, kept = model(**inputs).last_hidden_state, inputs["attention_mask"].bool()
    for filler in (-1, 1, -3, 1000):
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).masked_fill(~kept, filler)
        assert model(**inputs, position_ids=positions).last_hidden_state[kept].equal(expected[kept])
    ids = inputs["input_ids"][:1]
    assert torch.equal(model(ids, position_ids=torch.arange(9))[0], model(ids)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mega: laplace chunks", "megalodon: heads"])
def test_mega_uses_positions_of_the_mask(name):
    """Mega counts positions from the mask, and accepts `position_ids` of servers and trainers that agree with it."""
    model, (ids, mask) = decoders.make(name), decoders.padded([9, 4], 9, "left")
    positions, expected = mask.cumsum(dim=1) - 1, model(ids, mask).logits
    for given in (positions, positions.masked_fill(mask == 0, 1), positions.masked_fill(mask == 0, -7)):
        assert model(ids, mask, position_ids=given).logits.equal(expected)
    with on_device():
        assert model(ids, mask, position_ids=positions + 1).logits.equal(expected)
    with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
        model(ids, mask, position_ids=positions + 1)
    for second in (mask, mask[:, 6:]):
        past = model(ids[:, :6], mask[:, :6], use_cache=True).cache
        inputs = {"input_ids": ids[:, 6:], "attention_mask": second, "cache": past}
        with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
            model(**inputs, position_ids=positions[:, 6:] + 1)
        torch.testing.assert_close(model(**inputs, position_ids=positions[:, 6:]).logits, expected[:, 6:])


@pytest.mark.parametrize("family", FAMILIES)
def test_channels(family, tmp_path):
    """`[B, T, 1]` is `[B, T]`, and channels with the weights of one channel have the outputs of their sum.

    A folder of Mega before 0.5 has one channel, whatever it saved for images.
    """
    values, member = torch.randn(2, 10, 3, dtype=torch.float64), CLASSES[f"{family} ForSequenceClassification"]
    fields = FAMILIES[family].VALUES | {"pooling": "mean"}
    one, three = member.make(**fields), member.make(**fields, num_channels=3)
    expected = one(input_values=values.sum(-1)).logits
    torch.testing.assert_close(one(input_values=values.sum(-1, keepdim=True)).logits, expected, rtol=0, atol=0)
    weights = one.state_dict()
    name = next(name for name in weights if name.endswith("value_embeddings.weight"))
    three.load_state_dict(weights | {name: weights[name][:, None].expand(-1, 3)})
    torch.testing.assert_close(three(input_values=values).logits, expected)
    assert type(three.config).from_dict(three.config.to_dict()).num_channels == 3
    embedding = three.get_submodule(name.removesuffix(".weight"))
    torch.testing.assert_close(three(inputs_embeds=embedding(values)).logits, expected)
    one.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    old = json.loads(file.read_text(encoding="utf-8")) | ({"num_channels": 3} if family == "mega" else {})
    file.write_text(json.dumps(old), encoding="utf-8")
    loaded, info = type(one).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and loaded.config.num_channels == 1
    three.save_pretrained(tmp_path)
    for channels in (1, 2):
        config = type(three.config).from_pretrained(tmp_path, num_channels=channels)
        for fields in (config.to_dict(), FAMILIES[family].VALUES | {"num_channels": channels}):
            assert type(config).from_dict(fields).num_channels == channels


@torch.no_grad()
@pytest.mark.parametrize("name", ["luna types", "luna types of choices", "mega types"])
def test_token_types(name):
    """Types are embeddings: 0 is the default, other ones change the result, and those that do not exist raise."""
    member = MEMBERS[name]
    model, (inputs, _) = member.make(), collate(member, Batch("left", (9, 4)))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected, types = model(**inputs)[0], inputs["attention_mask"].long()
    assert torch.equal(model(**inputs, token_type_ids=0 * types)[0], expected)
    assert not torch.equal(model(**inputs, token_type_ids=types)[0], expected)
    with pytest.raises(ValueError, match="from [03] to 3; they must be .* the `type_vocab_size` 3 of"):
        model(**inputs, token_type_ids=3 * types)
