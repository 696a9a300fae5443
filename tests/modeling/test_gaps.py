"""Masked positions between tokens have no effect in any layout, option, cache or program."""

import pytest
import torch

from luna_mega.kernels.support import take_columns

from . import decoders, mega

MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
)
ROWS, LENGTH = MASK.shape
RECORDED = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}


def batch(model):
    """Return the source arguments, and the token ids (arbitrary where masked) and the mask of the target."""
    ids = torch.randint(3, 23, MASK.shape, generator=torch.Generator().manual_seed(0))
    sources = {}
    if model.config.is_encoder_decoder:  # the mask of the source has other gaps, and one row without a token
        mask = MASK.flip(0, 1)[:, :9]
        sources = {"input_ids": ids[:, 3:].flip(0), "attention_mask": mask}
    return sources, ids, MASK


def recorded(output):
    """Return the recorded states of source and target, and all attention weights."""
    sides = {"target": ("decoder_hidden_states", "hidden_states"), "source": ("encoder_hidden_states",)}
    states = {side: next((output[name] for name in names if name in output), ()) for side, names in sides.items()}
    return states, [x for name in output if name.endswith("attentions") for x in output[name]]


@torch.no_grad()
@pytest.mark.parametrize("name", ["luna: softplus", "mega: laplace chunks", "megalodon: heads"])
def test_generate_continues_a_batch_of_turns(name):
    """A second, left-padded turn after a cache has the same result for each row as its unpadded tokens."""
    model = decoders.make(name)
    turns = [[[5, 6, 7, 8, 9], [10, 11]], [[12, 13], [14, 15, 16, 17, 18, 19]]]
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0, 0, 10, 11], [0] * 6 + [12, 13, 14, 15, 16, 17, 18, 19]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1], [0] * 6 + [1] * 8])
    past = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).cache
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, cache=past, **options)[:, ids.shape[1] :]
    for row, (first, second) in enumerate(turns):
        prompt = torch.tensor([first + second])
        separate = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[:, prompt.shape[1] :]
        assert together[row].tolist() == separate[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("chunks", [False, True])
def test_recorded_states_and_weights_are_in_the_order_of_the_batch(chunks, place):
    fields = {"use_chunking": True, "chunk_size": 4} if chunks else {}
    model = mega.make("Model", **fields).double()
    ids = torch.randint(3, 23, MASK.shape, generator=torch.Generator().manual_seed(0))
    options = {"output_hidden_states": True, "output_attentions": True}
    output = model(ids, attention_mask=MASK, **options)
    for row in range(ROWS - 1):
        kept = MASK[row].bool()
        separate = model(ids[row, kept][None], **options)
        for got, reference in zip(output.hidden_states, separate.hidden_states, strict=True):
            torch.testing.assert_close(got[row, kept], reference[0])
        for got, reference in zip(output.attentions, separate.attentions, strict=True):
            if chunks:  # within chunks, weights are indexed by the position in the sequence
                size = min(reference.shape[-1], int(kept.sum()))
                torch.testing.assert_close(got[row, 0, :size, :size], reference[0, 0, :size, :size])
            else:
                torch.testing.assert_close(got[row, 0][kept][:, kept], reference[0, 0])


@torch.no_grad()
def test_cross_attention_weights_are_in_the_order_of_the_batch(place):
    model = decoders.make("mega seq2seq: softmax")
    sources, ids, mask = batch(model)
    options = {"output_attentions": True, "use_cache": False}
    output = model(**sources, **decoders.target(model, ids, mask), **options)
    for row in range(1, ROWS - 1):
        kept, of_source = mask[row].bool(), sources["attention_mask"][row].bool()
        source = {name: value[row : row + 1, of_source] for name, value in sources.items()}
        own = decoders.target(model, ids[row : row + 1, kept], mask[row : row + 1, kept])
        separate = model(**source, **own, **options)
        for got, reference in zip(output.cross_attentions, separate.cross_attentions, strict=True):
            torch.testing.assert_close(got[row, 0][kept][:, of_source], reference[0, 0])


@pytest.mark.parametrize(
    "name", ["mega: laplace chunks", "mega seq2seq: softmax", "megalodon: heads", "luna: softplus"]
)
def test_recorded_states_and_weights_have_gradients(name, place):
    """The loss depends on every recorded tensor, and the gradients of states equal those of rows without gaps."""
    model = decoders.make(name)
    sources, ids, mask = batch(model)
    kept = {"target": mask[2].bool()}
    states, weights = recorded(model(**sources, **decoders.target(model, ids, mask), **RECORDED))
    loss = states["target"][-1][2, kept["target"]].sin().sum()
    gradients = torch.autograd.grad(loss, [*states["target"], *states["source"], *weights])
    if sources:
        kept["source"] = sources["attention_mask"][2].bool()
        sources = {key: value[2:3, kept["source"]] for key, value in sources.items()}
    row = decoders.target(model, ids[2:3, kept["target"]], mask[2:3, kept["target"]])
    separate, _ = recorded(model(**sources, **row, **RECORDED))
    expected_gradients = torch.autograd.grad(
        separate["target"][-1].sin().sum(), [*separate["target"], *separate["source"]]
    )
    sides = ["target"] * len(states["target"]) + ["source"] * len(states["source"])
    for side, got, reference in zip(sides, gradients, expected_gradients, strict=False):
        torch.testing.assert_close(got[2, kept[side]], reference[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mega: laplace chunks", "megalodon: heads"])
def test_columns_move_before_the_first_and_after_the_last_layer(name, place, monkeypatch):
    """Hooks of layers see the kept positions of a row next to each other. The number of moves is fixed."""
    moved = []

    def take(x, index):
        moved.append(x)
        return take_columns(x, index)

    monkeypatch.setattr("luna_mega.modeling_common.layout.take_columns", take)
    for layers in (1, 3):
        model, seen = decoders.make(name, num_hidden_layers=layers), []
        model.base_model.layers[-1].register_forward_pre_hook(lambda layer, args, seen=seen: seen.append(args[0]))
        _, ids, mask = batch(model)
        model(ids, attention_mask=mask, use_cache=False)
        assert len(moved) == 2
        model(ids[2:3, mask[2].bool()], use_cache=False)
        moved.clear()
        torch.testing.assert_close(seen[0][2, : seen[1].shape[1]], seen[1][0])
