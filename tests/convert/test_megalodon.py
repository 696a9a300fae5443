"""Folders of the released Megalodon code: conversion, errors."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega import MegalodonConfig
from luna_mega.convert import ConversionError, convert_checkpoint
from tests.convert.contract import check_message, weights
from tests.convert.folders import edit, identical
from tests.convert.megalodon import MODEL, PIECES, folder, pieces, state


def test_shards_are_joined(tmp_path):
    """Torch stores no name of a file in a folder with another name than ASCII; then the order is unchecked."""
    for name, ranks in (("complete", 1), ("halves", 2), ("é", 2)):
        source, output = folder(tmp_path / name, swiglu=True, ranks=ranks), tmp_path / f"{name}-model"
        if name == "é":
            for file in source.glob("*.pth"):
                torch.save(torch.load(file), file)
        lines = [line for line in convert_checkpoint(source, output).warnings if "order of the shards" in line]
        assert [all(f"consolidated.0{rank}.pth" in x for rank in (0, 1)) for x in lines] == [True] * (name == "é")
        identical(weights(tmp_path / "complete-model"), weights(output))


def test_a_folder_without_a_tokenizer(tmp_path):
    source = folder(tmp_path / "source", tokenizer=None)
    (source / "tokenizer.model").rename(tmp_path / "pieces")
    report = convert_checkpoint(source, None)
    assert report.tokenizer is None and "--bpe FILE" in "".join(report.notes)
    assert convert_checkpoint(source, None, bpe=tmp_path / "pieces").tokenizer["size"] == 9


XYZ = [("<unk>", 0.0, 2), *(("xyz"[index] * (index + 1), -1.0, 1) for index in range(3)), *PIECES[4:]]
BYTES = [*PIECES, ("<0x0A>", 0.0, 6), ("<0xC3>", 0.0, 6), ("<0xA9>", 0.0, 6), ("bb", 0.0, 4)]
# Pieces, more settings of them, additional tokens; text, ids, decoded text, and the ids of <s>, </s> and padding.
TOKENIZERS = [
    (PIECES, {}, 256, "a  bca", [1, 3, 5, 4, 6], "a bca", (1, 2, 9)),
    (PIECES, {}, 256, "</s>", [1, 5, 0], "", (1, 2, 9)),  # text that looks like a special token is ordinary text
    ([*PIECES, ("<pad>", -9.0, 1)], {"normalizer": b"\x18\x00"}, 256, "abc", [1, 6, 4], "abc", (1, 2, 10)),
    (XYZ, {}, 256, "bc", [9, 5, 4], "bc", (9, 10, 11)),
    (BYTES, {"byte_fallback": 1, "normalizer": b"\x20\x00"}, 0,
     " a\n\u00e9bbbc", [1, 5, 3, 9, 10, 11, 12, 4], " a\n\u00e9bbbc", (1, 2, None)),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "settings", "extra", "text", "ids", "decoded", "special"), TOKENIZERS)
def test_the_tokenizer_has_the_ids_of_the_original(tmp_path, kinds, settings, extra, text, ids, decoded, special):
    source = folder(tmp_path / "source", tensors=state(len(kinds) + extra), extra=extra)
    (source / "tokenizer.model").write_bytes(pieces(kinds=kinds, **settings))
    convert_checkpoint(source, tmp_path / "model")
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(text).input_ids == ids and len(tokenizer) == len(kinds) + extra
    assert tokenizer.decode(ids, skip_special_tokens=True) == decoded
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == special
    assert MegalodonConfig.from_pretrained(tmp_path / "model").eos_token_id == special[1]
    if kinds is PIECES:
        assert tokenizer.convert_ids_to_tokens([9, 10, 264]) == ["<pad>", "<extra_10>", "<extra_264>"]


def settings(**changes):
    return lambda path: edit(path, model=MODEL | changes)


def consolidated(**changes):
    return lambda path: edit(path, "consolidate_config.json", **changes)


def without(name):
    return lambda path: (path / name).unlink()


def tensors(change, name="consolidated.pth"):
    """Return a function that changes the tensors of a file."""

    def apply(path):
        saved = torch.load(path / name)
        change(saved)
        torch.save(saved, path / name)

    return apply


def training(path):
    without("consolidate_config.json")(path)
    (path / "consolidated.pth").rename(path / "model.ckpt.00000.pth")


def a_shard_as_the_model(path):
    without(SECOND)(path)
    (path / FIRST).rename(path / "consolidated.pth")
    consolidated(model_parallel_size=1)(path)


FIRST, SECOND = "consolidated.00.pth", "consolidated.01.pth"
# Number of shards, change of the folder, a part of the error.
BAD = [
    (2, lambda path: shutil.copy(path / FIRST, path / SECOND), f"{SECOND} was saved as {FIRST}"),
    (2, lambda path: torch.save(torch.load(path / FIRST), path / SECOND), f"{SECOND} has the same tensors as {FIRST}"),
    (2, a_shard_as_the_model, f"consolidated.pth was saved as {FIRST}"),
    (2, without(SECOND), f"{SECOND} is missing"),
    (1, without("consolidated.pth"), "consolidated.pth is missing"),
    (1, lambda path: (path / "consolidated.02.pth").touch(), "is not one of"),
    (2, tensors(lambda x: [tensor.add_(1) for tensor in x.values()], SECOND), "not shards of one checkpoint"),
    (2, tensors(lambda x: x.update({"embed.weight": torch.zeros(9, 7)}), FIRST), "not shards of one"),
    (2, tensors(lambda x: x.pop("rope.freqs"), FIRST), f"{FIRST} lacks 'rope.freqs'"),
    (2, tensors(lambda x: x.update({"embed.weight": torch.zeros(9)}), FIRST), "and no dimension 1"),
    (1, lambda path: torch.save({"embed.weight": torch.zeros(9, 32)[:, :16]}, path / "consolidated.pth",
                                _use_new_zipfile_serialization=False), "does not fit its storage"),
    (1, tensors(lambda x: x["output.final_norm.prior_count"].fill_(3)), "prior_count' is 3"),
    (1, tensors(lambda x: x["embed.weight"].fill_(torch.nan)), "NaN or Inf in 1 of"),
    (1, without("config.json"), "no config.json"),
    (1, without("consolidate_config.json"), "without consolidate"),
    (1, training, "model.ckpt.00000.pth: sharded training state (FSDP)"),
    (1, settings(rope_base=500.0), "500.0 does not fit the tensor 'rope.freqs'; they have base 10000"),
    (1, settings(efficient_attn="flash"), "is not one of None, swift, fused"),
    (1, settings(num_heads=3), "each of the 3 heads"),
    (1, settings(sliding_window=5), "sliding_window"),
    (1, lambda path: edit(path, model=[]), "'model' does not contain"),
    (1, consolidated(dtype="int4"), "is not one of fp32, fp16, bf16"),
    (1, without("tokenizer.model"), "pass it with --bpe"),
    *((1, lambda path, x=x: edit(path, tokenizer=x), named) for x, named in (
        ([], "is not an object"),
        ({"path": "a\x1bb"}, "tokenizer = "),
        ({"additional_vocab_size": 5}, "no multiple of 256"),
        ({"path": "tokenizer.model", "additional_vocab_size": 256}, "9 pieces and 256 additional tokens do not fit"),
    )),
    *((1, lambda path, x=x: (path / "tokenizer.model").write_bytes(x), named) for x, named in (
        (b"no model", "not a Sentence"), (b"\x08" + b"\xff" * 11, "not a Sentence"), (pieces(model_type=1), "unigram"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "change", "named"), BAD)
def test_wrong_folders(tmp_path, ranks, change, named):
    source = folder(tmp_path / "source", ranks=ranks)
    change(source)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(source, tmp_path / "model")
    check_message(str(error.value))
    assert named in str(error.value) and list(tmp_path.iterdir()) == [source]


def test_folders_of_other_models(tmp_path):
    source, llama = folder(tmp_path / "source"), tmp_path / "llama"
    llama.mkdir()
    torch.save({"tok_embeddings.weight": torch.zeros(3, 2)}, llama / FIRST)
    (llama / "params.json").write_text('{"dim": 2}', encoding="utf-8")
    one_file = "one file of a megalodon checkpoint; pass its folder"
    for path, named in (
        (source / "consolidated.pth", one_file), (llama, "is a folder"), (llama / FIRST, "no field 'args'")
    ):  # fmt: skip
        with pytest.raises(ConversionError, match=named):
            convert_checkpoint(path, tmp_path / "model")


def test_tokenizers_of_the_original(parity_folder, tmp_path):
    folders = [folder for folder in parity_folder.all("megalodon") if (folder / "consolidate_config.json").is_file()]
    assert folders
    for source in folders:
        meta, output = json.loads((source / "meta.json").read_text(encoding="utf-8")), tmp_path / source.name
        convert_checkpoint(source, output)
        tokenizer, ids = AutoTokenizer.from_pretrained(output), meta["tokenizer"]
        assert len(tokenizer) == ids["n_words"]
        for role in ("bos", "eos", "pad"):
            assert getattr(tokenizer, f"{role}_token_id") == (ids[f"{role}_id"] if ids[f"{role}_id"] >= 0 else None)
        for case in meta["greedy"].values():
            assert tokenizer(case["prompt"]).input_ids == case["prompt_ids"]
            assert tokenizer.batch_decode(case["prompt_ids"], skip_special_tokens=True) == case["prompt"]
