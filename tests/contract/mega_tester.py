"""The Mega classes under transformers' common model tests; `run_contract.py` runs this file inside their package.

What is switched off, and why:

* tests of a vocabulary, for the model of real values.
* `test_keep_in_fp32_modules` of transformers below 5.23, for the model with batch norm: it wants the integer
  `num_batches_tracked` in half precision. `tests/modeling/test_mega_precision.py` has what it is about.
"""

import unittest

import transformers
from packaging import version

from luna_mega import (
    MegaConfig,
    MegaForMaskedLM,
    MegaForMultipleChoice,
    MegaForQuestionAnswering,
    MegaForSequenceClassification,
    MegaForSequencePairClassification,
    MegaForTokenClassification,
    MegaModel,
)

from ..encoder_testing import EncoderTester, EncoderTests, PipelineTests, WithoutVocabulary


class MegaModelTester(EncoderTester):
    config_class = MegaConfig
    num_attention_heads = 1  # of the recorded attention [B, chunks, C, C]: the chunks
    causal_lm_class = MegaForMaskedLM  # the class with a loss that test_training_overfit trains
    small = {
        "intermediate_size": 48,
        "shared_representation_size": 16,
        "ema_projection_size": 4,
        "nffn_hidden_size": 37,
        "max_positions": 64,
        "initializer_range": 0.2,  # with v4's 0.02 next to nothing comes through layers this narrow
    }


class MegaModelTest(EncoderTests, unittest.TestCase):
    """Softmax attention over the whole sequence, rotary bias, ScaleNorm before the sub-layers: the defaults."""

    model_tester_class = MegaModelTester
    all_model_classes = (
        MegaModel,
        MegaForMaskedLM,
        MegaForSequenceClassification,
        MegaForMultipleChoice,
        MegaForTokenClassification,
        MegaForQuestionAnswering,
        MegaForSequencePairClassification,
    )
    training_overfit_steps = 100
    training_overfit_learning_rate = 1e-2

    def test_training_overfit(self):
        # Dropout makes the gradient of the last step, which the test looks at, a matter of luck.
        names = ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob")
        self.model_tester.fields = self.fields | dict.fromkeys(names, 0.0)
        super().test_training_overfit()


class MegaChunkModelTest(MegaModelTest):
    """Laplace attention in chunks that the length is no multiple of, simple bias, LayerNorm behind the sub-layers."""

    fields = {
        "attention_activation": "laplace",
        "use_chunking": True,
        "chunk_size": 4,
        "relative_positional_bias": "simple",
        "normalization_type": "layernorm",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
        "embedding_norm": True,
        "pooling": "mean",
        "pair_features": "interaction",
    }

    def test_attention_outputs(self):
        self.model_tester.num_attention_heads, self.model_tester.encoder_seq_length = 2, 4
        super().test_attention_outputs()


class MegaValuesModelTest(WithoutVocabulary, MegaModelTest):
    """Real values in place of tokens, batch norm, feature dropout, classification by the mean: the paper's speech."""

    all_model_classes = (
        MegaModel,
        MegaForSequenceClassification,
        MegaForTokenClassification,
        MegaForSequencePairClassification,
    )
    fields = {
        "input_type": "values",
        "normalization_type": "batchnorm",
        "final_norm": True,
        "use_feature_dropout": True,
        "pooling": "mean",
    }

    @unittest.skipIf(version.parse(transformers.__version__) < version.parse("5.23"), "it counts integers as weights")
    def test_keep_in_fp32_modules(self):
        super().test_keep_in_fp32_modules()


class MegaPipelineTest(PipelineTests, unittest.TestCase):
    model_tester_class = MegaModelTester
    model_classes = {cls.__name__.removeprefix("Mega"): cls for cls in MegaModelTest.all_model_classes}
