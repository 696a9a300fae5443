"""Parts of `luna_mega.training`: tokenizers, models and their lengths, plots, progress, and float32 products."""

import json
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    DistilBertConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    TrainerState,
)

from luna_mega import LunaSeq2SeqConfig, MegaSeq2SeqConfig
from luna_mega.training import load_tokenizer, models as training_models
from luna_mega.training.models import CheckpointArguments, ModelArguments, longest_input, make_config
from luna_mega.training.plots import plot_losses
from luna_mega.training.products import product_error, use_onednn
from luna_mega.training.tokenizers import (
    make_bytes,
    make_words,
    train_bpe,
    train_characters,
    train_joint_bpe,
    train_words,
)
from luna_mega.training.trainer import ProgressBar
from tests.examples.contract import MEGA, reviews
from tests.examples.runs import write
from tests.marks import slow_but

TEXTS = ["the quick brown fox", "the lazy dog", "quick dogs and lazy foxes"] * 20


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, vocab_size=300, model_max_length=64)


def test_bpe(bpe, tmp_path):
    """Ids and formats of RoBERTa; the first word has a leading space, and the mask takes the space before it."""
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


@pytest.mark.parametrize(("train", "least"), [(train_bpe, 261), (train_joint_bpe, 260)])
def test_vocabulary_of_a_bpe(train, least):
    assert len(train(TEXTS, least, 64)) == least
    with pytest.raises(ValueError, match=rf"vocab_size \({least - 1}\) must be at least {least}"):
        train(TEXTS, least - 1, 64)


def test_joint_bpe_ends_with_the_end_token():
    tokenizer = train_joint_bpe(["Zwei Männer.", "Two men's  dog"] * 9, vocab_size=300, model_max_length=9)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.model_max_length) == (1, 3, 9)
    assert tokenizer.tokenize("Zwei Zwei") == ["ĠZwei", "ĠZwei"]
    assert tokenizer("two")["input_ids"][-1] == tokenizer.eos_token_id == 2


@given(text=st.text(st.sampled_from("ab Zé文🙂\t\n\u00a0'.<"), max_size=12))
def test_every_text_survives(text):
    """Tokens of all texts are known, and decode to the text; a joint BPE reads texts without spaces around them."""
    joint, characters = train_joint_bpe([], 260, 64), train_characters([text])
    for tokenizer, read in ((joint, text.strip()), (characters, text), (make_bytes(), text)):
        ids = tokenizer(read, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids and not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == read
        assert [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    assert len(ids) == len(text.encode())


def test_words():
    words = train_words(["a a a b b c", "a <unk> <unk>\td"], vocab_size=6)
    assert words.get_vocab() == {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5}
    assert words("a c <unk>b", add_special_tokens=False)["input_ids"] == [4, 3, 3, 5]


@pytest.mark.parametrize(
    "made",
    [make_bytes(), make_words("ab"), train_characters(["ab"]), train_bpe(["ab"], 300, 16)],
    ids=["bytes", "words", "characters", "bpe"],
)
def test_tokenizers_of_the_package_return_no_types(made):
    assert isinstance(made, PreTrainedTokenizerFast) and list(made("a", "b")) == ["input_ids", "attention_mask"]


@pytest.fixture
def bert(tmp_path) -> PreTrainedTokenizerFast:
    """Return BERT's tokenizer, which returns two token types."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(tmp_path / "bert")
    return AutoTokenizer.from_pretrained(tmp_path / "bert")


def test_models_and_token_types(bert, tmp_path):
    """A new Mega has the types of the tokenizer; the tokenizer of a saved model without a second type returns none."""
    config = make_config(ModelArguments(model_type="mega", config_overrides=MEGA), bert, 16)
    assert config.add_token_type_embeddings and config.type_vocab_size == 2
    for config in (DistilBertConfig(), RobertaConfig(type_vocab_size=1), LlamaConfig()):
        config.update({"pad_token_id": 0, "max_position_embeddings": 32})
        config.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path / "bert")
        make_config(CheckpointArguments(str(tmp_path)), loaded, 16)
        assert "token_type_ids" not in loaded("a", "b")


V4 = ["hf_mlm_laplace_simple_batchnorm", "hf_mlm_laplace_simple_chunk", "hf_mlm_softmax_rotary_rmsnorm", "hf_seqcls"]


@pytest.fixture
def words(tmp_path):
    """Save a tokenizer of words, return its option; v4 folders have 100 tokens, fewer than a byte-level BPE needs."""
    train_words([row["text"] for row in reviews(16, seed=0)], 100).save_pretrained(tmp_path / "words")
    return ["--tokenizer_name", tmp_path / "words"]


@pytest.mark.parametrize("name", slow_but(["hf_seqcls"], V4))
def test_v4_folder_is_fine_tuned_on_glue(name, call, words, parity_folder, tmp_path):
    folder, output = parity_folder("mega", name), tmp_path / "out"
    write(reviews(16, seed=0), tmp_path / "data" / "train.jsonl")
    model = ["--task_name", "sst2", "--dataset_path", tmp_path / "data", "--max_seq_length", 24]
    model += ["--model_name_or_path", folder, "--ignore_mismatched_sizes", *words, "--do_train", "--output_dir", output]
    call("run_glue", *model, "--save_strategy", "no", "--max_steps", 1, "--learning_rate", 0)
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
def test_inputs_longer_than_the_positions(case, words):
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


def test_names_are_not_formulas(tmp_path):
    pytest.importorskip("matplotlib")
    history = [{"step": 3, "train_loss": 2.0}, {"step": 3, "eval_loss": 1.0, "eval_bleu": 5.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    plot_losses({"$x_{": tmp_path}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_plot_of_losses(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}]
    history += [{"step": 2, "eval_accuracy": 0.5, "eval_runtime": 9.0, "eval_samples_per_second": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    drawn = {}
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.update({file: figure}))
    plot_losses({"a": tmp_path, "b": tmp_path}, "losses.png")
    axes, accuracy = drawn["losses.png"].axes
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points["a, training"] == points["b, training"] == [[1, 2], [2, 1]]
    assert points["a, evaluation loss"] == [[2, 1.5]] and axes.get_xlabel() == "steps"
    assert all(step == int(step) for panel in (axes, accuracy) for step in panel.get_xticks())
    assert accuracy.lines[1].get_xydata().tolist() == [[2, 0.5]] and accuracy.get_ylabel() == "accuracy"
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history[3:]}), encoding="utf-8")
    with pytest.raises(ValueError, match="trainer_state.json has no loss"):
        plot_losses({"a": tmp_path}, "losses.png")


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
EMPTY = ["--model_name_or_path", "{folder}", "--output_dir", "{folder}/out"]


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


def in_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float() @ b.bfloat16().float()


def others() -> list:
    """Return the settings of CUDA, and of other operators on the CPU."""
    parts = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends)
    parts += (torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn)
    return [torch.backends.cuda.matmul.allow_tf32, *(part.fp32_precision for part in parts)]


@pytest.mark.parametrize(
    ("device", "cpu", "product", "chosen"),
    [
        ("cpu", AMD, exact, True),
        ("cpu", AMD, in_bfloat16, False),
        ("cpu", AMD, lambda a, b: exact(a, b) * torch.nan, False),
        ("cpu", AMD | {"avx512_bw": False}, exact, False),
        ("cpu", AMD | {"cpu_name": "Intel Xeon"}, exact, False),
        ("cpu", {"sve": True}, exact, False),
        ("cuda", AMD, exact, False),
    ],
    ids=["amd", "bfloat16", "nan", "amd without avx512", "intel", "arm", "gpu"],
)
def test_choice(device, cpu, product, chosen, capsys):
    legacy, before, state = torch.get_float32_matmul_precision(), others(), torch.get_rng_state()
    use_onednn(device, cpu=cpu, product=product)
    assert SETTING.fp32_precision == ("bf16" if chosen else "none") and others() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out.count("\n") == chosen
    SETTING.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == legacy


def test_setting_of_the_user_is_kept():
    SETTING.fp32_precision = "ieee"
    use_onednn("cpu", cpu=AMD, product=exact)
    assert SETTING.fp32_precision == "ieee"


def test_error_of_products():
    assert product_error(exact) < 1e-7 < product_error(torch.matmul) < 5e-6 < 1e-3 < product_error(in_bfloat16)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("run_glue", [*EMPTY, "--task_name=sst2", "--do_eval", "--use_cpu"]),
        ("eval_lm", [*EMPTY, "--device=cpu"]),
        ("demo", []),
    ],
)
def test_scripts(script, monkeypatch, tmp_path, name, options):
    """The script ends with an error after the choice, because there are no models."""
    module, threads = script(name), torch.get_num_threads()
    choose = partial(use_onednn, cpu=AMD, product=exact)
    for place in ("luna_mega.training.use_onednn", "luna_mega.training.runs.use_onednn"):
        monkeypatch.setattr(place, choose)
    if name == "demo":
        monkeypatch.setattr(module, "FIXTURES", tmp_path)
        monkeypatch.setattr(module, "disable_progress_bars", lambda: None)
        monkeypatch.setattr(module, "disable_progress_bar", lambda: None)
        options = ["--output_dir", "{folder}/out"]
    with pytest.raises((SystemExit, OSError)):
        module.main([option.format(folder=tmp_path) for option in options])
    torch.set_num_threads(threads)
    assert SETTING.fp32_precision == "bf16"
