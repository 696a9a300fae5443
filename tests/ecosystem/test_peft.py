"""PEFT with every class of all families: trainable parameters, saved adapters, merged models."""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.modeling import luna, mega, megalodon_decoders
from tests.modeling.decoders import PLAIN, check_names_of_the_cache, make_plain

peft = pytest.importorskip("peft", reason="peft is not installed")
other = pytest.importorskip("peft.utils.other", reason="peft is not installed")

FAMILIES = {"luna": luna, "mega": mega, "megalodon": megalodon_decoders}
# The linear layers listed in docs/ecosystem.md. A causal Luna only packs keys; a Mega decoder also has `k_proj`.
TARGETS = {
    "luna": ["query", "pack_query", "key_value", "pack_key_value", "output", "fc1", "fc2"],
    "mega": ["v_proj", "mx_proj", "h_proj", "fc1", "fc2"],
    "megalodon": ["wz", "wv", "wr", "wh1", "wh2", "fc1", "fc2"],
}
# Parameters outside of linear layers; PEFT adapts them by name.
PARAMETERS = {"mega": "mega_layer.qk_weight", "megalodon": "mega.gamma"}
HEADS = [head for head in luna.HEADS if head != "Model"]
CLASSES = {
    **dict.fromkeys(("luna", "mega"), [*HEADS, "ForCausalLM", "ForConditionalGeneration"]),
    "megalodon": ["ForSequenceClassification", "ForCausalLM"],
}
CASES = [(family, name) for family, names in CLASSES.items() for name in names]
TASK_CASES = [
    case for case in CASES if case[1] in ("ForSequenceClassification", "ForCausalLM", "ForConditionalGeneration")
]
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def make(family, name):
    if name in HEADS:
        return FAMILIES[family].make(name, vocab_size=40).double()
    return make_plain(family, is_encoder_decoder=name == "ForConditionalGeneration")


def batch(name):
    """Return inputs with padding and labels."""
    inputs = luna.head_inputs(name, [9, 5]) if name in luna.HEADS else luna.tokens([9, 5])
    if name in luna.HEADS:
        return inputs | luna.labels(name, inputs)
    inputs["input_ids"] %= 30
    return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def lora(family, **options):
    return peft.LoraConfig(**{"target_modules": TARGETS[family], "r": 4} | options)


def adapt(model, config):
    """Return the model with an adapter that changes its results."""
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def logits(model, inputs):
    with torch.no_grad():
        outputs = model(**inputs)
    return outputs.start_logits if "start_positions" in inputs else outputs.logits


def check(model, base, config, inputs, folder, merged=True):
    """Check that all trained parameters get gradients, and that the saved and the merged model have equal results."""
    original = logits(base, inputs)
    model = adapt(model, config)
    expected = logits(model, inputs)
    # virtual tokens precede the logits of the text
    assert (expected[:, -original.shape[1] :] - original).abs().max() > 1e-4
    model(**inputs).loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not [name for name, parameter in trained.items() if parameter.grad is None]
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(base, folder)
    torch.testing.assert_close(logits(again, inputs), expected, atol=1e-6, rtol=0)
    if merged:
        torch.testing.assert_close(logits(model.merge_and_unload(), inputs), expected, atol=1e-7, rtol=0)
    return trained


@pytest.mark.parametrize(("family", "name"), CASES)
def test_lora_on_every_linear_layer(family, name, tmp_path):
    """LoRA adapts every linear layer, except heads that PEFT trains completely."""
    heads = {"ForTokenClassification": ["classifier"], "ForQuestionAnswering": ["qa_outputs"]}
    config = lora(family, target_modules="all-linear", task_type=TASKS.get(name), exclude_modules=heads.get(name))
    check(make(family, name), make(family, name), config, batch(name), tmp_path)


TIED = [case for case in CASES if case[0] != "megalodon" and case[1] in ("ForMaskedLM", "ForCausalLM")]
TIED += [("luna", "ForConditionalGeneration"), ("mega", "ForConditionalGeneration")]


@pytest.mark.parametrize(("family", "name"), TIED)
def test_adapters_of_embeddings_are_merged_exactly_into_untied_weights(family, name):
    """Merged models with untied weights equal the adapter; with tied weights, PEFT merges the adapter into both."""
    inputs, differences = {key: x for key, x in batch(name).items() if key != "labels"}, []
    if name == "ForConditionalGeneration":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    for tied in (True, False):
        model = make(family, name)
        assert other._get_module_names_tied_with_embedding(model)  # PEFT must find the tied names
        if not tied:
            for key in model.all_tied_weights_keys:
                key = key.removesuffix(".weight")
                model.set_submodule(key, copy.deepcopy(model.get_submodule(key)))
            model.config.tie_word_embeddings = False
        output = model.get_output_embeddings()
        (target,) = (key for key, module in model.named_modules() if module is output)
        model = adapt(model, lora(family, target_modules=[target, "word_embeddings"]))
        expected = logits(model, inputs)
        differences.append((logits(model.merge_and_unload(), inputs) - expected).abs().max())
    assert differences[0] > 1e-3 and differences[1] < 1e-7


@pytest.mark.parametrize("method", ["names", "DoRA", "IA3", "modules_to_save", "target_parameters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_methods(family, method, tmp_path):
    if method == "IA3":
        config = peft.IA3Config(target_modules=TARGETS[family], feedforward_modules=["fc2"])
    elif method == "modules_to_save":
        config = lora(family, modules_to_save=["classifier"])
    elif method == "target_parameters":
        if family not in PARAMETERS:
            pytest.skip("all matrices of Luna's attention are linear layers")
        config = lora(family, target_parameters=[PARAMETERS[family]], r=1)
    else:
        config = lora(family, use_dora=method == "DoRA")
    name = "ForSequenceClassification"
    trained = check(make(family, name), make(family, name), config, batch(name), tmp_path)
    assert any("classifier" in parameter for parameter in trained) == (method == "modules_to_save")
    owner = PARAMETERS.get(family, "none.").rpartition(".")[0]
    assert any(f"{owner}.lora" in parameter for parameter in trained) == (method == "target_parameters")


@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
@pytest.mark.parametrize(("family", "name"), TASK_CASES)
def test_virtual_tokens(family, name, kind, tmp_path):
    options = {"task_type": TASKS[name], "num_virtual_tokens": 3, "num_attention_heads": 1, "num_layers": 2}
    config = peft.PromptTuningConfig(**options)
    if kind == "p-tuning":
        config = peft.PromptEncoderConfig(**options, encoder_hidden_size=8)
    check(make(family, name), make(family, name), config, batch(name), tmp_path, merged=False)


@pytest.mark.parametrize(("family", "name"), TASK_CASES)
def test_prefix_tuning_raises(family, name):
    """Prefix tuning raises an error, because a recurrent state has no keys and values to tune."""
    options = {"num_virtual_tokens": 3, "num_attention_heads": 1, "num_layers": 2, "token_dim": 12}
    model = peft.get_peft_model(make(family, name), peft.PrefixTuningConfig(task_type=TASKS[name], **options))
    with pytest.raises(ValueError, match="prefix tuning") as error:
        model(**batch(name))
    assert "\n" not in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize(("family", "encoder_decoder"), PLAIN)
def test_generate_with_an_adapter(family, encoder_decoder):
    model = make_plain(family, is_encoder_decoder=encoder_decoder)
    kind = "SEQ_2_SEQ_LM" if encoder_decoder else "CAUSAL_LM"
    inputs = {name: batch("ForCausalLM")[name].flip(1) for name in ("input_ids", "attention_mask")}
    inputs |= {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    adapted = adapt(copy.deepcopy(model), lora(family, task_type=kind, lora_alpha=64))
    expected = adapted.generate(**inputs)
    assert not torch.equal(expected, model.generate(**inputs))
    with adapted.disable_adapter():
        assert torch.equal(adapted.generate(**inputs), model.generate(**inputs))
    assert torch.equal(adapted.merge_and_unload().generate(**inputs), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_cache(family):
    adapted = adapt(make_plain(family), lora(family, task_type="CAUSAL_LM", lora_alpha=64))
    check_names_of_the_cache(adapted, torch.randint(3, 23, (2, 6)))


@pytest.mark.parametrize(("family", "name"), TASK_CASES)
def test_gradient_checkpointing(family, name):
    inputs, gradients = batch(name), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = adapt(make(family, name), lora(family, target_modules="all-linear", task_type=TASKS[name])).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs, **({} if name in luna.HEADS else {"use_cache": False})).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters() if x.requires_grad})
    torch.testing.assert_close(*gradients)
    assert all(gradient is not None for gradient in gradients[1].values())


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_fine_tunes_a_classifier(family, tmp_path):
    """Trainer trains the adapter and the head, and saves both to the folder."""
    name = "ForSequenceClassification"
    draw = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(4, 40, (9,), generator=draw), "labels": index % 2} for index in range(32)]
    for row in rows:
        row["input_ids"][1:4] = 5 + row["labels"]
    config = lora(family, task_type="SEQ_CLS", modules_to_save=["classifier"], lora_alpha=16)
    model = peft.get_peft_model(make(family, name), config)
    options = {"learning_rate": 2e-2, "per_device_train_batch_size": 8, "max_steps": 12, "gradient_checkpointing": True}
    options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 12}
    trainer = Trainer(model, TrainingArguments(tmp_path, **options), train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before
    again = peft.PeftModel.from_pretrained(make(family, name), tmp_path / "checkpoint-12")
    trainer = Trainer(again, TrainingArguments(tmp_path, **options), eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(after, abs=1e-6)
