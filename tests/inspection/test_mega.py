"""`luna-mega verify` and `luna-mega info` for Mega; formulas against PyTorch's counts."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from torch.utils.flop_counter import FlopCounterMode

import luna_mega
from luna_mega import (
    LunaConfig,
    LunaModel,
    MegaConfig,
    MegaForCausalLM,
    MegaForMaskedLM,
    MegaForSequenceClassification,
    MegaModel,
)
from luna_mega.convert import ConversionError
from luna_mega.inspection import costs, info
from luna_mega.inspection.verify import compare
from luna_mega.kernels.api import use_backend
from luna_mega_cli import main
from tests.convert.mega import BODY, POSITIONS, mega
from tests.convert.mega_lm import KINDS, mega_lm
from tests.inspection.counting import Peak, numbers_kept, padded

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "shared_representation_size": 16,
    "ema_projection_size": 4,
    "nffn_hidden_size": 40,
    "max_positions": 64,
}
DECODER = {"is_decoder": True, "bidirectional": False, "add_lm_hidden_dense_layer": False}
BANDS = {"adaptive_input_cutoffs": [30], "adaptive_softmax_cutoffs": [30], "adaptive_input_factor": 2}
PICTURES = {"input_type": "patches", "image_size": 32, "patch_size": 4, "output_projection": True, "final_norm": True}
CHUNKS = {"use_chunking": True, "chunk_size": 8}
# Encoder-decoders are compared in test_decoders.py.
CLASSES = [name for name in luna_mega.__all__ if name.startswith("MegaFor") and "Conditional" not in name]
CLASSES.append("MegaModel")


def save(folder, model_class=MegaForMaskedLM, **fields):
    own = {"MegaForCausalLM": DECODER, "MegaForImageClassification": PICTURES}.get(model_class.__name__, {})
    model_class(MegaConfig(**SIZES | own | fields)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_equals_itself(tmp_path, name):
    folder = save(tmp_path / "a", getattr(luna_mega, name))
    comparison = compare(folder, folder, tolerance=0.0, length=9)
    assert comparison.within and comparison.largest == 0 and comparison.model_class == name
    assert [row["layer"] for row in comparison.layers] == [0, 1, 2, 3]
    assert not compare(folder, save(tmp_path / "b", getattr(luna_mega, name))).within


@pytest.mark.parametrize("fields", [{"input_type": "values"}, {"relative_positional_bias": "simple"}, CHUNKS])
def test_other_inputs(tmp_path, capsys, fields):
    folder = save(tmp_path / "a", MegaForSequenceClassification, pooling="mean", **fields)
    assert main(["verify", str(folder), str(folder), "--length", "90"]) == 0
    printed = capsys.readouterr().out
    assert "packed" not in printed and "embeddings" in printed and "equal in every number" in printed


def test_models_of_two_families(tmp_path):
    LunaModel(LunaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)).save_pretrained(
        tmp_path / "luna"
    )
    with pytest.raises(ConversionError, match="class: 'MegaModel' and 'LunaModel'"):
        compare(save(tmp_path / "mega", MegaModel), tmp_path / "luna")


@pytest.mark.parametrize("kind", ["tied", "untied", "adaptive", "adaptive, untied"])
def test_language_models(convert, tmp_path, kind):
    state = mega_lm(**KINDS[kind])
    folder = convert(state)
    comparison = compare(folder, convert.file, tolerance=0.0)
    assert comparison.within and list(comparison.results) == ["logits"]
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "text-generation"
    state["model"]["decoder.layers.1.mega_layer.h_proj.weight"] *= 1.5
    torch.save(state, tmp_path / "other.pt")
    assert [row["hidden"] > 0 for row in compare(folder, tmp_path / "other.pt").layers] == [False, False, True]


@pytest.mark.parametrize("name", ["07_lm_enwik8_tied_rotary_chunk_notmultiple", "08_lm_wt103_adaptive_tied"])
def test_genuine_language_models(parity_folder, tmp_path, capsys, name):
    checkpoint, folder = parity_folder("mega", name) / "checkpoint.pt", tmp_path / "model"
    assert main(["convert", str(checkpoint), "--output", str(folder)]) == 0
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "text-generation"
    assert main(["verify", str(folder), str(checkpoint), "--length", "50", "--tolerance", "0"]) == 0
    assert "MegaForCausalLM" in capsys.readouterr().out


def test_checkpoints_of_the_two_branches(convert, tmp_path):
    """The tensors of one file, loaded with the convention of either branch."""
    state = mega(rotary=True)
    folder = convert(state)
    assert compare(folder, convert.file).largest == 0
    other = compare(folder, convert.file, ema_convention="flash")
    assert other.layers[0]["hidden"] == 0 and other.layers[1]["hidden"] > 1e-3
    assert main(["verify", str(folder), str(folder), "--ema-convention", "flash"]) == 1


MODELS = {
    "mlm": (MegaForMaskedLM, {}),
    "no dense": (MegaForMaskedLM, {"add_lm_hidden_dense_layer": False}),
    "encoder": (MegaModel, {"use_normalized_ffn": False, "normalization_type": "batchnorm"}),
    "chunks": (MegaModel, CHUNKS | {"attention_activation": "laplace"}),
    "classes": (MegaForSequenceClassification, {"classifier_num_layers": 2, "classifier_hidden_size": 10}),
    "pair": (luna_mega.MegaForSequencePairClassification, {"pooling": "mean"}),
    "choice": (luna_mega.MegaForMultipleChoice, {}),
    "tokens": (luna_mega.MegaForTokenClassification, {}),
    "spans": (luna_mega.MegaForQuestionAnswering, {}),
    "pictures": (luna_mega.MegaForImageClassification, PICTURES | {"image_size": 24, "patch_size": 6}),
    "lm": (MegaForCausalLM, DECODER | CHUNKS),
    "dense lm": (MegaForCausalLM, DECODER | {"add_lm_hidden_dense_layer": True}),
    "narrow": (MegaForCausalLM, DECODER | {"embedding_size": 20, "tie_word_embeddings": False}),
    "adaptive": (MegaForCausalLM, DECODER | BANDS),
    "adaptive tied": (MegaForCausalLM, DECODER | BANDS | {"tie_adaptive_projections": True, "embedding_size": 40}),
    "adaptive untied": (MegaForCausalLM, DECODER | BANDS | {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_the_count_of_pytorch(name):
    """Except for the moving average, whose operations the counter ignores.

    The reference attends to complete sequences, so a model with chunks is counted over one chunk.
    """
    model_class, fields = MODELS[name]
    length = fields.get("chunk_size", 24)
    model = model_class(MegaConfig(**SIZES | fields)).eval()
    inputs, sequences = {"input_ids": torch.randint(4, 30, (1, length))}, 1
    if name == "pair":
        inputs["pair_input_ids"], sequences = torch.randint(4, 40, (1, length)), 2
    if name == "pictures":
        inputs, length = {"pixel_values": torch.randn(1, 3, 24, 24)}, 16
    if name == "choice":
        inputs["input_ids"] = inputs["input_ids"][None]
    with torch.no_grad(), use_backend("reference"), FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts = counter.get_flop_counts()
    average = sum(sum(count.values()) for module, count in counts.items() if module.endswith("ema_gate"))
    found = costs.flops_per_token(model, length)
    expected = (found["total"] - found["moving_average"]) * length * sequences
    assert expected == pytest.approx(counter.get_total_flops() - average, rel=1e-9)
    assert found["moving_average"] == 3 * (2 if model.config.bidirectional else 1) * 32 * 6 * 4


def test_chunks_see_their_own_keys():
    """The number of keys visible to a token is the same in one chunk and in several; the last chunk may be short."""
    complete, chunks = (MegaModel(MegaConfig(**SIZES | fields)) for fields in ({}, CHUNKS))
    of_chunks = {length: costs.flops_per_token(chunks, length)["attention"] for length in (8, 21, 24)}
    assert of_chunks[8] == of_chunks[24]
    ratio = of_chunks[21] / costs.flops_per_token(complete, 21)["attention"]
    assert ratio == pytest.approx((8 * 8 + 8 * 8 + 5 * 5) / 21**2)


VARIANTS = {
    "plain": {},
    "no dropout": dict.fromkeys(("dropout_prob", "hidden_dropout_prob", "nffn_activation_dropout_prob"), 0.0),
    "scale norm": {"normalization_type": "scalenorm"},
    "batch norm": {"normalization_type": "batchnorm"},
    "chunks": CHUNKS,
    "truncated": {"truncation": 40},
    "no feed-forward": {"use_normalized_ffn": False},
    "one direction": {"bidirectional": False},
    "wide average": {"ema_projection_size": 16},
    "lm": DECODER,
    "large lm": DECODER | {"vocab_size": 4000},
    "lm without dropout": DECODER | {"dropout_prob": 0.0},
    "adaptive": DECODER | BANDS | {"vocab_size": 4000, "adaptive_softmax_dropout": 0.1},
}


@pytest.mark.parametrize(
    ("model_class", "variant", "length"),
    [(MegaModel, variant, length) for variant in VARIANTS for length in (100, 300)]
    + [(MegaModel, "chunks", 4100)]
    + [(MegaForMaskedLM, variant, 100) for variant in ("plain", "no dropout")]
    + [(MegaForCausalLM, variant, 300) for variant in ("lm", "large lm", "lm without dropout", "adaptive")],
)
def test_training_activations_equal_tensors_saved_by_autograd(model_class, variant, length):
    fields = {"normalization_type": "layernorm"} | VARIANTS[variant]
    model = model_class(MegaConfig(**SIZES | fields)).train()
    ids = torch.randint(4, 40, (1, length))
    ids = ids % 26 + 4  # all in the first band, if there are bands
    labels = {"labels": ids} if model_class is not MegaModel else {}
    numbers = numbers_kept(model, {"input_ids": ids, "attention_mask": padded(ids)} | labels)
    assert costs.training_activations(model, length) == pytest.approx(numbers, rel=0.04)


def test_training_activations_of_images():
    fields = {"normalization_type": "layernorm", "dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    model = luna_mega.MegaForImageClassification(MegaConfig(**SIZES | PICTURES | fields)).train()
    pictures = {"pixel_values": torch.randn(1, 3, 32, 32), "labels": torch.tensor([1])}
    assert costs.training_activations(model, 64) == pytest.approx(numbers_kept(model, pictures), rel=0.04)


PEAKS = [{}, CHUNKS, {"nffn_hidden_size": 500}, {"vocab_size": 4000}]
LARGE_BANDS = {"vocab_size": 4000, "adaptive_input_cutoffs": [400, 1200], "adaptive_softmax_cutoffs": [400, 1200]}


@pytest.mark.parametrize(
    ("model_class", "fields"),
    [(model_class, fields) for model_class in (MegaModel, MegaForMaskedLM) for fields in PEAKS]
    + [(MegaForCausalLM, DECODER | {"use_cache": False} | fields) for fields in (*PEAKS, LARGE_BANDS)],
)
def test_inference_peak(model_class, fields):
    model, ids = model_class(MegaConfig(**SIZES | fields)).eval(), torch.randint(4, 40, (1, 300))
    with torch.no_grad(), Peak() as peak:
        model(ids, attention_mask=padded(ids))
    assert costs.inference_activations(model, 300) == pytest.approx(peak.peak / 4, rel=0.03)


@pytest.mark.parametrize("fields", [{}, CHUNKS, {"truncation": 40}, CHUNKS | {"truncation": 400}])
def test_cache_size_equals_the_cached_tensors(fields, tmp_path):
    model, ids = MegaForCausalLM(MegaConfig(**SIZES | DECODER | fields)).eval(), torch.randint(4, 40, (1, 103))
    with torch.no_grad():
        layers = model(ids).past_key_values.layers
    kept = sum(
        tensor.numel()
        for layer in layers
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    )
    assert costs.cache_numbers(model, 103) == kept
    model.save_pretrained(tmp_path)
    assert info.describe(tmp_path, 103).activation_bytes["cache"] == 4 * kept


def test_info_of_a_folder(tmp_path, capsys):
    folder = save(tmp_path / "a", MegaForSequenceClassification, normalization_type="batchnorm")
    assert main(["info", str(folder), "--length", "500", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert "moving_average" in printed and "of one sequence of length 500" in printed and "recurrence" in printed
    assert main(["info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = MegaForSequenceClassification.from_pretrained(folder)
    assert found["parameters"]["total"] == model.num_parameters() and found["length"] == 64
    assert found["parameters"]["embeddings"] == 40 * 32
    assert found["parameters"]["head"] == model.classifier.dense.weight.numel() + 32 + 2 * 33
    assert found["weights"] == {"dtype": "float32", "bytes": 4 * model.num_parameters()}
    assert found["heads"] == ["SequenceClassification: 2 classes, pooling cls"]
    assert found["config"]["ema_projection_size"] == 4 and "2 for each multiply-add" in found["formulas"]["FLOPs/token"]


@pytest.mark.parametrize(("branch", "sort"), [("main", False), ("flash", False), ("main", True)])
def test_info_of_a_checkpoint(convert, branch, sort):
    state = mega("mega_sc_raw_big", branch, values=True, norm_type="batchnorm", prenorm=True, classes=10)
    if sort:
        state["model"] = dict(sorted(state["model"].items()))
    convert.save(state)
    found = info.describe(convert.file)
    expected = "branch main or flash (not determined by the order of its tensors)" if sort else f"branch {branch}"
    assert found.written_by == f"fairseq: a mega_lra checkpoint (arch mega_sc_raw_big) of the Mega code, {expected}"
    assert found.heads == ["SequenceClassification: 10 classes, pooling mean"] and found.length == POSITIONS
    running = ("running_mean", "running_var", "num_batches_tracked")
    parameters = sum(tensor.numel() for key, tensor in state["model"].items() if not key.endswith(running))
    assert found.parameters["total"] == parameters
    assert found.parameters["embeddings"] == sum(
        state["model"][f"{BODY}.embed_tokens.{p}"].numel() for p in ("weight", "bias")
    )


def test_length_beyond_the_bias_table(tmp_path):
    folder = save(tmp_path / "a", relative_positional_bias="simple")
    with pytest.raises(ConversionError, match="the model has 64 learned positions"):
        info.describe(folder, 65)
    assert info.describe(save(tmp_path / "b", relative_positional_bias="simple", **CHUNKS), 65).length == 65


def test_v4_folders(parity_folder):
    """Folders of transformers v4 are supported without conversion."""
    folder = parity_folder("mega", "hf_mlm_softmax_rotary_scalenorm")
    found = info.describe(folder)
    assert found.heads == ["masked LM"] and "transformers 4." in found.written_by
    assert compare(folder, folder, tolerance=0.0).within
