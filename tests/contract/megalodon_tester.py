"""The Megalodon classes under transformers' common model tests; `run_contract.py` runs this file inside their package.

Disabled tests: attention maps of generation with a cache, which Megalodon does not support; they are tested without a
cache. transformers skips the same tests as for a Mega decoder, see `mega_tester.py`.
"""

import unittest

import torch

from luna_mega import (
    MegalodonCache,
    MegalodonConfig,
    MegalodonForCausalLM,
    MegalodonForSequenceClassification,
    MegalodonModel,
)

from ..encoder_testing import EncoderTester, EncoderTests, WeightsWithoutCache
from ..generation.test_utils import GenerationTesterMixin


class MegalodonModelTester(EncoderTester):
    config_class = MegalodonConfig
    causal_lm_class = MegalodonForCausalLM
    seq_length = encoder_seq_length = key_length = 7
    small = {
        "num_attention_heads": 2,
        "shared_representation_size": 16,
        "value_size": 48,
        "intermediate_size": 36,
        "ema_projection_size": 4,
        "norm_num_groups": 4,
        "chunk_size": 16,
        "pad_token_id": 0,  # test_training_overfit starts prompts with token 1, which must not be the padding token
    }
    num_attention_heads = 1  # third dimension of the recorded attention [B, H, chunks, C, C]: the number of chunks


class MegalodonModelTest(WeightsWithoutCache, GenerationTesterMixin, EncoderTests, unittest.TestCase):
    """Prompts are shorter than a chunk, and generation continues in the next chunk."""

    model_tester_class = MegalodonModelTester
    all_model_classes = (MegalodonModel, MegalodonForCausalLM, MegalodonForSequenceClassification)
    all_generative_model_classes = (MegalodonForCausalLM,)
    fields = {"norm_num_groups": 4}
    training_overfit_steps = 100
    training_overfit_learning_rate = 1e-2

    def attention_shape(self, batch_size, length, config):
        size = min(config.chunk_size, length)
        return batch_size, config.num_attention_heads, -(-length // size), size, size

    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        self.assertIsInstance(past_key_values, MegalodonCache)
        self.assertEqual(len(past_key_values), config.num_hidden_layers)
        self.assertEqual(past_key_values.get_seq_length(), seq_length)
        width, chunk = config.hidden_size, config.chunk_size
        for layer in past_key_values.layers:
            self.assertEqual(layer.average.shape, (batch_size, width, config.ema_projection_size, 2))
            self.assertEqual(layer.keys.shape, (batch_size, chunk, config.shared_representation_size))
            self.assertEqual(layer.values.shape, (batch_size, chunk, config.value_size))
            self.assertEqual(layer.norm_mean.shape, (batch_size, config.norm_num_groups))

    def _check_caches_are_equal(self, cache1, cache2):
        super()._check_caches_are_equal(cache1, cache2)
        for one, other in zip(cache1.layers, cache2.layers, strict=True):
            torch.testing.assert_close(one.tensors, other.tensors)


class MegalodonChunkModelTest(MegalodonModelTest):
    """Short chunks that do not divide the length, one head, gated feed-forward layers, tied weights."""

    fields = {
        "norm_num_groups": 4,
        "num_attention_heads": 1,
        "chunk_size": 4,
        "swiglu": True,
        "rescale_nffn": True,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "pooling": "mean",
    }

    def test_attention_outputs(self):
        self.model_tester.num_attention_heads, self.model_tester.encoder_seq_length = 2, 4
        self.model_tester.key_length = 4
        super().test_attention_outputs()
