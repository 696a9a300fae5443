"""Distillation of sentence encoders: errors, metrics, learning rates, resumed runs, and the saved folder."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from luna_mega import LunaModel
from luna_mega.distillation import embedding_trainer
from luna_mega.distillation.embedding_trainer import EmbeddingTrainer
from luna_mega.distillation.embeddings import embedding_loss, load_sentence_teacher
from luna_mega.distillation.sentences import read_modules
from luna_mega.training.data import SourceArguments, load_splits
from luna_mega.training.tokenizers import train_bpe
from tests.examples.runs import assert_complete, assert_error, assert_resumes
from tests.examples.test_run_mlm import texts, write

RUN = ["run_distill_embeddings"]
TYPES = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 1}


def save_encoder(folder: Path, model_class: type = BertModel) -> Path:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, intermediate_size=48, max_position_embeddings=32, initializer_range=0.3)
    model_class(config).save_pretrained(folder)
    train_bpe(texts(50, seed=1), vocab_size=300, model_max_length=32).save_pretrained(folder)
    return folder


def save_sentence_encoder(folder: Path) -> Path:
    """Save a sentence-transformers folder."""
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(TYPES)
    ]
    save_encoder(folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    for name, content in (
        ("modules.json", entries),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def corpus(tmp_path):
    for split, size in (("train", 40), ("held", 11)):
        write([" ".join(texts(4, seed=size + i)) for i in range(size)], tmp_path / "corpus" / f"{split}.jsonl")
    return tmp_path / "corpus"


def command(teacher: Path, data: Path, output: Path) -> list:
    return [
        *("--teacher", teacher, "--dataset_path", data, "--validation_split", "held", "--output_dir", output),
        *("--max_seq_length", 40, "--max_length", 64, "--projection_length", 16, "--projection_lengths", 4, 8),
        *("--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 4, "--salience_texts", 8),
    ]


def mean_cosine(output: Path, teacher: Path, corpus: Path, rows: int) -> float:
    """Return the mean cosine of the folders, with the teacher in windows, for one text at a time."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(output), AutoModel.from_pretrained(teacher)
    student, window = LunaModel.from_pretrained(output, projection_length=rows), 16
    values = []
    for text in load_splits({"held": None}, SourceArguments(dataset_path=str(corpus)))["held"]["text"]:
        ids = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")["input_ids"]
        parts = [torch.cat([ids[:, :1], part, ids[:, -1:]], 1) for part in ids[:, 1:-1].split(window - 2, dim=1)]
        parts = parts if ids.shape[1] > window else [ids]
        with torch.no_grad():
            vectors = [encoder(part).last_hidden_state[0, 0] for part in parts]
            target = sum(vector / vector.norm() for vector in vectors)
            values.append(torch.cosine_similarity(student(ids).last_hidden_state[0, 0], target, dim=0))
    return torch.stack(values).mean().item()


def test_results_match_the_folder(run, corpus, tmp_path):
    teacher, output = save_sentence_encoder(tmp_path / "teacher"), tmp_path / "out"
    summary = run(*command(teacher, corpus, output), "--max_steps", 3, "--eval_on_start", "true")
    assert_complete(output)
    cosines = [summary[f"eval_cosine_{rows}"] for rows in (4, 8)]
    assert cosines == pytest.approx([mean_cosine(output, teacher, corpus, rows) for rows in (4, 8)], abs=1e-5)
    assert summary["eval_loss"] == pytest.approx(1 - sum(cosines) / 2, abs=1e-6)
    first = json.loads((output / "trainer_state.json").read_text())["log_history"][0]
    assert first["step"] == 0 and first["eval_cosine_4"] != cosines[0]
    assert json.loads((output / "config.json").read_text())["projection_length"] == 16
    assert json.loads((output / "sentence_bert_config.json").read_text())["max_seq_length"] == 64
    assert json.loads((output / "config.json").read_text())["max_position_embeddings"] == 64
    tokenizer = json.loads((output / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is None and tokenizer["padding"] is None
    assert "fine-tuned from `teacher` on the corpus dataset" in (output / "README.md").read_text()


def test_teacher_with_a_head(run, corpus, tmp_path):
    """The encoder is distilled with mean pooling, and its length limit is the window."""
    teacher = save_encoder(tmp_path / "teacher", BertForMaskedLM)
    loaded = load_sentence_teacher(str(teacher))
    assert loaded.window == 32 and loaded.modules.pooling == ("mean",) and type(loaded.model) is BertModel
    summary = run(*command(teacher, corpus, tmp_path / "out"), "--do_train", "false")
    assert 0 < summary["eval_cosine_4"] < 1 and "train_loss" not in summary
    run(*command(teacher, corpus, tmp_path / "out"), "--max_steps", 1)
    assert type(AutoModel.from_pretrained(tmp_path / "out")) is LunaModel
    modules = read_modules(str(tmp_path / "out"))
    assert modules.pooling == ("mean",) and not modules.normalizes and modules.max_seq_length == 64


def test_optimizer_and_dropout(run, corpus, tmp_path, monkeypatch):
    create, seen = EmbeddingTrainer.create_optimizer, []
    monkeypatch.setattr(EmbeddingTrainer, "create_optimizer", lambda self, *args: seen.append(self) or create(self))
    options = ["--learning_rate", 1e-4, "--salience_learning_rate", 0.5, "--weight_decay", 0.25, "--max_steps", 1]
    run(*command(save_encoder(tmp_path / "teacher"), corpus, tmp_path / "out"), *options)
    groups = seen[0].optimizer.param_groups
    assert [(group["initial_lr"], group["weight_decay"]) for group in groups] == [(1e-4, 0.25), (0.5, 0.0)]
    student = seen[0].model
    assert {id(p) for p in groups[1]["params"]} == {id(x.attention.salience) for x in student.encoder.layers}
    assert not student.embeddings.word_embeddings.weight.requires_grad and student.config.dropout == 0.1
    student.train()
    ids = torch.arange(5, 35)[None]
    torch.testing.assert_close(student(ids)[0], student.eval()(ids)[0])


@pytest.mark.parametrize(("options", "longest"), [([], 32), (["--max_length", 48], 48)])
def test_steps_have_lengths_up_to_the_greatest(options, longest, run, corpus, tmp_path, monkeypatch):
    """By default, the greatest length is the one of the teacher's table."""
    sizes = []

    def loss(teacher, student, modules, batch, *others):
        sizes.append(int(batch["attention_mask"].sum(dim=1).max()))
        return embedding_loss(teacher, student, modules, batch, *others)

    monkeypatch.setattr(embedding_trainer, "embedding_loss", loss)
    argv = command(save_encoder(tmp_path / "teacher"), corpus, tmp_path / "out")
    del argv[argv.index("--max_seq_length") : argv.index("--projection_length")]
    run(*argv, *options, "--max_steps", 20, "--do_eval", "false")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == longest
    assert len(set(sizes)) > 8 and 4 <= min(sizes) < 10 and longest - 8 < max(sizes) <= longest


def test_resumed_run_is_equal(run, corpus, tmp_path):
    teacher = save_sentence_encoder(tmp_path / "teacher")
    assert_resumes(run, lambda output: command(teacher, corpus, output), AutoModel, tmp_path)
    assert (tmp_path / "complete" / "checkpoint-2" / "modules.json").is_file()


ERRORS = {
    "no teacher": (["--teacher", ""], "--teacher is missing"),
    "teacher": (["--teacher", "nowhere"], "--teacher nowhere: "),
    "window": (["--teacher_window", 33], "window=33 must be from 3 to the 32 positions of the teacher"),
    "no window": (["--teacher_window", 0], "window=0 must be from 3"),
    "rows": (["--projection_lengths", 4, 0], "--projection_lengths .* must be at least 1"),
    "length": (["--max_seq_length", 65], "--max_seq_length 65 exceeds --max_length 64; raise the latter"),
    "extension": (["--position_extension", "mirror"], "--position_extension mirror must be one of interpolate, wrap"),
    "split": (["--validation_split", "dev"], "has no split dev"),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_invalid_options_are_one_line(options, message, run, corpus, tmp_path):
    teacher, output = save_encoder(tmp_path / "teacher"), tmp_path / "out"
    assert_error(run, message, *command(teacher, corpus, output), *options, output=output)


def test_unsupported_pooling_is_one_line(run, corpus, tmp_path):
    teacher = save_sentence_encoder(tmp_path / "teacher")
    (teacher / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    assert_error(run, "sentence vectors by max are not supported", *command(teacher, corpus, tmp_path / "out"))
