"""The Luna classes under transformers' common model tests; `run_contract.py` runs this file inside their package.

What is switched off, and why:

* `test_all_params_have_gradient`: the last norm of P has no gradient under a head that does not read P.
  `test_parameters_without_gradient` asserts that this is the only one.
* tests of a vocabulary, for the model of real values.
"""

import unittest

from transformers.testing_utils import torch_device

from luna_mega import (
    LunaConfig,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForQuestionAnswering,
    LunaForSequenceClassification,
    LunaForSequencePairClassification,
    LunaForTokenClassification,
    LunaModel,
)

from ..encoder_testing import EncoderTester, EncoderTests, PipelineTests, WithoutVocabulary


class LunaModelTester(EncoderTester):
    config_class = LunaConfig
    num_attention_heads = 4
    key_length = 5  # of the recorded attention: the rows of P
    num_hidden_states_types = 2  # hidden_states and packed_hidden_states
    causal_lm_class = LunaForMaskedLM  # the class with a loss that test_training_overfit trains
    small = {
        "num_attention_heads": num_attention_heads,
        "num_pack_attention_heads": 2,
        "intermediate_size": 37,
        "projection_length": key_length,
        "max_position_embeddings": 64,
    }


class LunaModelTest(EncoderTests, unittest.TestCase):
    """Post-norm, tied keys and values, learned positions, classification by the first token: the paper's base model."""

    model_tester_class = LunaModelTester
    all_model_classes = (
        LunaModel,
        LunaForMaskedLM,
        LunaForSequenceClassification,
        LunaForMultipleChoice,
        LunaForTokenClassification,
        LunaForQuestionAnswering,
        LunaForSequencePairClassification,
    )
    test_all_params_have_gradient = False
    last_packed_norm = "encoder.layers.1.packed_layer_norm"

    def test_parameters_without_gradient(self):
        for model_class in self.all_model_classes[1:]:
            with self.subTest(model_class.__name__):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                model = model_class(config).to(torch_device).train()
                model(**self._prepare_for_class(inputs, model_class, return_labels=True)).loss.backward()
                reads_packed = hasattr(model, "pooler") and config.pooling.startswith("packed")
                unread = [] if reads_packed else [f"luna.{self.last_packed_norm}.{name}" for name in ("weight", "bias")]
                self.assertEqual([name for name, p in model.named_parameters() if p.grad is None], unread)


class LunaPreNormModelTest(LunaModelTest):
    """Untied keys and values, sinusoidal positions, pre-norm, all rows of P, classification by attention over P."""

    fields = {
        "tie_key_value": False,
        "position_embedding_type": "sinusoidal",
        "pre_norm": True,
        "dynamic_projection_length": False,
        "pooling": "packed_attention",
        "classifier_num_layers": 2,
        "pair_features": "interaction",
    }
    last_packed_norm = "encoder.packed_layer_norm"


class LunaSharedLayersModelTest(LunaModelTest):
    """One shared layer, a learned P per layer, no positions, no embedding norms, classification by max-pooling of P."""

    fields = {
        "share_layers": True,
        "contextual_projection": False,
        "position_embedding_type": "none",
        "embedding_norm": False,
        "pooling": "packed_max",
    }
    last_packed_norm = "encoder.layers.0.packed_layer_norm"


class LunaValuesModelTest(WithoutVocabulary, LunaModelTest):
    """Real values in place of tokens, classification by the mean."""

    all_model_classes = (
        LunaModel,
        LunaForSequenceClassification,
        LunaForTokenClassification,
        LunaForSequencePairClassification,
    )
    fields = {"input_type": "values", "pooling": "mean"}


class LunaPipelineTest(PipelineTests, unittest.TestCase):
    model_tester_class = LunaModelTester
    model_classes = {cls.__name__.removeprefix("Luna"): cls for cls in LunaModelTest.all_model_classes}
