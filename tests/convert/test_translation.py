"""Translation models of Luna and Mega: two dictionaries, norms stored minus one, names of languages."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega import LunaForConditionalGeneration
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError
from tests.convert import translation
from tests.convert.folders import dictionary, identical
from tests.convert.translation import LUNA_KINDS, MEGA_KINDS, luna_seq2seq, mega_seq2seq

FAMILIES = {"luna": luna_seq2seq, "mega": mega_seq2seq}
TWO = [("luna", "two vocabularies, pre-norm, fixed length"), ("mega", "two vocabularies")]


@pytest.mark.parametrize(("family", "kind"), TWO)
def test_model_and_dictionaries(tmp_path, family, kind):
    """A converted model has the weights and outputs of the checkpoint, and a tokenizer of each language."""
    fields = (LUNA_KINDS | MEGA_KINDS)[kind]
    ours, path = FAMILIES[family](**fields), save(tmp_path / "out", family, **fields)
    sizes = (ours.config.vocab_size, ours.config.decoder_config.vocab_size)
    files = [dictionary(tmp_path / f"{name}.txt", rows) for name, rows in zip("ab", sizes, strict=True)]
    report = convert_checkpoint(path, tmp_path / "back", dictionaries=files)
    assert report.model_class == type(ours).__name__ and not report.warnings
    back = type(ours).from_pretrained(tmp_path / "back").eval()
    identical(ours.state_dict(), back.state_dict())
    ids = torch.randint(4, 14, (2, 9))
    torch.testing.assert_close(back(ids, labels=ids).logits, ours(ids, labels=ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("w3 w1 zzz").input_ids == [7, 5, 3, 2]
    assert (tmp_path / "back" / "dict.target.txt").read_text(encoding="utf-8").count("\n") == sizes[1] - 4


def save(folder, family, change=None, **fields):
    """Save the checkpoint of a new model, with these changes of its args, and return its path."""
    folder.mkdir(exist_ok=True)
    torch.save(translation.checkpoint(FAMILIES[family](**fields), **change or {}), folder / "model.pt")
    return folder / "model.pt"


def test_norms_stored_minus_one(tmp_path):
    """A file of the 2023 code, with norm weights around 0, converts with the option."""
    content = translation.checkpoint(luna_seq2seq())
    norms = [key for key in content["model"] if "norm" in key and key.endswith(".weight")]
    content["model"] |= {key: content["model"][key] - 1 for key in norms}
    torch.save(content, tmp_path / "model.pt")
    report = convert_checkpoint(tmp_path / "model.pt", tmp_path / "back", layer_norm="plus-one")
    assert len(norms) == 2 * 3 + 2 * 4 + 3 and report.decisions["layer_norm"] == "plus-one"
    back = LunaForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(4, 14, (2, 9))
    torch.testing.assert_close(back(ids, labels=ids).logits, luna_seq2seq()(ids, labels=ids).logits)


@pytest.fixture
def checkpoint(tmp_path):
    """Return a checkpoint with two vocabularies and no dictionaries in its directory."""
    return save(tmp_path / "out", "mega", **MEGA_KINDS["two vocabularies"])


def test_dictionaries(tmp_path, checkpoint):
    report = convert_checkpoint(checkpoint, tmp_path / "none")
    assert report.tokenizer is None and any("dict.source.txt or dict.target.txt" in note for note in report.notes)
    source, target = dictionary(tmp_path / "dict.en.txt", 19), dictionary(tmp_path / "dict.de.txt", 14)
    # the sizes determine which dictionary is the source's
    convert_checkpoint(checkpoint, tmp_path / "both", dictionaries=[target, source])
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / "both", subfolder=name) for name in ("", "target")]
    assert [len(tokenizer) for tokenizer in tokenizers] == [19, 14]
    for given, message in (
        ([source], "dict.target.txt, is missing"),
        ([target], "dict.source.txt, is missing"),
        ([source, source], "fits as source, and so does"),
        ([source, dictionary(tmp_path / "c.txt", 15)], "11 symbols and 4 specials do not fit the 19 embeddings"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert_checkpoint(checkpoint, tmp_path / "bad", dictionaries=given)
    dictionary(checkpoint.parent / "dict.source.txt", 14)
    with pytest.raises(ConversionError, match=r"dict\.source\.txt: 10 symbols and 4 specials do not fit"):
        convert_checkpoint(checkpoint, tmp_path / "bad")
    with pytest.raises(ConversionError, match="there is no dictionary next to"):
        (checkpoint.parent / "dict.source.txt").unlink()
        convert_checkpoint(checkpoint, tmp_path / "bad", bpe=tmp_path / "codes")


def test_a_joint_vocabulary_has_one_dictionary(tmp_path):
    path = save(tmp_path / "out", "mega")
    one, other = dictionary(tmp_path / "a.txt", 19), dictionary(tmp_path / "b.txt", 19)
    convert_checkpoint(path, tmp_path / "one", dictionaries=[one])
    assert not (tmp_path / "one" / "target").exists()
    other.write_text(other.read_text(encoding="utf-8").replace("w3", "x"), encoding="utf-8")
    with pytest.raises(ConversionError, match="but the model has one embedding"):
        convert_checkpoint(path, tmp_path / "two", dictionaries=[one, other])
    separate = save(tmp_path / "x", "mega", share_encoder_decoder_embeddings=False)
    convert_checkpoint(separate, tmp_path / "both", dictionaries=[other, one])  # the first dictionary is the source's
    assert (tmp_path / "both" / "dict.txt").read_text(encoding="utf-8") == other.read_text(encoding="utf-8")


def test_tensors_take_precedence_over_args(tmp_path):
    path = save(tmp_path / "out", "mega", {"share_all_embeddings": True, "decoder_z_dim": 99}, decoder_vocab_size=14)
    warnings = "\n".join(convert_checkpoint(path, tmp_path / "a").warnings)
    assert "args.share_all_embeddings = True but the tensors have False" in warnings
    assert "args.decoder_z_dim = 99 but the tensors have 6" in warnings


@pytest.mark.parametrize("language", ["../../x", "/etc/x", "a\nb", "..\\x", ["en"], 3, "\x1b"])
def test_language_name_is_not_a_path(tmp_path, language):
    """A language name that is a path raises an error, because it becomes part of a file name."""
    path = save(tmp_path / "out", "mega", {"source_lang": language})
    with pytest.raises(ConversionError, match="args.source_lang = .* is not (a name|the name of a language)"):
        convert_checkpoint(path, tmp_path / "a")


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_generation(tmp_path, family):
    convert_checkpoint(save(tmp_path / "out", family), tmp_path / "folder")
    generation = json.loads((tmp_path / "folder" / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["num_beams"], generation["decoder_start_token_id"]) == (5, 2)
    assert generation["max_length"] == {"luna": 21, "mega": 202}[family]
    assert "AutoModelForSeq2SeqLM" in (tmp_path / "folder" / "README.md").read_text(encoding="utf-8")
