"""The Luna classes under transformers' common model tests; `run_contract.py` runs this file inside their package.

Disabled tests, and the reasons:

* tests of a vocabulary, for the model of real values.
* `test_bc_cache_name_forward`: it passes `use_cache=True` to encoders, which raise `ValueError`, and skips cache
  classes that are not from transformers. `tests/modeling/test_decoders.py` tests both names.

transformers itself skips generation tests that need a GPU or a package, and tests of features that a Luna decoder does
not declare: assisted decoding (`_is_stateful`), a static cache (`_can_compile_fullgraph`), 4D masks, other attention
functions.
"""

import unittest

import torch

from luna_mega import (
    LunaCache,
    LunaConfig,
    LunaForCausalLM,
    LunaForConditionalGeneration,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForQuestionAnswering,
    LunaForSequenceClassification,
    LunaForSequencePairClassification,
    LunaForTokenClassification,
    LunaModel,
    LunaSeq2SeqCache,
    LunaSeq2SeqConfig,
)

from ..encoder_testing import EncoderDecoderTests, EncoderTester, EncoderTests, WithoutVocabulary
from ..generation.test_utils import GenerationTesterMixin
from ..test_modeling_common import ids_tensor, random_attention_mask


class LunaModelTester(EncoderTester):
    config_class = LunaConfig
    num_attention_heads = 4
    key_length = 5  # last dimension of the recorded attention: the rows of P
    num_hidden_states_types = 2  # hidden_states and packed_hidden_states
    causal_lm_class = LunaForMaskedLM  # the class that test_training_overfit trains, because it has a loss
    small = {
        "num_attention_heads": num_attention_heads,
        "num_pack_attention_heads": 2,
        "intermediate_size": 37,
        "projection_length": key_length,
        "max_position_embeddings": 64,
    }


class LunaModelTest(EncoderTests, unittest.TestCase):
    """The paper's base model: post-norm, tied keys and values, learned positions, classification by the first token."""

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


class LunaSharedLayersModelTest(LunaModelTest):
    """One shared layer, a learned P per layer, no positions, no embedding norms, classification by max-pooling of P."""

    fields = {
        "share_layers": True,
        "contextual_projection": False,
        "position_embedding_type": "none",
        "embedding_norm": False,
        "pooling": "packed_max",
    }


class LunaValuesModelTest(WithoutVocabulary, LunaModelTest):
    """Real values instead of tokens, classification with mean pooling."""

    all_model_classes = (
        LunaModel,
        LunaForSequenceClassification,
        LunaForTokenClassification,
        LunaForSequencePairClassification,
    )
    fields = {"input_type": "values", "pooling": "mean"}


class LunaDecoderTests(GenerationTesterMixin, EncoderTests):
    """Overrides that all decoders share."""

    def _check_attentions_for_generate(
        self, batch_size, attentions, prompt_length, output_length, config, decoder_past_key_values
    ):
        """Check that every step has attention weights over the rows of P."""
        heads = config.get_text_config(decoder=True).num_attention_heads
        self.assertEqual(len(attentions), output_length - prompt_length)
        for length, step in enumerate(attentions, start=prompt_length):
            new = length if decoder_past_key_values is None or length == prompt_length else 1
            self.assertEqual({layer.shape for layer in step}, {(batch_size, heads, new, self.model_tester.key_length)})

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        cache = past_key_values
        if self.is_encoder_decoder:
            self.assertIsInstance(past_key_values, LunaSeq2SeqCache)
            cache, config = past_key_values.self_attention_cache, config.get_text_config(decoder=True)
        self.assertIsInstance(cache, LunaCache)
        self.assertEqual(len(cache), config.num_hidden_layers)
        self.assertEqual(cache.get_seq_length(), seq_length)
        heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        for layer in cache.layers:
            self.assertEqual(layer.tensors["key_mean"].shape[:3], (batch_size, heads, width))
            self.assertEqual(layer.tensors["pack_query"].shape[::2], (batch_size, heads))

    def _check_caches_are_equal(self, cache1, cache2):
        if isinstance(cache1, LunaSeq2SeqCache):
            self._check_caches_are_equal(cache1.self_attention_cache, cache2.self_attention_cache)
            self._check_caches_are_equal(cache1.cross_attention_cache, cache2.cross_attention_cache)
            return
        for one, other in zip(cache1.layers, cache2.layers, strict=True):
            self.assertEqual((one.seen, one.tensors.keys()), (other.seen, other.tensors.keys()))
            for name, tensor in one.tensors.items():
                torch.testing.assert_close(tensor, other.tensors[name])


class LunaCausalModelTester(LunaModelTester):
    num_hidden_states_types = 2
    causal_lm_class = LunaForCausalLM
    # test_training_overfit starts prompts with token 1, which must not be the padding token
    small = LunaModelTester.small | {"is_decoder": True, "pad_token_id": 0, "bos_token_id": 1}


class LunaCausalModelTest(LunaDecoderTests, unittest.TestCase):
    """The decoder-only model with the default configuration, and generation."""

    model_tester_class = LunaCausalModelTester
    all_model_classes = (LunaForCausalLM,)


class LunaCausalPreNormModelTest(LunaCausalModelTest):
    """A decoder-only model with elu, untied keys and values, sinusoidal positions and pre-norm."""

    fields = {
        "causal_activation": "elu",
        "tie_key_value": False,
        "position_embedding_type": "sinusoidal",
        "pre_norm": True,
    }


class LunaSeq2SeqModelTester(LunaModelTester):
    config_class = LunaSeq2SeqConfig
    causal_lm_class = LunaForConditionalGeneration
    decoder_seq_length = LunaModelTester.seq_length
    decoder_key_length = LunaModelTester.key_length
    num_hidden_states_types = 4  # those of the encoder and of the decoder
    small = LunaModelTester.small | {"pad_token_id": 0, "bos_token_id": 1}

    def prepare_config_and_inputs_for_common(self):
        config, inputs = super().prepare_config_and_inputs_for_common()
        shape, first_word = [self.batch_size, self.decoder_seq_length], config.eos_token_id + 1
        inputs["decoder_input_ids"] = ids_tensor(shape, config.vocab_size - first_word) + first_word
        inputs["decoder_attention_mask"] = random_attention_mask(shape)
        return config, inputs


class LunaSeq2SeqModelTest(EncoderDecoderTests, LunaDecoderTests, unittest.TestCase):
    """The encoder-decoder with the default configuration: one embedding, learned positions, post-norm."""

    model_tester_class = LunaSeq2SeqModelTester
    all_model_classes = (LunaForConditionalGeneration,)

    def _check_encoder_attention_for_generate(self, attentions, batch_size, config, prompt_length):
        shape = (batch_size, config.num_attention_heads, prompt_length, self.model_tester.key_length)
        self.assertEqual([layer.shape for layer in attentions], [shape] * config.num_hidden_layers)


class LunaSeq2SeqPreNormModelTest(LunaSeq2SeqModelTest):
    """The encoder-decoder with untied weights, sinusoidal positions, pre-norm and two embeddings."""

    fields = {
        "tie_key_value": False,
        "position_embedding_type": "sinusoidal",
        "pre_norm": True,
        "embedding_norm": False,
        "share_encoder_decoder_embeddings": False,
    }
