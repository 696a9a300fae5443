"""One function for random encoder-decoders: without a cache, with a dynamic and with a static one.

The logits of a source and a target alone equal those in a batch with padding and gaps, in float64.
"""

import random

import torch

from luna_mega import LunaForConditionalGeneration, LunaSeq2SeqConfig, MegaForConditionalGeneration, MegaSeq2SeqConfig
from tests.modeling import random_models
from tests.random_cases import cuts, in_blocks, run_block

BOTH = {"num_decoder_layers": (None, 1, 3), "decoder_vocab_size": (None, 30), "decoder_intermediate_size": (None, 20)}
BOTH |= {"unpad_inputs": (True, False)}


def luna(rng):
    fields = random_models.luna(
        rng, (1, 2), **BOTH, num_decoder_attention_heads=(None, 2), causal_activation=("softplus", "elu"),
        dynamic_projection_length=(None, True, False), contextual_projection=(None, True, False),
        decoder_position_embedding_type=(None, "learned", "sinusoidal"), decoder_pre_norm=(None, True),
        max_target_positions=(None, 80),
    )  # fmt: skip
    return LunaForConditionalGeneration, LunaSeq2SeqConfig(**fields)


def mega(rng):
    fields = random_models.mega(
        rng, (1, 2), **BOTH, decoder_ema_projection_size=(None, 0, 2), decoder_chunk_size=(None, 3, -1),
        bidirectional=(True, None),
    )  # fmt: skip
    return MegaForConditionalGeneration, MegaSeq2SeqConfig(**fields)


class Pairs:
    """Random sources and targets, and the logits of each pair alone. Targets have padding on the left."""

    def __init__(self, rng, model):
        self.rng, self.model, batch = rng, model, rng.choice((1, 2, 4))
        self.source = torch.randint(4, 40, (batch, rng.choice((1, 4, 9, 17))))
        self.target = torch.randint(4, 30, (batch, rng.choice((2, 5, 11))))
        self.source_mask, self.mask = torch.ones_like(self.source), torch.ones_like(self.target)
        random_models.drop(rng, self.source_mask, rng.choice(("left", "right", "gaps", "none")))
        self.prompt = rng.randrange(1, self.target.shape[1])
        random_models.drop(rng, self.mask[:, : self.prompt], rng.choice(("left", "none")))
        self.expected = torch.stack([self.alone(row) for row in range(batch)])
        self.encoded = model.get_encoder()(self.source, attention_mask=self.source_mask)

    def alone(self, row):
        source, kept = self.source[row, self.source_mask[row].bool()], self.mask[row].bool()
        logits = self.model(source[None], decoder_input_ids=self.target[row, kept][None], use_cache=False).logits
        return logits.new_full((len(kept), logits.shape[-1]), torch.nan).masked_scatter(kept[:, None], logits[0])

    def select(self, change):
        for name in ("source", "source_mask", "target", "mask", "expected"):
            setattr(self, name, change(getattr(self, name)))
        self.encoded = type(self.encoded)(**{name: change(x) for name, x in self.encoded.items() if torch.is_tensor(x)})

    def run(self, start, stop, cache=None, **options):
        masks = [self.mask[:, :stop], *([None] if start else [])]
        options = {"encoder_outputs": self.encoded, "cache": cache, "use_cache": True} | options
        output = self.model(
            attention_mask=self.source_mask,
            decoder_input_ids=self.target[:, start:stop],
            decoder_attention_mask=self.rng.choice(masks),
            **options,
        )
        kept = self.mask[:, start:stop].bool()
        torch.testing.assert_close(output.logits[kept], self.expected[:, start:stop][kept], rtol=1e-8, atol=1e-8)
        return output.cache

    def disturb(self, cache):
        """Continue with another token."""
        token = torch.randint(4, 30, (len(self.target), 1))
        self.model(encoder_outputs=self.encoded, attention_mask=self.source_mask, decoder_input_ids=token, cache=cache)


@torch.no_grad()
def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = random_models.make(rng, *rng.choice((luna, mega))(rng))
    pairs = Pairs(rng, model)
    total, source = pairs.target.shape[1], {"input_ids": pairs.source, "encoder_outputs": None}
    pairs.run(0, total, use_cache=False, **source)
    cache = pairs.run(0, pairs.prompt, **rng.choice((source, {})))
    if rng.random() < 0.5:
        cache.make_static(total + rng.choice((0, 3)))
    parts = cuts(rng, total - pairs.prompt, most=6)
    if cache.is_static:
        parts = ((step, step + 1) for step in range(total - pairs.prompt))
    for start, stop in parts:
        if rng.random() < 0.5:
            cache = random_models.change_cache(pairs, cache, "crop")
        assert pairs.run(pairs.prompt + start, pairs.prompt + stop, cache) is cache
    assert cache.get_seq_length() == total
    options = {"num_beams": rng.choice((1, 3)), "do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    texts = [
        model.generate(pairs.source, attention_mask=pairs.source_mask, **options, **how)
        for how in ({}, {"use_cache": False}, {"cache_implementation": "static"})[: rng.choice((0, 3))]
    ]
    assert all(torch.equal(texts[0], text) for text in texts)


@in_blocks(fast=25, total=200)
def test_one_result(first):
    run_block(check, first)
