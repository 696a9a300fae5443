import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    T5Config,
)

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForMaskedLM
from luna_mega.distillation import extend_positions, stages
from luna_mega.distillation.stages import AlignTrainer
from luna_mega.training import language_modeling, masking
from luna_mega.training.data import SourceArguments, load_splits
from luna_mega.training.tokenizers import train_bpe
from tests.examples import runs
from tests.examples.runs import assert_complete, assert_error
from tests.examples.test_run_mlm import texts, write
from tests.marks import slow_but

RUN = ["run_distill"]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LLAMA = SIZES | {"num_key_value_heads": 1, "max_position_embeddings": 64}
GPT2 = {
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
WEIGHTS = "model.safetensors"


@pytest.fixture
def corpus(tmp_path):
    for split, size in (("train", 60), ("validation", 20)):
        write([*texts(size, seed=size), "", " \n"], tmp_path / "corpus" / f"{split}.jsonl")
    return tmp_path / "corpus"


@pytest.fixture
def make_teacher(script, tmp_path):
    """Save a random model as teacher, with a tokenizer."""

    def make(model_class, config) -> Path:
        torch.manual_seed(0)
        tokenizer = train_bpe(texts(50, seed=1), vocab_size=300, model_max_length=32)
        model = model_class(config)
        if model_class is RobertaForMaskedLM:
            frequent = tokenizer.encode("one two three", add_special_tokens=False)
            model.lm_head.bias.data[frequent] = 8.0  # some predictions of teacher and student are correct
        model.save_pretrained(tmp_path / "teacher")
        tokenizer.save_pretrained(tmp_path / "teacher")
        return tmp_path / "teacher"

    return make


@pytest.fixture
def roberta(make_teacher):
    return make_teacher(RobertaForMaskedLM, RobertaConfig(**SIZES, max_position_embeddings=34))


def command(teacher: Path, data: Path, output: Path, calibration=1, align=2, steps=2) -> list:
    return [
        *("--teacher", teacher, "--dataset_path", data, "--output_dir", output, "--block_size", 32),
        *("--per_device_train_batch_size", 4, "--save_strategy", "no"),
        *("--calibration_batches", calibration, "--align_steps", align, "--max_steps", steps),
    ]


def read_rows(output: Path) -> list[dict]:
    return json.loads((output / "stages.json").read_text())["rows"]


def masked_scores(script, model, corpus: Path, folder: Path, block: int = 32, window: int = 32) -> dict[str, float]:
    """Return loss and accuracy of a model of transformers' own, in windows of blocks, at the tokens that are masked."""
    tokenizer, data = AutoTokenizer.from_pretrained(folder), masking.MaskedTextArguments(block_size=block)
    split = load_splits({"validation": None}, SourceArguments(dataset_path=str(corpus)))["validation"]
    masked = masking.mask_once(masking.cut_blocks(split, "validation", tokenizer, data), tokenizer, data, seed=42)
    ids, labels = (torch.tensor(masked[name]).reshape(-1, window) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[labels != -100]
    labels = labels[labels != -100]
    right = (logits.argmax(-1) == labels).float().mean().item()
    return {"loss": cross_entropy(logits, labels).item(), "accuracy": right, "guesses": logits.argmax(-1)}


@pytest.mark.parametrize("kind", ["luna", pytest.param("mega", marks=pytest.mark.slow)])
def test_all_stages(kind, run, script, roberta, corpus, tmp_path):
    output = tmp_path / "out"
    options = ["--student", kind, "--eval_strategy", "steps", "--eval_steps", 1, "--license", "mit"]
    (roberta / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# Teacher\n")
    summary = run(*command(roberta, corpus, output), *options)
    rows, calibrated = read_rows(output), ["calibrate"]
    assert [row["stage"] for row in rows] == ["copy", *calibrated, "align", "align", "distill", "distill"]
    block = 4 * 32
    tokens = [0, *[block] * len(calibrated)]
    tokens += [tokens[-1] + block * step for step in (1, 2, 3, 4)]
    assert [row["tokens"] for row in rows] == tokens and summary["tokens"] == tokens[-1]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds) and summary["seconds"] == seconds[-1] >= summary["train_seconds"]

    teacher = masked_scores(script, AutoModelForMaskedLM.from_pretrained(roberta), corpus, roberta)
    assert summary["teacher_loss"] == pytest.approx(teacher["loss"], rel=1e-5)
    assert summary["teacher_accuracy"] == pytest.approx(teacher["accuracy"])
    student = masked_scores(script, AutoModelForMaskedLM.from_pretrained(output), corpus, output)
    assert summary["eval_loss"] == rows[-1]["loss"] == pytest.approx(student["loss"], rel=1e-5)
    assert summary["eval_accuracy"] == pytest.approx(student["accuracy"])
    agreement = (student["guesses"] == teacher["guesses"]).float().mean().item()
    assert 0 < summary["eval_agreement"] == rows[-1]["agreement"] == pytest.approx(agreement)
    assert summary["eval_perplexity"] == pytest.approx(math.exp(student["loss"]), rel=1e-5)

    assert_complete(output, summary)
    card = (output / "README.md").read_text()
    assert "distilled from `teacher` on corpus" in card and "names the license cc-by-4.0." in card
    assert "license: mit" in card and "| teacher |" in card
    assert str(tmp_path) not in card.partition("## Distillation")[2].partition("## ")[0]
    state = AutoModelForMaskedLM.from_pretrained(output / "_align").state_dict()
    assert state.keys() == AutoModelForMaskedLM.from_pretrained(output).state_dict().keys()


@pytest.mark.slow
def test_stage_with_zero_steps_is_skipped(run, script, roberta, corpus, tmp_path):
    run(*command(roberta, corpus, tmp_path / "out", 0, 0, 0), "--projection_length", 8)
    assert [row["stage"] for row in read_rows(tmp_path / "out")] == ["copy"]
    student, teacher = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (tmp_path / "out", roberta))
    assert student.config.projection_length == 8
    words = (model.get_input_embeddings().weight for model in (student, teacher))
    assert torch.equal(*words)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    summary = run(*command(roberta, corpus, tmp_path / "aligned", 0, 2, 0))
    assert [row["stage"] for row in read_rows(tmp_path / "aligned")] == ["copy", "align"]
    aligned = masked_scores(script, AutoModelForMaskedLM.from_pretrained(tmp_path / "aligned"), corpus, roberta)
    assert summary["eval_loss"] == pytest.approx(aligned["loss"], rel=1e-5)


@pytest.mark.parametrize(("model_class", "config"), [(LunaForMaskedLM, LunaConfig), (MegaForMaskedLM, MegaConfig)])
def test_a_copy_agrees_with_its_teacher(model_class, config, run, make_teacher, corpus, tmp_path):
    kind, sizes = config.model_type, SIZES if config is LunaConfig else SIZES | {"num_attention_heads": 1}
    teacher = make_teacher(model_class, config(**sizes))
    summary = run(*command(teacher, corpus, tmp_path / "out", 1, 0, 0), "--student", kind)
    assert summary["eval_agreement"] == 1.0 and summary["eval_loss"] == pytest.approx(summary["teacher_loss"])


CAUSAL = {"gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2)), "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA))}


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_but([("gpt2", "luna"), ("llama", "mega")], [(name, kind) for name in CAUSAL for kind in ("luna", "mega")]),
)
def test_causal(name, kind, run, script, make_teacher, corpus, tmp_path):
    teacher = make_teacher(*CAUSAL[name])
    if name == "llama":  # as Qwen, without a token at the beginning
        tokenizer = AutoTokenizer.from_pretrained(teacher)
        tokenizer.bos_token = None
        tokenizer.save_pretrained(teacher)
    summary = run(*command(teacher, corpus, tmp_path / "out"), "--student", kind, "--per_device_eval_batch_size", 2)
    rows = read_rows(tmp_path / "out")
    assert [row["stage"] for row in rows] == ["copy", "align", "distill"]
    assert rows[0]["loss"] < math.log(300) + 0.1  # that of uniform predictions
    norms = {
        "gpt2": "transformer.ln_f.",
        "llama": "model.norm.",
        "luna": "luna.decoder.layer_norm.",
        "mega": "mega.final_norm.norm.",
    }
    theirs, ours = load_file(teacher / WEIGHTS), load_file(tmp_path / "out" / "_align" / WEIGHTS)
    for parameter in ("weight", "bias"):
        if norms[name] + parameter in theirs:  # alignment keeps the teacher's last norm
            assert torch.equal(theirs[norms[name] + parameter], ours[norms[kind] + parameter])
    tokenizer, module = AutoTokenizer.from_pretrained(tmp_path / "out"), language_modeling
    split = load_splits({"validation": None}, SourceArguments(dataset_path=str(corpus)))["validation"]
    stream = module.encode(split["text"], tokenizer, "eos")
    for folder, key in ((tmp_path / "out", "eval"), (teacher, "teacher")):
        model, total, right, count = AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0, 0, 0
        for block in stream.split(32):
            with torch.no_grad():
                logits = model(block[None], attention_mask=torch.ones(1, len(block))).logits[0, :-1]
            total += cross_entropy(logits, block[1:], reduction="sum").item()
            right, count = right + (logits.argmax(-1) == block[1:]).sum().item(), count + len(block) - 1
        assert summary[f"{key}_loss"] == pytest.approx(total / count, rel=1e-5)
        assert summary[f"{key}_accuracy"] == pytest.approx(right / count)


LABELS = {"id2label": {0: "bad", 1: "good", 2: "odd"}, "label2id": {"bad": 0, "good": 1, "odd": 2}}


@pytest.mark.parametrize(
    ("labels", "kind"), slow_but([("numbers", "mega")], [("names", "luna"), ("numbers", "mega"), ("scores", "luna")])
)
def test_classifier(labels, kind, run, make_teacher, tmp_path):
    fields = LABELS if labels != "scores" else {"num_labels": 1, "problem_type": "regression"}
    config = RobertaConfig(**SIZES, max_position_embeddings=34, **fields)
    teacher = make_teacher(RobertaForSequenceClassification, config)
    for split, size in (("train", 16), ("validation", 7)):
        values = {"names": ["odd", "bad", "good"], "numbers": [2, 0, 1], "scores": [0.5, 1.0, 2.5]}[labels]
        rows = [{"first": text, "second": "one two", "label": values[i % 3]} for i, text in enumerate(texts(size, 1))]
        runs.write(rows, tmp_path / "data" / f"{split}.jsonl")
    options = ["--text_column", "first", "--pair_column", "second", "--per_device_eval_batch_size", 3]
    options += ["--student", kind]
    summary = run(*command(teacher, tmp_path / "data", tmp_path / "out"), *options)
    student = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert student.config.id2label == AutoModelForSequenceClassification.from_pretrained(teacher).config.id2label
    tokenizer, logits = AutoTokenizer.from_pretrained(tmp_path / "out"), []
    with torch.no_grad():
        for row in rows:
            logits.append(student(**tokenizer(row["first"], row["second"], return_tensors="pt")).logits[0])
    logits = torch.stack(logits)
    if labels == "scores":
        expected = (logits[:, 0] - torch.tensor([row["label"] for row in rows])).square().mean().item()
        assert "eval_accuracy" not in summary and "eval_agreement" not in summary
    else:
        targets = torch.tensor([(2, 0, 1)[i % 3] for i in range(len(rows))])
        expected = cross_entropy(logits, targets).item()
        assert summary["eval_accuracy"] == pytest.approx((logits.argmax(-1) == targets).float().mean().item())
        assert 0 <= summary["eval_agreement"] <= 1
    assert summary["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_continued_distillation_of_a_student(run, roberta, corpus, tmp_path):
    """An existing student is neither copied nor calibrated again."""
    first = run(*command(roberta, corpus, tmp_path / "first"))
    again = run(*command(roberta, corpus, tmp_path / "again", 1, 0, 1), "--student", tmp_path / "first")
    assert [row["stage"] for row in read_rows(tmp_path / "again")] == ["distill"]
    assert again["model"] == f"{tmp_path / 'first'} from {roberta}"
    options = ["--student", tmp_path / "first", "--learning_rate", 0]
    still = run(*command(roberta, corpus, tmp_path / "still", 1, 0, 1), *options)
    assert still["eval_loss"] == pytest.approx(first["eval_loss"])


def test_options_of_teacher_student_and_data(run, make_teacher, corpus, tmp_path):
    """Fewer layers, longer blocks, a BERT in half precision whose tokenizer has no `<s>`, and one that stops early."""
    teacher = make_teacher(BertForMaskedLM, BertConfig(**SIZES, max_position_embeddings=20))
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_special_tokens({"cls_token": "<s>", "sep_token": "</s>"})
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(teacher)
    options = ["--teacher_window", 16, "--teacher_dtype", "bfloat16", "--layers", 0, 2, "--positions", "mirror"]
    options += [
        "--max_length",
        40,
        "--gradient_accumulation_steps",
        2,
        "--short_seq_prob",
        0.5,
        "--align_whole",
        "true",
    ]
    run(*command(teacher, corpus, tmp_path / "out"), *options, "--config_overrides", "num_attention_heads=4")
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").config
    assert (config.num_hidden_layers, config.max_position_embeddings, config.num_attention_heads) == (2, 40, 4)


@pytest.mark.parametrize("how", slow_but(["windows"], ["windows", "copy", "mirror", "interpolate"]))
def test_a_longer_student(how, run, script, roberta, corpus, tmp_path):
    """Position embeddings are extended as configured, and the teacher processes its blocks in windows."""
    options = ["--block_size", 48, "--teacher_window", 16, "--max_length", 80, "--positions", how]
    summary = run(*command(roberta, corpus, tmp_path / "out", 0, 0, 0), *options)
    teacher, student = (AutoModelForMaskedLM.from_pretrained(folder) for folder in (roberta, tmp_path / "out"))
    theirs, ours = teacher.roberta.embeddings, student.luna.embeddings
    assert torch.equal(ours.token_type_embeddings.weight, theirs.token_type_embeddings.weight)
    table = extend_positions(theirs.position_embeddings.weight[2:], 80, how)
    assert torch.equal(ours.position_embeddings.weight[2:], table)
    scores = masked_scores(script, teacher, corpus, roberta, block=48, window=16)
    assert summary["teacher_loss"] == pytest.approx(scores["loss"], rel=1e-5)
    scores = masked_scores(script, student, corpus, roberta, block=48, window=48)
    assert summary["eval_loss"] == pytest.approx(scores["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_streaming(causal, run, make_teacher, roberta, corpus, tmp_path):
    teacher = make_teacher(*CAUSAL["gpt2"]) if causal else roberta
    summary = run(*command(teacher, corpus, tmp_path / "out"), "--streaming", "true", "--shuffle_buffer", 20)
    assert summary["steps"] == 2 and summary["train_samples"] is None and math.isfinite(summary["eval_loss"])


class Killed(Exception):
    pass


def begin(case: str, make_teacher, corpus: Path, tmp_path: Path) -> tuple[list, list, type]:
    """Return command and options of a run for a RoBERTa, a causal model or a classifier, and the student's class."""
    options = ["--save_strategy", "steps", "--save_steps", 2, "--eval_strategy", "steps", "--eval_steps", 2]
    if case == "causal":
        teacher, model_class = make_teacher(*CAUSAL["llama"]), AutoModelForCausalLM
        options += ["--student", "mega", "--config_overrides", "hidden_dropout_prob=0.1"]
    elif case == "classifier":
        config = RobertaConfig(**SIZES, **LABELS, max_position_embeddings=34)
        teacher, model_class = (
            make_teacher(RobertaForSequenceClassification, config),
            AutoModelForSequenceClassification,
        )
        for split in ("train", "validation"):
            rows = [{"text": text, "label": index % 3} for index, text in enumerate(texts(16, 1))]
            runs.write(rows, corpus / f"{split}.jsonl")
        options += ["--student", "mega", "--config_overrides", "hidden_dropout_prob=0.1"]
    else:
        config = RobertaConfig(**SIZES, max_position_embeddings=34)
        teacher, model_class = make_teacher(RobertaForMaskedLM, config), AutoModelForMaskedLM
        options += ["--config_overrides", "dropout=0.1"]
    return command(teacher, corpus, tmp_path / "complete", align=4, steps=4), options, model_class


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "trainer", "step"),
    [
        *(("masked", trainer, step) for trainer in ("AlignTrainer", "DistillTrainer") for step in (0, 3)),
        ("causal", "DistillTrainer", 3),
        ("classifier", "AlignTrainer", 3),
    ],
)
def test_a_killed_run_is_resumed_exactly(case, trainer, step, run, script, make_teacher, corpus, tmp_path, monkeypatch):
    """Killed in its first step or after its first checkpoint: a finished alignment is not repeated."""
    arguments, options, model_class = begin(case, make_teacher, corpus, tmp_path)
    run(*arguments, *options)
    kind = getattr(stages, trainer)
    original, calls = kind.compute_loss, []

    def kill(self, *inputs, **others):
        calls.append(1)
        if len(calls) > step:
            raise Killed
        return original(self, *inputs, **others)

    arguments[5] = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(kind, "compute_loss", kill)
        run(*arguments, *options)
    if (trainer, step) == ("AlignTrainer", 0):
        with pytest.raises(SystemExit, match="no checkpoint there"):
            run(*arguments, *options, "--resume_from_checkpoint", "last")
        return
    with pytest.raises(SystemExit, match="pass --resume_from_checkpoint last"):
        run(*arguments, *options)
    aligned, seen = AlignTrainer.compute_loss, []

    def count(self, *inputs, **others):
        seen.append(1)
        return aligned(self, *inputs, **others)

    monkeypatch.setattr(AlignTrainer, "compute_loss", count)
    run(*arguments, *options, "--resume_from_checkpoint", "last")
    assert len(seen) == (2 if trainer == "AlignTrainer" else 0)
    states = (model_class.from_pretrained(tmp_path / name).state_dict() for name in ("complete", "killed"))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    rows = [[{**row, "seconds": 0} for row in read_rows(tmp_path / name)] for name in ("complete", "killed")]
    assert rows[0] == rows[1]


ERRORS = {
    "no teacher": (["--teacher", ""], "--teacher is missing"),
    "teacher": (["--teacher", "nowhere"], "--teacher nowhere: "),
    "student": (["--student", "bert"], "--student bert is neither luna, mega, nor the folder of one"),
    "block": (["--block_size", 40], "more than the 32 tokens that the teacher supports; pass --teacher_window 32"),
    "window": (["--block_size", 40, "--teacher_window", 33], "--block_size 40 is more than the 32 tokens"),
    "positions": (["--max_length", 8], "--block_size 32 is more than the 8 positions of the student"),
    "steps": (["--streaming", "true", "--max_steps", -1], "--streaming needs --max_steps"),
    "field": (["--config_overrides", "heads=3"], "a luna has no field heads"),
    "rows of a mega": (["--student", "mega", "--projection_length", 4], "a mega has no field projection_length"),
    "vocabulary": (["--config_overrides", "vocab_size=301"], "vocab_size is 301 and the teacher's 300"),
    "end": (["--config_overrides", "eos_token_id=5"], "eos_token_id is 5 and the teacher's 2"),
    "decoder": (["--config_overrides", "is_decoder=true"], "roberta. is an encoder and .* set is_decoder=False"),
    "width": (["--config_overrides", "hidden_size=64"], "hidden_size is 64 and the teacher's 32"),
    "layers": (["--layers", 0, 7], "must name one of the teacher's 3 layers"),
    "layerdrop": (["--config_overrides", "layerdrop=0.1"], "alignment runs every layer; set layerdrop=0.0"),
    "share": (["--distill_share", 1.5], "--distill_share must be from 0 to 1"),
    "dtype": (["--teacher_dtype", "int8"], "--teacher_dtype int8 must be one of auto"),
    "tied": (["--config_overrides", "tie_key_value=true"], "set tie_key_value=False"),
    "compiled": (["--torch_compile", "true"], "--torch_compile: "),
    "split": (["--max_eval_samples", 1], "split validation has too little text"),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_options_are_one_line(options, message, run, roberta, corpus, tmp_path):
    assert_error(run, message, *command(roberta, corpus, tmp_path / "out"), *options)


def test_unsupported_teachers(run, roberta, corpus, tmp_path):
    T5Config().save_pretrained(tmp_path / "t5")
    DebertaV2Config(relative_attention=True).save_pretrained(tmp_path / "deberta")
    broken = AutoModelForMaskedLM.from_pretrained(roberta)
    broken.roberta.encoder.layer[0].output.dense.bias.data[0] = math.nan
    broken.save_pretrained(tmp_path / "nan")
    shutil.copytree(roberta, tmp_path / "unmasked")
    tokenizer = AutoTokenizer.from_pretrained(roberta)
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "unmasked")
    shutil.copytree(roberta, tmp_path / "bare")
    (tmp_path / "bare" / WEIGHTS).unlink()
    for name, message in (
        ("t5", "t5 is an encoder-decoder and cannot be a teacher; supported are bert"),
        ("deberta", "has relative position biases, which students do not support; use one of"),
        ("nan", "weights are not finite in 1 tensors .* use another checkpoint"),
        ("unmasked", "the tokenizer has no mask token, .* use the teacher's tokenizer"),
        ("bare", "no weights in model.safetensors or pytorch_model.bin; pass a checkpoint"),
    ):
        assert_error(run, f"--teacher .*{name}: .*{message}", *command(tmp_path / name, corpus, tmp_path / "out"))
    options = ["--student", roberta]
    assert_error(run, "cannot be a student", *command(roberta, corpus, tmp_path / "out"), *options)
