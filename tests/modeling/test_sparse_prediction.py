"""`sparse_prediction`: in training, masked-LM heads only project the predicted positions; results are unchanged."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForMaskedLM

from .mega import NO_DROPOUT

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
LUNA = {"num_attention_heads": 2, "projection_length": 4, "dropout": 0.0, "attention_dropout": 0.0}
MODELS = {
    "luna": lambda **fields: LunaForMaskedLM(LunaConfig(**SIZES, **LUNA, **fields)),
    "mega": lambda **fields: MegaForMaskedLM(MegaConfig(**SIZES, **NO_DROPOUT, **fields)),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_same_loss_and_gradients(model_type):
    torch.manual_seed(0)
    dense = MODELS[model_type]().double().train()
    sparse = MODELS[model_type](sparse_prediction=True).double().train()
    sparse.load_state_dict(dense.state_dict())
    ids = torch.randint(4, 40, (3, 9))
    ids[1, 6:] = dense.config.pad_token_id
    labels = ids.masked_fill((torch.rand(3, 9) < 0.6) | (ids == dense.config.pad_token_id), -100)
    outputs = [model(ids, labels=labels) for model in (dense, sparse)]
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits[labels != -100])
    for (name, one), other in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(sparse(ids).logits, dense(ids).logits)


@pytest.mark.parametrize("model_type", MODELS)
def test_trainer_aligns_predictions_and_labels(model_type, tmp_path):
    """`Trainer.predict` returns a prediction for every label, and the same loss as without `sparse_prediction`."""
    torch.manual_seed(0)
    ids = torch.randint(4, 40, (5, 9))
    labels = ids.masked_fill(torch.rand(5, 9) < 0.7, -100)
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels}).with_format("torch")
    dense, sparse = MODELS[model_type](), MODELS[model_type](sparse_prediction=True)
    sparse.load_state_dict(dense.state_dict())
    options = {"per_device_eval_batch_size": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    results = [Trainer(x, TrainingArguments(str(tmp_path), **options)).predict(rows) for x in (dense, sparse)]
    for one, other in zip(*results, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_allclose(other, one, atol=1e-6)
    assert results[1].metrics["test_loss"] == pytest.approx(results[0].metrics["test_loss"], abs=1e-6)
    assert results[1].predictions.shape[:2] == results[1].label_ids.shape
