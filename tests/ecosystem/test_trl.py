"""TRL with the causal models. It computes losses from the body and `lm_head.weight`; they must equal the model's."""

import copy
import logging
import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tests.modeling import mega
from tests.modeling.decoders import check_names_of_the_cache, make_plain

pytest.importorskip("trl", reason="TRL is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

MODELS = {
    "luna": ("luna", dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)),
    "mega": ("mega", mega.NO_DROPOUT | {"add_lm_hidden_dense_layer": False}),
    "mega chunk": (
        "mega",
        mega.NO_DROPOUT | {"add_lm_hidden_dense_layer": False, "use_chunking": True, "chunk_size": 4},
    ),
    "megalodon": ("megalodon", {}),
}
# Texts of 3 to 9 tokens; most lengths are not a multiple of the chunk.
TEXTS = [" ".join(f"w{(row * place) % 25}" for place in range(1, 4 + row % 7)) for row in range(16)]
QUIET = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}


def make(name, **fields):
    family, options = MODELS[name]
    return make_plain(family, dtype=torch.float32, **{"vocab_size": 40} | options | fields)


def arguments(kind, folder, **options):
    batch = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": len(TEXTS), "logging_steps": 1}
    return kind(output_dir=str(folder), **QUIET | batch | {"max_steps": 3, "learning_rate": 1e-3} | options)


def expected_loss(model, tokenizer):
    """Return the mean loss over the tokens of all texts, each evaluated separately."""
    total = count = 0
    with torch.no_grad():
        for text in TEXTS:
            ids = tokenizer(f"{text} </s>", return_tensors="pt")["input_ids"]
            total += model.eval()(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    return total / count


def sft(model, tokenizer, folder, peft_config=None, **options):
    options = {"max_length": 16} | options
    data = Dataset.from_dict({"text": TEXTS})
    return SFTTrainer(
        model,
        arguments(SFTConfig, folder / "out", **options),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        peft_config=peft_config,
    )


@pytest.mark.parametrize("method", ["padded", "packing", "padding_free", "LoRA", "checkpointing", "by name"])
@pytest.mark.parametrize("name", MODELS)
def test_sft(name, method, tokenizer, tmp_path):
    """The loss equals that of separate texts, before and after training, for any batching."""
    model, options, given = make(name), {"gradient_checkpointing": method == "checkpointing"}, tokenizer
    if method == "packing":
        options |= {"packing": True, "eval_packing": True}
    elif method == "padding_free":
        options |= {"padding_free": True, "max_length": None}
    elif method == "LoRA":
        options["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    elif method == "by name":
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        model, given = str(tmp_path / "model"), None
    trainer = sft(model, given, tmp_path, **options)
    before = trainer.evaluate()["eval_loss"]
    assert before == pytest.approx(expected_loss(trainer.model, tokenizer), abs=2e-6)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before
    assert after == pytest.approx(expected_loss(trainer.model, tokenizer), abs=2e-6)
    if method in ("padded", "LoRA"):
        check_names_of_the_cache(trainer.model.eval(), torch.randint(3, 23, (2, 6)))


@pytest.mark.parametrize("fields", [{"add_lm_hidden_dense_layer": True}, {"adaptive_softmax_cutoffs": [20]}])
def test_layers_ignored_by_trl_raise(fields, tokenizer, tmp_path):
    fields |= {"adaptive_input_cutoffs": fields.get("adaptive_softmax_cutoffs")}
    model = make("mega", **fields)
    with pytest.raises(ValueError, match="TRL .* lm_head.weight, but .* Trainer") as error:
        sft(model, tokenizer, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reference", ["explicit", "by name"])
@pytest.mark.parametrize("name", MODELS)
def test_dpo(name, reference, tokenizer, tmp_path):
    """At first the model equals its reference, so that the loss is ln 2; then the loss decreases."""
    rows = {"prompt": TEXTS, "chosen": [" w3 w4"] * len(TEXTS), "rejected": [" w5"] * len(TEXTS)}
    model = make(name)
    if reference == "by name":
        model.save_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model) if reference == "explicit" else None,
        args=arguments(DPOConfig, tmp_path / "out"),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0]


DROPOUT = {
    "luna": dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "word_dropout"), 0.5),
    "mega": dict.fromkeys(mega.NO_DROPOUT, 0.5),
    "megalodon": dict.fromkeys(("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.5),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dpo_of_a_model_with_dropout(name, tokenizer, tmp_path):
    """TRL sets `p = 0` in every `nn.Dropout`, so that the first loss is ln 2."""
    rows = {"prompt": TEXTS, "chosen": [" w3 w4"] * len(TEXTS), "rejected": [" w5"] * len(TEXTS)}
    model = make(name, **DROPOUT[name])
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=arguments(DPOConfig, tmp_path / "out", max_steps=1),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_grpo(name, tokenizer, tmp_path):
    """Completions for prompts of several lengths are generated, scored and used in training."""
    model, written = make(name), []

    def reward(completions, **kwargs):
        written.extend(completions)
        return [float(len(set(completion.split()))) for completion in completions]

    options = {"num_generations": 4, "max_completion_length": 6, "max_steps": 2, "learning_rate": 1e-2}
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=arguments(GRPOConfig, tmp_path / "out", **options),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        processing_class=tokenizer,
    )
    before = copy.deepcopy(model.state_dict())
    trainer.train()
    assert len(written) == 8 and any(written)
    changed = [key for key, value in trainer.model.state_dict().items() if not torch.equal(value, before[key])]
    assert len(changed) > len(before) / 2
    entropies = [entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry]
    assert all(map(math.isfinite, entropies))


@pytest.mark.parametrize("name", ["luna", "mega"])
def test_gkd(name, tokenizer, tmp_path, monkeypatch):
    """A student approaches the distribution of a Luna, on texts and on its own completions."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    # TRL 1.16 passes `generation_config` together with an option to `generate`, which transformers deprecates.
    monkeypatch.setattr(logging.Logger, "warning_once", lambda *args, **kwargs: None)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    roles = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5 w6"}]
    teacher, student, ids = make("luna", initializer_range=1.0), make(name), torch.tensor([[5, 6, 7, 8, 9, 10]])

    def divergence():
        with torch.no_grad():
            ours, theirs = (model.eval()(ids).logits.log_softmax(-1) for model in (student, teacher))
        return torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="batchmean").item()

    before = divergence()
    options = {"lmbda": 0.5, "max_new_tokens": 4, "max_length": 16, "max_steps": 8, "learning_rate": 1e-2}
    trainer = GKDTrainer(
        student,
        teacher,
        arguments(GKDConfig, tmp_path / "out", **options),
        train_dataset=Dataset.from_dict({"messages": [roles] * 32}),
        processing_class=tokenizer,
    )
    trainer.train()
    assert divergence() < 0.9 * before
