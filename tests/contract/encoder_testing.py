"""Base of the testers of the Luna and Mega classes; `run_contract.py` copies it next to transformers' tests."""

import inspect
import unittest
from numbers import Real

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline, set_seed
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

    @unittest.skip("an encoder raises `ValueError` for `use_cache=True`; see tests/modeling/test_cache_names.py")
    def test_bc_cache_name_forward(self):
        pass

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


class WithoutVocabulary:
    """Disable the tests of a vocabulary, for models of real values."""

    test_resize_embeddings = False

    @unittest.skip("the test embeds token ids; a model of real values has no vocabulary")
    def test_inputs_embeds(self):
        pass

    @unittest.skip("the test embeds token ids; a model of real values has no vocabulary")
    def test_inputs_embeds_matches_input_ids(self):
        pass

    @unittest.skip("the test expects an nn.Embedding; a model of real values has no vocabulary")
    def test_model_get_set_embeddings(self):
        pass

    @unittest.skip("the test changes vocab_size, which a model of real values does not read")
    def test_load_with_mismatched_shapes(self):
        pass

    @unittest.skip("the test overfits on token ids")
    def test_training_overfit(self):
        pass


class EncoderDecoderTests:
    """Overrides for encoder-decoders with a head."""

    is_encoder_decoder = True

    @unittest.skip("the test overfits on a sequence and then generates it from its own beginning")
    def test_training_overfit(self):
        pass


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


class PipelineTests:
    """Run every pipeline that an encoder's heads support: a single text has the same result as in a padded batch.

    `model_classes` maps the part of a class name after `Luna` or `Mega` to the class. `PipelineTesterMixin` cannot be
    used: its tests are in `tests/pipelines`, which the source distribution lacks, and use checkpoints from the Hub.
    """

    texts = ("the cat sat on the <mask>", "a <mask>", "the mat was red and the <mask> was not", "<mask> sat")

    @classmethod
    def setUpClass(cls):
        words = "<s> <pad> </s> <unk> <mask> the a cat dog mat sat was on and not red this text is about".split()
        tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        cls.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            cls_token="<s>",
            pad_token="<pad>",
            eos_token="</s>",
            sep_token="</s>",
            unk_token="<unk>",
            mask_token="<mask>",
        )

    def outputs(self, task, name, call=(), unpad=lambda output, text: output, **fields):
        set_seed(0)
        config = self.model_tester_class(self, vocab_size=len(self.tokenizer), **fields).get_config()
        model = self.model_classes[name](config).eval()
        pipe = pipeline(task, model=model, tokenizer=self.tokenizer, device=torch_device)
        separate = [pipe(text, **dict(call)) for text in self.texts]
        batched = pipe((text for text in self.texts), batch_size=2, **dict(call))
        self.assert_alike(separate, [unpad(output, text) for output, text in zip(batched, self.texts, strict=True)])
        return separate

    def assert_alike(self, first, second):
        """Check that lists and dictionaries are equal, with numbers rounded to 4 places."""
        if isinstance(first, dict):
            self.assertEqual(first.keys(), second.keys())
            first, second = list(first.values()), list(second.values())
        if isinstance(first, list):
            self.assertEqual(len(first), len(second))
            for one, other in zip(first, second, strict=True):
                self.assert_alike(one, other)
        elif isinstance(first, Real):
            self.assertAlmostEqual(first, second, places=4)
        else:
            self.assertEqual(first, second)

    def test_fill_mask(self):
        for candidates in self.outputs("fill-mask", "ForMaskedLM"):
            self.assertEqual(len(candidates), 5)
            self.assertNotIn("<mask>", candidates[0]["sequence"])

    def test_text_classification(self):
        name = "ForSequenceClassification"
        for scores in self.outputs("text-classification", name, {"top_k": None}, num_labels=3):
            self.assertEqual({score["label"] for score in scores}, {"LABEL_0", "LABEL_1", "LABEL_2"})
            self.assertAlmostEqual(sum(score["score"] for score in scores), 1.0, places=5)

    def test_token_classification(self):
        outputs = self.outputs("token-classification", "ForTokenClassification", {"ignore_labels": []})
        for text, tokens in zip(self.texts, outputs, strict=True):
            self.assertEqual([token["word"] for token in tokens], text.split())

    def test_feature_extraction(self):
        def unpad(features, text):
            return [features[0][: len(text.split()) + 2]]

        outputs = self.outputs("feature-extraction", "Model", unpad=unpad)
        for text, features in zip(self.texts, outputs, strict=True):
            shape = (1, len(text.split()) + 2, self.model_tester_class.hidden_size)
            self.assertEqual(torch.tensor(features).shape, shape)

    def test_zero_shot_classification(self):
        call = {"candidate_labels": ["cat", "dog"], "hypothesis_template": "this text is about {}"}
        label2id = {"contradiction": 0, "neutral": 1, "entailment": 2}
        fields = {"label2id": label2id, "id2label": {index: label for label, index in label2id.items()}}
        for answer in self.outputs("zero-shot-classification", "ForSequenceClassification", call, **fields):
            self.assertEqual(set(answer["labels"]), {"cat", "dog"})
            self.assertAlmostEqual(sum(answer["scores"]), 1.0, places=5)
