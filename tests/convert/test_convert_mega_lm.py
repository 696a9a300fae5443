"""Mega language models: values read from tensors and args, tied weights, invalid files, dictionaries."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega.convert.evidence import same_bits
from tests.convert.folders import load
from tests.convert.mega import POSITIONS
from tests.convert.mega_lm import KINDS, VOCABULARY, mega_lm

TOKENS = torch.tensor([[2, 5, 16, 31, 9], [2, 7, 22, 1, 1]])
WORDS, OUT = "decoder.embed_tokens.weight", "decoder.output_projection.weight"


@pytest.mark.parametrize("arch", ["mega_lm", "mega_lm_big", "mega_lm_enwik8_large"])
def test_missing_activation_dropout_is_zero(convert, arch):
    assert load(convert(mega_lm(arch, activation_dropout=None))).config.nffn_activation_dropout_prob == 0.0
    assert "args.activation_dropout is missing" in convert.screen


@pytest.mark.parametrize("kind", ["tied", "untied", "adaptive", "adaptive, untied", "adaptive input"])
def test_args_of_the_architecture(convert, kind):
    """The name of the architecture supplies all args that tensors do not determine."""
    state = mega_lm(**KINDS[kind])
    keep = ("arch", "task", "decoder_chunk_size", "normalize_before", "no_affine_final_norm", "no_scale_embedding")
    keep += ("adaptive_input_factor", "adaptive_softmax_factor", "truncation_length", "attention_activation_fn")
    for name in vars(state["args"]).keys() - set(keep):
        delattr(state["args"], name)
    convert(state)
    report = json.loads((convert.output / "conversion_report.json").read_text(encoding="utf-8"))
    assert report["warnings"] == []
    config = load(convert.output).config
    assert config.tie_word_embeddings is KINDS[kind].get("tied", False)
    assert config.tie_adaptive_projections is KINDS[kind].get("tied_proj", False)


def test_copies_that_are_not_tied(convert):
    """Weights are tied only if they have equal values and the args specify tying."""
    state = mega_lm(tied=True, share_decoder_input_output_embed=False)
    assert load(convert(state)).config.tie_word_embeddings is False
    state = mega_lm(share_decoder_input_output_embed=True)
    convert.output = convert.output.with_name("other")
    model = load(convert(state))
    assert torch.equal(model.lm_head.weight, state["model"][OUT]) and model.config.tie_word_embeddings is False
    assert "args.share_decoder_input_output_embed = True but the tensors have False" in convert.screen


def test_cutoffs_in_the_args(convert):
    """Cutoffs in the args may end with the vocabulary size; other differences cause a warning."""
    convert(mega_lm(**KINDS["adaptive"] | {"adaptive_input_cutoff": f"12, 20,{VOCABULARY}"}))
    assert "warning" not in convert.screen
    convert.output = convert.output.with_name("other")
    convert(mega_lm(**KINDS["adaptive"] | {"adaptive_softmax_cutoff": "12,21"}))
    assert "args.adaptive_softmax_cutoff = '12,21' but the tensors have '12,20'" in convert.screen


def dictionary(convert, symbols):
    path = convert.source / "dict.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def test_words(convert):
    dictionary(convert, [*(f"w{index}" for index in range(26)), "madeupword0000", "madeupword0001"])
    model = load(convert(mega_lm(rotary=False, chunk=-1)))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("w0 x  w2\nw3 </s> \n\nw4").input_ids == [2, 4, 3, 6, 2, 7, 2, 2, 2, 8]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert tokenizer.model_max_length == POSITIONS and len(tokenizer) == VOCABULARY
    written = model.generate(**tokenizer("w0 w1", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True).startswith("w0 w1")
    assert model.generate(max_new_tokens=2, do_sample=False)[0, 0] == 2


def test_bytes(convert):
    symbols = [101, 32, 116, 97, 195, 169, 60, 47, 115, 62, *range(200, 217)]
    dictionary(convert, [*symbols, "madeupword0000"])
    load(convert(mega_lm()))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    ids = {byte: 4 + index for index, byte in enumerate(symbols)} | {10: 2}
    text = "tea é\n\n</s>  ate\n"
    assert tokenizer(text).input_ids == [ids[byte] for byte in text.encode()]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("b").input_ids == [3] and tokenizer.eos_token_id == tokenizer.bos_token_id == 2
    assert len(tokenizer) == VOCABULARY and tokenizer.model_max_length > 1e9
    assert "bytes, 32 ids" in convert.screen


def test_bytes_with_a_separate_newline(convert):
    dictionary(convert, range(28))
    load(convert(mega_lm()))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("\n").input_ids == [14] and tokenizer.eos_token == "</s>" and tokenizer.eos_token_id == 2


def test_dictionary_of_another_size(convert):
    dictionary(convert, range(300))
    assert "(4 specials + 300 symbols = 304)" in convert.error(mega_lm())


def test_bpe_of_a_dictionary_that_lacks_pieces(convert, shared_dir):
    dictionary(convert, range(28))
    message = convert.error(mega_lm(), "--bpe", shared_dir / "data" / "gpt2_bpe")
    assert "of GPT-2's pieces" in message and "omit --bpe" in message
    (convert.source / "dict.txt").unlink()
    assert "no dictionary next to" in convert.error(mega_lm(), "--bpe", shared_dir / "data" / "gpt2_bpe")


def test_bpe(convert, shared_dir):
    """A dictionary may contain all of GPT-2's pieces in a different order."""
    dictionary(convert, [*range(50256, -1, -1)])
    state = mega_lm()
    for name in (WORDS, OUT):
        state["model"][name] = torch.randn(50261, 16)
    load(convert(state, "--bpe", shared_dir / "data" / "gpt2_bpe"))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("Hello world").input_ids == [2, *(4 + 50256 - piece for piece in (15496, 995))]
    assert tokenizer.decode(tokenizer("Hello world").input_ids, skip_special_tokens=True) == "Hello world"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert len(tokenizer) == 50261 and "GPT-2 byte-pair encoding" in convert.screen


def test_a_tensor_that_repeats_one_number_equals_its_copy():
    one, copy = torch.full((1,), float("nan")), torch.full((3, 2), float("nan"))
    assert same_bits(one.expand(3, 2), copy) and not same_bits(one.expand(3, 2), torch.zeros(3, 2))
