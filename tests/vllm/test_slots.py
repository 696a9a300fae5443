"""States in slots: scheduled, aborted and batched requests get the results of `generate` for each request."""

import random

import pytest
import torch

from luna_mega.modeling_common.padding_free import PaddingFreeLayout
from luna_mega.vllm.served_models import SERVED_MODELS
from luna_mega.vllm.slots import Sequences

MODELS = {
    "mega": ("mega", {}),
    "mega-laplace-simple": ("mega", {"attention_activation": "laplace", "relative_positional_bias": "simple"}),
    "mega-layer-norm": ("mega", {"normalization_type": "layernorm", "final_norm": True, "embedding_norm": True}),
    "megalodon": ("megalodon", {}),
    "megalodon-swiglu-one-head": (
        "megalodon",
        {"swiglu": True, "rescale_nffn": True, "scale_embedding": True, "num_attention_heads": 1},
    ),
    "luna": ("luna", {}),
    "luna-pre-norm-shared": ("luna", {"pre_norm": True, "share_layers": True, "tie_key_value": False}),
    "luna-sinusoidal-elu": ("luna", {"position_embedding_type": "sinusoidal", "causal_activation": "elu"}),
}


class Server:
    """A scheduler that randomly selects requests and the number of prompt tokens per step."""

    def __init__(self, model, slots: int, most: int, seed: int = 0):
        self.family = SERVED_MODELS[type(model).__name__](model.config, torch.float32)
        self.family.load(model.state_dict())
        shapes, dtypes = self.family.state_shapes(model.config), self.family.state_dtypes(torch.float32)
        # Slots contain states of other sequences, which must not be used.
        self.states = [
            tuple(torch.full((slots, *shape), 1e4, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
            for _ in range(model.config.num_hidden_layers)
        ]
        self.free, self.most, self.random = list(range(slots)), most, random.Random(seed)

    @torch.inference_mode()
    def step(self, tokens: list[list[int]], slots: list[int], before: list[int]) -> torch.Tensor:
        """Return the log-probabilities after the last token of each request; decoding requests come first."""
        singles = sum(len(new) == 1 and seen > 0 for new, seen in zip(tokens, before, strict=True))
        lengths = torch.tensor([len(new) for new in tokens])
        slots, before = torch.tensor(slots), torch.tensor(before)
        groups = [Sequences(slots[:singles], before[:singles])] if singles else []
        if singles < len(tokens):
            bounds = torch.nn.functional.pad(lengths[singles:].cumsum(0, dtype=torch.int32), (1, 0))
            layout = PaddingFreeLayout(bounds, int(lengths.max()), shape=(1, int(bounds[-1])))
            groups.append(Sequences(slots[singles:], before[singles:], layout))
        positions = torch.cat([torch.arange(n) + b for n, b in zip(lengths.tolist(), before.tolist(), strict=True)])
        hidden = self.family.embed(self.family.look_up(torch.tensor(sum(tokens, []))), positions)
        for index, states in enumerate(self.states):
            hidden = self.family.advance(index, hidden, states, groups)
        return self.family.score(self.family.finish(hidden)[lengths.cumsum(0) - 1]).log_softmax(-1)

    def serve(self, requests, leave=()):
        """Return the tokens and log-probabilities of each request; requests in `leave` are aborted halfway."""
        waiting, running, results = list(range(len(requests))), {}, {}
        while waiting or running:
            while waiting and self.free:
                number = waiting.pop(0)
                running[number] = {"slot": self.free.pop(0), "seen": 0, "tokens": [], "chances": []}
            chosen = self.random.sample(sorted(running), self.random.randint(1, len(running)))
            calls = []
            for number in chosen:
                state, text = running[number], requests[number].prompt + running[number]["tokens"]
                new = text[state["seen"] :]
                calls.append((number, state, new[: self.random.randint(1, self.most)]))
            calls.sort(key=lambda call: not (len(call[2]) == 1 and call[1]["seen"] > 0))
            out = self.step([c[2] for c in calls], [c[1]["slot"] for c in calls], [c[1]["seen"] for c in calls])
            for (number, state, new), chances in zip(calls, out, strict=True):
                state["seen"] += len(new)
                request = requests[number]
                if state["seen"] >= len(request.prompt):
                    state["tokens"].append(int(chances.argmax()))
                    state["chances"].append(float(chances.max()))
                done = len(state["tokens"]) == len(request.tokens)
                if done or (number in leave and len(state["tokens"]) > len(request.tokens) // 2):
                    self.free.insert(self.random.randint(0, len(self.free)), state["slot"])
                    results[number] = running.pop(number)
        return [results[number] for number in range(len(requests))]


def check(results, requests, leave=()):
    for number, (result, request) in enumerate(zip(results, requests, strict=True)):
        count = len(result["tokens"])
        assert count == len(request.tokens) or number in leave
        assert result["tokens"] == request.tokens[:count]
        assert result["chances"] == pytest.approx(request.chances[:count], abs=1e-5)


@pytest.mark.parametrize("family", ["mega", "megalodon", "luna"])
def test_requests_start_and_finish(family, served):
    model, requests = served(family, 6)
    assert len({token for request in requests for token in request.tokens}) >= 15
    leave = (2, 4)
    check(Server(model, slots=3, most=40).serve(requests, leave), requests, leave)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 13, 512])
@pytest.mark.parametrize("name", MODELS)
def test_pieces_of_any_size(name, most, served):
    model, requests = served(MODELS[name][0], 24, **MODELS[name][1])
    check(Server(model, slots=8, most=most, seed=most).serve(requests), requests)


@pytest.mark.parametrize("control", ["write", "new"])
@pytest.mark.parametrize("family", ["mega", "megalodon", "luna"])
def test_lost_or_swapped_state_is_detected(family, control, served, monkeypatch):
    model, requests = served(family, 6)
    server = Server(model, slots=1, most=100)
    if control == "write":
        monkeypatch.setattr(Sequences, "write", lambda *_: None)
    else:  # a new sequence then reads the state of another one
        made = Sequences.__init__
        monkeypatch.setattr(Sequences, "__init__", lambda self, a, b, *rest: made(self, a, b.clamp(min=1), *rest))
    results = server.serve([request._replace(tokens=request.tokens[:2]) for request in requests])
    apart = max(abs(r["chances"][-1] - q.chances[1]) for r, q in zip(results, requests, strict=True))
    assert apart > 1e-3


@pytest.mark.parametrize("family", ["mega", "megalodon", "luna"])
def test_padding_after_the_sequences_is_zero(family, served):
    model, _ = served(family, 6)
    server = Server(model, slots=2, most=1)
    hidden = torch.randn(5, 32)
    groups = [(torch.tensor([0, 1]), torch.tensor([0, 0]))]
    with torch.inference_mode():
        output = server.family.advance(0, hidden, server.states[0], [Sequences(*x) for x in groups])
        separate = server.family.advance(0, hidden[:1], server.states[0], [Sequences(*(x[:1] for x in groups[0]))])
    assert not output[2:].any() and output[:2].any()
    torch.testing.assert_close(output[:1], separate)


@pytest.mark.parametrize(("family", "exact"), [("mega", ["ema_gate"]), ("megalodon", ["cema", "rope"])])
def test_weights_of_bfloat16_keep_the_average_exact(family, exact, served):
    model, _ = served(family, 6)
    family = SERVED_MODELS[type(model).__name__](model.config, torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in family.model.state_dict().items()}
    for part in exact:
        assert {dtype for name, dtype in dtypes.items() if f".{part}." in name} == {torch.float32}
    assert family.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("mega", {"use_chunking": False, "chunk_size": -1}, "without chunks"),
        ("mega", {"truncation": 64}, "truncation=64"),
        ("mega", {"adaptive_softmax_cutoffs": [20, 60]}, "adaptive softmax"),
        ("megalodon", {"windowed_statistics": True}, "windowed_statistics"),
        ("megalodon", {"chunk_size": 26}, "chunk_size must be a multiple of 4.*got 26"),
    ],
)
def test_states_of_another_size_raise(family, fields, reason, served):
    model, _ = served(family, 6)
    config = type(model.config)(**model.config.to_dict() | fields)
    with pytest.raises(ValueError, match=reason):
        SERVED_MODELS[type(model).__name__](config, torch.float32)


def test_missing_weights_are_named(served):
    model, _ = served("luna", 6)
    weights = model.state_dict()
    del weights["luna.decoder.layers.1.fc1.weight"]
    with pytest.raises(ValueError, match="lacks the weights.*layers.1.fc1.weight"):
        SERVED_MODELS["LunaForCausalLM"](model.config, torch.float32).load(weights | {"other": torch.ones(1)})
