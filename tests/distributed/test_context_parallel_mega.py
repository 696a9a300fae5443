"""Mega on context-parallel shards against the same model on complete sequences in one process."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist

import luna_mega
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.modeling_common.sharding import ShardedLayout
from luna_mega.modeling_mega.layers_mega import MegaDropout
from tests.modeling.luna import enlarged, head_inputs, labels, tokens
from tests.modeling.mega import HEADS, NO_DROPOUT, tiny_config

TOTAL, LENGTHS = 23, {2: (8, 15), 4: (4, 8, 4, 7)}
# The second ends, or with left padding starts, on another rank; the third starts at a chunk.
SEQUENCES = [23, 5, 15]
CHUNKS = {"use_chunking": True, "chunk_size": 4}
CAUSAL = {"is_decoder": True, "bidirectional": False, "use_cache": True}
VALUES = {"input_type": "values", "pooling": "mean"}
ADAPTIVE = {"adaptive_input_cutoffs": [10, 25], "adaptive_softmax_cutoffs": [10, 25], "embedding_size": 24}
HEAD_CASES = [
    *((head, CHUNKS) for head in HEADS),
    ("ForCausalLM", CAUSAL | CHUNKS),
    ("ForMaskedLM", {"attention_activation": "relu2", "sparse_prediction": True, "add_token_type_embeddings": True}),
]
# Heads whose loss transformers does not round to float32.
LAYER_CASES = [
    ("Model", CHUNKS | {"ema_shift": True, "relative_positional_bias": "simple", "normalization_type": "rmsnorm"}),
    ("Model", {"attention_activation": "laplace", "relative_positional_bias": "simple"}),
    ("Model", {"normalization_type": "batchnorm", "padded_batch_statistics": True, "final_norm": True}),
    ("Model", CHUNKS | {"normalization_type": "batchnorm", "padded_batch_statistics": True}),
    ("Model", CAUSAL | {"attention_activation": "laplace", "truncation": TOTAL}),
    ("ForSequenceClassification", CHUNKS | VALUES | {"normalization_type": "batchnorm", "embedding_norm": True}),
    ("ForCausalLM", CAUSAL | CHUNKS | ADAPTIVE | {"attention_activation": "relu2", "normalize_before_mega": False}),
    ("ForCausalLM", CAUSAL | ADAPTIVE | {"legacy_adaptive_loss": True, "tie_word_embeddings": False}),
]


def build(head, **overrides):
    def size(name):
        return 0.5 if "qk_weight" in name or "rel_pos_bias" in name else 0.1

    model_class = luna_mega.MegaForCausalLM if head == "ForCausalLM" else HEADS[head]
    config = tiny_config(**NO_DROPOUT | {"classifier_dropout": 0.0} | overrides)
    return enlarged(model_class, config, size).train()


def drop_some(batch):
    """Return the batch with masks that also have gaps; chunks of 4 still start at shards."""
    mask = torch.ones(3, TOTAL, dtype=torch.long)
    mask[1, [1, 2, 5, 6, 9, 10, 14, 22]] = mask[2, :8] = mask[2, [8, 11, 12]] = 0
    masks = {
        name: mask.view(3, *(1,) * (x.dim() - 2), TOTAL).expand_as(x) for name, x in batch.items() if "mask" in name
    }
    return batch | masks


def complete_batch(head, side, model):
    batch = drop_some(head_inputs(head, [TOTAL] * 3)) if side == "gaps" else head_inputs(head, SEQUENCES, side)
    if head == "ForCausalLM":
        return batch | {"labels": batch["input_ids"]}
    batch |= labels(head, batch)
    if head in ("ForMaskedLM", "ForTokenClassification"):
        batch["labels"][batch["attention_mask"] == 0] = -100
        batch["labels"][:, 4:12] = -100  # one of 4 ranks has nothing to predict
    if head == "ForQuestionAnswering":
        batch |= {"start_positions": torch.tensor([10, 0, 40]), "end_positions": torch.tensor([22, 13, 3])}
    if model.config.input_type == "values":
        batch["input_values"] = batch.pop("input_ids").to(model.dtype).sin()
    if model.config.add_token_type_embeddings:
        batch["token_type_ids"] = batch["input_ids"] % 2
    return batch


def cut(batch, lengths):
    """Return this rank's part of all tensors `[..., T]`."""
    start = sum(lengths[: dist.get_rank()])
    stop = start + lengths[dist.get_rank()]
    return {name: x[..., start:stop] if x.shape[-1] == TOTAL else x for name, x in batch.items()}


def total_loss(head, output, mask, shard=None):
    if head != "Model":
        return output.loss
    weighed = (output.last_hidden_state.sin() * mask[..., None]).sum()
    return output.pooler_output.sum() + (weighed if shard is None else shard.all_reduce_sum(weighed))


def distance(x, y):
    """Return the maximum difference, relative to the largest element of `x` if that is above 1."""
    return 0.0 if x.numel() == 0 else ((x - y).abs().max() / x.abs().max().clamp(min=1.0)).item()


def compare(head, overrides, side, dtype, checkpointing):
    """Return the differences of this rank's outputs, buffers and mean gradients from the complete sequence, by name."""
    lengths, group = LENGTHS[dist.get_world_size()], dist.group.WORLD
    model = build(head, **overrides).to(dtype)
    shared = copy.deepcopy(model)
    if checkpointing:
        shared.gradient_checkpointing_enable()
    batch = complete_batch(head, side, model)
    part = cut(batch, lengths)
    expected, actual = model(**batch), shared(**part, cp_group=group)
    total_loss(head, expected, batch["attention_mask"]).backward()
    total_loss(head, actual, part["attention_mask"], ContextShard(group, lengths)).backward()
    found = {name: distance(x, dict(shared.named_buffers())[name]) for name, x in model.named_buffers()}
    for name, x in expected.items():
        if isinstance(x, torch.Tensor) and not (name == "logits" and model.config.sparse_prediction):
            y = actual[name]
            if x.dim() > 1 and x.shape[1] == TOTAL:  # rows at padding are meaningless
                x, kept = cut({"x": x.transpose(1, -1)}, lengths)["x"].transpose(1, -1), part["attention_mask"].bool()
                assert x.shape == y.shape, (name, x.shape, y.shape)
                x, y = x[kept], y[kept]
            found[name] = distance(x, y)
    for (name, parameter), other in zip(model.named_parameters(), shared.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            dist.all_reduce(other.grad)
            found[f"gradient of {name}"] = distance(parameter.grad, other.grad / len(lengths))
    return found


def compare_all(cases):
    return [compare(*case) for case in cases]


def check(ranks, count, cases, tolerance):
    for found in ranks(count, compare_all, cases):
        for case, differences in zip(cases, found, strict=True):
            name = max(differences, key=differences.get)
            assert differences[name] <= tolerance, (case, name, differences[name])


@pytest.mark.parametrize(
    "count, side, checkpointing",
    [(2, "right", True), (2, "gaps", False), pytest.param(4, "left", False, marks=pytest.mark.slow)],
)
def test_every_head(ranks, count, side, checkpointing):
    cases = [(*case, side, torch.float32, checkpointing) for case in HEAD_CASES]
    check(ranks, count, cases, 1e-5)


@pytest.mark.parametrize(
    "count, side, checkpointing",
    [(2, "left", False), (2, "gaps", False), pytest.param(4, "right", True, marks=pytest.mark.slow)],
)
def test_every_kind_of_layer(ranks, count, side, checkpointing):
    cases = [case for case in LAYER_CASES if side == "right" or "padded_batch_statistics" not in case[1]]
    check(ranks, count, [(*case, side, torch.float64, checkpointing) for case in cases], 1e-10)


def drop_features():
    layout = ShardedLayout.of(dist.group.WORLD, None, torch.ones(3, 2))
    torch.manual_seed(dist.get_rank())
    return MegaDropout(0.5, features=True).train()(torch.ones(3, 2, 8), layout)


def test_feature_dropout_drops_a_channel_at_all_positions(ranks):
    first, second = ranks(2, drop_features)
    assert torch.equal(first, second) and torch.equal(first[:, 0], first[:, 1])
    assert sorted(first.unique().tolist()) == [0.0, 2.0]


def of_layers(overrides, layers):
    torch.manual_seed(0)
    return luna_mega.MegaModel(tiny_config(**NO_DROPOUT | overrides | {"num_hidden_layers": layers}))


def measure(make, length):
    """Return the number of elements that this rank receives in the forward and the backward of one layer.

    `make` returns a model with the given number of layers.
    """
    received, originals = [0], {name: getattr(dist, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}

    def counting(function):
        def count(output, *args, **kwargs):
            received[0] += sum(x.numel() for x in output) if isinstance(output, list) else output.numel()
            return function(output, *args, **kwargs)

        return count

    def run(layers):
        model, before = make(layers), received[0]
        states = model(torch.full((2, length), 5), cp_group=dist.group.WORLD).last_hidden_state
        states.sum().backward()
        return received[0] - before

    for name, function in originals.items():
        setattr(dist, name, counting(function))
    try:
        return run(2) - run(1)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


@pytest.mark.parametrize("overrides, rows", [(CHUNKS, 48), (CHUNKS | CAUSAL, 24)], ids=["both ways", "causal"])
def test_communication_does_not_grow_with_the_length(ranks, overrides, rows):
    states = 2 * rows * 4  # [B, R, N]; two of them arrive in the forward, their sum in the backward
    for length in (8, 64):
        assert ranks(2, measure, functools.partial(of_layers, overrides), length) == [3 * states] * 2


def invalid_calls():
    rank, group = dist.get_rank(), dist.group.WORLD
    ids = torch.full((2, 6), 5)
    late = torch.tensor([[1] * 6, [0] * (3 - 3 * rank) + [1] * (3 + 3 * rank)])
    cases = [
        (CHUNKS, {}),
        (CHUNKS | {"chunk_size": 2}, {"attention_mask": late}),
        (CHUNKS | {"chunk_size": 3, "padded_batch_statistics": True}, {"attention_mask": late}),
        ({"truncation": 11}, {}),
        ({}, {"token_type_ids": ids} if rank else {}),
        ({}, {"output_attentions": True}),
        ({"is_decoder": True}, {"use_cache": True}),
        ({"is_decoder": True, "add_cross_attention": True}, {"encoder_hidden_states": torch.zeros(2, 3, 24)}),
    ]
    messages = []
    for overrides, arguments in cases:
        model = luna_mega.MegaModel(tiny_config(**overrides))
        with pytest.raises(ValueError) as error:
            model(ids, **arguments, cp_group=group)
        messages.append(str(error.value))
    model(ids, cp_group=group) if not model.config.add_cross_attention else dist.barrier()
    return messages


def test_unsupported_inputs_raise_on_every_rank(ranks):
    first, second = ranks(2, invalid_calls)
    cut = "ends after 6 tokens of a sequence, inside an attention chunk of 4"
    assert cut in first[0] and "shard_sequence(batch, group, multiple=4)" in first[0] and first[0] == second[0]
    assert "ends after 3 tokens of a sequence, inside an attention chunk of 2" in first[1]
    assert "padded_batch_statistics=True" in first[2] and "pad on the right" in first[2]
    assert "truncation=11 is below the length 12" in first[3]
    assert "a rank has no positions, or its inputs were invalid" in first[4] and "no type embeddings" in second[4]
    assert "attention weights" in first[5] and "a cache is not supported" in first[6] and "cross_attention" in first[7]
    assert first[1:4] == second[1:4] and first[5:] == second[5:]


@torch.no_grad()
def shard_and_run():
    model = build("ForMaskedLM", **CHUNKS).eval()
    batch = tokens(SEQUENCES)
    part = luna_mega.shard_sequence(batch, dist.group.WORLD, multiple=model.config.attention_chunk)
    return part["input_ids"].shape[1], model(**part, cp_group=dist.group.WORLD).logits, model(**batch).logits


def test_shard_sequence_cuts_at_chunks(ranks):
    lengths, parts, wholes = zip(*ranks(2, shard_and_run), strict=True)
    assert lengths == (12, 11)
    mask = tokens(SEQUENCES)["attention_mask"].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[mask], wholes[0][mask], atol=1e-5, rtol=1e-5)
