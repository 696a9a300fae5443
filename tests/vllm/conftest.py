"""Tiny models whose next token depends on the entire text, and requests with the results of `generate`."""

import copy
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import luna_mega

VOCABULARY = 101


class Request(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # tokens that `generate` adds
    chances: list[float]  # their log-probabilities, computed by one call of the model in float64
    rounding: float  # the largest difference from them of one call in float32


def make_model(family: str, **fields) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "mega":
        options = {
            "intermediate_size": 48, "shared_representation_size": 16, "nffn_hidden_size": 64, "chunk_size": 24,
            "ema_projection_size": 4, "bidirectional": False, "use_chunking": True, "max_positions": 512,
            "initializer_range": 0.3,
        }  # fmt: skip
        config, model_class = luna_mega.MegaConfig, luna_mega.MegaForCausalLM
    elif family == "megalodon":
        options = {
            "num_attention_heads": 2, "shared_representation_size": 16, "value_size": 48, "intermediate_size": 64,
            "chunk_size": 24, "ema_projection_size": 4, "norm_num_groups": 4,
        }  # fmt: skip
        config, model_class = luna_mega.MegalodonConfig, luna_mega.MegalodonForCausalLM
    else:
        options = {"num_attention_heads": 4, "intermediate_size": 64, "projection_length": 8}
        options |= {"max_position_embeddings": 512, "initializer_range": 0.12}
        config, model_class = luna_mega.LunaConfig, luna_mega.LunaForCausalLM
    options |= {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "is_decoder": True}
    options |= {"tie_word_embeddings": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    model = model_class(config(**options | fields)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.35)
    return model


def make_requests(model, count: int, longest: int = 90, most: int = 40) -> list[Request]:
    generator = torch.Generator().manual_seed(1)

    def draw(high):
        return int(torch.randint(1, high + 1, (), generator=generator))

    requests, exact = [], copy.deepcopy(model).double()
    for _ in range(count):
        prompt = torch.randint(3, VOCABULARY, (1, draw(longest)), generator=generator)
        if prompt.shape[1] > 4:
            prompt[0, 3] = model.config.pad_token_id  # within a text, the padding token is an ordinary token
        mask, length = torch.ones_like(prompt), prompt.shape[1]
        text = model.generate(prompt, attention_mask=mask, max_new_tokens=draw(most), do_sample=False, eos_token_id=[])
        new = text[0, length:]
        with torch.no_grad():
            logits = [x(text, torch.ones_like(text)).logits[0, length - 1 : -1].double() for x in (exact, model)]
        chances, rounded = (x.log_softmax(-1).gather(1, new[:, None])[:, 0] for x in logits)
        rounding = (rounded - chances).abs().max().item()
        requests.append(Request(prompt[0].tolist(), new.tolist(), chances.tolist(), rounding))
    return requests


@pytest.fixture(scope="session")
def served():
    """Return a function that returns a model and requests for it; both are cached."""
    made = {}

    def get(family: str, count: int, **fields):
        key = (family, count, *sorted(fields.items()))
        if key not in made:
            model = make_model(family, **fields)
            made[key] = model, make_requests(model, count)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of printable ASCII characters."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    symbols = [*special, "\u0120", *(chr(code) for code in range(33, 33 + VOCABULARY - len(special) - 1))]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, model_input_names=["input_ids", "attention_mask"])


@pytest.fixture(scope="module")
def folder(served, tokenizer, tmp_path_factory):
    """Return a function that saves a model of a family with its tokenizer to a new folder."""

    def save(family):
        path = tmp_path_factory.mktemp(family)
        served(family, 6)[0].save_pretrained(path)
        tokenizer.save_pretrained(path)
        return str(path)

    return save


@pytest.fixture(scope="session")
def complete(served, tokenizer):
    """Return a function that returns the greedy continuation of a text."""

    def complete(family: str, prompt: str, count: int) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"max_new_tokens": count, "do_sample": False}
        text = served(family, 6)[0].generate(ids, attention_mask=torch.ones_like(ids), **options)
        return tokenizer.decode(text[0, ids.shape[1] :], skip_special_tokens=True)

    return complete
