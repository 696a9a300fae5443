"""Number of compilations: at most two for all lengths, one for batches and one for single sequences."""

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from . import decoders, luna, mega
from .decoders import make

CHUNKS = {"use_chunking": True, "chunk_size": 8}
MODELS = {
    "mega chunks": lambda: mega.make("ForMaskedLM", num_hidden_layers=1, **CHUNKS),
    "luna decoder": lambda: make("luna: softplus", num_hidden_layers=1).float(),
    "luna seq2seq": lambda: make("luna seq2seq: translation", num_hidden_layers=1).float(),
    "mega decoder, chunks": lambda: make("mega: laplace chunks", num_hidden_layers=1).float(),
    "megalodon": lambda: make("megalodon: heads", num_hidden_layers=1).float(),
}
# Lengths that a chunk divides or does not divide, lengths below a chunk and below l, and a batch of one sequence.
SHAPES = [(2, 17), (1, 19), (2, 16), (3, 5), (1, 3)]
# Model and whether it is trained; one case of each kind is slow, and the others are checked every week.
CASES = [("mega chunks", True), ("luna decoder", False)]


@pytest.mark.slow
@pytest.mark.parametrize("name, training", decoders.weekly_but(CASES, product(MODELS, [False, True])))
def test_two_programs_serve_all_lengths(name, training):
    torch.compiler.reset()
    counter, model = CompileCounter(), MODELS[name]().train(training)
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for batch, length in SHAPES:
        inputs = luna.tokens([length, max(1, length - 1), max(1, length // 2)][:batch])
        inputs = {key: value.clamp(max=29) for key, value in inputs.items()}
        if training:
            compiled(**inputs, labels=inputs["input_ids"]).loss.backward()
            continue
        options = {"use_cache": False} if model.config.is_decoder else {}
        if model.config.is_encoder_decoder:
            options = {"use_cache": False, "decoder_input_ids": inputs["input_ids"]}
        with torch.no_grad():
            expected, actual = (run(**inputs, **options).logits for run in (model, compiled))
        kept = inputs["attention_mask"].bool()
        torch.testing.assert_close(actual[kept], expected[kept], atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", decoders.weekly_but(["mega decoder, chunks"], ["luna decoder", "mega decoder, chunks", "megalodon"])
)
def test_a_compiled_model_generates_the_same_tokens(name):
    torch.compiler.reset()
    counter, model = CompileCounter(), MODELS[name]().eval()
    inputs = {key: value.clamp(max=29) for key, value in luna.tokens([11, 7]).items()}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    model.compile(backend=counter)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert counter.frame_count < 8  # must be fewer than the 12 steps, two of which end a chunk
