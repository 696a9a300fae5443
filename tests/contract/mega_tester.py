"""The Mega classes under transformers' common model tests; `run_contract.py` runs this file inside their package.

Disabled tests, and the reasons:

* tests of a vocabulary, for the model of real values; for the adaptive model, tests that resize the vocabulary or
  require a single `nn.Embedding`.
* `test_bc_cache_name_forward`, see `luna_tester.py`.
* attention maps of generation with a cache, which a Mega decoder does not support; they are tested without a cache.

transformers itself skips generation tests that need a GPU or a package, and tests of features that a Mega decoder does
not declare: assisted decoding (`_is_stateful`), a static cache (`_can_compile_fullgraph`), position ids and 4D masks,
other attention functions. Padding within a continued sequence is only tested on models with `layer_types`;
`tests/modeling/test_decoders.py` covers it.
"""

import unittest

import torch

from luna_mega import (
    MegaCache,
    MegaConfig,
    MegaForCausalLM,
    MegaForConditionalGeneration,
    MegaForImageClassification,
    MegaForMaskedLM,
    MegaForMultipleChoice,
    MegaForQuestionAnswering,
    MegaForSequenceClassification,
    MegaForSequencePairClassification,
    MegaForTokenClassification,
    MegaModel,
    MegaSeq2SeqCache,
    MegaSeq2SeqConfig,
    MegaSeq2SeqModel,
)

from ..encoder_testing import (
    EncoderDecoderTests,
    EncoderTester,
    EncoderTests,
    WeightsWithoutCache,
    WithoutVocabulary,
    skipped,
)
from ..generation.test_utils import GenerationTesterMixin
from ..test_modeling_common import floats_tensor

NO_DROPOUT = dict.fromkeys(
    ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob"), 0.0
)


class MegaModelTester(EncoderTester):
    config_class = MegaConfig
    num_attention_heads = 1  # second dimension of the recorded attention [B, chunks, C, C]: the number of chunks
    causal_lm_class = MegaForMaskedLM  # the class that test_training_overfit trains, because it has a loss
    small = {
        "intermediate_size": 48,
        "shared_representation_size": 16,
        "ema_projection_size": 4,
        "nffn_hidden_size": 37,
        "max_positions": 64,
        "initializer_range": 0.2,  # with v4's value of 0.02, the signal vanishes in layers this narrow
    }


class MegaModelTest(EncoderTests, unittest.TestCase):
    """The default configuration: softmax over all positions, rotary bias, ScaleNorm before the sublayers."""

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
        # Dropout would randomize the gradient of the last step, which the test checks.
        self.model_tester.fields = self.fields | NO_DROPOUT
        super().test_training_overfit()


class MegaChunkModelTest(MegaModelTest):
    """Laplace attention in chunks that do not divide the length, simple bias, LayerNorm after the sublayers."""

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
    """The paper's speech model: real values instead of tokens, batch norm, feature dropout, mean pooling."""

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


class MegaPicturesTester(MegaModelTester):
    encoder_seq_length = seq_length = key_length = 16  # number of patches
    small = MegaModelTester.small | {
        "input_type": "patches", "image_size": 16, "patch_size": 4, "max_positions": 16, "output_projection": True,
        "final_norm": True, "attention_activation": "laplace", "relative_positional_bias": "simple",
        "ema_shift": True, "normalization_type": "layernorm", "drop_path_rate": 0.1, "pooling": "mean",
        "classifier_num_layers": 0,
    }  # fmt: skip

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": floats_tensor([self.batch_size, 3, 16, 16])}


class MegaPicturesModelTest(WithoutVocabulary, EncoderTests, unittest.TestCase):
    """Images, with the configuration of the paper's ImageNet model."""

    model_tester_class = MegaPicturesTester
    all_model_classes = (MegaModel, MegaForImageClassification)


class MegaCausalModelTester(MegaModelTester):
    causal_lm_class = MegaForCausalLM
    # test_training_overfit starts prompts with token 1, which must not be the padding token
    small = MegaModelTester.small | {"is_decoder": True, "bidirectional": False, "pad_token_id": 0, "bos_token_id": 1}


class MegaCausalModelTest(WeightsWithoutCache, GenerationTesterMixin, MegaModelTest):
    """The language model with the default configuration, and generation."""

    model_tester_class = MegaCausalModelTester
    all_model_classes = (MegaForCausalLM,)

    def attention_shape(self, batch_size, length, config):
        size = config.attention_chunk or length
        return batch_size, -(-length // size), size, size

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        self.assertIsInstance(past_key_values, MegaCache)
        self.assertEqual(len(past_key_values), config.num_hidden_layers)
        self.assertEqual(past_key_values.get_seq_length(), seq_length)
        for layer in past_key_values.layers:
            kept = config.attention_chunk or layer.keys.shape[1]
            self.assertLessEqual(seq_length, layer.keys.shape[1] if config.attention_chunk is None else seq_length)
            self.assertEqual(layer.average.shape, (batch_size, config.hidden_size, config.ema_projection_size))
            self.assertEqual(layer.keys.shape, (batch_size, kept, config.shared_representation_size))
            self.assertEqual(layer.values.shape, (batch_size, kept, config.intermediate_size))

    def _check_caches_are_equal(self, cache1, cache2):
        super()._check_caches_are_equal(cache1, cache2)
        for one, other in zip(cache1.layers, cache2.layers, strict=True):
            for field in ("average", "mask", "position"):
                torch.testing.assert_close(getattr(one, field), getattr(other, field))


class MegaCausalChunkModelTest(MegaChunkModelTest, MegaCausalModelTest):
    """The language model with chunks that divide neither the prompt nor the output."""


class MegaAdaptiveModelTest(MegaCausalModelTest):
    """Adaptive embeddings and softmax with tied weights, RMSNorm, truncated moving average."""

    fields = {
        "adaptive_input_cutoffs": [20, 50],
        "adaptive_softmax_cutoffs": [20, 50],
        "normalization_type": "rmsnorm",
        "truncation": 3,
    }
    test_resize_embeddings = False
    test_model_get_set_embeddings = skipped("the test expects an nn.Embedding, adaptive ones are several")


class MegaSeq2SeqModelTester(MegaModelTester):
    config_class = MegaSeq2SeqConfig
    small = MegaModelTester.small | {"decoder_intermediate_size": 40}

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        inputs["decoder_input_ids"] = inputs["input_ids"].flip(0)
        inputs["decoder_attention_mask"] = inputs["attention_mask"].flip(0)
        return config, inputs


class MegaSeq2SeqModelTest(EncoderDecoderTests, MegaCausalModelTest):
    """The encoder-decoder with one vocabulary, and generation."""

    model_tester_class = MegaSeq2SeqModelTester
    all_model_classes = (MegaForConditionalGeneration,)

    def attention_shape(self, batch_size, length, config):
        return super().attention_shape(batch_size, length, config.decoder_config)

    def _check_encoder_attention_for_generate(self, attentions, **expected):
        if attentions is not None:  # attention weights are not returned with a cache
            super()._check_encoder_attention_for_generate(attentions, **expected)

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        if isinstance(past_key_values, MegaSeq2SeqCache):
            past_key_values = past_key_values.self_attention_cache
        super()._check_past_key_values_for_generate(batch_size, past_key_values, seq_length, config.decoder_config)

    def _check_caches_are_equal(self, cache1, cache2):
        super()._check_caches_are_equal(cache1.self_attention_cache, cache2.self_attention_cache)
        sources = (cache1.cross_attention_cache, cache2.cross_attention_cache)
        for one, other in zip(*(cache.layers for cache in sources), strict=True):
            torch.testing.assert_close((one.keys, one.values), (other.keys, other.values))


class MegaSeparateSeq2SeqModelTest(MegaSeq2SeqModelTest):
    """Three embedding matrices, a narrower decoder, Laplace attention, simple bias, LayerNorm after the sublayers."""

    fields = {
        "attention_activation": "laplace",
        "relative_positional_bias": "simple",
        "normalization_type": "layernorm",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
        "decoder_shared_representation_size": 12,
        "tie_word_embeddings": False,
    }


class MegaSeq2SeqBodyTester(MegaSeq2SeqModelTester):
    is_training = False  # without a head there is no loss


class MegaSeq2SeqBodyTest(EncoderTests, unittest.TestCase):
    """The encoder-decoder without a head."""

    model_tester_class = MegaSeq2SeqBodyTester
    all_model_classes = (MegaSeq2SeqModel,)
    is_encoder_decoder = True

    test_base_model_prefix_loads_base_weights = skipped("the encoder is a separate model, not the body of a head")
    test_training_overfit = skipped("without a head there is no loss")
