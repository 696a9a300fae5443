"""Folders of the released Megalodon code: conversion, errors."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from luna_mega import MegalodonConfig, MegalodonForCausalLM
from luna_mega.convert import convert_checkpoint
from tests.convert.folders import edit, identical, load
from tests.convert.megalodon import MODEL, PIECES, folder, pieces, state
from tests.errors import command_error


def check_weights(weights, model, report):
    """Check that a model has the values of all tensors of a file."""
    ours = model.state_dict()
    assert weights.keys() == {row["source"] for row in report.mapped}
    for row in report.mapped:
        assert torch.equal(ours[row["target"]].float(), weights[row["source"]].float()), row


def test_shards_are_joined(tmp_path):
    folder(tmp_path / "complete", swiglu=True)
    folder(tmp_path / "halves", swiglu=True, ranks=2)
    for name in ("complete", "halves"):
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}-model")
    models = [load_file(tmp_path / f"{name}-model" / "model.safetensors") for name in ("complete", "halves")]
    identical(*models)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_without_names(tmp_path, ranks):
    """Torch stores no name of a file whose path has non-ASCII characters; one line says that the order is unchecked."""
    source = folder(tmp_path / "é", ranks=ranks)
    for file in source.glob("*.pth"):
        torch.save(torch.load(file), file)
    report = convert_checkpoint(source, tmp_path / "model")
    lines = [line for line in report.warnings if "order of the shards" in line]
    assert len(lines) == (ranks > 1) and all(
        f"consolidated.{rank:02d}.pth" in x for x in lines for rank in range(ranks)
    )


def test_half_precision_stays_as_it_is(tmp_path):
    source = folder(tmp_path / "source", dtype="bf16", share_emb=True)
    report = convert_checkpoint(source, tmp_path / "model")
    assert report.dtype_out == "bfloat16" and (tmp_path / "model" / "tokenizer.model").read_bytes() == pieces()
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {x.dtype for x in stored.values() if x.is_floating_point()} == {torch.bfloat16}
    # The model stores rates and frequencies in float32, with the values of the file.
    model = MegalodonForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert model.megalodon.layers[1].mega.cema.alpha.dtype == torch.float32
    check_weights(torch.load(source / "consolidated.pth"), model, report)


def test_a_narrower_dtype_does_not_round_frequencies_and_rates(tmp_path):
    source = folder(tmp_path / "source")
    convert_checkpoint(source, tmp_path / "model", dtype="bfloat16")
    stored, weights = load_file(tmp_path / "model" / "model.safetensors"), torch.load(source / "consolidated.pth")
    assert torch.equal(stored["megalodon.rope.freqs"], weights["rope.freqs"])
    assert stored["megalodon.layers.0.mega.cema.delta"].dtype == torch.float32
    assert stored["megalodon.layers.0.mega.wz.weight"].dtype == torch.bfloat16


def test_a_folder_without_a_tokenizer(tmp_path):
    source = folder(tmp_path / "source", tokenizer=None)
    (source / "tokenizer.model").rename(tmp_path / "pieces")
    report = convert_checkpoint(source, tmp_path / "model")
    assert report.tokenizer is None and "--bpe FILE" in "".join(report.notes)
    report = convert_checkpoint(source, tmp_path / "with", bpe=tmp_path / "pieces")
    assert report.tokenizer["size"] == 9 and (tmp_path / "with" / "tokenizer.model").is_file()


def test_the_tokenizer_has_the_ids_of_the_original(tmp_path):
    source = folder(tmp_path / "source", extra=256, output_size=9)
    convert_checkpoint(source, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == 9 + 256 and tokenizer.pad_token_id == 9
    assert tokenizer("a  bca").input_ids == [1, 3, 5, 4, 6] and tokenizer.decode([1, 3, 5, 4, 6], True) == "a bca"
    # text that looks like a special token is tokenized as ordinary text
    assert tokenizer("</s>").input_ids == [1, 5, 0]
    assert tokenizer.convert_ids_to_tokens([9, 10, 264]) == ["<pad>", "<extra_10>", "<extra_264>"]
    (source / "tokenizer.model").write_bytes(
        pieces(kinds=[("<unk>", 0.0, 2), *(("xyz"[i] * (i + 1), -1.0, 1) for i in range(3)), *PIECES[4:]])
    )
    convert_checkpoint(source, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (9, 10, 11) and MegalodonConfig.from_pretrained(tmp_path / "other").eos_token_id == 10


def test_bytes_and_pieces_of_the_user(tmp_path):
    kinds = [*PIECES, ("<0x0A>", 0.0, 6), ("<0xC3>", 0.0, 6), ("<0xA9>", 0.0, 6), ("bb", 0.0, 4)]
    source = folder(tmp_path / "source", tensors=state(len(kinds)))
    (source / "tokenizer.model").write_bytes(pieces(kinds=kinds, byte_fallback=1, normalizer=b"\x20\x00"))
    convert_checkpoint(source, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer(" a\n\u00e9bbbc").input_ids
    assert ids == [1, 5, 3, 9, 10, 11, 12, 4] and tokenizer.decode(ids, skip_special_tokens=True) == " a\n\u00e9bbbc"


def test_card(tmp_path):
    source = folder(tmp_path / "source", ranks=2)
    convert_checkpoint(source, tmp_path / "model")
    assert "Converted from the Megalodon checkpoint `source`" in (tmp_path / "model" / "README.md").read_text(
        encoding="utf-8"
    )


def broken(change):
    """Return a function that changes a tensor of the first shard in a folder."""

    def apply(path):
        file = next(iter(sorted(path.glob("consolidated*.pth"))))
        tensors = torch.load(file)
        change(tensors)
        torch.save(tensors, file)

    return apply


def other_run(path):
    tensors = {name: x + 1 for name, x in torch.load(path / "consolidated.01.pth").items()}
    torch.save(tensors, path / "consolidated.01.pth")


def cut(path):
    file = path / "consolidated.pth"
    file.write_bytes(file.read_bytes()[:-3000])


def training(path):
    (path / "consolidate_config.json").unlink()
    (path / "consolidated.pth").rename(path / "model.ckpt.00000.pth")


def settings(**changes):
    return lambda path: edit(path, model=MODEL | changes)


def prefixed(tensors):
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def copied(path):
    torch.save(torch.load(path / "consolidated.00.pth"), path / "consolidated.01.pth")


def swapped(path):
    first, second = path / "consolidated.00.pth", path / "consolidated.01.pth"
    first.rename(path / "x"), second.rename(first), (path / "x").rename(second)


def a_shard_as_the_model(path):
    (path / "consolidated.01.pth").unlink()
    (path / "consolidated.00.pth").rename(path / "consolidated.pth")
    edit(path, "consolidate_config.json", model_parallel_size=1)


BAD = {
    "a copied shard": (2, copied, "consolidated.01.pth has the same tensors as consolidated.00.pth"),
    "swapped shards": (2, swapped, "consolidated.00.pth was saved as consolidated.01.pth"),
    "a shard as the model": (2, a_shard_as_the_model, "consolidated.pth was saved as consolidated.00.pth"),
    "another base": (1, settings(rope_base=500.0), "500.0 does not fit the tensor 'rope.freqs'; they have base 10000"),
    "prefix": (1, broken(prefixed), "all names start with 'module.'"),
    "a shard is missing": (2, lambda path: (path / "consolidated.01.pth").unlink(), "consolidated.01.pth is missing"),
    "all shards are missing": (1, lambda path: (path / "consolidated.pth").unlink(), "consolidated.pth is missing"),
    "one too many": (1, lambda path: (path / "consolidated.02.pth").touch(), "is not one of"),
    "another run": (2, other_run, "not shards of one checkpoint"),
    "another shape": (2, broken(lambda x: x.update({"embed.weight": torch.zeros(9, 7)})), "not shards of one"),
    "another name": (2, broken(lambda x: x.pop("rope.freqs")), "consolidated.00.pth lacks 'rope.freqs'"),
    "no configuration": (1, lambda path: (path / "config.json").unlink(), "no config.json"),
    "not consolidated": (1, lambda path: (path / "consolidate_config.json").unlink(), "without consolidate"),
    "FSDP": (1, training, "model.ckpt.00000.pth: sharded training state (FSDP)"),
    "NaN": (1, broken(lambda x: x["embed.weight"].fill_(torch.nan)), "NaN or Inf in 1 of"),
    "heads": (1, settings(num_heads=3), "each of the 3 heads"),
    "groups": (1, settings(norm_num_groups=5), "norm_num_groups = 5"),
    "width": (1, settings(model_dim=32), "has shape"),
    "an unknown tokenizer": (1, lambda path: (path / "tokenizer.model").write_bytes(b"no model"), "not a Sentence"),
    "another tokenizer": (1, lambda path: (path / "tokenizer.model").write_bytes(pieces(kinds=PIECES[:8])), "8 pieces"),
    "unigram": (1, lambda path: (path / "tokenizer.model").write_bytes(pieces(model_type=1)), "of kind unigram"),
    "no tokenizer": (1, lambda path: (path / "tokenizer.model").unlink(), "pass it with --bpe"),
    "truncated": (1, cut, "damaged or truncated"),
    "a count": (1, broken(lambda x: x["output.final_norm.prior_count"].fill_(3)), "prior_count' is 3"),
    "tied but different": (1, settings(share_emb=True), "are tied in the original but differ"),
    "dtype": (1, lambda path: edit(path, "consolidate_config.json", dtype="int4"), "is not one of fp32, fp16, bf16"),
    "number of shards": (1, lambda path: edit(path, "consolidate_config.json", model_parallel_size=2**31), "is not"),
    "settings": (1, lambda path: edit(path, model=[]), "'model' does not contain"),
    "a type": (1, settings(chunk_size="x"), "model.chunk_size = 'x' is not an integer"),
    "extra tokens": (1, lambda path: edit(path, tokenizer={"additional_vocab_size": 5}), "no multiple of 256"),
    "extra tokens that the model lacks": (
        1,
        lambda path: edit(path, tokenizer={"path": "tokenizer.model", "additional_vocab_size": 256}),
        "9 pieces and 256 additional tokens do not fit the model",
    ),
    "no size": (1, lambda path: edit(path, model=MODEL | {"ffn_hidden_dim": None}), "2048"),
    "a word": (1, lambda path: edit(path, tokenizer={"path": "a\x1bb"}), "tokenizer = "),
    "an unknown field": (1, settings(sliding_window=5), "sliding_window"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, name):
    ranks, change, words = BAD[name]
    source = folder(tmp_path / "source", ranks=ranks)
    change(source)
    before = sorted(tmp_path.iterdir())
    message = command_error(capsys, "convert", source, "--output", tmp_path / "model")
    assert words in message and message[:-1].isprintable() and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dict", __file__], "pass the SentencePiece model with --bpe"),
        (["--bpe", "missing.model"], "missing.model: no such file"),
        (["--layer-norm", "standard"], "Megalodon stores norm weights minus 1"),
        (["--ema-convention", "main"], "one form of its moving average"),
    ],
)
def test_inapplicable_options(tmp_path, capsys, options, words):
    source = folder(tmp_path / "source")
    assert words in command_error(capsys, "convert", source, "--output", tmp_path / "model", *options)
    assert not (tmp_path / "model").exists()


def test_a_single_file_of_a_folder(tmp_path, capsys):
    file = folder(tmp_path / "source") / "consolidated.pth"
    message = command_error(capsys, "convert", file, "--output", tmp_path / "model")
    assert "one file of a megalodon checkpoint; pass its folder" in message


def test_llama_folder_is_not_megalodon(tmp_path, capsys):
    torch.save({"tok_embeddings.weight": torch.zeros(3, 2)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text('{"dim": 2}', encoding="utf-8")
    for source, named in ((tmp_path, "is a folder"), (tmp_path / "consolidated.00.pth", "no field 'args'")):
        assert named in command_error(capsys, "convert", source, "--output", tmp_path / "out")


def test_fixtures_of_the_original(parity_folder, tmp_path):
    folders = [folder for folder in parity_folder.all("megalodon") if (folder / "consolidate_config.json").is_file()]
    assert folders
    for source in folders:
        meta, output = json.loads((source / "meta.json").read_text(encoding="utf-8")), tmp_path / source.name
        report = convert_checkpoint(source, output / "model")
        assert not report.warnings and not report.dropped
        tokenizer, ids = AutoTokenizer.from_pretrained(output / "model"), meta["tokenizer"]
        assert len(tokenizer) == ids["n_words"] == report.tokenizer["size"]
        for role in ("bos", "eos", "pad"):
            assert getattr(tokenizer, f"{role}_token_id") == (ids[f"{role}_id"] if ids[f"{role}_id"] >= 0 else None)
        for case in meta["greedy"].values():
            for text, expected in zip(case["prompt"], case["prompt_ids"], strict=True):
                assert tokenizer(text).input_ids == expected
                assert tokenizer.decode(expected, skip_special_tokens=True) == text
        load(output / "model", MegalodonForCausalLM)
