"""Base of the testers of the Luna and Mega classes; `run_contract.py` copies it next to transformers' tests."""

import inspect
import unittest

import torch
from transformers import set_seed
from transformers.testing_utils import torch_device

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, floats_tensor, global_rng, ids_tensor, random_attention_mask
from .test_training_mixin import TrainingTesterMixin


class EncoderTester:
    """Small configurations and inputs for the common tests. Subclasses define `config_class` and `small`."""

    batch_size = 13
    seq_length = 7
    num_choices = 4
    is_training = True
    hidden_size = 32
    num_hidden_layers = 2

    def __init__(self, parent, **fields):
        self.parent = parent
        self.fields = fields

    def get_config(self):
        fields = {"vocab_size": 99, "hidden_size": self.hidden_size, "num_hidden_layers": self.num_hidden_layers}
        return self.config_class(**fields | self.small | self.fields)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = [self.batch_size, self.seq_length]
        attention_mask = random_attention_mask(shape)
        if config.input_type == "values":
            return config, {"input_values": floats_tensor(shape), "attention_mask": attention_mask}
        first_word = config.eos_token_id + 1  # the ids contain no padding tokens
        input_ids = ids_tensor(shape, config.vocab_size - first_word) + first_word
        return config, {"input_ids": input_ids, "attention_mask": attention_mask}


class EncoderTests(ModelTesterMixin, TrainingTesterMixin):
    """The common tests, with a second input for pair classifiers. Subclasses set `model_tester_class`."""

    # Older transformers unfreeze all parameters in this test and then require gradients of unused ones.
    test_all_params_have_gradient = "frozen" in inspect.getsource(
        ModelTesterMixin.check_training_gradient_checkpointing
    )

    fields = {}

    test_bc_cache_name_forward = unittest.skip("an encoder raises `ValueError` for `use_cache=True`")(lambda self: None)

    def setUp(self):
        set_seed(0)
        global_rng.seed(0)
        self.model_tester = self.model_tester_class(self, **self.fields)
        config_class = self.model_tester_class.config_class
        self.config_tester = ConfigTester(self, config_class=config_class, hidden_size=36, **self.fields)

    def test_config(self):
        self.config_tester.run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if model_class.__name__.endswith("ForSequencePairClassification"):
            name = "input_values" if "input_values" in inputs else "input_ids"
            inputs[f"pair_{name}"] = inputs[name].flip(-1)
            if inputs.get("attention_mask") is not None:
                inputs["pair_attention_mask"] = inputs["attention_mask"].flip(-1)
            if return_labels:
                inputs["labels"] = torch.zeros(len(inputs[name]), dtype=torch.long, device=torch_device)
        return inputs


def skipped(reason):
    return unittest.skip(reason)(lambda self: None)


class WithoutVocabulary:
    """Disable the tests of a vocabulary, which embed token ids or change `vocab_size`, for models of real values."""

    test_resize_embeddings = False
    test_inputs_embeds = test_inputs_embeds_matches_input_ids = skipped("a model of real values has no vocabulary")
    test_model_get_set_embeddings = test_load_with_mismatched_shapes = test_training_overfit = test_inputs_embeds


class EncoderDecoderTests:
    """Overrides for encoder-decoders with a head."""

    is_encoder_decoder = True

    test_training_overfit = skipped("the test overfits on a sequence and then generates it from its own beginning")


class WeightsWithoutCache:
    """Overrides for decoders that return attention weights during generation only without a cache.

    `attention_shape` returns the shape of the weights of a batch of the given length.
    """

    def _greedy_generate(self, *arguments, use_cache=True, output_attentions=False, **options):
        options |= {"use_cache": use_cache, "output_attentions": output_attentions and not use_cache}
        return super()._greedy_generate(*arguments, **options)

    def _beam_search_generate(self, *arguments, use_cache=True, output_attentions=False, **options):
        options |= {"use_cache": use_cache, "output_attentions": output_attentions and not use_cache}
        return super()._beam_search_generate(*arguments, **options)

    def _check_attentions_for_generate(
        self, batch_size, attentions, prompt_length, output_length, config, decoder_past_key_values
    ):
        if decoder_past_key_values is not None:
            self.assertIsNone(attentions)
            return
        self.assertEqual(len(attentions), output_length - prompt_length)
        for length, step in enumerate(attentions, start=prompt_length):
            self.assertEqual({layer.shape for layer in step}, {self.attention_shape(batch_size, length, config)})
