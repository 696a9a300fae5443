"""The Luna models with the features of transformers: precision, compiling, export, saving, pipelines."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    pipeline,
)

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    LunaForMaskedLM,
    LunaForSequenceClassification,
    LunaForSequencePairClassification,
)
from luna_mega.modeling_common.layout import DENSE, DenseLayout
from luna_mega.modeling_luna import modeling_luna

from .luna import HEADS, POOLINGS, VALUES, VARIANTS, head_inputs, labels, make, tiny_config
from .saving import comes_back, masked_lm_comes_back

COUNTS = {  # counted in the original: masked LM, encoder only
    "base_512": (131_902_041, 131_259_648),
    "base_512 untied": (146_076_249, 145_433_856),
    "base_2048": (133_179_993, 132_537_600),
    "large_512": (380_783_705, 379_681_792),
    "large_2048": (380_914_777, 379_812_864),
}


@pytest.mark.parametrize("preset", COUNTS)
def test_parameter_counts(preset):
    name, *untied = preset.split()
    config = getattr(LunaConfig, name)(tied=not untied)
    with torch.device("meta"):
        model, classifier = LunaForMaskedLM(config), LunaForSequenceClassification(config)
    total, encoder = COUNTS[preset]
    assert model.num_parameters() == total
    assert model.luna.num_parameters() == encoder
    head = config.hidden_size * (config.hidden_size + 1) + 2 * (config.hidden_size + 1)
    assert classifier.num_parameters() == encoder + head


@pytest.mark.parametrize("preset", ["listops", "text", "retrieval", "image", "pathfinder", "pathfinder128"])
def test_lra_presets(preset):
    config = getattr(LunaConfig, f"lra_{preset}")(vocab_size=20, projection_length=8, max_position_embeddings=32)
    pair = preset == "retrieval"
    model = (LunaForSequencePairClassification if pair else LunaForSequenceClassification)(config)
    head = "ForSequencePairClassification" if pair else "ForSequenceClassification"
    inputs = {name: value.clamp(max=19) for name, value in head_inputs(head, [9, 4]).items()}
    assert model(**inputs).logits.shape == (2, 10 if preset in ("listops", "image") else 2)
    assert not config.tie_key_value and model.classifier.out_proj.bias is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_low_precision_training_step(head, dtype):
    model = make(head).to(dtype).train()
    inputs = head_inputs(head, [21, 5, 1])
    output = model(**inputs, **labels(head, inputs))
    (output[0].float().square().sum()).backward()
    assert torch.isfinite(output[0]).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_autocast_keeps_gradients_finite():
    model = make("ForMaskedLM").train()
    inputs = head_inputs("ForMaskedLM", [21, 5])
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**inputs, **labels("ForMaskedLM", inputs)).loss
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_eager_is_sdpa(variant):
    """Attention step by step and the fused op: same outputs, same gradients."""
    inputs = head_inputs("ForMaskedLM", [21, 5])
    gradients = []
    for implementation in ("sdpa", "eager"):
        model = make("ForMaskedLM", **VARIANTS[variant])
        model.set_attn_implementation(implementation)
        loss = model(**inputs, **labels("ForMaskedLM", inputs)).loss
        loss.backward()
        gradients.append([loss] + [p.grad for p in model.parameters() if p.grad is not None])
    for fused, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, eager, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_states(variant):
    model = make("ForSequenceClassification", **VARIANTS[variant])
    inputs = head_inputs("ForSequenceClassification", [21, 5])
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in output.hidden_states] == [(2, 21, 24)] * 3
    assert [x.shape for x in output.packed_hidden_states] == [(2, 6, 24)] * 3
    assert [x.shape for x in output.attentions] == [(2, 4, 21, 6)] * 2
    base = model.luna(**inputs, output_packed_attentions=True)
    assert len(model(**inputs, output_packed_attentions=True).packed_attentions) == 2
    heads = model.config.num_pack_attention_heads
    assert [x.shape for x in base.packed_attentions] == [(2, heads, 6, 21)] * 2
    torch.testing.assert_close(base.packed_attentions[0].sum(-1), torch.ones(2, heads, 6))
    assert (base.packed_attentions[0][1, :, :, 5:] == 0).all()
    torch.testing.assert_close(output.hidden_states[-1], base.last_hidden_state)
    torch.testing.assert_close(output.packed_hidden_states[-1], base.packed_last_hidden_state)
    assert model(**inputs).packed_hidden_states is None


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_compile_fullgraph(head):
    torch.compiler.reset()  # avoids the recompile limit, which earlier tests of this process may have reached
    model = make(head, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = head_inputs(head, [21, 5])
    inputs |= labels(head, inputs)
    torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])


@pytest.mark.slow
def test_compile_trains():
    torch.compiler.reset()  # avoids the recompile limit, which earlier tests of this process may have reached
    inputs = head_inputs("ForMaskedLM", [21, 5])
    gradients = []
    for compiling in (False, True):
        model = make("ForMaskedLM").train()
        torch.manual_seed(0)
        model.config.dropout = 0.0
        run = torch.compile(model.eval(), fullgraph=True, backend="aot_eager") if compiling else model.eval()
        run(**inputs, **labels("ForMaskedLM", inputs)).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_export(head):
    """One exported program supports every batch size and length and does not depend on this package."""
    model = make(head)
    inputs = head_inputs(head, [21, 9])
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, shape), strict=False)
    assert "luna_mega" not in exported.graph_module.code
    for lengths in ([21, 9], [30, 2, 7], [6, 6, 1, 3], [2, 1]):
        inputs = head_inputs(head, lengths)
        torch.testing.assert_close(exported.module()(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("variant", ["tied", "pre-norm", "shared layers", "P not contextual"])
def test_gradient_checkpointing(variant, reentrant):
    inputs = head_inputs("ForMaskedLM", [21, 5])
    gradients = []
    for checkpointing in (False, True):
        model = make("ForMaskedLM", **VARIANTS[variant]).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(1)
        model(**inputs, **labels("ForMaskedLM", inputs)).loss.backward()
        # A reentrant checkpoint returns zero gradients for parameters that do not contribute to the loss.
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, msg=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", [*VARIANTS, "values"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_save_and_load(tmp_path, pooling, variant):
    overrides = VALUES if variant == "values" else VARIANTS[variant]
    model = make("ForSequenceClassification", pooling=pooling, **overrides)
    inputs = {"input_values": torch.randn(2, 9)} if variant == "values" else head_inputs("Model", [9, 4])
    comes_back(tmp_path, model, inputs)


@pytest.mark.parametrize("tied", [True, False])
def test_masked_lm_weights(tmp_path, tied):
    model, words = make("ForMaskedLM", tie_word_embeddings=tied), "luna.embeddings.word_embeddings.weight"
    masked_lm_comes_back(tmp_path, model, head_inputs("ForMaskedLM", [9, 4]), words, "lm_head.decoder.weight")


def test_every_parameter_is_initialized():
    """Parameters missing in a checkpoint are also initialized if the model is built on the meta device."""
    for overrides in (*VARIANTS.values(), VALUES):
        model = HEADS["ForSequenceClassification"].from_pretrained(
            None, config=tiny_config(pooling="packed_attention", **overrides), state_dict={}
        )
        for name, parameter in model.named_parameters():
            norm = "layer_norm.weight" in name
            scaled = model.config.scale_embedding and ("word_embeddings" in name or "packed_embeddings" in name)
            deviation = model.config.hidden_size**-0.5 if scaled else 0.02
            assert norm or parameter.abs().max() < 7 * deviation, name
            assert parameter.is_meta is False and torch.isfinite(parameter).all(), name
            if name.endswith("bias"):
                assert (parameter == 0).all(), name
            elif not norm:
                assert 0.5 * deviation < parameter.std() < 1.5 * deviation, name


def test_layerdrop():
    model = make("Model", layerdrop=0.9, num_hidden_layers=8, dropout=0.0, attention_dropout=0.0)
    inputs = head_inputs("Model", [9])
    evaluated = [model(**inputs).last_hidden_state for _ in range(2)]
    assert torch.equal(*evaluated)
    model.train()
    torch.manual_seed(0)
    lengths = {len(model(**inputs, output_hidden_states=True).packed_hidden_states) for _ in range(20)}
    assert min(lengths) < 4 and max(lengths) < 9


def test_dropout_is_drawn_for_every_sequence():
    model = make("Model", dropout=0.5).train()
    twice = {name: value.expand(2, -1) for name, value in head_inputs("Model", [9]).items()}
    embeds, layout = model.get_input_embeddings()(twice["input_ids"]), DenseLayout(twice["attention_mask"].bool())
    tokens, ((packed,), _) = model.embeddings(embeds, layout, torch.arange(9)[None], with_packed=True)
    assert not torch.equal(tokens[0], tokens[1]) and not torch.equal(packed[0], packed[1])


def test_decoding_step_keeps_keys_and_values_tied(monkeypatch):
    """The operator multiplies P with one state instead of two if the key is the value."""
    given, step = [], modeling_luna.luna_causal_attention_step

    def record(query, pack_query, pack_key, key, value, *rest, **options):
        given.append(key is value)
        return step(query, pack_query, pack_key, key, value, *rest, **options)

    monkeypatch.setattr(modeling_luna, "luna_causal_attention_step", record)
    model = LunaForCausalLM(tiny_config(is_decoder=True)).eval()
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3)
    assert given == [True] * (2 * model.config.num_hidden_layers)


def test_sinusoids_equal_fairseq():
    """Half sines, half cosines, frequencies 10000^(-k / (d/2 - 1)); the first token is at pad + 1, P at 0."""
    model = HEADS["Model"](tiny_config(position_embedding_type="sinusoidal", embedding_norm=False)).eval()
    ids = torch.full((1, 3), 7)
    embeds = model.get_input_embeddings()(ids)
    tokens, (packed, _) = model.embeddings(embeds, DENSE, torch.arange(3)[None], with_packed=True)
    frequency = 10000.0 ** (-torch.arange(12) / 11.0)
    scale = 24**0.5
    for actual, raw, first in (
        (tokens, model.embeddings.word_embeddings.weight[7], 2),
        (packed[0], model.embeddings.packed_embeddings, 0),
    ):
        angle = (first + torch.arange(3.0))[:, None] * frequency
        expected = scale * (raw if raw.dim() == 1 else raw[:3]) + torch.cat([angle.sin(), angle.cos()], dim=1)
        torch.testing.assert_close(actual[0], expected)


def test_pipelines(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    make("ForMaskedLM").save_pretrained(tmp_path)
    filled = pipeline("fill-mask", model=str(tmp_path), top_k=2)("w1 w2 <mask> w3")
    assert [set(entry) >= {"score", "token", "sequence"} for entry in filled] == [True, True]
    make("ForSequenceClassification").save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path))
    together = classify(["w1 w2 w3 w4", "w5"], batch_size=2)
    assert together[1]["score"] == pytest.approx(classify("w5")[0]["score"], abs=1e-5)


def test_auto_classes_know_luna():
    config = AutoConfig.for_model("luna", hidden_size=24, num_attention_heads=4, num_hidden_layers=1)
    assert isinstance(config, LunaConfig)
    assert type(AutoModelForSequenceClassification.from_config(config)) is LunaForSequenceClassification
