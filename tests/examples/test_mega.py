"""Mega in the example scripts; their options and data are tested with Luna."""

import math
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
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
def corpus(tmp_path):
    draw = random.Random(0)
    for name in ("train", "validation"):
        lines = [{"text": sentence(draw.random() < 0.5, draw)} for _ in range(60)]
        write(lines, tmp_path / "corpus" / f"{name}.jsonl")
    return ["--dataset_path", tmp_path / "corpus", "--block_size", 24]


@pytest.fixture
def race(tmp_path):
    """Return the options of a RACE task in which the correct option contains the word "good"."""
    draw = random.Random(0)
    for name in ("train", "validation"):
        examples = []
        for index in range(32):
            label = draw.randrange(4)
            options = [f"{'good' if option == label else 'bad'} {draw.choice(WORDS)}" for option in range(4)]
            row = {
                "article": sentence(True, draw),
                "question": "the _ was",
                "options": options,
                "answer": "ABCD"[label],
            }
            examples.append({"example_id": f"middle{index}.txt", **row})
        write(examples, tmp_path / "race" / f"{name}.jsonl")
    return ["--task", "race", "--dataset_path", tmp_path / "race", "--max_seq_length", 32]


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


@pytest.mark.slow
def test_glue_from_scratch(run, glue, tmp_path):
    options = ["--learning_rate", 0.02, "--num_train_epochs", 4, "--train_sampling_strategy", "group_by_length"]
    summary = run("run_glue", *glue, *scratch(tmp_path / "out"), *options)
    assert summary["eval_accuracy"] == 1.0
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert (config.model_type, config.chunk_size, config.max_positions) == ("mega", 6, 24)
    assert config.id2label == {0: "negative", 1: "positive"}

    again = ["--model_name_or_path", tmp_path / "out", "--output_dir", tmp_path / "again"]
    assert run("run_glue", *glue, *again)["eval_loss"] == pytest.approx(summary["eval_loss"], abs=1e-6)


@pytest.mark.slow
def test_race_from_scratch(run, race, tmp_path):
    options = ["--learning_rate", 0.02, "--num_train_epochs", 8]
    summary = run("run_race", *race, *scratch(tmp_path / "out"), *options)
    assert summary["eval_accuracy"] > 0.9 and "eval_middle_accuracy" in summary
    assert AutoModelForMultipleChoice.from_pretrained(tmp_path / "out").config.model_type == "mega"


@pytest.mark.slow
def test_pretrained_from_scratch_and_fine_tuned(run, corpus, glue, tmp_path):
    options = ["--learning_rate", 0.02, "--num_train_epochs", 8]
    summary = run("run_mlm", *corpus, *scratch(tmp_path / "mlm"), *options)
    assert summary["eval_perplexity"] < 30  # about 300 before training
    tuned = ["--model_name_or_path", tmp_path / "mlm", "--output_dir", tmp_path / "out", "--do_train"]
    run("run_glue", *glue, *tuned, "--max_steps", 1, "--learning_rate", 0)
    mlm, classifier = (
        dict(auto.from_pretrained(tmp_path / name).mega.named_parameters())
        for auto, name in ((AutoModelForMaskedLM, "mlm"), (AutoModelForSequenceClassification, "out"))
    )
    torch.testing.assert_close(classifier, mlm, rtol=0, atol=0)


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


@pytest.mark.slow
def test_v4_folder_is_fine_tuned_on_race(run, race, words, parity_folder, tmp_path):
    folder = parity_folder("mega", "hf_multiplechoice")
    model = ["--model_name_or_path", folder, *words, "--output_dir", tmp_path / "out", "--do_train"]
    summary = run("run_race", *race, *model, "--learning_rate", 0.01, "--num_train_epochs", 8)
    assert summary["eval_accuracy"] > 0.9


@pytest.mark.slow
def test_v4_folder_is_pretrained_further(run, corpus, words, parity_folder, tmp_path):
    folder = parity_folder("mega", "hf_mlm_laplace_rotary_post")
    model = ["--model_name_or_path", folder, *words]
    before = run("run_mlm", *corpus, *model, "--output_dir", tmp_path / "before")["eval_perplexity"]
    options = ["--do_train", "--learning_rate", 0.01, "--num_train_epochs", 8, "--output_dir", tmp_path / "out"]
    after = run("run_mlm", *corpus, *model, *options)["eval_perplexity"]
    assert math.isfinite(before) and after < 0.3 * before


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
