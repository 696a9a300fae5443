"""sentence-transformers with the encoders: embeddings of any length, training, cross-encoders, folders, bundles."""

import json
import os
import subprocess
import sys

import pytest
import torch
from datasets import Dataset
from transformers import BertTokenizer

from luna_mega.hub.bundle import bundle
from tests.modeling import luna, mega
from tests.modeling.test_mega_v4_folders import write_folder

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

from sentence_transformers import (  # noqa: E402
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments  # noqa: E402
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator  # noqa: E402
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss  # noqa: E402

CHUNK = 4
MODELS = {
    "luna": (luna, {}),
    "mega": (mega, {}),
    "mega chunk": (mega, {"use_chunking": True, "chunk_size": CHUNK}),
    "mega chunk simple": (
        mega,
        {"use_chunking": True, "chunk_size": CHUNK, "relative_positional_bias": "simple", "truncation": 3},
    ),
}
# Every length from one token to two chunks plus one token.
TEXTS = [" ".join(f"w{(7 * length + place) % 35}" for place in range(length)) for length in range(1, 2 * CHUNK + 2)]
PAIRS = [(f"w{row} w1 w2", f"w3 w4 w1 w0 w{row} w2 w{row}") for row in range(5, 29)]
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "learning_rate": 4e-3}


@pytest.fixture(params=MODELS)
def folder(request, tokenizer, tmp_path):
    """Save an encoder with its tokenizer and return the folder."""
    module, fields = MODELS[request.param]
    module.make("Model", **fields).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def encode(model, texts, **options):
    return torch.as_tensor(model.encode(texts, show_progress_bar=False, **options))


def test_embeddings_do_not_depend_on_the_batch(folder):
    """Order and padding have no effect (sentence-transformers sorts by length); the mean excludes padding."""
    model = SentenceTransformer(str(folder), device="cpu")
    separate = torch.cat([encode(model, [text]) for text in TEXTS])
    for size in (2, 5, len(TEXTS)):
        torch.testing.assert_close(encode(model, TEXTS, batch_size=size), separate, atol=1e-6, rtol=0)
    with torch.no_grad():
        states = [model[0].model(**model.tokenizer(text, return_tensors="pt")).last_hidden_state for text in TEXTS]
    torch.testing.assert_close(torch.cat([state.mean(1) for state in states]), separate, atol=1e-6, rtol=0)
    assert (separate[1:] - separate[:-1]).abs().amax(1).min() > 1e-3


def test_training_ranks_pairs(folder, tmp_path):
    """The loss decreases, similar pairs become more similar, and the saved folder returns the same embeddings."""
    model = SentenceTransformer(str(folder), device="cpu")
    first, second = ([pair[side] for pair in PAIRS] for side in (0, 1))
    evaluator = EmbeddingSimilarityEvaluator(first * 2, second + second[1:] + second[:1], [1.0] * 24 + [0.0] * 24)
    before = evaluator(model)["spearman_cosine"]
    arguments = SentenceTransformerTrainingArguments(
        tmp_path / "out", max_steps=18, per_device_train_batch_size=8, logging_steps=1, **QUIET
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"anchor": first, "positive": second}),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert evaluator(model)["spearman_cosine"] > before
    model.save(str(tmp_path / "trained"))
    again = SentenceTransformer(str(tmp_path / "trained"), device="cpu")
    torch.testing.assert_close(encode(again, TEXTS), encode(model, TEXTS), atol=1e-6, rtol=0)


def test_cross_encoder(folder, tmp_path):
    model = CrossEncoder(str(folder), num_labels=1, device="cpu")
    rows = [(*PAIRS[row], 1.0) if row % 2 else (PAIRS[row][0], PAIRS[row - 1][1], 0.0) for row in range(24)]
    columns = dict(zip(("first", "second", "label"), map(list, zip(*rows, strict=True)), strict=True))
    arguments = CrossEncoderTrainingArguments(tmp_path / "out", max_steps=3, logging_steps=1, **QUIET)
    CrossEncoderTrainer(model, arguments, train_dataset=Dataset.from_dict(columns)).train()
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    together = model.predict(pairs, batch_size=len(pairs))
    separate = [model.predict([pair]).item() for pair in pairs]
    assert together == pytest.approx(separate, abs=1e-6)
    model.save_pretrained(str(tmp_path / "trained"))
    assert CrossEncoder(str(tmp_path / "trained"), device="cpu").predict(pairs) == pytest.approx(together, abs=1e-6)


@pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
def test_tokenizer_with_types(family, tmp_path):
    """Embeddings accept the token types of BERT's tokenizer (0 for texts); pairs require type embeddings."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{number}" for number in range(35)]]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)}, model_max_length=32)
    family.make("Model", pad_token_id=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = SentenceTransformer(str(tmp_path), device="cpu")
    assert "token_type_ids" in model.tokenizer(TEXTS[0])
    separate = torch.cat([encode(model, [text]) for text in TEXTS])
    torch.testing.assert_close(encode(model, TEXTS), separate, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="no type embeddings"):
        CrossEncoder(str(tmp_path), num_labels=1, device="cpu").predict(PAIRS)


def test_folder_of_v4_encodes(tokenizer, tmp_path):
    """A folder with v4's weights and the files of sentence-transformers 2, as on the Hub, encodes texts."""
    folder = tmp_path / "v4"
    config, _ = write_folder(folder, "BEE-spoke-data/mega-small-embed-synthSTS-16384-v1")
    tokenizer.save_pretrained(folder)
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {"word_embedding_dimension": config["hidden_size"], "include_prompt": True}
    pooling |= {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in modes}
    (folder / "1_Pooling").mkdir()
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    model = SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == 128
    with torch.no_grad():
        states = [model[0].model(**model.tokenizer(text, return_tensors="pt")).last_hidden_state for text in TEXTS]
    expected = torch.cat([state.mean(1) for state in states])
    torch.testing.assert_close(encode(model, TEXTS, batch_size=len(TEXTS)), expected, atol=1e-6, rtol=0)
    assert (expected[1:] - expected[:-1]).abs().amax(1).min() > 1e-3


STRANGER = """
import json, sys
sys.modules["luna_mega"] = None  # cannot be imported
from sentence_transformers import SentenceTransformer
texts = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    model = SentenceTransformer(folder, device="cpu", trust_remote_code=True)
    print(json.dumps(model.encode(texts).tolist()))
"""


def test_bundles_do_not_require_the_package(tokenizer, tmp_path):
    expected = []
    for name, (module, fields) in MODELS.items():
        module.make("Model", **fields).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        expected.append(encode(SentenceTransformer(str(tmp_path / name), device="cpu"), TEXTS))
        bundle(tmp_path / name, tmp_path / f"{name}-bundle")
    command = [
        sys.executable,
        "-c",
        STRANGER,
        json.dumps(TEXTS),
        *(str(tmp_path / f"{name}-bundle") for name in MODELS),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_HOME"] = str(tmp_path / "home")
    run = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    for line, embeddings in zip(run.stdout.splitlines(), expected, strict=True):
        torch.testing.assert_close(torch.tensor(json.loads(line)), embeddings, atol=1e-6, rtol=0)
