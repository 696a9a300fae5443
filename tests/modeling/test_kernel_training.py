"""Training and generation with and without the Triton kernels agree; `test_losses_of_rows.py` has all layouts."""

from itertools import product

import pytest
import torch

from luna_mega.kernels.api import use_backend

from . import luna, luna_decoders, mega, mega_decoders
from .decoders import weekly_but

STEPS = 3
ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 40}
LUNA = ONE_LAYER | {"dropout": 0.0, "attention_dropout": 0.0}
MEGA = ONE_LAYER | mega.NO_DROPOUT
MODELS = {
    "luna": lambda: luna.make("ForMaskedLM", unpad_inputs=True, num_attention_heads=2, **LUNA),
    "luna decoder": lambda: luna_decoders.make(dtype=torch.float32, **LUNA),
    "mega": lambda: mega.make("ForMaskedLM", unpad_inputs=True, **mega.VARIANTS["laplace chunks"], **MEGA),
    "mega decoder": lambda: mega_decoders.make(**mega_decoders.DECODER_ONLY["laplace chunks"], **MEGA).float(),
}


def train(model, backend, device, dtype):
    """Return the losses of several training steps on one padded batch."""
    model = model.to(device, dtype).train()
    inputs = {name: value.to(device) for name, value in luna.tokens([9, 11, 3]).items()}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-2), []
    with use_backend(backend):
        for _ in range(STEPS):
            loss = model(**inputs, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return torch.tensor(losses)


CASES = [("mega", torch.float32), ("luna decoder", torch.bfloat16)]


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", weekly_but(CASES, product(MODELS, [torch.float32, torch.bfloat16])))
def test_losses_do_not_depend_on_the_backend(name, dtype, triton_device):
    make = MODELS[name]
    without, with_kernels = (train(make(), backend, triton_device, dtype) for backend in ("torch", "triton"))
    assert without[-1] < 0.9 * without[0]
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(with_kernels, without, rtol=tolerance, atol=0.0)


@pytest.mark.slow
def test_generation(triton_device):
    """Decoding with the Triton kernels generates the same tokens as without."""
    inputs = {name: value.to(triton_device) for name, value in luna.tokens([9, 4], "left").items()}
    for name in ("luna decoder", "mega decoder"):
        model, generated = MODELS[name]().to(triton_device).eval(), []
        for backend in ("torch", "triton"):
            with use_backend(backend):
                generated.append(model.generate(**inputs, max_new_tokens=8, do_sample=False))
        assert generated[0].equal(generated[1])
