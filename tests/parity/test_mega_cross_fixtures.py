"""Gated cross-attention against the original, and decoders of transformers v4 that have cross-attention."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.modeling_common.layout import NO_PADDING, PaddedLayout
from luna_mega.modeling_mega.modeling_mega import MegaCacheLayer, MegaCrossCacheLayer, MegaGatedCrossAttention
from tests.parity.original import Original

MODULES = [
    "05_xattn_laplace_simple",
    "05_xattn_relu2_rotary",
    "05_xattn_softmax_rotary_longtgt_post",
    "05_xattn_softmax_simple",
]
FOLDERS = ["hf_clm_cross_laplace", "hf_clm_cross_softmax"]


def ours(name: str) -> str:
    return "rel_pos_bias.b_param" if name == "rel_pos_bias.beta" else name


class Module(Original):
    def __init__(self, *folders):
        super().__init__(*folders)
        args = self.args
        config = MegaConfig(
            hidden_size=args["embed_dim"],
            shared_representation_size=args["zdim"],
            max_positions=args["max_positions"],
            attention_activation=args.get("attention_activation", "softmax"),
            relative_positional_bias=args.get("rel_pos_bias", "simple"),
            normalization_type=args.get("norm_type", "layernorm"),
            normalize_before_mega=args.get("prenorm", True),
            is_decoder=True,
            bidirectional=False,
            add_cross_attention=True,
        )
        self.layer = MegaGatedCrossAttention(config).eval()
        self.layer.load_state_dict({ours(key): value for key, value in self.weights().items()})
        self.query, self.key, self.cot = map(self.time_major, ("query", "key", "cot"))
        self.layouts = {"": NO_PADDING, "_padded": PaddedLayout(self.io["key_padding_mask"] == 0)}


@pytest.fixture(params=MODULES)
def module(request, parity_folder, outputs):
    return Module(parity_folder("mega", request.param), outputs)


def test_cross_attention(module, parity):
    """Output, weights and all gradients equal the original's, with the op and with `return_weights`."""
    for (padded, source), output_weights in ((pair, flag) for pair in module.layouts.items() for flag in (False, True)):
        module.layer.zero_grad()
        query, key = (x.clone().requires_grad_() for x in (module.query, module.key))
        output, weights = module.layer(query, NO_PADDING, key, source, output_weights)
        parity.check(f"out{padded}", output.transpose(0, 1), module.io[f"out{padded}"], **module.tight)
        if output_weights:
            parity.check(f"attn{padded}", weights[:, 0], module.io[f"attn{padded}"], **module.tight)
        output.backward(module.cot)
        for name, x in (("query", query), ("key", key)):
            expected = module.io[f"grad_{name}{padded}"]
            parity.check(f"grad_{name}{padded}", x.grad.transpose(0, 1), expected, **module.loose)
        gradients, parameters = module.starting_with(f"grad{padded}."), dict(module.layer.named_parameters())
        assert set(map(ours, gradients)) == parameters.keys()
        for name, expected in gradients.items():
            parity.check(f"grad{padded}.{name}", parameters[ours(name)].grad, expected, **module.loose)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7])
def test_steps(module, parity, length):
    for padded, layout in module.layouts.items():
        past, source, outputs = MegaCacheLayer(), MegaCrossCacheLayer(), []
        for part in module.query.split(length, dim=1):
            past.seen += part.shape[1]
            past.store(position=torch.full((len(part),), past.seen))
            key = module.key if not source.is_initialized else None
            outputs.append(module.layer(part, NO_PADDING, key, layout, cache=past, cross_cache=source)[0])
        expected = module.io[f"step_out{padded}"]
        parity.check(f"step_out{padded}", torch.cat(outputs, 1).transpose(0, 1), expected, **module.tight)


@pytest.mark.parametrize("name", FOLDERS)
def test_v4_decoder(parity_folder, parity, name):
    """One call equals v4; v4's query positions are too high by one from the second decoding step on."""
    folder = parity_folder("mega", name)
    io = load_file(folder / "io.safetensors")
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is MegaForCausalLM and not any(loading.values())
    states = {"encoder_hidden_states": io["encoder_hidden_states"]}
    source = states | {"encoder_attention_mask": io["encoder_attention_mask"]}
    inputs = {"": (io["input_ids"], io["attention_mask"]), "nomask.": (io["input_ids_nopad"], None)}
    options = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    for prefix, (ids, mask) in inputs.items():
        with torch.no_grad():
            output = model.eval()(ids, mask, **(states if mask is None else source), **options)
        keep = None if mask is None else mask.bool()
        parity.check(f"{prefix}logits", output.logits, io[f"{prefix}logits"], keep=keep)
        for index, (own, cross) in enumerate(zip(output.attentions, output.cross_attentions, strict=True)):
            expected = io[f"{prefix}cross_attentions.{index}"]
            parity.check(f"{prefix}cross_attentions.{index}", cross[:, 0], expected, keep=keep)
            parity.check(f"{prefix}attentions.{index}", own[:, 0], io[f"{prefix}attentions.{index}"][:, 0], keep=keep)
        for index, hidden in enumerate(output.hidden_states):
            parity.check(f"{prefix}hidden.{index}", hidden, io[f"{prefix}hidden_states.{index}"], keep=keep)
    past, logits = None, []
    with torch.no_grad():
        for token in io["input_ids_nopad"].split(1, dim=1):
            output = model(token, cache=past, use_cache=True, **({} if past else states))
            past = output.cache
            logits.append(output.logits)
    parity.check("steps", torch.cat(logits, 1), io["nomask.logits"])
    loss = model(io["input_ids"], io["attention_mask"], **source, labels=io["labels"]).loss
    parity.check("loss", loss, io["loss"])
    loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name.removeprefix("grad."): value for name, value in io.items() if name.startswith("grad.")}
    for name, expected in gradients.items():
        parity.check(f"grad.{name}", parameters[name].grad, expected, atol=1e-4, rtol=1e-3)
    # In v4, `generate` fails here ("Requested cross-attention without providing encoder hidden states").
    prompt = io["input_ids_nopad"][:, :5]
    tokens = [model.generate(prompt, **source, num_beams=2, max_new_tokens=5, use_cache=flag) for flag in (True, False)]
    assert torch.equal(*tokens)
