"""Further ways to pass inputs; `test_contract.py` has all layouts, and `test_errors.py` wrong arguments."""

import inspect
import json
import re

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForMaskedLM,
    DataCollatorWithFlattening,
    Wav2Vec2FeatureExtractor,
    pipeline,
)

import luna_mega
from tests.modeling import decoders, luna, mega
from tests.modeling.contract import soil

FAMILIES = {"luna": luna, "mega": mega}
family = pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
ONE_SEQUENCE = [head for head in luna.HEADS if head != "ForSequencePairClassification"]


@family
@pytest.mark.parametrize("head", ONE_SEQUENCE)
def test_positions_of_all_rows(family, head):
    """`position_ids` `[T]` apply to every row, also if a head reads the inputs before the base model."""
    model, ids = family.make(head), luna.head_inputs(head, [9, 9])["input_ids"]
    assert torch.equal(model(ids, position_ids=torch.arange(9))[0], model(ids)[0])


@family
@pytest.mark.parametrize("head", ONE_SEQUENCE[1:])
def test_positional_arguments_are_those_of_bert(family, head):
    model, inputs = family.make(head), luna.head_inputs(head, [9, 4])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    expected = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"])[0]
    assert torch.equal(model(None, inputs["attention_mask"], None, None, embeds)[0], expected)
    columns = [*inspect.signature(model.forward).parameters][:5]
    assert columns == [*inspect.signature(getattr(transformers, f"Bert{head}").forward).parameters][1:6]


@family
def test_values_have_no_vocabulary(family):
    name, model = family.__name__.split(".")[-1].capitalize(), family.make("Model", **family.VALUES)
    for head in ("ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering"):
        with pytest.raises(ValueError, match=f"{name}{head} needs input_type='tokens', got 'values'"):
            family.make(head, **family.VALUES)
    for change in (
        lambda: model.set_input_embeddings(torch.nn.Embedding(3, 24)),
        lambda: model.resize_token_embeddings(9),
    ):
        with pytest.raises(ValueError, match=f"{name}Model needs input_type='tokens'"):
            change()
    with pytest.raises(ValueError, match="exactly one of input_values and inputs_embeds"):
        model(**luna.head_inputs("Model", [9]))
    with pytest.raises(ValueError, match=r"input_values` must have the shape \[B, T\], or .* got \[2, 9, 2\]"):
        model(input_values=torch.zeros(2, 9, 2))


@family
def test_attention_implementations(family, tmp_path):
    """Only "sdpa" (the kernels) and "eager" (the reference) are supported; other values do not change the model."""
    model, inputs = family.make("ForMaskedLM"), luna.tokens([9, 4])
    assert model.config._attn_implementation == "sdpa"
    expected = model(**inputs).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(**inputs).logits, expected)
    model.save_pretrained(tmp_path)
    for name in ("sdpa", "eager"):
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.config._attn_implementation == name
        torch.testing.assert_close(loaded(**inputs).logits, expected)
    for name in ("flash_attention_2", "flex_attention", "kernels-community/flash-attn3", "paged|eager", "fastest"):
        message = f'"{re.escape(name)}"` is not supported: \\w+ has its own kernels; omit .* or pass .eager'
        with pytest.raises(ValueError, match=message):
            AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            AutoModelForMaskedLM.from_config(family.tiny_config(), attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
        assert model.config._attn_implementation == "eager"


PADDED = {"normalization_type": "batchnorm", "padded_batch_statistics": True}
PATCHES = {"input_type": "patches", "image_size": 12, "patch_size": 4, "num_channels": 2, "pooling": "mean"}


@pytest.mark.parametrize("fields", [PADDED, PADDED | {"embedding_norm": True, **mega.NO_DROPOUT}, PATCHES])
def test_nan_in_training(fields):
    """NaN at padding changes nothing if padding counts in statistics, or in patches of images."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 1, 1]])
    name, values, place, head = "inputs_embeds", torch.randn(2, 9, 24) * mask[..., None], mask, mega.HEADS["Model"]
    if fields is PATCHES:
        name, values, head = "pixel_values", torch.randn(2, 2, 12, 12), luna_mega.MegaForImageClassification
        place = mask.view(2, 1, 3, 3).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).expand(-1, 2, -1, -1)
    found = []
    for x in (values, soil(values, place)):
        model, x = luna.enlarged(head, mega.tiny_config(**fields)).train(), x.detach().requires_grad_()
        torch.manual_seed(1)
        output = model(**{name: x}, attention_mask=mask)[0]
        output = output if output.dim() == 2 else output[mask.bool()]
        output.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([output.detach(), x.grad, *gradients, *model.buffers()])
    assert all(map(torch.equal, *found)) and found[0][0].isfinite().all()
    assert not found[1][1][~place.bool()].any() and found[1][1][place.bool()].any()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_nan_in_masked_outputs_of_an_encoder(family):
    model, mask = decoders.make_plain(family, is_encoder_decoder=True), decoders.padded([7, 3], 7, "right")[1]
    ids = torch.full((2, 5), 5)
    encoded = model.get_encoder()(torch.full((2, 7), 6), attention_mask=mask)
    expected = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids).logits
    encoded.last_hidden_state = soil(encoded.last_hidden_state, mask)
    if (packed := getattr(encoded, "packed_mask", None)) is not None:
        encoded.packed_last_hidden_state = soil(encoded.packed_last_hidden_state, packed)
    assert model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids).logits.equal(expected)


def test_positions_of_padding_have_no_effect():
    model, inputs = luna.make("Model"), luna.tokens([9, 4], "left")
    expected, kept = model(**inputs).last_hidden_state, inputs["attention_mask"].bool()
    for filler in (-1, 1, -3, 1000):
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).masked_fill(~kept, filler)
        states = model(**inputs, position_ids=positions).last_hidden_state
        assert states[kept].equal(expected[kept])


@family
def test_masks_of_every_dtype(family):
    ids, model = torch.tensor([[5, 6, 7, 8]]), family.make("Model")
    masks = [torch.tensor([[1, 1, 0, 1]], dtype=dtype) for dtype in (torch.bool, torch.long, torch.int32, torch.half)]
    expected, *others = (model(ids, mask).last_hidden_state for mask in masks)
    assert all(other.equal(expected) for other in others)


LENGTHS = [17, 1, 8, 23, 5]


def flattened(items, **options):
    return DataCollatorWithFlattening(return_tensors="pt", **options)(items)


@pytest.mark.parametrize("bounds", [[0, 4, 14], [0, 7, 14]])
def test_a_padding_free_batch_has_no_pooler_output(bounds):
    """A padding-free batch has no pooler output, even if it has as many sequences as rows."""
    model, inputs = mega.make("Model"), luna.tokens([7, 7])["input_ids"]
    assert model(inputs).pooler_output is not None
    assert model(inputs, cu_seq_lens_q=torch.tensor(bounds), max_length_q=10).pooler_output is None


@pytest.mark.parametrize("family", [luna, mega])
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


@pytest.mark.parametrize("family", [luna, mega])
def test_padding_free_trains_like_separate_sequences(family):
    """Feature dropout drops channels per sequence of a padding-free batch: two equal sequences differ."""
    model = family.make("Model", **({"use_feature_dropout": True} if family is mega else {})).train()
    batch = flattened([{"input_ids": torch.full((4,), 7)} for _ in range(6)])
    batch.pop("labels")
    states = model(**batch).last_hidden_state.view(6, 4, -1)
    assert not torch.allclose(states[0], states[1])


@pytest.mark.parametrize("family", [luna, mega])
def test_positions_limit_the_batch(family):
    """Tokens, but not padding, must fit into the table of positions; `test_contract.py` has wider batches."""
    fields = (
        {"relative_positional_bias": "simple", "max_positions": 8} if family is mega else {"max_position_embeddings": 8}
    )
    model = family.make("Model", **fields)
    for inputs in (luna.tokens([9, 3], "left"), luna.tokens([9])):
        with pytest.raises(ValueError, match="length 9 exceeds the 8|8 positions, got 9"):
            model(**inputs)
    if family is luna:
        with pytest.raises(ValueError, match="learned positions"):
            luna.make("Model", max_position_embeddings=5)(**luna.tokens([9]), position_ids=torch.arange(9) % 6)


@pytest.mark.parametrize("family", [luna, mega])
def test_all_outputs_of_the_collator(family):
    items = [{"input_ids": luna.tokens([length])["input_ids"][0]} for length in LENGTHS]
    batch = flattened(items, return_flash_attn_kwargs=True, return_seq_idx=True)
    batch.pop("labels")
    model = family.make("Model").double()
    torch.testing.assert_close(model(**batch)[0], model(batch["input_ids"], position_ids=batch["position_ids"])[0])


@pytest.mark.parametrize(
    ("name", "side"),
    [("mega: laplace chunks", "left"), ("mega: truncated", "right"), ("megalodon: heads", "left")],
)
@torch.no_grad()
def test_mega_uses_positions_of_the_mask(name, side):
    """Mega counts positions from the mask, and accepts `position_ids` of servers and trainers that agree with it."""
    model, (ids, mask) = decoders.make(name), decoders.padded([9, 4], 9, side)
    positions = mask.cumsum(dim=1) - 1
    for given in (positions, positions.masked_fill(mask == 0, 1), positions.masked_fill(mask == 0, -7)):
        assert model(ids, mask, position_ids=given).logits.equal(model(ids, mask).logits)
    with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
        model(ids, mask, position_ids=positions + 1)
    if side == "right":
        return
    for second in (mask, mask[:, 6:]):
        for offset, right in ((0, True), (1, False)):
            past = model(ids[:, :6], mask[:, :6], use_cache=True).cache
            inputs = {"position_ids": positions[:, 6:] + offset, "cache": past}
            if right:
                expected = model(ids, mask).logits[:, 6:]
                torch.testing.assert_close(model(ids[:, 6:], second, **inputs).logits, expected)
            else:
                with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
                    model(ids[:, 6:], second, **inputs)


def make_channels(family, channels=3, **fields):
    values = FAMILIES[family].VALUES | {"pooling": "mean"} | ({} if channels is None else {"num_channels": channels})
    return FAMILIES[family].make("ForSequenceClassification", **values, **fields)


def value_embedding(model):
    return next(module for name, module in model.named_modules() if name.endswith("value_embeddings"))


@pytest.mark.parametrize("family", FAMILIES)
def test_channels(family, tmp_path):
    """`[B, T, 1]` is `[B, T]`, and channels with the weights of one channel have the outputs of their sum.

    A folder of Mega before 0.5 has one channel, whatever it saved for images.
    """
    values, mask = torch.randn(2, 10, 3), torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    default, one, three = (make_channels(family, channels) for channels in (None, 1, 3))
    shapes = {name: x.shape for name, x in value_embedding(default).state_dict().items()}
    assert shapes == {"weight": (24,), "bias": (24,)} and default.config.num_channels == 1
    expected = default(input_values=values[..., 0]).logits
    for inputs in (values[..., 0], values[..., :1]):
        torch.testing.assert_close(one(input_values=inputs).logits, expected, rtol=0, atol=0)
    weights = one.state_dict()
    name = next(name for name in weights if name.endswith("value_embeddings.weight"))
    three.load_state_dict(weights | {name: weights[name][:, None].expand(-1, 3)})
    expected = one(input_values=values.sum(-1), attention_mask=mask).logits
    torch.testing.assert_close(three(input_values=values, attention_mask=mask).logits, expected)
    embedded = three(inputs_embeds=value_embedding(three)(values), attention_mask=mask).logits
    torch.testing.assert_close(embedded, expected)
    for shape in ((2, 10), (2, 10, 1), (2, 10, 4), (2, 3, 10), (2, 10, 3, 1), (10,)):
        with pytest.raises(ValueError, match=r"`input_values` must have the shape \[B, T, 3\]"):
            three(input_values=torch.randn(shape))
    with pytest.raises(ValueError, match=r"`input_values` must have the shape \[B, T\]"):
        one(input_values=values)
    assert type(three.config).from_dict(three.config.to_dict()).num_channels == 3
    one.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    old = json.loads(file.read_text(encoding="utf-8")) | ({"num_channels": 3} if family == "mega" else {})
    file.write_text(json.dumps(old), encoding="utf-8")
    loaded, info = type(one).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and loaded.config.num_channels == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_audio_classification(family, tmp_path):
    """The folder of run_audio.py works with the class and the pipeline for audio."""
    model = make_channels(family, 1, num_labels=2, id2label={0: "no", 1: "yes"})
    model.save_pretrained(tmp_path)
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=1000, return_attention_mask=True)
    extractor.save_pretrained(tmp_path)
    assert type(AutoModelForAudioClassification.from_pretrained(tmp_path)) is type(model)
    clip = np.random.default_rng(0).standard_normal(80).astype(np.float32)
    found = pipeline("audio-classification", model=str(tmp_path))(clip)
    scores = model(**extractor(clip, sampling_rate=1000, return_tensors="pt")).logits.softmax(-1)[0]
    assert {part["label"]: part["score"] for part in found} == pytest.approx(
        dict(zip(["no", "yes"], scores.tolist(), strict=True)), abs=1e-6
    )
