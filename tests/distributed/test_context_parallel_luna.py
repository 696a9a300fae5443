"""Luna over sequences that ranks share against the same model over whole sequences, in one process."""

import pytest
import torch
import torch.distributed as dist

import luna_mega
from luna_mega.kernels.context_parallel import ContextShard, all_reduce_sum
from tests.modeling.luna import HEADS, enlarged, head_inputs, labels, tiny_config, tokens

LENGTHS = {2: (9, 14), 4: (3, 10, 1, 9)}
TOTAL = 23
SEQUENCES = [23, 5, 14]  # the last two end, or with padding on the left begin, on different ranks
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "classifier_dropout"), 0.0)
CAUSAL = {"is_decoder": True, "use_cache": True}


def build(head, **overrides):
    model_class = luna_mega.LunaForCausalLM if head == "ForCausalLM" else HEADS[head]
    return enlarged(model_class, tiny_config(**NO_DROPOUT | overrides))


def whole_batch(head, side):
    if head == "ForCausalLM":
        batch = tokens(SEQUENCES, side)
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
    batch = head_inputs(head, SEQUENCES, side)
    batch |= labels(head, batch)
    if head in ("ForMaskedLM", "ForTokenClassification"):
        batch["labels"][:, 4:11] = -100  # a rank of 4 has nothing to predict
    if head == "ForQuestionAnswering":
        batch |= {"start_positions": torch.tensor([10, 0, 40]), "end_positions": torch.tensor([22, 13, 3])}
    return batch


def cut(batch, lengths):
    """Return this rank's part of all tensors `[..., T]`; the two towers and the options are cut alike."""
    start = sum(lengths[: dist.get_rank()])
    stop = start + lengths[dist.get_rank()]
    return {name: x[..., start:stop] if x.shape[-1] == TOTAL else x for name, x in batch.items()}


def differences(expected, actual, model, losses, lengths):
    """Return the largest differences of the outputs, and of the mean of the ranks' gradients, by name."""
    start = sum(lengths[: dist.get_rank()])
    found = {}
    for name, x in expected.items():
        if isinstance(x, torch.Tensor) and name != "attention_mask":  # None on a rank that keeps all of its part
            part = x[:, start : start + lengths[dist.get_rank()]] if x.dim() > 1 and x.shape[1] == TOTAL else x
            assert part.shape == actual[name].shape, (name, part.shape, actual[name].shape)
            found[name] = (part - actual[name]).abs().max().item()
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    gradients = [torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) for loss in losses]
    for name, whole, shared in zip(parameters, *gradients, strict=True):
        assert (whole is None) == (shared is None), name
        if whole is not None:
            shared = shared.clone()
            dist.all_reduce(shared)
            found[f"gradient of {name}"] = (whole - shared / dist.get_world_size()).abs().max().item()
    return found


def loss_of(head, output, mask, shared):
    """Return the loss of an output; without a head it is the sum of what its tokens and its P weigh."""
    if head != "Model":
        return output.loss
    tokens_, packed = output.last_hidden_state, output.packed_last_hidden_state
    weighed = (tokens_.sin() * mask[..., None]).sum()
    if shared:
        weighed = all_reduce_sum(weighed, shared)
    kept = 1.0 if output.packed_mask is None else output.packed_mask[..., None]
    return weighed + (packed.cos() * kept).sum()


def compare(head, overrides, side, dtype, checkpointing):
    lengths = LENGTHS[dist.get_world_size()]
    model = build(head, **overrides).to(dtype)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    batch = whole_batch(head, side)
    part, group = cut(batch, lengths), dist.group.WORLD
    expected, actual = model(**batch), model(**part, cp_group=group)
    shard = ContextShard(group, lengths)
    losses = [
        loss_of(head, expected, batch["attention_mask"], None),
        loss_of(head, actual, part["attention_mask"], shard),
    ]
    if head == "Model":  # rows at padding are meaningless
        for output, mask in ((expected, batch["attention_mask"]), (actual, part["attention_mask"])):
            output["last_hidden_state"] = output.last_hidden_state * mask[..., None]
    return differences(expected, actual, model, losses, lengths)


def compare_all(cases):
    return [compare(*case) for case in cases]


def check(ranks, count, cases, tolerance):
    for found in ranks(count, compare_all, cases):
        for case, differences_ in zip(cases, found, strict=True):
            name = max(differences_, key=differences_.get)
            assert differences_[name] < tolerance, (case, name, differences_[name])


@pytest.mark.parametrize("count", [2, 4])
def test_every_head(ranks, count):
    heads = [*HEADS, "ForCausalLM"]
    cases = [
        (head, CAUSAL if head == "ForCausalLM" else {}, side, torch.float32, checkpointing)
        for head in heads
        for side, checkpointing in (("right", False), ("left", True))
    ]
    check(ranks, count, cases, 1e-5)


def test_every_variant(ranks):
    """Positions, norms, P's kinds and poolings; in float64 what is left of the differences is rounding."""
    causal = [CAUSAL | more for more in ({"causal_activation": "elu"}, {"pre_norm": True}, {"tie_key_value": False})]
    poolings = [{"pooling": pooling, "pool_padding": pads} for pooling in POOLINGS for pads in (False, True)]
    cases = [("Model", overrides) for overrides in VARIANTS.values()]
    cases += [("ForCausalLM", overrides) for overrides in causal]
    cases += [("ForSequenceClassification", overrides) for overrides in poolings]
    cases += [("ForMaskedLM", {"sparse_prediction": True})]
    check(ranks, 4, [(*case, side, torch.float64, False) for case in cases for side in ("left", "right")], 2e-7)
