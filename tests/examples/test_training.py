"""Parts of `luna_mega.training`: tokenizers, models and their lengths, plots, progress, and float32 products."""

import json

import pytest
import torch
from datasets import Dataset
from hypothesis import given, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from luna_mega import LunaSeq2SeqConfig, MegaSeq2SeqConfig
from luna_mega.training import load_tokenizer
from luna_mega.training.classification import TextArguments, encode_split
from luna_mega.training.models import ModelArguments, longest_input, make_config, make_model
from luna_mega.training.plots import plot_losses
from luna_mega.training.products import use_onednn
from luna_mega.training.tokenizers import (
    make_bytes,
    make_words,
    train_bpe,
    train_characters,
    train_joint_bpe,
    train_words,
)
from luna_mega.training.trainer import OrderedTrainer, ProgressBar
from tests.examples.runs import TINY, assert_error

TEXTS = ["the quick brown fox", "the lazy dog", "quick dogs and lazy foxes"] * 20


def test_bpe(tmp_path):
    """Ids and formats of RoBERTa; the first word has a leading space, and the mask takes the space before it."""
    bpe = train_bpe(TEXTS, vocab_size=300, model_max_length=64)
    assert bpe.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert bpe.mask_token_id == len(bpe) - 1 < 300 and bpe.model_max_length == 64
    first, second = (bpe(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "dogs"))
    assert bpe("the fox")["input_ids"] == [0, *first, 2]
    assert bpe("the fox", "dogs")["input_ids"] == [0, *first, 2, 2, *second, 2]
    one, _, three = bpe.tokenize("quick the quick")
    assert one == three and bpe("the <mask>")["input_ids"] == bpe("the<mask>")["input_ids"]
    bpe.backend_tokenizer.model.save(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"vocab.json", "merges.txt"}
    assert load_tokenizer(str(tmp_path))(" x the fox")["input_ids"] == bpe("x the fox")["input_ids"]


@given(text=st.text(st.sampled_from("ab Zé文🙂\t\n\u00a0'.<"), max_size=12))
def test_every_text_survives(text):
    """Tokens of all texts are known, and decode to the text; a joint BPE reads texts without spaces around them."""
    joint, characters = train_joint_bpe([], 260, 64), train_characters([text])
    for tokenizer, read in ((joint, text.strip()), (characters, text), (make_bytes(), text)):
        ids = tokenizer(read, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids and not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == read
        assert [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1, 2]
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        assert list(tokenizer("a", "b")) == ["input_ids", "attention_mask"]  # no token types
    assert len(ids) == len(text.encode())


def test_words():
    words = train_words(["a a a b b c", "a <unk> <unk>\td"], vocab_size=6)
    assert words.get_vocab() == {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    assert words("a c <unk>b", add_special_tokens=False)["input_ids"] == [4, 3, 3, 5]


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001"])
def test_numbers_of_overrides(text):
    """YAML 1.1 would read the first as text."""
    model = ModelArguments(config_overrides=f"layer_norm_eps={text}")
    assert make_config(model, make_words("abc"), 24).layer_norm_eps == 1e-5


def test_tokenizers_without_a_padding_token():
    """They are sufficient for blocks of text, but neither for batches of texts nor for positions of RoBERTa."""
    tokenizer = make_words("abc")
    tokenizer.pad_token = None
    message = "the tokenizer has no padding token; pass another --tokenizer_name"
    assert_error(make_config, f"roberta: {message}", ModelArguments(model_type="roberta"), tokenizer, 24)
    split, training = Dataset.from_dict({"text": ["a"]}), TrainingArguments(report_to="none", use_cpu=True)
    assert_error(encode_split, message, split, "train", ["text"], [0], tokenizer, TextArguments(), training)


def test_weights_are_trained_in_float32(tmp_path):
    """AdamW's small updates of weights in bfloat16 would be lost."""
    model = ModelArguments(config_overrides=TINY)
    config = make_config(model, make_words("abc"), 24)
    make_model(AutoModelForMaskedLM, model, config).bfloat16().save_pretrained(tmp_path)
    network = make_model(AutoModelForMaskedLM, ModelArguments(model_name_or_path=str(tmp_path)), config)
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


class ByTokens(OrderedTrainer):
    max_tokens = 16


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (OrderedTrainer, {}),
        (OrderedTrainer, {"train_sampling_strategy": "group_by_length"}),
        (OrderedTrainer, {"accelerator_config": {"use_seedable_sampler": False}}),
        (ByTokens, {}),
    ],
)
def test_data_seed(trainer, options, tmp_path):
    """`--data_seed` is the seed of the order, by default `--seed`."""
    lengths = [index % 7 + 1 for index in range(24)]
    rows = {"input_ids": [[1] * length for length in lengths], "length": lengths, "row": range(24)}
    split, orders = Dataset.from_dict(rows | {"lengths": [[length] for length in lengths]}), []
    for seed, data_seed in ((1, None), (2, 1), (1, 2)):
        options |= {
            "seed": seed,
            "data_seed": data_seed,
            "remove_unused_columns": False,
            "per_device_train_batch_size": 4,
        }
        training = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, do_train=True, **options)
        collate = {"data_collator": lambda batch: {"row": torch.tensor([row["row"] for row in batch])}}
        set_seed(seed)
        batches = trainer(torch.nn.Linear(1, 1), training, train_dataset=split, **collate).get_train_dataloader()
        orders.append([row for batch in batches for row in batch["row"].tolist()])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ("relative_positional_bias=simple,max_positions=8", False),
        ("relative_positional_bias=simple,max_position_embeddings=8", False),
        ("relative_positional_bias=simple", True),
        ("relative_positional_bias=rotary,max_positions=8", True),
        ("relative_positional_bias=simple,use_chunking=true,chunk_size=4,max_positions=8", True),
    ],
)
def test_inputs_longer_than_the_positions(overrides, fits):
    model = ModelArguments(model_type="mega", config_overrides=overrides)
    tokenizer = make_words("abc", model_max_length=8)  # the block length of pretraining
    if fits:
        config = make_config(model, tokenizer, 24)
        make_model(AutoModelForMaskedLM, model, config)(torch.randint(4, len(tokenizer), (2, 24)))
        assert tokenizer.model_max_length == 24
    else:
        assert_error(make_config, "inputs of 24 tokens do not fit in the 8 positions", model, tokenizer, 24)


def test_longest_input():
    """Both sides of an encoder-decoder; RoBERTa's positions up to the padding id, 1, are no positions of tokens."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2}
    luna = LunaSeq2SeqConfig(**sizes, max_position_embeddings=9, max_target_positions=7)
    assert (longest_input(luna), longest_input(luna, "decoder")) == (9, 7)
    mega = MegaSeq2SeqConfig(hidden_size=16, relative_positional_bias="simple", max_positions=9)
    mega.cross_attention_positions = 8
    assert (longest_input(mega), longest_input(mega, "decoder")) == (8, 8)
    for model_type, longest in (("bert", 512), ("roberta", 510)):
        assert longest_input(AutoConfig.for_model(model_type, max_position_embeddings=512)) == longest


def test_plot_of_losses(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.figure")
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}]
    history += [{"step": 2, "eval_accuracy": 0.5, "eval_runtime": 9.0, "eval_samples_per_second": 1.0}]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": history}), encoding="utf-8")
    drawn, save = [], pyplot.Figure.savefig
    monkeypatch.setattr(pyplot.Figure, "savefig", lambda figure, file: drawn.append(figure) or save(figure, file))
    plot_losses({"$x_{": tmp_path, "b": tmp_path}, tmp_path / "plot.png")  # names are not formulas
    axes, accuracy = drawn[0].axes
    points = {line.get_label(): line.get_xydata().tolist() for line in [*axes.lines, accuracy.lines[1]]}
    assert points["$x_{, training"] == points["b, training"] == [[1, 2], [2, 1]]
    assert points["b, evaluation loss"] == [[2, 1.5]] and accuracy.lines[1].get_xydata().tolist() == [[2, 0.5]]
    assert all(step == int(step) for panel in (axes, accuracy) for step in panel.get_xticks())
    assert (axes.get_xlabel(), accuracy.get_ylabel()) == ("steps", "accuracy")
    state.write_text(json.dumps({"log_history": history[3:]}), encoding="utf-8")
    with pytest.raises(ValueError, match="trainer_state.json has no loss"):
        plot_losses({"a": tmp_path}, tmp_path / "plot.png")


@pytest.mark.parametrize("first", [1, 11])
def test_progress_of_a_new_and_of_a_resumed_run(first, capsys):
    bar, state = ProgressBar(), TrainerState(max_steps=20)
    bar.on_train_begin(None, state, None)
    for state.global_step in range(first, 21):
        bar.on_step_end(None, state, None)
    bar.on_train_end(None, state, None)
    shown = capsys.readouterr().err
    assert f"| {first}/20 [00:00<?, ?it/s]" in shown and "| 20/20 [00:00<00:00" in shown


AMD = {"cpu_name": "AMD EPYC 9B45", "avx512_bw": True}
SETTING = torch.backends.mkldnn.matmul


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


def in_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()


CHOICES = [  # device, properties of the processor, product, and whether oneDNN is chosen
    ("cpu", AMD, exact, True),
    ("cpu", AMD, in_bfloat16, False),
    ("cpu", AMD, lambda a, b: exact(a, b) * torch.nan, False),
    ("cpu", AMD | {"avx512_bw": False}, exact, False),
    ("cpu", AMD | {"cpu_name": "Intel Xeon"}, exact, False),
    ("cpu", {"sve": True}, exact, False),
    ("cuda", AMD, exact, False),
]


@pytest.mark.parametrize(("device", "cpu", "product", "chosen"), CHOICES)
def test_products(device, cpu, product, chosen, capsys):
    """OneDNN is chosen for accurate products on the CPU only; random numbers and a setting of the user are kept."""
    state = torch.get_rng_state()
    use_onednn(device, cpu=cpu, product=product)
    assert SETTING.fp32_precision == ("bf16" if chosen else "none")
    assert torch.equal(torch.get_rng_state(), state) and capsys.readouterr().out.count("\n") == chosen
    assert torch.backends.mkldnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "none"
    SETTING.fp32_precision = "ieee"
    use_onednn(device, cpu=cpu, product=product)
    assert SETTING.fp32_precision == "ieee"


def test_reported_scores_reach_the_callbacks(tmp_path):
    """Callbacks receive reported scores as they receive those of `Trainer.evaluate`, for example to stop early."""

    class Seen(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            control.should_training_stop = metrics["eval_loss"] == 1.0

    training = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = OrderedTrainer(torch.nn.Linear(1, 1), training, callbacks=[Seen()])
    assert trainer.report({"loss": 1.0}, "eval")["eval_loss"] == 1.0 and trainer.control.should_training_stop
