"""Luna on context-parallel shards against the same model on complete sequences in one process."""

import pytest
import torch
import torch.distributed as dist

import luna_mega
from luna_mega.kernels.context_parallel import ContextShard
from tests.modeling.luna import HEADS, POOLINGS, VARIANTS, enlarged, head_inputs, labels, tiny_config, tokens

LENGTHS = {2: (9, 14), 4: (3, 10, 1, 9)}
TOTAL = 23
SEQUENCES = [23, 5, 14]  # the last two end, or with left padding start, on different ranks
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "classifier_dropout"), 0.0)
SEQ2SEQ = {"is_encoder_decoder": True}
CAUSAL = {"is_decoder": True, "use_cache": True}


def build(head, **overrides):
    return enlarged(getattr(luna_mega, f"Luna{head}"), tiny_config(**NO_DROPOUT | overrides))


def complete_batch(head, side):
    if head == "ForCausalLM":
        batch = tokens(SEQUENCES, side)
        return batch | {"labels": batch["input_ids"]}
    if head == "ForConditionalGeneration":
        batch, target = tokens(SEQUENCES, side), tokens(SEQUENCES[::-1], side)
        return batch | {"labels": target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)}
    batch = head_inputs(head, SEQUENCES, side)
    batch |= labels(head, batch)
    if head in ("ForMaskedLM", "ForTokenClassification"):
        batch["labels"][:, 4:11] = -100  # one of 4 ranks has nothing to predict
    if head == "ForQuestionAnswering":
        batch |= {"start_positions": torch.tensor([10, 0, 40]), "end_positions": torch.tensor([22, 13, 3])}
    return batch


def cut(batch, lengths):
    """Return this rank's shard of all tensors `[..., T]`, including pairs and options."""
    start = sum(lengths[: dist.get_rank()])
    stop = start + lengths[dist.get_rank()]
    return {name: x[..., start:stop] if x.shape[-1] == TOTAL else x for name, x in batch.items()}


def differences(expected, actual, model, losses, lengths):
    """Return the largest differences of the outputs, and of the mean of the ranks' gradients, by name."""
    start = sum(lengths[: dist.get_rank()])
    found = {}
    for name, x in expected.items():
        if isinstance(x, torch.Tensor) and name != "attention_mask":  # None on a rank without padding
            part = x[:, start : start + lengths[dist.get_rank()]] if x.dim() > 1 and x.shape[1] == TOTAL else x
            if part.shape[:1] != actual[name].shape[:1]:
                continue  # logits of predicted positions only: they differ between ranks
            assert part.shape == actual[name].shape, (name, part.shape, actual[name].shape)
            found[name] = (part - actual[name]).abs().max().item()
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    gradients = [torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) for loss in losses]
    for name, complete, shared in zip(parameters, *gradients, strict=True):
        assert (complete is None) == (shared is None), name
        if complete is not None:
            shared = shared.clone()
            dist.all_reduce(shared)
            found[f"gradient of {name}"] = (complete - shared / dist.get_world_size()).abs().max().item()
    return found


def loss_of(head, output, mask, shared):
    """Return the loss of an output; without a head it is a weighted sum of the tokens and of P."""
    if head != "Model":
        return output.loss
    tokens_, packed = output.last_hidden_state, output.packed_last_hidden_state
    weighed = (tokens_.sin() * mask[..., None]).sum()
    if shared:
        weighed = shared.all_reduce_sum(weighed)
    kept = 1.0 if output.packed_mask is None else output.packed_mask[..., None]
    return weighed + (packed.cos() * kept).sum()


def compare(head, overrides, side, dtype, checkpointing):
    lengths = LENGTHS[dist.get_world_size()]
    model = build(head, **overrides).to(dtype)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    batch = complete_batch(head, side)
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


@pytest.mark.parametrize(
    "count, side, checkpointing", [(2, "right", False), pytest.param(4, "left", True, marks=pytest.mark.slow)]
)
def test_every_head(ranks, count, side, checkpointing):
    heads = dict.fromkeys(HEADS, {}) | {"ForCausalLM": CAUSAL, "ForConditionalGeneration": SEQ2SEQ}
    cases = [(head, overrides, side, torch.float32, checkpointing) for head, overrides in heads.items()]
    check(ranks, count, cases, 1e-5)


@pytest.mark.slow
def test_every_variant(ranks):
    """Positions, norms, kinds of P and poolings; in float64 the remaining differences are rounding errors."""
    poolings = [{"pooling": pooling} for pooling in POOLINGS]
    poolings += [{"pooling": pooling, "pool_padding": True} for pooling in ("mean", "packed_mean")]
    cases = [("Model", overrides) for overrides in VARIANTS.values()]
    cases += [("ForSequenceClassification", overrides) for overrides in poolings]
    check(ranks, 4, [(*case, side, torch.float64, False) for case in cases for side in ("left", "right")], 1e-11)


@pytest.mark.slow
def test_every_language_model(ranks):
    """Token losses of transformers are float32."""
    cases = [("ForCausalLM", CAUSAL | more) for more in ({"causal_activation": "elu"}, {"pre_norm": True})]
    cases += [("ForMaskedLM", {"sparse_prediction": True}), ("ForConditionalGeneration", SEQ2SEQ | {"pre_norm": True})]
    check(ranks, 4, [(*case, side, torch.float64, False) for case in cases for side in ("left", "right")], 2e-6)


def draw_alike():
    """Return the replicated tensors of ranks in training with all kinds of dropout."""
    dropout = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "word_dropout"), 0.3)
    model = build("ForSequenceClassification", **dropout, classifier_dropout=0.3, layerdrop=0.5, num_hidden_layers=6)
    model.train().gradient_checkpointing_enable()
    torch.manual_seed(dist.get_rank())
    part = cut(complete_batch("ForSequenceClassification", "right"), LENGTHS[dist.get_world_size()])
    output = model(**part, cp_group=dist.group.WORLD, output_hidden_states=True)
    output.loss.backward()
    return output.loss.item(), output.logits.tolist(), output.packed_hidden_states[-1].tolist()


def test_ranks_share_dropout_of_replicated_tensors(ranks):
    first, *others = ranks(4, draw_alike)
    assert all(other == first for other in others)


UNSUPPORTED = [
    ("Model", {}, {"position_ids": torch.arange(9)[None]}, "`position_ids` are not supported with `cp_group`"),
    ("Model", {}, {"output_attentions": True}, "output_attentions=False"),
    ("Model", {}, {"seq_idx": None}, "pad the batch"),
    ("Model", {"unpad_inputs": True}, {}, "unpad_inputs=False"),
    ("Model", {"max_position_embeddings": 20}, {}, "length 23 exceeds the 20 learned positions"),
    ("ForCausalLM", CAUSAL, {"use_cache": True}, "`use_cache=False`"),
    ("ForCausalLM", CAUSAL, {"logits_to_keep": 1}, "`logits_to_keep` is not supported with `cp_group`"),
    ("ForSequenceClassification", {"drop_first_token": True, "pooling": "cls"}, {}, "drop_first_token=False"),
]


def collect_errors():
    errors = []
    for head, overrides, options, _ in UNSUPPORTED:
        batch = {"input_ids": cut(tokens([23]), LENGTHS[2])["input_ids"]}
        if "seq_idx" in options:
            options = {"seq_idx": torch.arange(batch["input_ids"].shape[1])[None] // 4}
        with pytest.raises(ValueError) as error:
            build(head, **overrides)(**batch, **options, cp_group=dist.group.WORLD)
        errors.append(str(error.value))
    with pytest.raises(ValueError) as error:  # another batch size on the last rank, which the others receive
        build("Model")(torch.ones(1 + dist.get_rank(), 5, dtype=torch.long), cp_group=dist.group.WORLD)
    with pytest.raises(Exception, match="no positions|`input_ids` are from"):  # raised only on the last rank
        build("ForMaskedLM")(torch.full((1, 5), 99 * dist.get_rank()), cp_group=dist.group.WORLD)
    return [*errors, str(error.value)]


def test_unsupported_inputs_raise(ranks):
    for rank, errors in enumerate(ranks(2, collect_errors)):
        last = ("batch must be equal on all ranks of the group, got [1, 2]",)
        for text, (*_, message) in zip(errors, [*UNSUPPORTED, last], strict=True):
            assert message in text or (rank == 1 and "no positions" in text), text
