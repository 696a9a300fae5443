"""The Luna classes under transformers' common model tests; `run_contract.py` runs this file inside their package.

What is switched off, and why:

* `test_all_params_have_gradient`: the last norm of P has no gradient under a head that does not read P.
  `test_parameters_without_gradient` asserts that this is the only one.
* tests of a vocabulary, for the model of real values.
"""

import unittest

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline, set_seed
from transformers.testing_utils import nested_simplify, torch_device

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

from ..test_configuration_common import ConfigTester
from ..test_modeling_common import ModelTesterMixin, floats_tensor, global_rng, ids_tensor, random_attention_mask
from ..test_training_mixin import TrainingTesterMixin


class LunaModelTester:
    """Small configuration and inputs, in the form the common tests ask for."""

    batch_size = 13
    seq_length = 7
    num_choices = 4
    is_training = True
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    key_length = 5  # of the recorded attention: the rows of P
    num_hidden_states_types = 2  # hidden_states and packed_hidden_states
    causal_lm_class = LunaForMaskedLM  # the class with a loss that test_training_overfit trains

    def __init__(self, parent, **fields):
        self.parent = parent
        self.fields = fields

    def get_config(self):
        return LunaConfig(
            **{
                "vocab_size": 99,
                "hidden_size": self.hidden_size,
                "num_hidden_layers": self.num_hidden_layers,
                "num_attention_heads": self.num_attention_heads,
                "num_pack_attention_heads": 2,
                "intermediate_size": 37,
                "projection_length": self.key_length,
                "max_position_embeddings": 64,
            }
            | self.fields
        )

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        shape = [self.batch_size, self.seq_length]
        attention_mask = random_attention_mask(shape)
        if config.input_type == "values":
            return config, {"input_values": floats_tensor(shape), "attention_mask": attention_mask}
        first_word = config.eos_token_id + 1  # no padding among the tokens
        input_ids = ids_tensor(shape, config.vocab_size - first_word) + first_word
        return config, {"input_ids": input_ids, "attention_mask": attention_mask}


class LunaModelTest(ModelTesterMixin, TrainingTesterMixin, unittest.TestCase):
    """Post-norm, tied keys and values, learned positions, classification by the first token: the paper's base model."""

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
    fields = {}
    last_packed_norm = "encoder.layers.1.packed_layer_norm"

    def setUp(self):
        set_seed(0)
        global_rng.seed(0)
        self.model_tester = LunaModelTester(self, **self.fields)
        self.config_tester = ConfigTester(self, config_class=LunaConfig, hidden_size=36, **self.fields)

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_parameters_without_gradient(self):
        for model_class in self.all_model_classes[1:]:
            with self.subTest(model_class.__name__):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                model = model_class(config).to(torch_device).train()
                model(**self._prepare_for_class(inputs, model_class, return_labels=True)).loss.backward()
                reads_packed = hasattr(model, "pooler") and config.pooling.startswith("packed")
                unread = [] if reads_packed else [f"luna.{self.last_packed_norm}.{name}" for name in ("weight", "bias")]
                self.assertEqual([name for name, p in model.named_parameters() if p.grad is None], unread)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if model_class is LunaForSequencePairClassification:
            name = "input_values" if "input_values" in inputs else "input_ids"
            inputs[f"pair_{name}"] = inputs[name].flip(-1)
            if inputs.get("attention_mask") is not None:
                inputs["pair_attention_mask"] = inputs["attention_mask"].flip(-1)
            if return_labels:
                inputs["labels"] = torch.zeros(len(inputs[name]), dtype=torch.long, device=torch_device)
        return inputs


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


class LunaValuesModelTest(LunaModelTest):
    """Real values in place of tokens, classification by the mean."""

    all_model_classes = (
        LunaModel,
        LunaForSequenceClassification,
        LunaForTokenClassification,
        LunaForSequencePairClassification,
    )
    fields = {"input_type": "values", "pooling": "mean"}
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


class LunaPipelineTest(unittest.TestCase):
    """Every pipeline that a Luna head serves: a text alone and in a padded batch give the same.

    `PipelineTesterMixin` cannot be used: what it runs is in `tests/pipelines`, which the source distribution lacks, on
    checkpoints from the Hub.
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

    def outputs(self, task, model_class, call=(), unpad=lambda output, text: output, **fields):
        set_seed(0)
        config = LunaModelTester(self, vocab_size=len(self.tokenizer), **fields).get_config()
        pipe = pipeline(task, model=model_class(config).eval(), tokenizer=self.tokenizer, device=torch_device)
        alone = [pipe(text, **dict(call)) for text in self.texts]
        batched = pipe((text for text in self.texts), batch_size=2, **dict(call))
        batched = [unpad(output, text) for output, text in zip(batched, self.texts, strict=True)]
        self.assertEqual(nested_simplify(alone, 4), nested_simplify(batched, 4))
        return alone

    def test_fill_mask(self):
        for candidates in self.outputs("fill-mask", LunaForMaskedLM):
            self.assertEqual(len(candidates), 5)
            self.assertNotIn("<mask>", candidates[0]["sequence"])

    def test_text_classification(self):
        for scores in self.outputs("text-classification", LunaForSequenceClassification, {"top_k": None}, num_labels=3):
            self.assertEqual({score["label"] for score in scores}, {"LABEL_0", "LABEL_1", "LABEL_2"})
            self.assertAlmostEqual(sum(score["score"] for score in scores), 1.0, places=5)

    def test_token_classification(self):
        outputs = self.outputs("token-classification", LunaForTokenClassification, {"ignore_labels": []})
        for text, tokens in zip(self.texts, outputs, strict=True):
            self.assertEqual([token["word"] for token in tokens], text.split())

    def test_feature_extraction(self):
        def unpad(features, text):
            return [features[0][: len(text.split()) + 2]]

        outputs = self.outputs("feature-extraction", LunaModel, unpad=unpad)
        for text, features in zip(self.texts, outputs, strict=True):
            self.assertEqual(torch.tensor(features).shape, (1, len(text.split()) + 2, LunaModelTester.hidden_size))

    def test_zero_shot_classification(self):
        call = {"candidate_labels": ["cat", "dog"], "hypothesis_template": "this text is about {}"}
        label2id = {"contradiction": 0, "neutral": 1, "entailment": 2}
        fields = {"label2id": label2id, "id2label": {index: label for label, index in label2id.items()}}
        for answer in self.outputs("zero-shot-classification", LunaForSequenceClassification, call, **fields):
            self.assertEqual(set(answer["labels"]), {"cat", "dog"})
            self.assertAlmostEqual(sum(answer["scores"]), 1.0, places=5)
