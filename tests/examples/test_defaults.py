"""Default options fit every model: lengths are reduced to its positions, and errors precede the training."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from luna_mega import LunaSeq2SeqConfig, MegaSeq2SeqConfig
from luna_mega.training.models import longest_input
from tests.examples import test_resume as resume
from tests.examples.runs import TINY, assert_error
from tests.marks import slow_but

SHORT = ["--config_overrides", f"{TINY},max_position_embeddings=8"]
TABLE = ["--config_overrides", f"{resume.MEGA},relative_positional_bias=simple,max_positions=8", "--model_type", "mega"]
GLUE, RACE = ["run_glue", "text", "--task_name", "sst2"], ["run_race", "race"]
MLM, CLM, TEXT = ["run_mlm", "text"], ["run_clm", "text"], ["run_text_classification", "text"]
LRA = ["lra.run_lra", "text", "--task_name", "text", "--model_type", "mega"]
TRANSLATION = ["run_translation", "pairs", "--vocab_size", 270]
EVALUATED = ["--do_eval", "--max_steps", 1]
REDUCED = {
    "glue": ([*GLUE, *SHORT], ["--max_seq_length 128 is reduced to 8, because the model has 8 positions"]),
    "text": ([*TEXT, *SHORT], ["--max_seq_length 512 is reduced to 8"]),
    "race": ([*RACE, *SHORT], ["--max_seq_length 512 is reduced to 8"]),
    "mlm": ([*MLM, *SHORT], ["--max_seq_length 512 is reduced to 8"]),
    "clm": ([*CLM, *SHORT, "--model_type", "luna"], ["--block_size 512 is reduced", "--eval_context 8192 is reduced"]),
    "lra": ([*LRA, *TABLE], ["--max_seq_length 4096 is reduced to 8"]),
    "translation": (
        [*TRANSLATION, "--config_overrides", f"{TINY},max_position_embeddings=9,max_target_positions=7"],
        ["--max_source_length 128 is reduced to 9", "--max_target_length 128 is reduced to 7"],
    ),
}
BART = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"
OTHERS = {
    "bert": resume.BERT,
    "roberta": resume.BERT,
    "modernbert": resume.BERT,
    "bart": f"{BART},encoder_ffn_dim=16,decoder_ffn_dim=16",
    "t5": "d_model=16,num_layers=1,num_heads=2,d_ff=16,d_kv=8",
}
TRAINED = [("clm", "bert"), ("mlm", "modernbert"), ("text", "bart"), ("glue", "t5")]
MORE = [("clm", "bart"), ("mlm", "bart"), ("glue", "bart"), ("text", "t5"), ("lra", "bart"), ("mlm", "roberta")]
MORE += [("translation", "bart")]


@pytest.mark.parametrize("case", REDUCED)
def test_lengths_above_the_positions(train_rows, case, capsys):
    """Scripts use the smaller of the option and the positions of the model, and print so."""
    arguments, lines = REDUCED[case]
    output = train_rows("out", *arguments, *EVALUATED)
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed
    assert AutoTokenizer.from_pretrained(output).model_max_length <= 9
    assert json.loads((output / "all_results.json").read_text(encoding="utf-8"))["eval_loss"] > 0


def test_positions_of_both_sides():
    sizes = {"hidden_size": 16, "num_attention_heads": 2}
    luna = LunaSeq2SeqConfig(**sizes, max_position_embeddings=9, max_target_positions=7)
    assert (longest_input(luna), longest_input(luna, "decoder")) == (9, 7)
    mega = MegaSeq2SeqConfig(hidden_size=16, relative_positional_bias="simple", max_positions=9)
    mega.cross_attention_positions = 8
    assert (longest_input(mega), longest_input(mega, "decoder")) == (8, 8)


@pytest.mark.parametrize(("name", "model_type"), slow_but(TRAINED, TRAINED + MORE))
def test_other_models_are_evaluated(train_rows, name, model_type):
    """Models of transformers with other outputs: encoder states, logits of masked tokens, no cache with labels."""
    arguments = {"clm": CLM, "mlm": MLM, "glue": GLUE, "text": TEXT, "lra": LRA, "translation": TRANSLATION}[name]
    options = ["--model_type", model_type, "--config_overrides", OTHERS[model_type]]
    options += ["--block_size" if name == "clm" else "--max_seq_length", 24] if name in ("clm", "mlm") else []
    output = train_rows("out", *arguments, *EVALUATED, *options)
    assert json.loads((output / "all_results.json").read_text(encoding="utf-8"))["eval_loss"] > 0
    if model_type == "roberta":  # the first token has the position after the padding id, 1
        assert AutoConfig.from_pretrained(output).max_position_embeddings == 26


@pytest.mark.parametrize(("arguments", "model_type"), [(GLUE, "luna_seq2seq"), (RACE, "megalodon"), (MLM, "t5")])
def test_models_without_a_class(train_rows, arguments, model_type, tmp_path):
    message = f"--model_type {model_type} is not supported: transformers has no AutoModelFor"
    assert_error(train_rows, message, "out", *arguments, "--model_type", model_type, output=tmp_path / "out")


CARRIED = {
    "positions": (
        ["luna", TINY],
        "consecutive tokens, but the model has 16 positions; pass --config_overrides position_",
    ),
    "table": (["mega", f"{resume.MEGA},relative_positional_bias=simple"], "relative_positional_bias=rotary"),
    "layerdrop": (["luna", f"{TINY},position_embedding_type=none,layerdrop=0.1"], "but layerdrop=0.1 skips some"),
}


@pytest.mark.parametrize("case", CARRIED)
def test_carried_states_that_a_model_does_not_support(train_rows, case, tmp_path):
    (model_type, overrides), message = CARRIED[case]
    options = [*CLM, "--carry_state", "true", "--block_size", 16, "--model_type", model_type]
    run = [*options, "--config_overrides", overrides]
    assert_error(train_rows, message, "out", *run, output=tmp_path / "out")


def test_blocks_shorter_than_the_shortest(train_rows, tmp_path):
    options = [*CLM, "--config_overrides", resume.CHUNKS, "--block_size", 16, "--min_block_size", 24]
    assert_error(train_rows, "--min_block_size 24 and --block_size 16", "out", *options, output=tmp_path / "out")
