"""`sparse_prediction`: masked-LM heads only project the predicted positions; results are unchanged."""

import pytest
import torch

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForMaskedLM

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
MODELS = {
    "luna": lambda **fields: LunaForMaskedLM(LunaConfig(**SIZES, num_attention_heads=2, projection_length=4, **fields)),
    "mega": lambda **fields: MegaForMaskedLM(MegaConfig(**SIZES, **fields)),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_same_loss_and_gradients(model_type):
    torch.manual_seed(0)
    dense = MODELS[model_type]().double().eval()
    sparse = MODELS[model_type](sparse_prediction=True).double().eval()
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
