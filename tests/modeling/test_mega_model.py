"""The Mega encoder as users of transformers meet it: invariance to padding, precision, compiling, saving, errors."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import luna_mega
from luna_mega.modeling_mega.modeling_mega import MegaDropout

from .luna import head_inputs, labels, results

HEADS = {
    name: getattr(luna_mega, f"Mega{name}")
    for name in (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForSequencePairClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
}
VARIANTS = {
    "rotary scalenorm": {},
    "laplace chunks": {"attention_activation": "laplace", "use_chunking": True, "chunk_size": 8},
    "relu2 simple post-norm": {
        "attention_activation": "relu2",
        "relative_positional_bias": "simple",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
        "normalization_type": "layernorm",
    },
    "one direction, truncated": {"bidirectional": False, "truncation": 5, "normalization_type": "rmsnorm"},
    "batchnorm, norms around": {
        "normalization_type": "batchnorm",
        "embedding_norm": True,
        "final_norm": True,
        "scale_embedding": True,
    },
    "simple chunks, shift, no ffn": {
        "relative_positional_bias": "simple",
        "use_chunking": True,
        "chunk_size": 7,
        "ema_shift": True,
        "use_normalized_ffn": False,
    },
}


def tiny_config(**overrides):
    fields = {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "ema_projection_size": 4,
        "shared_representation_size": 12,
        "nffn_hidden_size": 20,
        "max_positions": 48,
        "num_labels": 3,
    }
    return luna_mega.MegaConfig(**fields | overrides)


def make(head, **overrides):
    torch.manual_seed(0)
    model = HEADS[head](tiny_config(**overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", HEADS)
def test_a_sequence_does_not_depend_on_padding_or_batch_mates(head, variant):
    model, lengths = make(head, **VARIANTS[variant]), [21, 1, 5, 13]
    with torch.no_grad():
        together = None
        for side, width in (("right", 21), ("right", 30), ("left", 30)):
            inputs = head_inputs(head, lengths, side, width)
            actual = results(head, model(**inputs), inputs["attention_mask"])
            together = together or actual
            for expected, row in zip(together, actual, strict=True):
                torch.testing.assert_close(row, expected, atol=2e-5, rtol=1e-4)
        for row, length in enumerate(lengths):
            inputs = {name: value[row : row + 1] for name, value in head_inputs(head, lengths).items()}
            alone = {name: value if "pair" in name else value[..., :length] for name, value in inputs.items()}
            actual = results(head, model(**alone), alone["attention_mask"])[0]
            torch.testing.assert_close(actual, together[row], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_of_padding_is_finite_and_alone(variant):
    model = make("ForSequenceClassification", pooling="mean", **VARIANTS[variant])
    inputs = head_inputs("ForSequenceClassification", [9, 9])
    expected = model(**inputs).logits[0].detach()
    inputs["attention_mask"][1] = 0
    logits = model(**inputs).logits
    torch.testing.assert_close(logits[0], expected, atol=2e-5, rtol=1e-4)
    logits.square().sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", ["softmax", "laplace", "relu2"])
@pytest.mark.parametrize("norm", ["layernorm", "scalenorm", "rmsnorm", "batchnorm", "syncbatchnorm"])
def test_low_precision_training_step(norm, function, dtype):
    model = make("ForMaskedLM", normalization_type=norm, attention_activation=function).to(dtype).train()
    inputs = head_inputs("ForMaskedLM", [21, 5, 1])
    output = model(**inputs, **labels("ForMaskedLM", inputs))
    output.loss.backward()
    assert torch.isfinite(output.logits).all() and torch.isfinite(output.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", ["rotary scalenorm", "laplace chunks", "one direction, truncated"])
def test_compile_fullgraph(variant):
    torch.compiler.reset()  # code that was compiled often in this process is refused
    model = make("ForMaskedLM", **VARIANTS[variant])
    inputs = head_inputs("ForMaskedLM", [21, 5])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    inputs = head_inputs("ForMaskedLM", [21, 5])
    gradients = []
    for checkpointing in (False, True):
        model = make("ForMaskedLM", normalization_type="batchnorm").train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(1)
        model(**inputs, **labels("ForMaskedLM", inputs)).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers()))
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_load(tmp_path, variant):
    model = make("ForSequenceClassification", classifier_num_layers=2, **VARIANTS[variant])
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not report["missing_keys"] and not report["unexpected_keys"]
    inputs = head_inputs("Model", [9, 4])
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def test_every_parameter_is_initialised():
    for overrides in (*VARIANTS.values(), {"input_type": "values"}):
        config = tiny_config(add_token_type_embeddings=True, **overrides)
        model = HEADS["ForSequenceClassification"].from_pretrained(None, config=config, state_dict={})
        for name, tensor in model.state_dict().items():
            assert torch.isfinite(tensor).all() and tensor.abs().max() < 10, name
            if name.endswith("ema_expansion_matrix"):
                assert (tensor[:, ::2] > 0).all() and (tensor[:, 1::2] < 0).all()


def test_recorded_states():
    model = make("ForMaskedLM", use_chunking=True, chunk_size=8)
    output = model(**head_inputs("ForMaskedLM", [21, 5]), output_hidden_states=True, output_attentions=True)
    assert [x.shape for x in output.hidden_states] == [(2, 21, 24)] * 3
    assert [x.shape for x in output.attentions] == [(2, 3, 8, 8)] * 2


def test_values_and_dropout():
    model = HEADS["ForSequenceClassification"](
        tiny_config(input_type="values", pooling="mean", use_feature_dropout=True)
    )
    loss = model(input_values=torch.randn(4, 19), labels=torch.tensor([0, 1, 2, 0])).loss
    loss.backward()
    assert torch.isfinite(loss) and model.main_input_name == "input_values"


def test_feature_dropout_drops_channels():
    dropout = MegaDropout(0.5, features=True).train()
    torch.manual_seed(0)
    dropped = dropout(torch.ones(3, 7, 50))
    assert ((dropped == 0).all(dim=1) | (dropped == 2).all(dim=1)).all()
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert torch.equal(dropout.eval()(torch.ones(3, 7, 50)), torch.ones(3, 7, 50))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attention_activation": "gelu"}, "attention_activation must be one of softmax, laplace, relu2"),
        ({"normalization_type": "norm"}, "normalization_type must be one of"),
        ({"use_chunking": True}, "use_chunking needs a chunk_size of at least 1, got -1"),
        ({"shared_representation_size": 13}, "an even shared_representation_size, got 13"),
        ({"num_attention_heads": 2}, "num_attention_heads must be 1, got 2"),
        ({"ema_shift": True, "bidirectional": False}, "ema_shift=True needs bidirectional=True"),
        ({"is_decoder": True}, "is_decoder=True needs bidirectional=False"),
        ({"add_cross_attention": True}, "add_cross_attention=True needs is_decoder=True"),
        ({"dropout_prob": 1.0}, r"dropout_prob must be in \[0, 1\), got 1.0"),
    ],
)
def test_configuration(fields, message):
    with pytest.raises(Exception, match=message):  # transformers 5.17 wraps the ValueError
        tiny_config(**fields)


def test_what_this_version_does_not_have():
    with pytest.raises(ValueError, match="the Mega encoder only"):
        HEADS["Model"](tiny_config(is_decoder=True, bidirectional=False))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input_ids": torch.zeros(0, 5, dtype=torch.long), "attention_mask": None}, "batch is empty: 0 sequences"),
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
        ({"attention_mask": torch.ones(2, 8)}, "attention_mask must have the shape"),
        ({"token_type_ids": torch.zeros(2, 9, dtype=torch.long)}, "add_token_type_embeddings=False"),
        ({"position_ids": torch.zeros(2, 9)}, "Mega models take no position_ids"),
    ],
)
def test_inputs(change, message):
    with pytest.raises(ValueError, match=message):
        make("Model")(**head_inputs("Model", [9, 4]) | change)


def test_sequence_longer_than_the_bias_table():
    with pytest.raises(ValueError, match="serves at most 48 positions, got 49"):
        make("Model", relative_positional_bias="simple")(**head_inputs("Model", [49]))
    make("Model")(**head_inputs("Model", [49]))
