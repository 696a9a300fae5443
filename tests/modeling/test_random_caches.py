"""One function, however it is computed: without a cache, with a dynamic and with a static one, for random decoders.

The logits of each text in a batch equal those of a batch that contains only this text and its source, without padding,
in float64. The prompt is split into calls of random lengths. Steps, calls of several positions and changes of the cache
follow.
"""

import random

import torch

import luna_mega
from tests.modeling import decoders, random_models
from tests.random_cases import choose, in_blocks, run_block

BOTH = {"num_decoder_layers": (None, 1, 3), "decoder_vocab_size": (None, 30), "decoder_intermediate_size": (None, 20)}
BOTH |= {"unpad_inputs": (True, False)}
LUNA = BOTH | {
    "num_decoder_attention_heads": (None, 2), "dynamic_projection_length": (None, True, False),
    "contextual_projection": (None, True, False), "decoder_position_embedding_type": (None, "learned", "sinusoidal"),
    "decoder_pre_norm": (None, True), "max_target_positions": (None, 80),
}  # fmt: skip
MEGA = BOTH | {
    "decoder_ema_projection_size": (None, 0, 2), "decoder_chunk_size": (None, 3, -1), "bidirectional": (True, None),
}  # fmt: skip


def luna(rng, translates):
    more = LUNA if translates else {}
    return random_models.luna(rng, (1, 2), causal_activation=("softplus", "elu"), **more)


def mega(rng, translates):
    if translates:
        return random_models.mega(rng, (1, 2), **MEGA)
    fields = random_models.mega(rng, add_lm_hidden_dense_layer=(True, False), tie_word_embeddings=(True, False))
    return fields | {"bidirectional": False}


def megalodon(rng, translates):
    fields = choose(
        rng, num_hidden_layers=(1, 2, 3), num_attention_heads=(1, 2, 4), ema_projection_size=(1, 2, 5),
        norm_num_groups=(1, 2, 4, 8), chunk_size=(3, 4, 8, 64), norm_affine=(True, False), swiglu=(True, False),
        rescale_nffn=(True, False), scale_embedding=(True, False), tie_word_embeddings=(True, False),
        pad_token_id=(0, None),
    )  # fmt: skip
    fields |= {"shared_representation_size": 8, "value_size": 16, "intermediate_size": 24, "bos_token_id": 1}
    return random_models.SIZES | fields


FAMILIES = [(luna, False), (mega, False), (megalodon, False), (luna, True), (mega, True)]


def random_model(rng):
    family, translates = rng.choice(FAMILIES)
    fields, prefix = family(rng, translates), family.__name__.capitalize()
    if translates:
        config, head = getattr(luna_mega, f"{prefix}Seq2SeqConfig")(**fields), "ForConditionalGeneration"
    else:
        config, head = getattr(luna_mega, f"{prefix}Config")(**fields, is_decoder=True, eos_token_id=2), "ForCausalLM"
    return random_models.make(rng, getattr(luna_mega, prefix + head), config)


class Texts:
    """Random texts, padded on the left and with gaps in the prompt; their sources, and the logits of each text."""

    def __init__(self, rng, model):
        self.rng, self.model, self.total = rng, model, rng.choice((3, 6, 12, 20, 33))
        self.prompt, batch = rng.randrange(1, self.total), rng.choice((1, 2, 3, 5))
        self.ids = torch.randint(4, 30, (batch, self.total))
        self.mask = torch.ones_like(self.ids)
        gaps = rng.random() < 0.3
        for row in self.mask:
            row[: rng.choice((0, 0, rng.randrange(self.prompt)))] = 0
            if gaps:
                row[: self.prompt - 1] &= torch.rand(self.prompt - 1) < 0.8
        self.source = {}
        if model.config.is_encoder_decoder:
            ids = torch.randint(4, 40, (batch, rng.choice((1, 4, 9, 17))))
            self.source = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            random_models.drop(rng, self.source["attention_mask"], rng.choice(("left", "right", "gaps", "none")))
            self.encoded = model.get_encoder()(**self.source)
        self.expected = torch.stack([self.single(row) for row in range(batch)])

    def single(self, row):
        kept, source = self.mask[row].bool(), {}
        if self.source:
            source = {"input_ids": self.source["input_ids"][row, self.source["attention_mask"][row].bool()][None]}
        text = decoders.target(self.model, self.ids[row][kept][None], self.mask[row][kept][None])
        logits = self.model(**source, **text, use_cache=False).logits
        return logits.new_full((self.total, logits.shape[-1]), torch.nan).masked_scatter(kept[:, None], logits[0])

    def select(self, change):
        self.ids, self.mask, self.expected = (change(x) for x in (self.ids, self.mask, self.expected))
        if self.source:
            self.source = {name: change(x) for name, x in self.source.items()}
            tensors = {name: change(x) for name, x in self.encoded.items() if torch.is_tensor(x)}
            self.encoded = type(self.encoded)(**tensors)

    def given(self):
        """Return the sources as tokens or as outputs of the encoder."""
        encoded = self.source and {"encoder_outputs": self.encoded, "attention_mask": self.source["attention_mask"]}
        return self.rng.choice((self.source, encoded))

    def drop(self, at):
        """Drop a position of a text, as after the end of a text."""
        row = self.rng.randrange(len(self.ids))
        self.mask, self.expected = self.mask.clone(), self.expected.clone()
        self.mask[row, at] = 0
        self.expected[row] = self.single(row)

    def run(self, start, stop, cache, use_cache=True):
        """Compute positions with a mask of these, of all so far, or without a mask; check the logits."""
        new = self.mask[:, start:stop]
        mask = self.rng.choice([new, self.mask[:, :stop], *([None] if new.all() and start else [])])
        text = decoders.target(self.model, self.ids[:, start:stop], mask, cache=cache, use_cache=use_cache)
        output = self.model(**self.given(), **text)
        kept = new.bool()
        torch.testing.assert_close(output.logits[kept], self.expected[:, start:stop][kept], rtol=1e-8, atol=1e-8)
        return output.cache

    def disturb(self, cache):
        """Continue with another token."""
        ids = torch.randint(4, 30, (len(self.ids), 1))
        self.model(**self.given(), **decoders.target(self.model, ids, cache=cache))


@torch.no_grad()
def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    texts = Texts(rng, random_model(rng))
    texts.run(0, texts.total, None, use_cache=False)
    cache, at = None, 0
    for stop in sorted({texts.prompt, *(rng.randrange(1, texts.prompt + 1) for _ in range(rng.choice((0, 1, 3))))}):
        cache, at = texts.run(at, stop, cache), stop
    if rng.random() < 0.5:
        cache.make_static(texts.total + rng.choice((0, 1, 7)))
    while at < texts.total:
        if rng.random() < 0.4:
            cache = random_models.change_cache(texts, cache, "crop")
        if rng.random() < 0.1:
            texts.drop(at)
        stop = at + 1 if cache.is_static or rng.random() < 0.8 else rng.randrange(at + 1, min(at + 6, texts.total) + 1)
        assert texts.run(at, stop, cache) is cache
        at = stop
    assert cache.get_seq_length() == texts.total
    options = {"num_beams": rng.choice((1, 3)), "do_sample": False, "max_new_tokens": 3, "eos_token_id": None}
    prompt = texts.source or {
        "input_ids": texts.ids[:, : texts.prompt],
        "attention_mask": texts.mask[:, : texts.prompt],
    }
    if rng.random() < 0.3 and prompt["attention_mask"].any(1).all():
        ways = ({}, {"use_cache": False}, {"cache_implementation": "static"})
        found = [texts.model.generate(**prompt, **options, **how) for how in ways]
        assert all(torch.equal(found[0], text) for text in found)


@in_blocks(fast=25, slow=150)
def test_one_result(first):
    run_block(check, first)
