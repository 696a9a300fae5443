"""Wrong arguments raise an error that names the argument and its value, in every class that has the argument.

`test_configuration.py` has wrong fields of configurations.
"""

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache
from transformers.distributed import DistributedConfig

from tests.modeling import contract, decoders, luna, mega
from tests.modeling.contract import CLASSES, Member

IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])  # 2 is the decoder start token
FLAT = torch.arange(4, 13)[None]
BOUNDS = torch.tensor([0, 3, 9], dtype=torch.int32)
TWO = {"cu_seq_lens_q": BOUNDS}
RIGHT = torch.tensor([1, 2])


@cache
def make(name):
    return CLASSES[name].make()


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def call(head="Model", lengths=(9, 4), **changes):
    """Return a call with the inputs of a head, of which some are changed; None omits an input."""
    return lambda model: model(**luna.head_inputs(head, list(lengths)) | changes)


def flat(**inputs):
    return lambda model: model(**{"input_ids": FLAT} | inputs)


def generate(model, ids=IDS, mask=None, **options):
    named = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        named = {f"decoder_{name}": value for name, value in named.items()} | decoders.source(model, len(ids))
    named = {name: value for name, value in named.items() if value is not None}
    return model.generate(**named, do_sample=False, max_new_tokens=3, **options)


def run(model, ids=IDS, mask=None, **options):
    return model(**decoders.source(model, len(ids)) | decoders.target(model, ids, mask) | options)


def filled(model, ids=IDS, **options):
    """Return a cache that contains `ids`."""
    return run(model, ids, use_cache=True, **options).cache


@torch.enable_grad()
def train(model, **options):
    model = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    return run(model.train(), **options)


def decode(model, **states):
    return model.get_decoder()(torch.tensor([[4]]), **states)


def encoded(model):
    return model.get_encoder()(**decoders.source(model, 2))


def fused(fused_lm_head):
    """A `forward` as that of TRL, which uses only the weight of the head."""


def both(*ends):
    return [f"{family} {end}" for family in ("luna", "mega") for end in ends]


ENCODERS, LABELED = both("Model"), both("ForMaskedLM", "ForTokenClassification")
READERS = both("Model", "ForSequenceClassification")
SPANS, PAIRS, CHOICES = both("ForQuestionAnswering"), both("ForSequencePairClassification"), both("ForMultipleChoice")
CAUSAL = [f"{family} decoder" for family in decoders.FAMILIES]
SEQ2SEQ, LUNA, MEGA = both("seq2seq"), ["luna Model"], ["mega Model"]
EVERY, BOTH = ENCODERS + CAUSAL, CAUSAL + SEQ2SEQ
EMBEDS = r"inputs_embeds \[B, T, 24\], got "
SHAPE = r"must have the shape \[2, 5\]"
VALUES = "attention_mask` has values from"
VALUED, BANDS = {"input_type": "values"}, contract.ADAPTIVE

# Faults: the classes, the message, the call, and fields of the configuration, if any.
INPUTS = {
    "no row": (READERS, "batch is empty: 0 sequences", call(input_ids=ones(0, 5), attention_mask=None)),
    "no column": (READERS, "2 sequences of length 0", call(input_ids=ones(2, 0), attention_mask=None)),
    "no input": (READERS, "exactly one of input_ids and inputs_embeds", call(input_ids=None)),
    "values": (READERS + CAUSAL, "input_type='tokens'|input_values", call(input_values=zeros(2, 9))),
    "one dimension": (READERS, r"input_ids` must have the shape \[B, T\], or .* got \[9\]", call(input_ids=ones(9))),
    "another width": (READERS, EMBEDS + ".* 23", call(input_ids=None, inputs_embeds=zeros(2, 9, 23))),
    "a shorter mask": (
        READERS, r"must have the shape \[2, 9\] of the input, got \[2, 8\]", call(attention_mask=ones(2, 8)),
    ),
    "an unknown argument": (READERS, "(Luna|Mega) models do not support head_mask; omit", call(head_mask=zeros(2, 9))),
    "fewer types": (READERS, r"`token_type_ids` must .* \[2, 9\] .*, got \[2, 8\]", call(token_type_ids=ones(2, 8))),
    "a cache": (READERS, "require a decoder", call(use_cache=True)),
    "numbers as positions": (ENCODERS, "integers, got Tensor of torch.float32", call(position_ids=torch.ones(2, 9))),
    "fewer positions": (ENCODERS, r"the shape \[2, 9\] of the input, got \[2, 8\]", call(position_ids=ones(2, 8))),
    "reserved positions": (LUNA, "are from -2 to 0; they must be at least 0", call(position_ids=-2 * ones(2, 9))),
    "late positions": (LUNA, "are from 0 to 48.* less than the 48", call(position_ids=48 * ones(2, 9))),
    "other positions": (MEGA, "differ from the positions of `attention_mask`", call(position_ids=torch.arange(1, 10))),
    "an additive mask": (
        READERS, VALUES + " -inf to -inf, .*attention_mask == 0", call(attention_mask=ones(2, 9).log() - 1 / zeros(1)),
    ),
    "numbers of documents": (READERS, VALUES + " 1 to 2", call(attention_mask=torch.tensor([[1] * 4 + [2] * 5] * 2))),
    "fewer pairs": (
        PAIRS, "2 first inputs, but 1 second inputs",
        call(PAIRS[0].split()[1], pair_input_ids=ones(1, 9), pair_attention_mask=None),
    ),
    "no pairs": (PAIRS, "exactly one of", call(PAIRS[0].split()[1], pair_input_ids=None)),
    "positions of pairs": (
        PAIRS[:1], "counted from the attention masks; omit `position_ids`",
        call(PAIRS[0].split()[1], position_ids=ones(2, 9)),
    ),
    "positions without the first": (
        ["luna ForSequenceClassification"], "`position_ids` are not supported with `drop_first_token=True`",
        call(position_ids=ones(2, 9)), {"drop_first_token": True},
    ),
    "no options": (CHOICES, r"input_ids \[B, options, T\].*got \[2, 9\]", call()),
    "not the three channels": (
        READERS, r"`input_values` must have the shape \[B, T, 3\]", call(input_ids=None, input_values=zeros(2, 9, 1)),
        {"input_type": "values", "num_channels": 3},
    ),
    "longer than Mega's table": (
        MEGA, "8 positions, got 9", call(), {"relative_positional_bias": "simple", "max_positions": 8},
    ),
    "later than Mega's table": (
        ["mega decoder"], "8 positions, got 10", lambda m: run(m, cache=filled(m)),
        {"relative_positional_bias": "simple", "max_positions": 8},
    ),
    "longer than the table": (LUNA, "length 49 exceeds the 48", call(lengths=(49, 3))),
    "a flat mask": (BOTH, r"attention_mask must .* \[2, 5\] of", lambda m: run(m, mask=ones(5), cache=filled(m))),
    "another type": (CAUSAL, "no type embeddings; omit them", lambda m: run(m, token_type_ids=ones(2, 5))),
}  # fmt: skip
PADDING_FREE = {
    "no classes": (both("ForSequenceClassification"), "Classification does not support padding-free", flat(**TWO)),
    "weights": (ENCODERS, "no attention weights", flat(**TWO, output_attentions=True)),
    "the table": (LUNA, "learned positions", flat(input_ids=FLAT.repeat(1, 6), position_ids=torch.arange(54) % 49)),
    "descending": (ENCODERS, "must increase", flat(cu_seq_lens_q=torch.tensor([0, 5, 4], dtype=torch.int32))),
    "only of keys": (ENCODERS, "`cu_seq_lens_q` is missing; pass it with cu_seq_lens_k", flat(cu_seq_lens_k=BOUNDS)),
    "other keys": (ENCODERS, "`cu_seq_lens_k` differs from `cu_seq_lens_q`", flat(**TWO, cu_seq_lens_k=BOUNDS + 1)),
    "too short": (ENCODERS, "max_seqlen is 5, but a sequence has length 6", flat(**TWO, max_length_q=5)),
    "other lengths of keys": (ENCODERS, "`max_length_k` is 7, but .* 6", flat(**TWO, max_length_q=6, max_length_k=7)),
    "a mask": (ENCODERS, "`attention_mask` .* `cu_seq_lens_q`", flat(**TWO, attention_mask=ones(1, 9))),
    "disagreement": (ENCODERS, "disagree", flat(**TWO, seq_idx=torch.tensor([[0] * 4 + [1] * 5]))),
    "states and padding": (
        ENCODERS + CAUSAL, "one row without padding, got 1 positions of padding",
        flat(seq_idx=(FLAT > 6).long(), attention_mask=(FLAT < 12).long(), output_hidden_states=True, use_cache=False),
    ),
    "a cache": (CAUSAL, "a padding-free batch has no cache", flat(seq_idx=(FLAT > 6).long(), use_cache=True)),
    "a flat index": (EVERY, r"integers of the shape \[1, 9\]", flat(seq_idx=FLAT[0], use_cache=False)),
    "a span": (
        SPANS, "has no loss for a padding-free", flat(**TWO, start_positions=RIGHT[:1], end_positions=RIGHT[:1]),
    ),
}  # fmt: skip
LABELS = {
    "no input": (
        LABELED + both("ForSequenceClassification"), "exactly one of", call(input_ids=None, labels=ones(2, 9)),
    ),
    "flat labels of a target": (SEQ2SEQ, r"must have the shape \[B, T\] of a target", lambda m: m(IDS, labels=IDS[0])),
    "no end": (SPANS, "`end_positions` is missing; pass `start_positions` and", call(start_positions=RIGHT)),
    "flat labels": (LABELED, r"`labels` must have the shape \[2, 9\]", call(labels=ones(18))),
    "no ids": (LABELED, r"`labels` must .*\bids\b.*, got torch\.float32", call(labels=torch.ones(2, 9))),
    "below 0": (LABELED + CHOICES, r"`labels` are from -5.* ids from 0 to \d+, or -100", lambda m: labels_of(m, -5)),
    "above the last": (LABELED + CHOICES + BOTH, "`labels` are from .*1000.* ids from", lambda m: labels_of(m, 1000)),
    "another shape": (BOTH, r"`labels` must have the shape \[2, 5\]", lambda m: run(m, labels=IDS.T)),
    "more than logits": (
        BOTH, r"`labels` must have the shape \[2, 3\] .* got \[2, 5\]",
        lambda m: run(m, labels=IDS, logits_to_keep=3),
    ),
    "shifted": (CAUSAL, r"`shift_labels` must have the shape \[2, 5\]", lambda m: run(m, shift_labels=IDS[:, 1:])),
    "too few choices": (CHOICES, r"`labels` must have the shape \[2\]", lambda m: labels_of(m, 0, 1)),
}  # fmt: skip
GENERATE = {
    "no target": (SEQ2SEQ, "`decoder_input_ids` has length 0", lambda m: generate(m, IDS[:, :0])),
    "the prompt in the cache": (BOTH, "contains 5 positions already", lambda m: generate(m, cache=filled(m))),
    "a mask of another length": (
        BOTH, r"must have the shape \[2, 5\] .*, or \[2, 7\] with the 2 positions of .*, got \[2, 9\]",
        lambda m: generate(m, mask=ones(2, 9), cache=filled(m, IDS[:, :2])),
    ),
}  # fmt: skip
FORWARD = {
    "another cache": (BOTH, "must be a", lambda m: run(m, cache=DynamicCache())),
    "both names": (BOTH, "Both `past_key_values` and `cache` are set", lambda m: run(m, cache=0, past_key_values=0)),
    "a cache of one row": (BOTH, "does not fit this model and batch", lambda m: run(m, cache=filled(m, IDS[:1]))),
    "a mask that a cache does not explain": (BOTH, SHAPE, lambda m: run(m, mask=ones(2, 12), cache=filled(m))),
    "an additive mask": (BOTH, VALUES, lambda m: run(m, mask=-1.0 * ones(2, 5))),
    "an unknown argument": (BOTH, "do not support foo", lambda m: run(m, foo=1)),
    "tokens beyond the vocabulary": (BOTH, "are from 102 to 108", lambda m: run(m, IDS + 100)),
    "no token": (BOTH, "the batch is empty", lambda m: run(m, IDS[:, :0])),
    "positions of another length": (BOTH, "position_ids", lambda m: run(m, position_ids=torch.arange(4))),
    "states of an encoder": (
        BOTH, "(do not support|has no) .*encoder_hidden_states|encoder_hidden_states require a decoder",
        lambda m: run(m, encoder_hidden_states=torch.randn(2, 4, 12)),
    ),
    "checkpoints": (BOTH, "gradient checkpointing runs a layer twice", lambda m: train(m, use_cache=True)),
    "keys and values": (CAUSAL, "more than keys and values", lambda m: filled(m).update(zeros(1), zeros(1), 0)),
    "removing": (BOTH, "cannot be cropped from 5 to 4", lambda m: filled(m).crop(-1)),
}  # fmt: skip
TRANSLATION = {
    "no target": (SEQ2SEQ, "decoder_input_ids and decoder_inputs_embeds", lambda m: m(IDS)),
    "two targets": (SEQ2SEQ, "exactly one", lambda m: run(m, decoder_inputs_embeds=zeros(2, 5, 4))),
    "positions": (SEQ2SEQ, "`position_ids` is ambiguous", lambda m: run(m, position_ids=0 * IDS)),
    "a side": (SEQ2SEQ, "requires a (Luna|Mega)Seq2SeqConfig", lambda m: type(m)(m.config.encoder_config)),
    "a mask of the source": (SEQ2SEQ, "^`attention_mask` has values", lambda m: run(m, attention_mask=2 * ones(2, 13))),
    "a mask of the outputs": (
        SEQ2SEQ, r"encoder_attention_mask .*\[2, 13\], got \[2, 12\]",
        lambda m: m(encoder_outputs=encoded(m), attention_mask=ones(2, 12), decoder_input_ids=IDS),
    ),
    "another source": (
        SEQ2SEQ, r"another source.*5|`packed_states` .* \[2, 5, 24\]",
        lambda m: m(IDS, decoder_input_ids=IDS, cache=filled(m)),
    ),
    "a short tuple": (
        ["luna seq2seq"], "LunaModelOutput .* got a tuple with 1 tensors",
        lambda m: m(encoder_outputs=encoded(m).to_tuple()[:1], decoder_input_ids=IDS),
    ),
    "a longer source": (
        ["luna seq2seq"], "45 exceeds the 6 ", lambda m: m(IDS.repeat(1, 9), decoder_input_ids=IDS),
        {"position_embedding_type": "learned", "max_position_embeddings": 6},
    ),
    "no P": (
        ["luna seq2seq"], "`packed_states` is missing", lambda m: decode(m, encoder_hidden_states=zeros(1, 9, 24)),
    ),
    "only P": (["luna seq2seq"], "needs encoder_hidden_states", lambda m: decode(m, packed_states=zeros(1, 6, 24))),
    "no states": (["mega seq2seq"], "needs encoder_hidden_states", decode),
    "positions of a target": (["mega seq2seq"], "decoder_position_ids", lambda m: run(m, decoder_position_ids=IDS)),
    "narrow states": (["mega seq2seq"], r"\[1, S, 12\]", lambda m: decode(m, encoder_hidden_states=zeros(1, 3, 11))),
    "a source after the table": (
        ["mega seq2seq"], "10 positions, got 13", run,
        {"relative_positional_bias": "simple", "use_chunking": True, "chunk_size": 4, "max_positions": 10},
    ),
    "no padding": (
        ["mega seq2seq"], "add_cross_attention=True. does not support padding-free",
        lambda m: m.get_decoder()(FLAT, encoder_hidden_states=zeros(1, 9, 12), use_cache=False, **TWO),
    ),
    "a text after the table": (
        ["mega seq2seq"], "max_length=32 requires 31 .* has 6", lambda m: m.generate(IDS, max_length=32),
        {"relative_positional_bias": "simple", "max_positions": 24, "decoder_max_positions": 6},
    ),
    "rows of P": (
        ["luna decoder"], r"`packed_states` must have the shape \[2, rows, 24\], got \[1, 3, 24\]",
        lambda m: run(m, packed_states=zeros(1, 3, 24)),
    ),
    "a mask without P": (
        ["luna decoder"], "`packed_states` is missing; pass it", lambda m: run(m, packed_mask=ones(2, 6)),
    ),
    "weights of a step": (
        ["mega decoder", "megalodon decoder"], "`output_attentions=True` requires a new cache",
        lambda m: run(m, cache=filled(m), output_attentions=True),
    ),
}  # fmt: skip
METHODS = {
    "the embedding of values": (READERS, "needs input_type='tokens'", lambda m: m.set_input_embeddings(None), VALUED),
    "resizing values": (READERS, "needs input_type='tokens'", lambda m: m.resize_token_embeddings(9), VALUED),
    "resizing bands": (["mega decoder"], "cannot be resized", lambda m: m.resize_token_embeddings(50), BANDS),
    "resizing two vocabularies": (
        SEQ2SEQ, "source and target have different vocabularies of 30 and 35", lambda m: m.resize_token_embeddings(40),
        {"decoder_vocab_size": 35},
    ),
    "devices": (EVERY, "tensor parallelism", lambda m: m.maybe_distribute_model(m, DistributedConfig(tp_size=2), None)),
    "an odd width": (
        MEGA, "an even `shared_representation_size`, got 13",
        lambda m: (setattr(m.config, "shared_representation_size", 13), type(m)(m.config)), {},
    ),
    "a fused dense layer": (["mega decoder"], "model has a dense layer", lambda m: setattr(m, "forward", fused)),
    "fused bands": (["mega decoder"], "model has an adaptive softmax", lambda m: setattr(m, "forward", fused), BANDS),
    "tokens before the bands": (["mega decoder"], "of this model has 30 tokens", lambda m: m(IDS - 3), BANDS),
}  # fmt: skip
ROWS = {f"{group}: {name}": row for group, rows in (
    ("inputs", INPUTS), ("padding-free", PADDING_FREE), ("labels", LABELS), ("translation", TRANSLATION),
    ("methods", METHODS), ("generate", GENERATE), ("forward", FORWARD),
) for name, row in rows.items()}  # fmt: skip


def labels_of(model, wrong, more=0):
    """Return the output for labels of which the second one is wrong; `more` is the number of further labels."""
    head = type(model).__name__.split("For")[1]
    if head in ("CausalLM", "ConditionalGeneration"):
        return run(model, labels=torch.tensor([[3, wrong, 5, 6, 7]] * 2))
    labels = torch.zeros(2 + more, 9, dtype=torch.long).index_fill(1, torch.tensor(1), wrong)
    if head == "MultipleChoice":
        labels = torch.tensor([0, wrong, *[0] * more])
    return model(**luna.head_inputs(f"For{head}", [9, 4]), labels=labels)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("row", ROWS)
def test_error(row):
    names, message, action, *fields = ROWS[row]
    for name in names:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            action(CLASSES[name].make(**fields[0]) if fields else make(name))


CAUSAL_FIELDS = {"is_decoder": True, "pooling": "cls"}
OF_SEQUENCES = ("ForSequenceClassification", "ForSequencePairClassification", "ForMultipleChoice")
OF_TOKENS = ("ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering")
# Faults of a class and a configuration: the families, the classes, the fields, and the message.
NEW = [
    (("luna",), OF_TOKENS, luna.VALUES, "Luna{head} needs input_type='tokens', got 'values'"),
    (("mega",), OF_TOKENS, mega.VALUES, "Mega{head} needs input_type='tokens', got 'values'"),
    (("luna", "mega"), OF_SEQUENCES, CAUSAL_FIELDS, "pooling='cls'.*set pooling to 'last' or 'mean'"),
    (("luna",), OF_SEQUENCES, CAUSAL_FIELDS | {"pooling": "packed_mean"}, "pooling='packed_mean'.*'last' or 'mean'"),
    (("mega",), ("ForMaskedLM", "ForCausalLM"), {"embedding_size": 8},
     "embedding_size=(24|12), .* got 8; or pass tie_word_embeddings=False"),
    (("mega",), ("ForMaskedLM",), contract.ADAPTIVE, "adaptive_input_cutoffs=.8, 20.; pass tie_word_embeddings=False"),
    (("mega",), ("ForCausalLM",), {"is_decoder": False, "bidirectional": True}, "with is_decoder=True and bidir"),
    (("luna", "mega"), ("Model",), {"is_encoder_decoder": True}, "is an encoder or a decoder, but"),
    (("luna",), ("ForCausalLM",), {"add_cross_attention": True}, "use LunaForConditionalGeneration"),
]  # fmt: skip


@pytest.mark.parametrize("families, heads, fields, message", NEW)
def test_error_of_a_new_model(families, heads, fields, message):
    for family in families:
        for head in heads:
            with pytest.raises(ValueError, match=message.format(head=head)):
                Member(family, head, fields).make()
