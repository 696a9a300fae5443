"""The Mega models with the features of transformers: compiling, export, saving, training, dropout."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from luna_mega import MegaConfig, MegaForSequenceClassification
from luna_mega.modeling_mega.layers_mega import MegaRotaryRelativeBias
from luna_mega.modeling_mega.modeling_mega import MegaDropout

from . import mega_decoders
from .luna import head_inputs, labels, tokens
from .mega import HEADS, NO_DROPOUT, VALUES, VARIANTS, make, tiny_config
from .saving import comes_back, masked_lm_comes_back


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_compile_fullgraph(head):
    torch.compiler.reset()  # avoids the recompile limit, which earlier tests of this process may have reached
    model = make(head, num_hidden_layers=1, **VARIANTS["laplace chunks"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = head_inputs(head, [21, 5])
    inputs |= labels(head, inputs)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_trains(variant):
    """Outputs, gradients and batch statistics of a training step."""
    torch.compiler.reset()  # avoids the recompile limit, which earlier tests of this process may have reached
    inputs = head_inputs("ForMaskedLM", [21, 5])
    states = []
    for compiling in (False, True):
        model = make("ForMaskedLM", num_hidden_layers=1, **VARIANTS[variant], **NO_DROPOUT).train()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiling else model
        run(**inputs, **labels("ForMaskedLM", inputs)).loss.backward()
        states.append(gradients(model) | dict(model.named_buffers()))
    for name, plain in states[0].items():
        torch.testing.assert_close(states[1][name], plain, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "head, variant", [("ForMaskedLM", "rotary scalenorm"), *(("ForSequenceClassification", v) for v in VARIANTS)]
)
def test_export(head, variant):
    """One exported program supports every batch size and length and does not depend on this package."""
    model = make(head, num_hidden_layers=1, **VARIANTS[variant])
    inputs = head_inputs(head, [21, 9])
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, shape), strict=False)
    assert "luna_mega" not in exported.graph_module.code
    for lengths in ([21, 9], [30, 2, 7], [8, 8, 1, 3], [2, 1]):
        for side in ("left", "right"):
            inputs = head_inputs(head, lengths, side)
            actual, expected = exported.module()(**inputs)[0], model(**inputs)[0]
            if expected.shape[:2] == inputs["attention_mask"].shape:  # rows at padding are meaningless
                actual, expected = (x[inputs["attention_mask"].bool()] for x in (actual, expected))
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("variant", ["laplace chunks", "batchnorm, norms around"])
def test_gradient_checkpointing(variant, reentrant):
    """Same dropout, gradients and batch statistics."""
    inputs = head_inputs("ForMaskedLM", [21, 5])
    states = []
    for checkpointing in (False, True):
        model = make("ForMaskedLM", use_feature_dropout=True, **VARIANTS[variant]).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(1)
        model(**inputs, **labels("ForMaskedLM", inputs)).loss.backward()
        states.append(gradients(model) | dict(model.named_buffers()))
    for name, plain in states[0].items():
        torch.testing.assert_close(states[1][name], plain, msg=name)


@pytest.mark.parametrize("variant", [*VARIANTS, "values"])
def test_save_and_load(tmp_path, variant):
    overrides = VALUES if variant == "values" else VARIANTS[variant]
    model = make("ForSequenceClassification", classifier_num_layers=2, **overrides)
    inputs = {"input_values": torch.randn(2, 9)} if variant == "values" else tokens([9, 4])
    comes_back(tmp_path, model, inputs)


@pytest.mark.parametrize("tied", [True, False])
def test_masked_lm_weights(tmp_path, tied):
    model, words = make("ForMaskedLM", tie_word_embeddings=tied), "mega.embedding_layer.word_embeddings.weight"
    masked_lm_comes_back(tmp_path, model, tokens([9, 4]), words, "mlm_head.weight")


def test_every_parameter_is_initialized():
    """Parameters missing in a checkpoint are also initialized if the model is built on the meta device."""
    for overrides in (*VARIANTS.values(), VALUES):
        config = tiny_config(add_token_type_embeddings=True, **overrides)
        model = HEADS["ForSequenceClassification"].from_pretrained(None, config=config, state_dict={})
        for name, tensor in model.state_dict().items():
            assert not tensor.is_meta and torch.isfinite(tensor).all() and tensor.abs().max() < 10, name
            if name.endswith("ema_expansion_matrix"):
                assert (tensor[:, ::2] > 0).all() and (tensor[:, 1::2] < 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_states(variant):
    """Recording changes neither the outputs nor their gradients."""
    model, inputs = make("ForMaskedLM", **VARIANTS[variant]), head_inputs("ForMaskedLM", [21, 5])
    inputs |= labels("ForMaskedLM", inputs)
    chunk = model.config.attention_chunk or 21
    shape = (2, -(-21 // chunk), chunk, chunk)
    states = []
    for recording in (False, True):
        model.zero_grad()
        output = model(**inputs, output_hidden_states=recording, output_attentions=recording)
        output.loss.backward()
        states.append({"logits": output.logits} | gradients(model))
    for name, plain in states[0].items():
        torch.testing.assert_close(states[1][name], plain, msg=lambda text, n=name: f"{n}: {text}")
    assert [x.shape for x in output.hidden_states] == [(2, 21, 24)] * 3
    assert [x.shape for x in output.attentions] == [shape] * 2
    if model.config.attention_activation == "softmax":
        sums = output.attentions[0][0].sum(dim=-1).flatten()[:21]
        torch.testing.assert_close(sums, torch.ones(21))


def test_training_with_trainer(tmp_path):
    """Real values, chunks, batch norm, autocast, gradient checkpointing and accumulation."""
    options = {"normalization_type": "batchnorm", "use_chunking": True, "chunk_size": 8, "use_feature_dropout": True}
    model = MegaForSequenceClassification(tiny_config(**VALUES, **options))
    data = [
        {"input_values": torch.randn(19), "attention_mask": torch.ones(19, dtype=torch.long), "labels": i % 3}
        for i in range(12)
    ]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(0.5 < loss < 2.0 for loss in losses)
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all() and not torch.equal(tensor, before[name]), name
    assert 0.5 < trainer.evaluate()["eval_loss"] < 2.0
    loaded = MegaForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_feature_dropout_drops_channels():
    dropout = MegaDropout(0.5, features=True).train()
    dropped = dropout(torch.ones(3, 7, 50))
    assert ((dropped == 0).all(dim=1) | (dropped == 2).all(dim=1)).all()
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert torch.equal(dropout.eval()(torch.ones(3, 7, 50)), torch.ones(3, 7, 50))


@pytest.mark.parametrize("features", [False, True])
def test_places_of_dropout(features):
    """Every dropout of the configuration is active only in training and differs between two equal sequences."""
    inputs = {name: value.expand(2, -1) for name, value in tokens([9]).items()}
    for field in NO_DROPOUT:
        model = make(
            "Model", **NO_DROPOUT | {field: 0.5}, use_feature_dropout=features, use_chunking=True, chunk_size=4
        )
        first, second = model(**inputs).last_hidden_state
        torch.testing.assert_close(first, second)
        dropped, other = model.train()(**inputs).last_hidden_state
        assert not torch.allclose(dropped, other) and not torch.allclose(dropped, first), field
    model = make("ForTokenClassification", **NO_DROPOUT, classifier_dropout=0.5)
    expected = model(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    assert not torch.allclose(model.train()(**inputs).logits, expected)


def test_sublayers_of_a_block(monkeypatch):
    """Feature dropout applies to values, moving average, both outputs and the hidden layer; weights are pointwise."""
    seen = []

    def record(states, *options):
        seen.append(tuple(states.shape))
        return states

    monkeypatch.setattr(nn.functional, "dropout1d", record)
    make("Model", num_hidden_layers=1, use_feature_dropout=True).train()(**tokens([9, 4]))
    width, values, hidden = 24, 32, 20
    channels = [width, values, width, width, hidden, width]  # embeddings; values, average, output; hidden, output
    assert seen == [(2, size, 9) for size in channels]


def test_pipelines(tmp_path, tokenizer):
    """A pipeline only needs the folder, and a single text has the same result as in a padded batch."""
    texts = ["w1 w2 <mask> w3 w4 w5 w6 w7 w8", "w5 <mask>"]
    options = {"use_chunking": True, "chunk_size": 4}
    for task, head in (
        ("fill-mask", "ForMaskedLM"),
        ("text-classification", "ForSequenceClassification"),
        ("token-classification", "ForTokenClassification"),
    ):
        tokenizer.save_pretrained(tmp_path / head)
        make(head, **options).save_pretrained(tmp_path / head)
        pipe = pipeline(task, model=str(tmp_path / head))
        separate, together = [pipe(text) for text in texts], pipe(texts, batch_size=2)
        for one, other in zip(separate, together, strict=True):
            entries = zip(one, other if isinstance(other, list) else [other], strict=True)
            assert all(a["score"] == pytest.approx(b["score"], abs=1e-5) for a, b in entries)


def test_auto_classes_know_mega():
    config = AutoConfig.for_model("mega", hidden_size=24, num_hidden_layers=1)
    assert isinstance(config, MegaConfig)
    assert type(AutoModelForSequenceClassification.from_config(config)) is MegaForSequenceClassification


def test_evaluation_does_not_use_old_weights():
    """The original caches the kernel of the moving average in evaluation mode and does not update it."""
    model, inputs = make("Model"), tokens([21])
    model(**inputs).last_hidden_state.sum().backward()
    changed = {name: 0.5 * value for name, value in model.state_dict().items()}
    fresh = HEADS["Model"](model.config).eval()
    for each in (model, fresh):
        each.load_state_dict(changed)
    output = model(**inputs).last_hidden_state
    assert torch.equal(output, fresh(**inputs).last_hidden_state)
    output.sum().backward()


def test_bias_has_the_length_of_the_input(monkeypatch):
    """The rotary bias has the positions of the longest sequence, or of a step's keys, and no bit of it changes."""
    lengths, forward = [], MegaRotaryRelativeBias.forward
    complete = forward(bias := make("Model").layers[0].mega_layer.rel_pos_bias, 300)
    assert all(forward(bias, length).equal(complete[300 - length : 299 + length]) for length in (1, 2, 7, 33, 128, 299))
    monkeypatch.setattr(
        MegaRotaryRelativeBias, "forward", lambda self, length: lengths.append(length) or forward(self, length)
    )
    chunks = {"use_chunking": True, "chunk_size": 2**20}
    make("Model", **chunks)(**tokens([4, 3]))
    model = mega_decoders.make(use_chunking=True, chunk_size=1000)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=80, do_sample=False, eos_token_id=29)
    assert set(lengths) == {4, 3, 64, 128}
