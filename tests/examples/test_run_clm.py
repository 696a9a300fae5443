"""run_clm.py and eval_lm.py: streams of tokens, tokenizers, training, resuming, scores."""

import gzip
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM, TrainerCallback, TrainerState, TrainingArguments

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.training import language_modeling, tokenizers
from luna_mega.training.language_modeling import Streams
from luna_mega.training.trainer import OrderedTrainer
from tests.examples import runs

TINY = (
    "hidden_size=16,num_hidden_layers=1,intermediate_size=24,nffn_hidden_size=24,shared_representation_size=8,"
    "ema_projection_size=2,use_chunking=true,chunk_size=8,dropout_prob=0.0,hidden_dropout_prob=0.0,"
    "attention_probs_dropout_prob=0.0,nffn_activation_dropout_prob=0.0,initializer_range=0.1"
)
LINES = ["abcdefghij" * 3, "", "jihgfedcba" * 2] * 20


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    with gzip.open(folder / "train.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(LINES) + "\n")
    return folder


@pytest.fixture
def run(call, corpus, tmp_path):
    """Return a function that trains the tiny model and returns the summary."""
    small = ["--block_size", 32, "--eval_context", 64, "--eval_segment", 16, "--per_device_train_batch_size", 4]
    model = ["--config_overrides", TINY, "--output_dir", tmp_path / "out", "--do_train"]
    return partial(call, "run_clm", "--dataset_path", corpus, *small, *model)


CHARACTERS = ["--tokenization", "char", "--line_end", "newline", "--validation_share", "0.1"]


@pytest.mark.parametrize("line_end", ["newline", "eos"])
def test_stream(script, line_end):
    language_model, vocabulary = language_modeling, tokenizers
    tokenizer = vocabulary.train_characters([*LINES, "\n"])
    stream = language_model.encode(["ab", "", " c"], tokenizer, line_end)
    expected = "ab\n\n c\n" if line_end == "newline" else "ab</s>c</s>"
    assert tokenizer.decode(stream, clean_up_tokenization_spaces=False) == expected.replace(" c", "<unk>c")


def test_windows_of_an_epoch_have_as_many_tokens_as_the_text():
    windows = language_modeling.draw_windows(torch.arange(30), length=7, seed=0)
    assert len(windows) == 4
    assert all(torch.equal(window["shift_labels"], window["input_ids"] + 1) for window in windows)


def test_streams_continue_after_the_previous_batch(script):
    streams = Streams(torch.arange(100), length=7, batch_size=3)
    batches = [[streams[step * 3 + row] for row in range(3)] for step in range(len(streams) // 3)]
    for row in range(3):
        joined = torch.cat([batch[row]["input_ids"] for batch in batches])
        assert torch.equal(joined, torch.arange(33 * row, 33 * row + len(joined)))
        assert all(torch.equal(batch[row]["shift_labels"], batch[row]["input_ids"] + 1) for batch in batches)
    assert [int(batch[0]["step"]) for batch in batches] == [0, 1, 2, 3]


@torch.no_grad()
@given(
    context=st.sampled_from([4, 7, 13, 20, 26, 51, 52, 53, 1000]),
    segment=st.integers(1, 30),
    batch_size=st.integers(1, 4),
)
def test_score(context, segment, batch_size):
    """Evaluation in segments gives the score of complete blocks; every token except the first counts once."""
    torch.manual_seed(0)
    fields = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1, "use_chunking": True, "chunk_size": 4}
    model = MegaForCausalLM(MegaConfig(**fields, bidirectional=False, is_decoder=True, initializer_range=0.3)).eval()
    stream = torch.randint(3, 12, (53,))
    total = 0.0
    for start in range(0, 52, context):
        block = stream[start : start + context + 1]
        log_probabilities = model(block[None, :-1], torch.ones(1, len(block) - 1)).logits[0].log_softmax(-1)
        total -= log_probabilities.gather(1, block[1:, None]).sum().item()
    result = language_modeling.score_stream(model, stream, context, segment=segment, batch_size=batch_size)
    assert result["loss"] == pytest.approx(total / 52, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_token"] == pytest.approx(result["loss"] / math.log(2))


BLOCKS = {"carried state": ["--carry_state", "true"], "lengths": ["--min_block_size", "8"]}


@pytest.mark.parametrize(("model_type", "blocks"), [("luna", "carried state"), ("mega", "lengths")])
def test_other_blocks(run, tmp_path, model_type, blocks):
    options = ["--model_type", model_type]
    if model_type == "luna":
        options += ["--config_overrides", f"{runs.TINY},position_embedding_type=sinusoidal"]
    summary = run(*CHARACTERS, "--max_steps", "3", "--do_eval", *BLOCKS[blocks], *options)
    assert math.isfinite(summary["eval_perplexity"])
    name = type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__
    assert name == f"{model_type.capitalize()}ForCausalLM"


def test_words_with_an_adaptive_softmax(run):
    adaptive = ",adaptive_input_cutoffs=[4,5],adaptive_softmax_cutoffs=[4,5],adaptive_input_factor=2"
    words = ["--tokenization", "word", "--vocab_size", "100", "--validation_share", "0.5", "--block_size", "8"]
    summary = run(*words, "--max_steps", "3", "--do_eval", "--config_overrides", TINY + adaptive)
    assert math.isfinite(summary["eval_perplexity"])


def test_a_table_of_biases_has_one_chunk(script, corpus, tmp_path):
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "use_chunking": True, "chunk_size": 8}
    fields |= {"is_decoder": True, "bidirectional": False, "relative_positional_bias": "simple"}
    MegaForCausalLM(MegaConfig(vocab_size=20, **fields)).save_pretrained(tmp_path / "model")
    tokenizers.train_characters(LINES).save_pretrained(tmp_path / "model")
    options = ["--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "scores", "--device", "cpu"]
    options += ["--dataset_path", corpus, "--split", "train", "--line_end", "newline", "--chunk_size", 4]
    with pytest.raises(SystemExit, match="rotary bias"):
        script("eval_lm").main([*map(str, options)])


def test_reported_scores_reach_the_callbacks(tmp_path):
    """Callbacks receive reported scores as they receive those of `Trainer.evaluate`, for example to stop early."""

    class Seen(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            assert isinstance(args, TrainingArguments) and isinstance(state, TrainerState)
            control.should_training_stop = metrics["eval_loss"] == 1.0

    training = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = OrderedTrainer(torch.nn.Linear(1, 1), training, callbacks=[Seen()])
    assert trainer.report({"loss": 1.0}, "eval")["eval_loss"] == 1.0 and trainer.control.should_training_stop
