"""Mega in the example scripts; their options and data are tested with Luna."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from luna_mega.training import models as training_models
from tests.examples.runs import sentence, write
from tests.marks import slow_but

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
V4 = ["hf_mlm_laplace_simple_batchnorm", "hf_mlm_laplace_simple_chunk", "hf_mlm_softmax_rotary_rmsnorm", "hf_seqcls"]
WORDS = "the film book play was so fine lovely superb poor awful dull red blue good bad".split()
TINY = "hidden_size=16,intermediate_size=32,nffn_hidden_size=32,shared_representation_size=8,num_hidden_layers=1"
TINY += ",ema_projection_size=4,use_chunking=true,chunk_size=6,pooling=mean,normalization_type=layernorm"
TINY += ",attention_activation=laplace,relative_positional_bias=simple,dropout_prob=0.0"


@pytest.fixture
def glue(tmp_path):
    for name, size in (("train", 64), ("validation", 32)):
        draw = random.Random(size)
        labels = [draw.randrange(2) for _ in range(size)]
        write(
            [{"sentence": sentence(label == 1, draw), "label": label} for label in labels], tmp_path / f"{name}.jsonl"
        )
    return ["--task_name", "sst2", "--dataset_path", tmp_path, "--max_seq_length", 24]


@pytest.fixture
def words(tmp_path):
    """Save a tokenizer with one token per word; return its option.

    The v4 folders have 100 tokens, fewer than a byte-level BPE needs.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(zip(["bos_token", "pad_token", "eos_token", "unk_token", "mask_token"], SPECIALS, strict=True))
    options = {"model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **options).save_pretrained(tmp_path / "words")
    return ["--tokenizer_name", tmp_path / "words"]


@pytest.fixture
def run(call):
    return lambda name, *arguments: call(name, "--save_strategy", "no", "--do_eval", *arguments)


def scratch(output: Path, overrides: str = TINY) -> list:
    model = ["--model_type", "mega", "--config_overrides", overrides, "--vocab_size", 300]
    return [*model, "--output_dir", output, "--do_train", "--per_device_train_batch_size", 8]


@pytest.mark.parametrize("name", slow_but(["hf_seqcls"], V4))
def test_v4_folder_is_fine_tuned_on_glue(name, run, glue, words, parity_folder, tmp_path):
    folder, output = parity_folder("mega", name), tmp_path / "out"
    model = ["--model_name_or_path", folder, "--ignore_mismatched_sizes", *words, "--do_train", "--output_dir", output]
    run("run_glue", *glue, *model, "--max_steps", 1, "--learning_rate", 0)
    before, after = (AutoModelForSequenceClassification.from_pretrained(path).mega for path in (folder, output))
    torch.testing.assert_close(dict(after.named_parameters()), dict(before.named_parameters()), rtol=0, atol=0)
    for flag in ("legacy_rms_norm", "legacy_bias_table"):
        assert getattr(after.config, flag) == getattr(before.config, flag)
    assert before.config.legacy_rms_norm == name.endswith("rmsnorm")


LENGTHS = {
    "table": ("relative_positional_bias=simple,max_positions=8", False),
    "table by its other name": ("relative_positional_bias=simple,max_position_embeddings=8", False),
    "table of the length": ("relative_positional_bias=simple", True),
    "rotary": ("relative_positional_bias=rotary,max_positions=8", True),
    "chunks": ("relative_positional_bias=simple,use_chunking=true,chunk_size=4,max_positions=8", True),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_inputs_longer_than_the_positions(case, script, words):
    overrides, fits = LENGTHS[case]
    module = training_models
    model = module.ModelArguments(model_type="mega", config_overrides=overrides, tokenizer_name=words[1])
    tokenizer = module.make_tokenizer(model, [], 24)
    tokenizer.model_max_length = 8  # the block length of pretraining
    if fits:
        input_ids = torch.randint(5, len(tokenizer), (2, 24))
        module.make_model(AutoModelForMaskedLM, model, module.make_config(model, tokenizer, 24))(input_ids)
        assert tokenizer.model_max_length == 24
    else:
        with pytest.raises(SystemExit, match="inputs of 24 tokens do not fit in the 8 positions"):
            module.make_config(model, tokenizer, 24)


@pytest.mark.parametrize("model_type, longest", [("bert", 512), ("roberta", 510)])
def test_longest_input_of_other_models(model_type, longest):
    """The longest input excludes RoBERTa's positions up to the padding id, 1."""
    assert training_models.longest_input(AutoConfig.for_model(model_type, max_position_embeddings=512)) == longest


def test_unknown_names(run, glue, tmp_path):
    for overrides, message in (
        ("attention_activation=sigmoid", "attention_activation must be one of softmax, laplace, relu2, got 'sigmoid'"),
        ("normalization_type=groupnorm", "normalization_type must be one of layernorm"),
        ("use_chunking=true", "use_chunking needs a chunk_size of at least 1"),
        ("projection_length=16", "mega has no field projection_length"),
    ):
        with pytest.raises(SystemExit, match=message):
            run("run_glue", *glue, *scratch(tmp_path / "out", overrides))
    with pytest.raises(SystemExit, match="configuration: Unrecognized model identifier: megga"):
        run("run_glue", *glue, *scratch(tmp_path / "out"), "--model_type", "megga")
