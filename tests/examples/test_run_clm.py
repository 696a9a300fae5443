"""run_clm.py and eval_lm.py: streams of tokens, tokenizers, training, resuming, scores."""

import gzip
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerState, TrainingArguments

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.training import language_modeling, tokenizers
from luna_mega.training.language_modeling import Streams
from luna_mega.training.trainer import OrderedTrainer
from tests.examples import runs
from tests.examples.runs import assert_error

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


def test_tokenizers(script):
    vocabulary = tokenizers
    text = "To be,  or\nnot é"
    for tokenizer in (vocabulary.train_characters([text]), vocabulary.make_bytes()):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert len(ids) == len(text.encode())
    words = vocabulary.train_words(["a a a b b c", "a <unk> <unk>\td"], vocab_size=6)
    assert words.get_vocab() == {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    assert words("a c <unk>b", add_special_tokens=False)["input_ids"] == [4, 3, 3, 5]


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
@pytest.mark.parametrize(("context", "batch_size"), [(20, 1), (20, 3), (7, 2), (1000, 4)])
def test_score(script, context, batch_size):
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
    result = language_modeling.score_stream(model, stream, context, segment=3, batch_size=batch_size)
    assert result["loss"] == pytest.approx(total / 52, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_token"] == pytest.approx(result["loss"] / math.log(2))


def test_training_learns_resumes_and_loads(run, script, corpus, tmp_path):
    options = [*CHARACTERS, "--learning_rate", "2e-2", "--save_steps", "10", "--eval_strategy", "no"]
    first = run(*options, "--do_eval", "--max_steps", "20")
    assert first["eval_loss"] < 1.8 < math.log(11)
    assert first["eval_bits_per_token"] == pytest.approx(first["eval_loss"] / math.log(2))
    resumed = run(*options, "--max_steps", "25", "--resume_from_checkpoint", "last", "--do_eval")
    assert runs.steps(tmp_path / "out") == 25
    model, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("abcdefg", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert model.generate(ids, max_new_tokens=5, do_sample=False).shape == (1, 12)
    scores = script("eval_lm").main(
        [
            *("--model_name_or_path", str(tmp_path / "out"), "--dataset_path", str(corpus), "--split", "train"),
            *("--line_end", "newline", "--last_share", "0.1", "--eval_context", "16", "64", "--chunk_size", "8", "12"),
            *("--eval_segment", "16", "--output_dir", str(tmp_path / "scores"), "--device", "cpu"),
        ]
    )
    assert json.loads((tmp_path / "scores" / "scores.json").read_text(encoding="utf-8")) == scores
    assert [(row["chunk"], row["context"]) for row in scores] == [(8, 16), (8, 64), (12, 16), (12, 64)]
    assert next(row for row in scores if row["context"] == 64)["loss"] == pytest.approx(resumed["eval_loss"], rel=0.02)


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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["megalodon", "llama"])
def test_other_models(run, model_type, tmp_path):
    """A context has the same score in one segment and in several."""
    fields = "hidden_size=16,num_hidden_layers=1,intermediate_size=24,num_attention_heads=2"
    if model_type == "megalodon":
        fields += ",shared_representation_size=8,value_size=24,ema_projection_size=2,norm_num_groups=4,chunk_size=8"
    options = [*CHARACTERS, "--model_type", model_type, "--config_overrides", fields, "--max_steps", "3", "--do_eval"]
    summaries = [run(*options, "--eval_segment", n, "--output_dir", tmp_path / str(n)) for n in (16, 64)]
    losses = [summary["eval_loss"] for summary in summaries]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_words_with_an_adaptive_softmax(run):
    adaptive = ",adaptive_input_cutoffs=[4,5],adaptive_softmax_cutoffs=[4,5],adaptive_input_factor=2"
    words = ["--tokenization", "word", "--vocab_size", "100", "--validation_share", "0.5", "--block_size", "8"]
    summary = run(*words, "--max_steps", "3", "--do_eval", "--config_overrides", TINY + adaptive)
    assert math.isfinite(summary["eval_perplexity"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenization", "syllable"], "must be one of char, byte, bpe, word"),
        (["--line_end", "dot"], "must be one of newline, eos"),
        (["--validation_share", "1.5"], "must be in"),
        (["--model_type", "t5"], "t5 has no causal language model"),
        (["--model_type", "llama", "--carry_state", "true"], "requires a recurrent state: --model_type luna or mega"),
        (["--block_size", "100000"], "too few for blocks of 100000"),
        (["--carry_state", "true", "--block_size", "5000"], "too few for 4 blocks"),
        (["--min_block_size", "12"], "must be multiples of the chunk size 8"),
        (["--carry_state", "true", "--min_block_size", "8"], "--min_block_size is not supported with --carry_state"),
        (["--do_predict", "true"], "no test predictions"),
    ],
)
def test_errors(run, options, message):
    assert_error(run, message, *CHARACTERS, *options)


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
