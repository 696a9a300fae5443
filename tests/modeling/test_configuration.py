"""Configurations: invalid fields, names of other models, derived and changed fields, and encoder-decoders.

Invalid fields raise a one-sentence error that names the field and its value. Every name of BERT's configuration has an
effect on the configurations of all families, or raises an error.
"""

import dataclasses
import json
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, RobertaConfig
from transformers.models.auto import modeling_auto

from luna_mega import LunaConfig, LunaSeq2SeqConfig, MegaConfig, MegalodonConfig, MegaSeq2SeqConfig
from luna_mega._register import CONFIGS as TYPES
from tests.modeling import decoders, luna, mega, megalodon_decoders
from tests.modeling.contract import CLASSES

IMAGES = {"input_type": "patches", "image_size": 32, "patch_size": 8, "max_positions": 16}
IMAGES |= {"relative_positional_bias": "simple"}
BASES = {
    "luna": (luna, {}),
    "luna seq2seq": (luna, {"is_encoder_decoder": True}),
    "mega": (mega, {}),
    "mega untied": (mega, {"is_decoder": True, "tie_word_embeddings": False}),
    "mega values": (mega, {"input_type": "values"}),
    "mega images": (mega, IMAGES),
    "mega seq2seq": (mega, {"is_encoder_decoder": True}),
    "megalodon": (megalodon_decoders, {}),
}
BOTH = {
    "input_type": "pixels", "pooling": "max", "pair_features": "sum", "classifier_activation": "tanhh",
    "classifier_num_layers": -1, "add_cross_attention": True,
}  # fmt: skip
BOTH_SEQ2SEQ = {"decoder_start_token_id": 40, "input_type": "values", "num_decoder_layers": 0}
OF_IMAGES = {"patch_size": 8, "use_absolute_position_embeddings": False}
# Wrong values of single fields: the message names the field and the value. A tuple has several values.
SINGLE = {
    "luna": BOTH | {
        "hidden_size": 25, "num_pack_attention_heads": 5, "position_embedding_type": "rotary",
        "hidden_act": ("gleu", {}), "projection_length": (0, "long"), "dropout": 1.0, "word_dropout": 1.0,
        "layerdrop": 1e9, "layer_norm_eps": -1.0, "causal_activation": "relu", "embedding_size": 0,
        "type_vocab_size": -1, "max_position_embeddings": 2**31,
    },
    "luna seq2seq": BOTH_SEQ2SEQ | {"max_target_positions": 10**12, "type_vocab_size": 2},
    "mega": BOTH | OF_IMAGES | {
        "attention_activation": "gelu", "normalization_type": "norm", "relative_positional_bias": "tupe",
        "activation": ("gleu", {}), "shared_representation_size": 13, "num_attention_heads": 2, "dropout_prob": 1.0,
        "ema_projection_size": -1, "classifier_dropout": -0.1, "ema_beta_range": -1.0, "hidden_size": "wide",
        "truncation": 10**18, "num_hidden_layers": 10**10, "drop_path_rate": 1.0,
    },
    "mega values": OF_IMAGES | {"adaptive_input_cutoffs": [9]},
    "mega untied": {"adaptive_softmax_cutoffs": ([20, 10], [40], [])},
    "mega images": {
        "adaptive_input_cutoffs": [9], "patch_size": 7, "max_positions": 20, "unpad_inputs": True, "num_channels": 0,
    },
    "mega seq2seq": BOTH_SEQ2SEQ | {"embedding_size": 7, "decoder_ema_projection_size": -1},
    "megalodon": {
        "shared_representation_size": 10, "value_size": 21, "norm_num_groups": 5, "chunk_size": 0, "rope_theta": 0.0,
        "initializer": "zeros", "input_type": "values", "dropout_prob": 1.0,
    },
}  # fmt: skip
# Fields that exclude each other, and a text of the message.
IMAGE_SIZE = ({"image_size": 32}, "image_size=32 requires input_type='patches', got '(tokens|values)'; omit it")
TOKENS = ({"embedding_size": 8}, "embedding_size=8 requires input_type='tokens', got '(values|patches)'; omit it")
CHANNELS = "num_channels=2 requires input_type='values'( or 'patches')?, got 'tokens'"
SHARED = [
    ({"is_decoder": True}, "omit is_decoder"),
    ({"decoder_vocab_size": 9, "share_encoder_decoder_embeddings": True}, "decoder_vocab_size.*9"),
    ({"tie_word_embeddings": False, "share_encoder_decoder_embeddings": True}, "tie_word_embeddings.*False"),
]
TOGETHER = {
    "luna": [
        ({"pool_padding": True}, "pool_padding"),
        ({"pool_padding": True, "pooling": "mean", "unpad_inputs": True}, "unpad_inputs=True does not compute"),
        ({"hidden_size": 2, "num_attention_heads": 1, "position_embedding_type": "sinusoidal"}, "hidden_size.*2"),
        ({"contextual_projection": True, "is_decoder": True}, "contextual_projection.*True"),
        ({"embedding_size": 8, "is_decoder": True}, "embedding_size.*8"),
        (luna.VALUES | {"type_vocab_size": 2}, "input_type.* 'values'|type_vocab_size.*2"),
        ({"num_channels": 2}, CHANNELS),
    ],
    "luna seq2seq": [*SHARED, ({"num_decoder_attention_heads": 7}, "hidden_size .* num_attention_heads")],
    "mega": [
        IMAGE_SIZE,
        ({"chunk_size": 0, "use_chunking": True}, "chunk_size.*0"),
        ({"ema_shift": True, "bidirectional": False}, "ema_shift.*True"),
        ({"bidirectional": True, "is_decoder": True}, "bidirectional=False"),
        ({"ema_projection_size": 0, "truncation": 9}, "no moving average; omit truncation=9"),
        ({"unpad_inputs": True, "padded_batch_statistics": True}, "unpad_inputs.*True"),
        ({"num_channels": 2}, CHANNELS),
    ],
    "mega values": [IMAGE_SIZE, TOKENS],
    "mega untied": [
        ({"adaptive_softmax_cutoffs": [10, 20, 30], "adaptive_softmax_factor": 4}, "last of 4 bands"),
        ({"adaptive_softmax_cutoffs": [10], "tie_word_embeddings": True}, "tie_word_embeddings=False"),
        (
            {"tie_adaptive_projections": True, "adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]},
            "tie_adaptive_projections.*True",
        ),
    ],
    "mega images": [TOKENS, ({"is_decoder": True}, "input_type='patches'")],
    "mega seq2seq": [
        *SHARED,
        ({"adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]}, "no adaptive vocabulary"),
        ({"decoder_shared_representation_size": 5}, "shared_representation_size`, got 5"),
    ],
    "megalodon": [
        ({"is_decoder": False}, "must be True"),
        ({"output_size": 7, "tie_word_embeddings": True}, "vocab_size=30"),
    ],
}


@pytest.mark.parametrize("base", BASES)
def test_invalid_fields(base):
    module, fixed = BASES[base]
    rows = TOGETHER[base] + [
        ({name: value}, rf"(?s)\b{name}\b.*{re.escape(str(value)) if value != {} else ''}")
        for name, values in SINGLE[base].items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    for fields, text in rows:
        with pytest.raises((ValueError, TypeError, StrictDataclassError)) as error:
            module.tiny_config(**fixed | fields)
        message = str(error.value)
        assert isinstance(error.value, ValueError) == ("Validation error for field" not in message)
        assert "validator" not in message and "\n" not in message.partition("Validation error for field")[0], fields
        assert re.search(text, message), (fields, message)


# Names ----------------------------------------------------------------------------------------------------------------

CONFIGS = [LunaConfig, LunaSeq2SeqConfig, MegaConfig, MegaSeq2SeqConfig, MegalodonConfig]
# Another value than the default of every family. The last names are those of earlier versions of transformers.
VALUES = {
    "vocab_size": 77, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40,
    "hidden_act": "relu", "hidden_dropout_prob": 0.37, "attention_probs_dropout_prob": 0.36,
    "max_position_embeddings": 99, "type_vocab_size": 5, "initializer_range": 0.3, "layer_norm_eps": 3e-4,
    "pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5, "use_cache": False, "classifier_dropout": 0.35,
    "is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False, "output_hidden_states": True,
    "return_dict": False, "dtype": torch.float16, "chunk_size_feed_forward": 3, "is_encoder_decoder": True,
    "id2label": {0: "a", 1: "b", 2: "c"}, "problem_type": "regression",
    "output_attentions": True, "num_labels": 7, "per_layer_config": {0: {"intermediate_size": 8}},
    "tie_last_hidden_states": True, "position_embedding_type": "relative_key", "gradient_checkpointing": True,
}  # fmt: skip
UNSET = {"transformers_version", "architectures", "label2id"}  # written by transformers
SIDES = {"is_decoder", "add_cross_attention"}
# Names that have no other value in some classes, although they are fields.
FIXED = {*SIDES, "is_encoder_decoder", "position_embedding_type", "type_vocab_size", "num_attention_heads"}
BASE = {LunaConfig: {"num_attention_heads": 4}, LunaSeq2SeqConfig: {"num_attention_heads": 4}, MegaConfig: {}}
BASE |= {MegaSeq2SeqConfig: {}, MegalodonConfig: {"norm_num_groups": 4}}


@pytest.mark.parametrize("config_class", CONFIGS)
def test_names_of_bert(config_class, tmp_path, caplog):
    """Every name has an effect or raises an error; in a folder, names that a family does not have are ignored."""
    names = {item.name for other in (BertConfig, RobertaConfig) for item in dataclasses.fields(other)}
    assert names - UNSET <= VALUES.keys()
    base, absent, raised = BASE[config_class], config_class.absent_fields, set()
    config_class(**base).save_pretrained(tmp_path)
    for name, value in VALUES.items():
        try:
            config = config_class(**base | {name: value})
        except ValueError as error:
            assert re.search(rf"{name}.*(;|requires|must|has no)", str(error)), error
            raised.add(name)
            continue
        own = config_class.attribute_map.get(name, name)
        assert own in config_class.__dataclass_fields__ or isinstance(getattr(config_class, own), property), name
        assert getattr(config, name) == getattr(config, own) == value, name
        assert name == own or name not in config.to_dict()
        if name not in SIDES:  # Mega's folders store a direction, which a decoder does not support
            loaded = AutoConfig.from_pretrained(tmp_path, **{name: value})
            assert getattr(loaded, own) == value, name
    assert absent.keys() <= raised <= absent.keys() | FIXED
    for name in absent:
        config_class(**base, **{name: absent[name][0]})
        with pytest.raises(ValueError, match=f"`{name}`, got .*; "):
            config_class.from_pretrained(tmp_path, **{name: VALUES[name]})
    config = config_class.from_dict(base | {name: VALUES[name] for name in absent})
    assert config.to_dict() == config_class(**base).to_dict()
    assert all(f"`{name}` is ignored" in caplog.text for name in absent)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_two_names_of_a_field(config_class, tmp_path, caplog):
    """A folder prefers the family's own name. Arguments must agree."""
    config_class().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    for name, own in config_class.attribute_map.items():
        default = getattr(config_class(), own)
        value = "relu" if isinstance(default, str) else default * 2 if default else 0.25
        assert getattr(config_class(**{name: default, own: default}), own) == default
        message = f"`{own}` and `{name}` are the same field of {config_class.__name__}, got .*; pass only one of them"
        with pytest.raises(ValueError, match=message):
            config_class(**{name: value, own: default})
        file.write_text(json.dumps(fields), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            AutoConfig.from_pretrained(tmp_path, **{own: default, name: value})
        file.write_text(json.dumps({name: value} | fields), encoding="utf-8")
        config = AutoConfig.from_pretrained(tmp_path)
        assert getattr(config, own) == getattr(config, name) == default and name not in config.to_dict()
        assert f"`{name}` is ignored" in caplog.text


class Own(LunaConfig):
    """A configuration of a user with a constructor."""

    def __init__(self, hidden_dropout_prob=0.1, **fields):
        super().__init__(dropout=hidden_dropout_prob / 2, **fields)


def test_configurations_of_users(tmp_path):
    """Subclasses check names like the class; their own constructors receive the names that users pass."""
    plain = type("Plain", (LunaConfig,), {"model_type": "own_luna"})
    with pytest.raises(ValueError, match="`dropout` and `hidden_dropout_prob` are the same field of Plain"):
        plain(hidden_dropout_prob=0.3, dropout=0.2)
    assert Own(hidden_dropout_prob=0.3).dropout == 0.15
    luna.tiny_config(projection_length=7).save_pretrained(tmp_path)  # folders of the base type
    for kind in (LunaConfig, plain):
        kind.register_for_auto_class()
        assert kind._auto_class == (None if kind is LunaConfig else "AutoConfig")
    config = plain.from_pretrained(tmp_path)
    assert (config.model_type, config.projection_length) == ("own_luna", 7)


# Derived and changed fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_derived_fields(model_type):
    """Fields follow `hidden_size` under every name, and follow it again if a string changes it."""
    heads = {"num_attention_heads": 1 if model_type.startswith("mega") else 4}
    config, expected = (AutoConfig.for_model(model_type, **x) for x in ({}, {"hidden_size": 64} | heads))
    config.update_from_string(f"hidden_size=64,num_attention_heads={heads['num_attention_heads']}")
    assert config.to_dict() == expected.to_dict()
    assert AutoConfig.for_model(model_type, d_model=64, **heads).to_dict() == expected.to_dict()


def test_update_from_string_keeps_fields_that_were_set():
    config = LunaConfig(num_pack_attention_heads=6, num_labels=5, initializer_range=0.07)
    config.update_from_string("hidden_size=96,num_attention_heads=4")
    assert (config.num_pack_attention_heads, config.classifier_hidden_size, config.num_labels) == (6, 96, 5)
    assert config.initializer_range == 0.07
    config = MegaConfig()
    config.update_from_string("hidden_size=64,max_position_embeddings=99,embedding_size=32,is_decoder=true")
    assert (config.embedding_size, config.max_positions, config.bidirectional) == (32, 99, False)
    with pytest.raises(StrictDataclassError, match=r"hidden_size \(50\) .* num_attention_heads \(12\)"):
        LunaConfig().update_from_string("hidden_size=50")


@pytest.mark.parametrize("config_class", [LunaConfig, LunaSeq2SeqConfig])
def test_initializer_range_of_a_width(config_class):
    for width, expected in ((64, 128**-0.5), (128, 0.0625), (510, 1020**-0.5), (512, 0.02)):
        config = config_class(hidden_size=width, num_attention_heads=2)
        for side in (config, config.encoder_config, config.decoder_config):
            assert side.initializer_range == pytest.approx(expected)


def test_a_decoder_has_one_direction(tmp_path):
    """`is_decoder` determines `bidirectional`; a folder of an encoder can be loaded as a decoder."""
    for decoder in (True, False):
        config = mega.tiny_config(is_decoder=decoder)
        config.save_pretrained(tmp_path)
        assert config.bidirectional is MegaConfig.from_pretrained(tmp_path).bidirectional is not decoder
    assert MegaConfig.from_pretrained(tmp_path, is_decoder=True, bidirectional=False).is_decoder


@pytest.mark.parametrize(
    "module, message",
    [(luna, "(dynamic_projection_length|contextual_projection)=True requires an encoder.*=False"),
     (mega, "is_decoder=True requires bidirectional=False")],
)  # fmt: skip
def test_changed_fields_are_checked(module, message, tmp_path):
    """A model checks fields that are assigned, or are arguments of `from_pretrained`, as the constructor does."""
    module.make("ForMaskedLM").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.is_decoder = True
    for options in ({"config": config}, {"is_decoder": True}):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        module.HEADS["ForMaskedLM"](config)
    with pytest.raises(ValueError, match="classifier_dropout.*1.0"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, classifier_dropout=1.0)


IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])


@pytest.mark.parametrize(
    ("family", "name"),
    [("luna", "is_decoder"), ("mega", "add_cross_attention"), ("megalodon", "is_decoder"), ("luna", "first_position")],
)
def test_fields_that_determine_the_modules_cannot_be_changed(family, name):
    """`EncoderDecoderModel` sets `add_cross_attention` of a decoder without the modules, which ignored the source."""
    model = decoders.make_plain(family)
    setattr(model.config, name, not getattr(model.config, name) if name != "first_position" else 5)
    with pytest.raises(ValueError, match=f"`config.{name}` has been changed to .*; create it with this value"):
        model(IDS)


@pytest.mark.parametrize("name", ["mega decoder", "mega seq2seq", "megalodon decoder"])
def test_a_changed_chunk(name, tmp_path):
    """It has the same effect in the model, in its encoder and decoder, and in the saved folder."""
    model = CLASSES[name].make(torch.float32)
    inputs = dict.fromkeys(("input_ids", "decoder_input_ids")[: 1 + model.config.is_encoder_decoder], IDS)
    before = model(**inputs).logits
    model.config.update({"use_chunking": True, "chunk_size": 3})
    changed = model(**inputs).logits
    assert not torch.equal(changed, before)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(**inputs).logits, changed)


# Encoder-decoders -----------------------------------------------------------------------------------------------------

FAMILIES = {"luna": (LunaConfig, LunaSeq2SeqConfig, "wmt"), "mega": (MegaConfig, MegaSeq2SeqConfig, "wmt_en_de")}
families = pytest.mark.parametrize("family", FAMILIES)


@families
def test_types_of_encoder_decoders(family):
    """Each type is in one table of generating models, and presets and sides have the right types."""
    side_class, config_class, preset = FAMILIES[family]
    seq2seq, causal = (
        getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
    )
    assert family not in seq2seq and f"{family}_seq2seq" not in causal
    assert type(getattr(side_class, preset)(30)) is config_class
    subclass = type("OwnConfig", (config_class,), {"model_type": "own"})
    for kind in (config_class, subclass):
        for config in (kind(), getattr(kind, preset)(30)):
            assert type(config) is kind and config.is_encoder_decoder
            for side in (config.encoder_config, config.decoder_config):
                assert type(side) is side_class and side.model_type == family and not side.is_encoder_decoder


@families
def test_encoder_decoders_require_their_type(family, tmp_path):
    """A folder of an early version has another type, and loads after an edit that the message describes."""
    side_class, config_class, _ = FAMILIES[family]
    model = decoders.make_plain(family, is_encoder_decoder=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = file.read_text(encoding="utf-8")
    file.write_text(fields.replace(f'"{family}_seq2seq"', f'"{family}"'), encoding="utf-8")
    wrong_type = re.escape(
        f"`is_encoder_decoder=True` requires {config_class.__name__}, not {side_class.__name__}; "
        f'in a config.json, set "model_type": "{family}_seq2seq"'
    )
    assigned = side_class()
    assigned.is_encoder_decoder = True  # transformers validates assigned fields only before saving
    for make in (
        lambda: side_class(is_encoder_decoder=True),
        lambda: assigned.save_pretrained(tmp_path / "assigned"),
        lambda: AutoConfig.from_pretrained(tmp_path),
        lambda: type(model).from_pretrained(tmp_path),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match=wrong_type):
            make()
    with pytest.raises(ValueError, match=f"ForConditionalGeneration requires a {config_class.__name__}"):
        type(model)(assigned)
    with pytest.raises(StrictDataclassError, match=f"got `is_encoder_decoder=False`; use {side_class.__name__}"):
        config_class(is_encoder_decoder=False)
    file.write_text(fields, encoding="utf-8")
    type(model).from_pretrained(tmp_path)


@families
def test_folders_of_another_type(family, tmp_path):
    side_class, config_class, _ = FAMILIES[family]
    for saved, kind in ((side_class, config_class), (config_class, side_class), (side_class, MegalodonConfig)):
        saved().save_pretrained(tmp_path)
        message = f"`model_type` '{saved.model_type}', but {kind.__name__} requires '{kind.model_type}'"
        with pytest.raises(ValueError, match=message):
            kind.from_pretrained(tmp_path)
