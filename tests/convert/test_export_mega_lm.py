"""`luna-mega export` of Mega language models without conversion record, and models the original does not support."""

import pytest
import torch

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.convert.exporter import export_checkpoint
from tests.convert import exports
from tests.convert.exports import cannot_express, edit, fails
from tests.convert.mega import FIELDS
from tests.convert.mega_lm import KINDS, mega_lm
from tests.convert.test_export_mega import convert_again

SIZES = FIELDS | {
    "vocab_size": 40,
    "max_positions": 20,
    "is_decoder": True,
    "bidirectional": False,
    "final_norm": True,
    "lm_head_bias": False,
    "add_lm_hidden_dense_layer": False,
}
BANDS = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
AFTER = {"normalize_before_mega": False, "normalize_before_ffn": False, "final_norm": False}
MADE_HERE = {
    "tied": {"final_norm_affine": False, "scale_embedding": True},
    "untied": {"tie_word_embeddings": False, "embedding_size": 12},
    "after": AFTER | {"embedding_norm": True, "normalization_type": "batchnorm", "final_norm_affine": False},
    "chunks": {"relative_positional_bias": "simple", "use_chunking": True, "chunk_size": 6, "truncation": 4},
    "table": {"relative_positional_bias": "simple", "attention_activation": "relu2", "use_normalized_ffn": False},
    "adaptive": BANDS | {"adaptive_input_factor": 2, "adaptive_softmax_dropout": 0.2},
    "projections": BANDS | {"tie_adaptive_projections": True, "embedding_size": 32},
    "adaptive untied": {
        "adaptive_input_cutoffs": [10],
        "adaptive_softmax_cutoffs": [15, 25],
        "tie_word_embeddings": False,
        "adaptive_softmax_factor": 2.0,
    },
    "adaptive input": {"adaptive_input_cutoffs": [10], "tie_word_embeddings": False},
}


def save(folder, **fields):
    return exports.save(folder, MegaForCausalLM(MegaConfig(**SIZES | fields)))


@pytest.mark.parametrize("name", MADE_HERE)
def test_models_without_conversion_record(tmp_path, name):
    fields = MADE_HERE[name]
    report, back = convert_again(tmp_path, save(tmp_path / "model", **fields))
    adaptive = "adaptive_softmax_cutoffs" in fields
    assert not report.warnings and report.layout == "Mega LM of branch main"
    assert report.args["arch"] == ("mega_lm_adaptive_big" if adaptive else "mega_lm")
    config = MegaConfig.from_pretrained(back)
    for field, expected in (SIZES | fields).items():
        if not (field == "nffn_hidden_size" and name == "table"):
            assert getattr(config, field) == expected, field


UNSUPPORTED = {
    "dense layer": ({"add_lm_hidden_dense_layer": True}, "add_lm_hidden_dense_layer = True"),
    "bias": ({"lm_head_bias": True}, "lm_head_bias = True"),
    "mixed norms": ({"normalize_before_ffn": False}, "normalize_before_ffn = False"),
    "no final norm": ({"final_norm": False}, "final_norm = False"),
    "two norms": ({"embedding_norm": True}, "embedding_norm = True"),
    "padding": ({"pad_token_id": 0}, "pad_token_id = 0"),
    "end": ({"eos_token_id": 5}, "eos_token_id = 5"),
    "token types": ({"add_token_type_embeddings": True}, "add_token_type_embeddings = True"),
    "activation": ({"activation": "tanh"}, "activation = 'tanh'"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_unsupported_by_the_original(tmp_path, capsys, name):
    fields, expected = UNSUPPORTED[name]
    cannot_express(capsys, save(tmp_path / "model", **fields), "Mega LM of branch main", expected)


def test_fields_of_training_are_a_warning(tmp_path):
    fields = {"legacy_adaptive_loss": True, "padded_batch_statistics": True}
    report, _ = convert_again(tmp_path, save(tmp_path / "model", **BANDS, **fields))
    assert {warning.split(" = ")[0] for warning in report.warnings} == fields.keys()


def test_edited_configuration(convert, tmp_path, capsys):
    folder = convert(mega_lm(**KINDS["adaptive"], lr=[0.1]))
    edit(folder, dropout_prob=0.25, chunk_size=16)
    report, back = convert_again(tmp_path, folder)
    changed = "args of the converted file that no longer apply are replaced: decoder_chunk_size, dropout"
    assert any(warning.startswith(changed.split(":")[0]) for warning in report.warnings)
    config = MegaConfig.from_pretrained(back)
    assert (config.dropout_prob, config.chunk_size) == (0.25, 16) and report.args["lr"] == [0.1]
    edit(folder, adaptive_input_factor=3)
    assert "error" in fails(capsys, folder, tmp_path / "model.pt")


def test_dictionary(convert, make, tmp_path):
    make.dictionary(convert.source / "dict.txt", symbols=28)
    report = export_checkpoint(convert(mega_lm()), tmp_path / "out" / "model.pt")
    assert report.files == ["dict.txt", "model.pt"]
    assert (tmp_path / "out" / "dict.txt").read_bytes() == (convert.source / "dict.txt").read_bytes()


def test_a_tied_tensor_is_written_once(convert, tmp_path):
    state = mega_lm(**KINDS["adaptive"])
    convert(state)
    export_checkpoint(convert.output, tmp_path / "model.pt")
    tensors = torch.load(tmp_path / "model.pt", weights_only=False)["model"]
    copies = "decoder.adaptive_softmax.tail.0.2.weight", "decoder.embed_tokens.embeddings.1.0.weight"
    assert len({tensors[name].data_ptr() for name in copies}) == 1


def test_sizes_that_the_model_rejects(tmp_path, capsys):
    folder = save(tmp_path / "model", embedding_size=12, tie_word_embeddings=False)
    edit(folder, tie_word_embeddings=True)
    error = fails(capsys, folder, tmp_path / "model.pt")
    assert "the sizes of the configuration are invalid: tie_word_embeddings=True needs embedding_size" in error
