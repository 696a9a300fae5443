"""One function, however texts are laid out, for random encoders with a head, in float64.

A text alone has the results of the text in a batch: with padding on either side, gaps, more padding, other tokens at
padding, another order, masks of any type, `position_ids`, embeddings, recorded states and weights, and without padding
in one row.
"""

import random

import torch

from luna_mega import LunaConfig, MegaConfig
from tests.modeling import luna as luna_models, mega as mega_models, random_models
from tests.random_cases import in_blocks, run_block

CLASSES = {"luna": luna_models.HEADS, "mega": mega_models.HEADS}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
ENCODERS = {"unpad_inputs": (True, False), "embedding_size": (None, None, 8), "classifier_num_layers": (0, 1, 2)}
LENGTHS = (1, 2, 5, 9, 17, 33)


def luna(rng):
    fields = random_models.luna(
        rng, **ENCODERS, dynamic_projection_length=(True, False), contextual_projection=(True, False),
        type_vocab_size=(0, 2), pooling=luna_models.POOLINGS,
    )  # fmt: skip
    fields["projection_length"] = rng.choice((1, 3, 8, 40))
    return LunaConfig, fields, fields["type_vocab_size"] > 0


def mega(rng):
    fields = random_models.mega(
        rng, **ENCODERS, bidirectional=(True, False), add_token_type_embeddings=(True, False),
        pooling=("cls", "last", "mean"),
    )  # fmt: skip
    fields["ema_shift"] = fields["ema_projection_size"] > 0 and fields["bidirectional"] and rng.random() < 0.5
    return MegaConfig, fields, fields["add_token_type_embeddings"]


class Texts:
    """Random texts and the results of each text alone."""

    def __init__(self, rng, model, head, has_types):
        self.rng, self.model, self.head = rng, model, head
        shape = rng.choice((2, 3, 5)), rng.choice(LENGTHS)
        self.ids, self.mask = torch.randint(4, 40, shape), torch.ones(shape, dtype=torch.long)
        random_models.drop(rng, self.mask, rng.choice(("left", "right", "mixed", "gaps", "none")))
        self.types = torch.randint(0, 2, shape) if has_types and rng.random() < 0.7 else None
        self.expected = [self.alone(row) for row in range(len(self.ids))]

    def alone(self, row):
        kept = self.mask[row].bool()
        inputs = {name: x[row, kept][None] for name, x in self.inputs().items()}
        if self.rng.random() < 0.5:
            del inputs["attention_mask"]
        return self.results(inputs, torch.ones(1, int(kept.sum())))[0]

    def inputs(self):
        inputs = {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": self.types}
        return {name: x for name, x in inputs.items() if x is not None}

    def results(self, inputs, mask):
        return luna_models.results(self.head, self.model(**inputs), mask)

    def check(self, inputs, order=None):
        mask = inputs["attention_mask"]
        results = self.results(inputs, mask)
        for row, result in zip(range(len(results)) if order is None else order.tolist(), results, strict=True):
            torch.testing.assert_close(result, self.expected[row], rtol=1e-8, atol=1e-8)

    def check_every_layout(self):
        inputs, batch = self.inputs(), len(self.ids)
        dropped, order = self.mask == 0, torch.randperm(batch)
        noise = torch.where(dropped, torch.randint(0, 40, self.ids.shape), self.ids)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        extra = self.rng.choice(({}, {"output_hidden_states": True}, {"output_attentions": True}))
        self.check(inputs | {"input_ids": noise} | extra)
        self.check({name: x[order] for name, x in inputs.items()}, order)
        self.check(inputs | {"attention_mask": self.mask.to(self.rng.choice((torch.bool, torch.float64)))})
        self.check(inputs | {"position_ids": positions})
        wide = {name: torch.cat([x, x.new_zeros(batch, 3)], 1) for name, x in inputs.items()}
        self.check(wide | {"input_ids": torch.cat([noise, torch.randint(0, 40, (batch, 3))], 1)})
        embeddings = self.model.get_input_embeddings()(noise)
        self.check({name: x for name, x in inputs.items() if name != "input_ids"} | {"inputs_embeds": embeddings})
        if self.head != "ForSequenceClassification" and self.model.config._attn_implementation == "sdpa":
            self.check_padding_free()

    def check_padding_free(self):
        kept, lengths = self.mask.bool(), self.mask.sum(1)
        names = {"input_ids": self.ids, "token_type_ids": self.types}
        inputs = {name: x[kept][None] for name, x in names.items() if x is not None}
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        if self.rng.random() < 0.5:
            inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
        else:
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), int(lengths.max()))
        results = self.results(inputs, torch.ones(1, int(lengths.sum())))[0].split(lengths.tolist())
        for result, expected in zip(results, self.expected, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def check(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    family, head = rng.choice(tuple(CLASSES)), rng.choice(HEADS)
    config_class, fields, has_types = {"luna": luna, "mega": mega}[family](rng)
    fields["tie_word_embeddings"] = fields["embedding_size"] is None
    config = config_class(**fields, num_labels=2 if head == "ForQuestionAnswering" else 3)
    Texts(rng, random_models.make(rng, CLASSES[family][head], config), head, has_types).check_every_layout()


@in_blocks(fast=25, total=200)
def test_one_result(first):
    run_block(check, first)
