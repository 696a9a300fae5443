"""Sample inputs contain every input of a model and of its tokenizer."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import luna_mega
from luna_mega.hub.samples import make_inputs, sample_inputs
from tests.marks import slow_but
from tests.modeling import luna, mega, megalodon_decoders
from tests.modeling.decoders import make, make_plain

TYPES = {luna: {"type_vocab_size": 2}, mega: {"add_token_type_embeddings": True}}
IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": 3, "num_hidden_layers": 1, "hidden_size": 16}
MODELS = {
    **{f"luna {head}": lambda head=head: luna.make(head, **TYPES[luna]) for head in luna.HEADS},
    **{f"mega {head}": lambda head=head: mega.make(head, **TYPES[mega]) for head in mega.HEADS},
    "values": lambda: mega.make("ForSequenceClassification", **mega.VALUES),
    "without the first token": lambda: luna.make("ForSequenceClassification", drop_first_token=True),
    "images": lambda: luna_mega.MegaForImageClassification(luna_mega.MegaConfig.image_base_patch16_224(**IMAGES)),
    **{f"{name} decoder": lambda name=name: make_plain(name).float() for name in ("luna", "mega", "megalodon")},
    "mega chunks": lambda: mega.make("Model", **mega.VARIANTS["laplace chunks"]),
    "megalodon windows": lambda: megalodon_decoders.make("Model", torch.float32, windowed_statistics=True),
    **{f"{family} seq2seq": lambda name=f"{family} seq2seq: {name}": make(name).float()
       for family, name in (("luna", "translation"), ("mega", "softmax"))},
    **{f"bare decoder of {family}": lambda family=family: bare(family) for family in ("luna", "mega")},
}  # fmt: skip
FAST = ["luna Model", "luna ForMultipleChoice", "luna ForSequencePairClassification", "mega ForMaskedLM"]
FAST += ["values", "without the first token", "images", "mega decoder", "luna seq2seq", "bare decoder of luna"]
FAST += ["megalodon windows"]
# Not sample inputs: arguments that replace other arguments, computed values, labels, and options.
OTHERS = {
    *("inputs_embeds", "pair_inputs_embeds", "decoder_inputs_embeds", "position_ids", "encoder_outputs"),
    *("cache", "use_cache", "logits_to_keep", "labels", "start_positions", "end_positions"),
    *("interpolate_pos_encoding", "self", "kwargs", "options"),
}


def bare(family):
    model = make(f"{family} seq2seq: {'translation' if family == 'luna' else 'softmax'}")
    return getattr(luna_mega, f"{family.capitalize()}Model")(model.config.decoder_config).eval()


@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
def test_batches_have_every_input_and_run(name):
    model = MODELS[name]().eval()
    config, batches = model.config, sample_inputs(model)
    given = {argument for inputs in batches.values() for argument in inputs}
    unused = {"tokens": {"input_values", "pair_input_values", "pixel_values"}, "patches": {"attention_mask"}}
    unused["values"] = {"input_ids", "token_type_ids", "pair_input_ids", "pixel_values"}
    left = set(inspect.signature(model.forward).parameters) - OTHERS - unused[config.input_type] - given
    if not config.add_cross_attention:
        left -= {"encoder_hidden_states", "encoder_attention_mask"}
    if not getattr(config, "add_token_type_embeddings", getattr(config, "type_vocab_size", 0)):
        left.discard("token_type_ids")
    assert not left
    for batch, inputs in batches.items():
        with torch.no_grad():
            outputs = model(**inputs)
        assert all(x.isfinite().all() for x in outputs.to_tuple() if isinstance(x, torch.Tensor)), batch


@pytest.mark.parametrize(
    ("name", "fields", "lengths", "longest"),
    [
        ("luna", {"projection_length": 6}, {1, 5, 6, 13, 48}, None),
        ("luna", {"projection_length": 6}, {1, 5, 6}, 6),
        ("luna", {"projection_length": 6, "position_embedding_type": "sinusoidal"}, {1, 5, 6, 13}, None),
        ("luna", {"projection_length": 1}, {1, 32, 31, 48}, None),
        ("mega", {"use_chunking": True, "chunk_size": 8}, {1, 7, 8, 17}, None),
        ("mega", {}, {1, 31, 32, 65}, None),
        ("megalodon", {"chunk_size": 4}, {1, 3, 4, 9}, None),
        ("megalodon", {"chunk_size": 4, "windowed_statistics": True}, {1, 3, 4, 23, 24, 49}, None),
    ],
)
def test_lengths_surround_every_border(name, fields, lengths, longest):
    family = {"luna": luna, "mega": mega, "megalodon": megalodon_decoders}[name]
    options = {"dtype": torch.float32} if name == "megalodon" else {}
    batches = sample_inputs(family.make("Model", **options, **fields), longest=longest)
    masks = {name: inputs["attention_mask"].bool() for name, inputs in batches.items()}
    assert {mask.shape[1] for mask in masks.values() if len(mask) == 1} == lengths
    assert masks["padded left"].equal(masks["padded right"].flip(1)) and not masks["padded right"].all()
    gaps = masks["gaps"]
    assert (~gaps[:, 1:-1] & gaps[:, :-2].cummax(1)[0] & gaps.flip(1)[:, :-2].cummax(1)[0].flip(1)).any()


def test_types_are_those_of_pairs():
    model = luna.make("ForSequenceClassification", type_vocab_size=2)
    inputs = make_inputs(model, [5, 2, 1], side="left")
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    ids = inputs["input_ids"][inputs["attention_mask"].bool()]
    assert (
        len(ids.unique()) == 8 and 1 not in ids and (inputs["input_ids"][~inputs["attention_mask"].bool()] == 1).all()
    )


@pytest.mark.parametrize(
    ("types", "names", "expected"),
    [
        (0, None, None),
        (0, ["input_ids", "attention_mask"], None),
        (0, ["input_ids", "token_type_ids", "attention_mask"], 0),
        (1, None, None),
        (2, None, 1),
        (2, ["input_ids", "attention_mask"], 1),
    ],
)
def test_types_of_models_and_tokenizers(types, names, expected):
    model = luna.make("ForSequenceClassification", type_vocab_size=types)
    tokenizer = None if names is None else SimpleNamespace(model_input_names=names, pad_token_id=7)
    inputs = make_inputs(model, [8, 3], processor=tokenizer)
    found = inputs.get("token_type_ids")
    assert (None if found is None else found.max().item()) == expected
    assert inputs["input_ids"][1, 3:].unique().item() == (1 if tokenizer is None else 7)
