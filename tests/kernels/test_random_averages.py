"""Random moving averages have one result: in one call, in segments and steps, and in varlen and padded batches.

The results and gradients are those of one call of the reference in float64.
"""

import random
from functools import partial

import pytest
import torch

from luna_mega.kernels.moving_average import native
from tests.kernels.averages import KINDS, STATEFUL, Inputs
from tests.kernels.backends import TRITON
from tests.kernels.leaves import MASKS, assert_same
from tests.kernels.test_moving_average import FLOAT32, choose_form, small_tiles  # noqa: F401, a fixture
from tests.random_cases import cuts, in_blocks, run_block

LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 257)
FORMS = ("fft", "chunks", "export")


def random_inputs(rng, kind, backend, batch=None):
    """Return inputs, of which half have large logits, in one of several memory layouts."""
    lengths, channels, states = LENGTHS, (1, 3, 17), (1, 8)
    if backend == "triton":
        lengths, channels, states = (1, 2, 5, 17, 33), (1, 3, 5), (1, 2, 5)
    inputs = Inputs(
        rng.choice(lengths), kind, rng.choice(MASKS), rng.choice(states), batch or rng.choice((1, 2, 3)),
        rng.choice(channels), skip=rng.random() < 0.5,
    )  # fmt: skip
    inputs.to(rng.choice((torch.float64, torch.float32)) if backend == "torch" else torch.float32)
    scale, x = rng.choice((1, 1, 5, 30)), inputs.leaves[0].detach()
    layouts = (x, x.mT.contiguous().mT, torch.stack((x, x), -1)[..., 0])
    with torch.no_grad():
        inputs.leaves[0] = rng.choice(layouts).requires_grad_()
        for logit in inputs.leaves[1:3]:
            logit.mul_(scale).clamp_(-30, 30)
    return inputs


def in_parts(inputs, rng, *leaves, **options):
    """Compute segments and steps; a masked step is a segment, because it does not decay the state."""
    (x, *parameters), state = inputs.arguments(*leaves)
    outputs = []
    for start, stop in cuts(rng, x.shape[1], most=6):
        mask = None if inputs.mask is None else inputs.mask[:, start:stop].to(x.device)
        if stop == start + 1 and state is not None and (mask is None or mask.all()):
            step_options = {"backend": options["backend"]}
            output, state = inputs.step(x[:, start], state, *parameters, **step_options)
            output = output[:, None]
        else:
            output, state = inputs.op(
                x[:, start:stop], *parameters, mask=mask, initial_state=state, return_state=True, **options
            )
        outputs.append(output)
    return (torch.cat(outputs, 1), state) if inputs.states else torch.cat(outputs, 1)


def separate(inputs, bounds):
    """Return a function that runs the reference on each sequence separately; an empty sequence keeps its state."""

    def call(*leaves):
        (x, *rest), states = inputs.arguments(*leaves)
        outputs, lasts = [], []
        for index, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            state = None if states is None else states[index : index + 1]
            if start < end:
                mask = None if inputs.mask is None else inputs.mask[:, start:end]
                options = {"mask": mask, "initial_state": state, "return_state": states is not None}
                options |= {"backend": "reference"} | ({} if inputs.complex else {"shift": inputs.shift})
                output = inputs.op(x[:, start:end], *rest, **options)
                output, state = output if states is not None else (output, None)
                outputs.append(output)
            lasts.append(state)
        return torch.cat(outputs, 1) if states is None else (torch.cat(outputs, 1), torch.cat(lasts))

    return call


def rows(inputs, lengths, *leaves):
    """Return x and the states after the first positions of each row, with the reference."""
    (x, *parameters), states = inputs.arguments(*leaves)
    found = []
    for row, length in enumerate(lengths.tolist()):
        state = states[row : row + 1]
        if length:
            options = {"initial_state": state, "return_state": True, "backend": "reference"}
            state = inputs.op(x[row : row + 1, :length], *parameters, **options)[1]
        found.append(state)
    return x, torch.cat(found)


def exact(inputs, function=None, **options):
    """Return the results of the reference in float64 for the values of the leaves."""
    kept, inputs.leaves = inputs.leaves, [x.detach().double().requires_grad_() for x in inputs.leaves]
    results = inputs.run(function, **options)
    inputs.leaves = kept
    return results


def check(seed, options):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind, way = rng.choice(KINDS), rng.choice(("one call", "parts", "parts", "varlen", "lengths", "truncation"))
    options = dict(options)
    if options["backend"] == "torch" and native.missing() is None and rng.random() < 0.5:
        options["backend"] = "native"
    inputs = random_inputs(rng, kind, options["backend"], batch=1 if way == "varlen" else None)
    length, function, used, expected = inputs.leaves[0].shape[1], None, None, None
    if way == "truncation" and not inputs.complex and kind not in STATEFUL and options["backend"] == "torch":
        options["truncation"] = rng.choice((1, 2, 7, 50, 400))
    if way in ("parts", "truncation") and kind in ("causal", "complex", *STATEFUL):
        function = partial(in_parts, inputs, rng)
    elif way == "varlen":
        count = rng.choice((1, 2, 4))
        bounds = [0, *sorted(rng.randrange(length + 1) for _ in range(count - 1)), length]
        if inputs.states:
            state = inputs.leaves[-1].detach()
            inputs.leaves[-1] = state.expand(count, *state.shape[1:]).clone().requires_grad_()
        expected = exact(inputs, separate(inputs, bounds))
        options["cu_seqlens"] = torch.tensor(bounds, dtype=rng.choice((torch.int32, torch.int64)))
        options["cu_seqlens"] = options["cu_seqlens"].to(options["device"])
    elif way == "lengths" and kind in STATEFUL:
        lengths, used = torch.randint(0, length + 1, inputs.leaves[0].shape[:1]), [1]
        inputs.mask = torch.arange(length) < lengths[:, None]
        expected = exact(inputs, partial(rows, inputs, lengths), used=used)
        options["lengths"] = lengths.to(options["device"])
    if expected is None:
        same = {name: value for name, value in options.items() if name == "truncation"}
        expected = exact(inputs, backend="reference", **same)
    # Large logits amplify rounding: by up to 200 in the reference in float32.
    bound = 1e-11 if inputs.leaves[0].dtype == torch.float64 else 20 * FLOAT32
    with pytest.MonkeyPatch.context() as patch:
        choose_form(rng.choice(FORMS), patch)
        assert_same(inputs.run(function, used=used, **options), expected, bound)


@in_blocks(fast=50, slow=200)
def test_one_result(first):
    run_block(partial(check, options={"backend": "torch", "device": "cpu"}), first)


@pytest.mark.parametrize("backend", [TRITON])
@in_blocks(fast=0, slow=0, total=100)
def test_triton(first, backend, device):
    run_block(partial(check, options={"backend": backend, "device": device}), first)
