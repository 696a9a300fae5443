"""One function, however it is computed: without a cache, with a dynamic and with a static one, for random decoders.

The logits of each text in a batch equal those of a batch that contains only this text, without padding, in float64. The
prompt is split into calls of random lengths. Steps, calls of several positions and changes of the cache follow.
"""

import random

import torch

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    MegaConfig,
    MegaForCausalLM,
    MegalodonConfig,
    MegalodonForCausalLM,
)
from tests.modeling import random_models
from tests.random_cases import choose, in_blocks, run_block


def luna(rng):
    fields = random_models.luna(rng, causal_activation=("softplus", "elu"))
    return LunaForCausalLM, LunaConfig(**fields, is_decoder=True, eos_token_id=2)


def mega(rng):
    fields = random_models.mega(rng, add_lm_hidden_dense_layer=(True, False), tie_word_embeddings=(True, False))
    return MegaForCausalLM, MegaConfig(**fields, is_decoder=True, bidirectional=False, eos_token_id=2)


def megalodon(rng):
    fields = choose(
        rng, num_hidden_layers=(1, 2, 3), num_attention_heads=(1, 2, 4), ema_projection_size=(1, 2, 5),
        norm_num_groups=(1, 2, 4, 8), chunk_size=(3, 4, 8, 64), norm_affine=(True, False), swiglu=(True, False),
        rescale_nffn=(True, False), scale_embedding=(True, False), tie_word_embeddings=(True, False),
        pad_token_id=(0, None),
    )  # fmt: skip
    fields |= {"shared_representation_size": 8, "value_size": 16, "intermediate_size": 24}
    fields |= {"is_decoder": True, "bos_token_id": 1, "eos_token_id": 2}
    return MegalodonForCausalLM, MegalodonConfig(**random_models.SIZES, **fields)


class Texts:
    """Random texts with padding on the left and gaps in the prompt, and the logits of each text in a batch of one."""

    def __init__(self, rng, model):
        self.rng, self.model, self.total = rng, model, rng.choice((3, 6, 12, 20, 33))
        self.prompt, batch = rng.randrange(1, self.total), rng.choice((1, 2, 3, 5))
        self.ids = torch.randint(4, 40, (batch, self.total))
        self.mask = torch.ones_like(self.ids)
        gaps = rng.random() < 0.3
        for row in self.mask:
            row[: rng.choice((0, 0, rng.randrange(self.prompt)))] = 0
            if gaps:
                row[: self.prompt - 1] &= torch.rand(self.prompt - 1) < 0.8
        self.expected = torch.stack([self.single(row) for row in range(batch)])

    def single(self, row):
        kept = self.mask[row].bool()
        logits = self.model(
            self.ids[row][kept][None], use_cache=False, attention_mask=self.mask[row][kept][None]
        ).logits
        return logits.new_full((self.total, logits.shape[-1]), torch.nan).masked_scatter(kept[:, None], logits[0])

    def select(self, change):
        self.ids, self.mask, self.expected = (change(x) for x in (self.ids, self.mask, self.expected))

    def drop(self, at):
        """Drop a position of a text, as after the end of a text."""
        row = self.rng.randrange(len(self.ids))
        self.mask = self.mask.clone()
        self.mask[row, at] = 0
        self.expected = self.expected.clone()
        self.expected[row] = self.single(row)

    def run(self, start, stop, cache):
        """Compute positions with a mask of these, of all so far, or without a mask; check the logits."""
        new = self.mask[:, start:stop]
        masks = [new, self.mask[:, :stop], *([None] if new.all() and start else [])]
        output = self.model(self.ids[:, start:stop], attention_mask=self.rng.choice(masks), cache=cache, use_cache=True)
        kept = new.bool()
        torch.testing.assert_close(output.logits[kept], self.expected[:, start:stop][kept], rtol=1e-7, atol=1e-7)
        return output.cache

    def disturb(self, cache):
        """Continue with another token."""
        self.model(torch.randint(4, 40, (len(self.ids), 1)), cache=cache)


@torch.no_grad()
def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model_class, config = rng.choice((luna, mega, megalodon))(rng)
    model = random_models.make(rng, model_class, config)
    texts = Texts(rng, model)
    logits = model(texts.ids, attention_mask=texts.mask, use_cache=False).logits
    kept = texts.mask.bool()
    torch.testing.assert_close(logits[kept], texts.expected[kept], rtol=1e-7, atol=1e-7)
    cache, at = None, 0
    for stop in sorted({texts.prompt, *(rng.randrange(1, texts.prompt + 1) for _ in range(rng.choice((0, 1, 3))))}):
        cache, at = texts.run(at, stop, cache), stop
    if rng.random() < 0.5:
        cache.make_static(texts.total + rng.choice((0, 1, 7)))
    while at < texts.total:
        if rng.random() < 0.4:
            cache = random_models.change_cache(texts, cache)
        if rng.random() < 0.1:
            texts.drop(at)
        stop = at + 1 if cache.is_static or rng.random() < 0.8 else rng.randrange(at + 1, min(at + 6, texts.total) + 1)
        assert texts.run(at, stop, cache) is cache
        at = stop
    assert cache.get_seq_length() == texts.total


@in_blocks(fast=25, total=200)
def test_one_result(first):
    run_block(check, first)
