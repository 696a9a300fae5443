"""BERT's tokenizer, which returns two token types, works in every script that trains on texts."""

from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertTokenizer,
    DistilBertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    pipeline,
)

from luna_mega.training.models import CheckpointArguments, ModelArguments, make_config
from luna_mega.training.tokenizers import make_bytes, make_words, train_bpe, train_characters
from tests.examples.runs import TINY, write
from tests.examples.test_run_race import race_rows
from tests.marks import slow_but

WORDS = ["a", "b", "c", "the", "door", "is", "_", ".", "?", "good", "bad", "red", "blue"]
# run_clm.py evaluates blocks that are longer than the training blocks
ANY_LENGTH = "position_embedding_type=sinusoidal"
MEGA = "hidden_size=16,num_hidden_layers=1,intermediate_size=16,nffn_hidden_size=16,shared_representation_size=8"
MEGA += ",ema_projection_size=4"

# Options of a script for texts, and whether its models have token types.
SCRIPTS = {
    "mnli": (["run_glue", "--task_name", "mnli", "--max_seq_length", 16, "--token_dropout", 0.1], True),
    "texts": (["run_text_classification", "--text_columns", "sentence", "--max_seq_length", 16], True),
    "pairs": (["run_text_classification", "--text_columns", "sentence", "premise", "--max_seq_length", 16], True),
    "mlm": (["run_mlm", "--text_column", "sentence", "--max_seq_length", 8, "--short_seq_prob", 0.3], True),
    "clm": (
        ["run_clm", "--model_type", "luna", "--text_column", "sentence", "--block_size", 8, "--line_end", "newline"],
        False,
    ),
    "race": (["run_race", "--max_seq_length", 32], True),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary)}).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    """Write rows with the columns of all scripts."""
    rows = [
        {"sentence": "a b the door is good", "premise": "a b", "hypothesis": "c", "label": index % 2} | row
        for index, row in enumerate(race_rows(8, seed=0))
    ]
    for split in ("train", "validation", "validation_matched", "validation_mismatched"):
        write(rows, tmp_path / "data" / f"{split}.jsonl")
    return tmp_path / "data"


STEP = ["--do_train", "--do_eval", "--max_steps", 1, "--save_strategy", "no"]


@pytest.mark.parametrize("name", slow_but(["texts"], SCRIPTS))
def test_new_models_have_the_types_of_the_tokenizer(name, call, data, tokenizer, tmp_path):
    (script, *options), has_types = SCRIPTS[name]
    model = ["--tokenizer_name", tokenizer, "--config_overrides", f"{TINY},{ANY_LENGTH}"]
    call(script, *options, *model, *STEP, "--dataset_path", data, "--output_dir", tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").type_vocab_size == (2 if has_types else 0)
    types = AutoTokenizer.from_pretrained(tmp_path / "out")("a", "b").get("token_type_ids")
    assert types == ([0, 0, 0, 1, 1] if has_types else None)


@pytest.mark.parametrize("name", slow_but(["mnli"], SCRIPTS))
def test_models_without_types(name, call, data, tokenizer, tmp_path):
    """The tokenizer of a trained model without types returns no types, so that pipelines work for pairs too."""
    (script, *options), _ = SCRIPTS[name]
    model = ["--tokenizer_name", tokenizer, "--config_overrides", f"{TINY},{ANY_LENGTH},type_vocab_size=0"]
    paths = ["--dataset_path", data, "--output_dir", tmp_path / "out"]
    summary = call(script, *options, *model, *STEP, *paths)
    # a loaded model behaves in the same way
    paths[-1] = tmp_path / "again"
    model = ["--tokenizer_name", tokenizer, "--model_name_or_path", tmp_path / "out"]
    again = call(script, *options, *model, *paths, "--do_eval")
    (loss,) = {key for key in again if key in ("eval_loss", "eval_matched_loss")}
    assert again[loss] == pytest.approx(summary[loss], rel=1e-5)
    for folder in ("out", "again"):
        if (tmp_path / folder / "tokenizer_config.json").is_file():
            assert "token_type_ids" not in AutoTokenizer.from_pretrained(tmp_path / folder)("a", "b")
    if name in ("mnli", "texts"):
        text = {"text": "a b", "text_pair": "c"} if name == "mnli" else "a b"
        assert pipeline("text-classification", model=str(tmp_path / "out"))(text)


def test_a_new_mega_has_the_types_of_the_tokenizer(tokenizer):
    arguments = ModelArguments(model_type="mega", config_overrides=MEGA, tokenizer_name=str(tokenizer))
    config = make_config(arguments, AutoTokenizer.from_pretrained(tokenizer), 16)
    assert config.add_token_type_embeddings and config.type_vocab_size == 2


@pytest.mark.parametrize(
    "config",
    [DistilBertConfig(), RobertaConfig(type_vocab_size=1), LlamaConfig()],
    ids=lambda config: config.model_type,
)
def test_other_models_without_a_second_type(config, tokenizer, tmp_path):
    config.update({"pad_token_id": 0, "max_position_embeddings": 32})
    config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    make_config(CheckpointArguments(str(tmp_path)), loaded, 16)
    assert "token_type_ids" not in loaded("a", "b")


@pytest.mark.parametrize(
    "made",
    [make_bytes(), make_words("ab"), train_characters(["ab"]), train_bpe(["ab"], 300, 16)],
    ids=["bytes", "words", "characters", "bpe"],
)
def test_tokenizers_of_the_package_return_no_types(made):
    assert isinstance(made, PreTrainedTokenizerFast) and list(made("a", "b")) == ["input_ids", "attention_mask"]
