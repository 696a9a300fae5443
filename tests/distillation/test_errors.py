"""Models, options and tokenizers that `from_teacher` does not support."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from luna_mega import LunaForSequenceClassification
from luna_mega.distillation import Teacher, from_teacher
from luna_mega.distillation.loading import check_tokenizer
from luna_mega.distillation.parts import FAMILIES
from tests.distillation.models import make_model
from tests.errors import check_error


class MyClassifier(BertForSequenceClassification):
    pass


class MyEncoder(transformers.BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config)


class MyLinear(nn.Linear):
    pass


def bert(head="Model", **fields):
    return make_model("bert", head, **fields)


def with_class(kind):
    return kind(bert("ForSequenceClassification").config)


def with_layer(kind):
    model = bert()
    model.encoder.layer[1].output.dense = kind(24, 16)
    return model


def with_weight(change):
    model = bert()
    dense = model.encoder.layer[1].output.dense
    dense.weight = nn.Parameter(change(dense.weight.data), requires_grad=False)
    return model


MODELS = {
    "subclass": (lambda: with_class(MyClassifier), "BertForSequenceClassification"),
    "own class": (lambda: with_class(MyEncoder), "`model.base_model`"),
    "wrapper": (lambda: nn.DataParallel(bert()), "`model.module`"),
    "no model": (lambda: nn.Linear(2, 2), "Linear"),
    "layer": (lambda: with_layer(MyLinear), "MyLinear"),
    "integers": (lambda: with_weight(lambda x: (100 * x).to(torch.int8)), "torch.int8"),
    "float8": (lambda: with_weight(lambda x: x.to(torch.float8_e4m3fn)), "torch.float8_e4m3fn"),
    "meta": (lambda: with_weight(lambda x: x.to("meta")), "`device_map`"),
    "not finite": (lambda: with_weight(lambda x: x.index_fill(0, torch.tensor(0), torch.nan)), "layer.1.output.dense"),
    "head": (lambda: bert("ForNextSentencePrediction"), "BertForNextSentencePrediction"),
    "decoder": (lambda: bert(is_decoder=True), "is_decoder"),
    "head's activation": (lambda: make_model("roberta", "ForMaskedLM", hidden_act="relu"), "'relu'"),
    "summary": (lambda: make_model("electra", "ForMultipleChoice", summary_type="last"), "summary_type"),
}
OPTIONS = {
    "no tokenizer": ({"texts": ["a"]}, "`tokenizer`"),
    "a single text": ({"texts": "a b"}, "`texts`"),
    "no rows": ({"projection_length": 0}, "projection_length"),
    "no length": ({"max_length": 0}, "max_length"),
    "more rows than positions": ({"projection_length": 100_000}, "projection_length=100000 exceeds the longest text"),
    "more rows than tokens": ({"projection_length": 9, "max_length": 8}, "pass at most 8"),
    "labels of a loaded model": ({"num_labels": 2}, "num_labels"),
    "long": ({"max_length": 50, "position_extension": None}, "max_length=20"),
    "extension": ({"position_extension": "mirror"}, "position_extension"),
}
CONFIGS = {
    "t5": (lambda: transformers.T5Config(), "encoder-decoder"),
    "mpnet": (lambda: transformers.MPNetConfig(), "relative position biases"),
    "deberta": (lambda: transformers.DebertaV2Config(relative_attention=True), "relative position biases"),
    "relative keys": (lambda: transformers.BertConfig(position_embedding_type="relative_key"), "relative position"),
    "modernbert": (lambda: transformers.ModernBertConfig(), "modernbert"),
    "gpt2": (lambda: transformers.GPT2Config(), "gpt2"),
    "speech": (lambda: transformers.Wav2Vec2Config(), "wav2vec2"),
}


@pytest.mark.parametrize(("make", "named"), MODELS.values(), ids=MODELS)
def test_models(make, named):
    check_error(lambda: from_teacher(make()), ValueError, named)


@pytest.mark.parametrize(("options", "named"), OPTIONS.values(), ids=OPTIONS)
def test_options(options, named):
    check_error(lambda: from_teacher(bert(), **options), ValueError, named)


@pytest.mark.parametrize(("make", "named"), CONFIGS.values(), ids=CONFIGS)
def test_configurations(make, named, tmp_path):
    """The message names the value and the supported families."""
    make().save_pretrained(tmp_path)
    for expected in (named, ", ".join(FAMILIES)):
        check_error(lambda: from_teacher(str(tmp_path)), ValueError, expected)  # noqa: B023


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models(in_place):
    model, ids = bert("ForSequenceClassification"), torch.randint(3, 40, (2, 12))
    expected = model(ids).logits
    compiled = torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    student = from_teacher(model if in_place else compiled, projection_length=12).model
    assert type(student) is LunaForSequenceClassification
    torch.testing.assert_close(student(ids).logits, expected, rtol=0, atol=1e-5)


def word_tokenizer(**tokens):
    largest = tokens.pop("largest", 5)
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<mask>": 3, "a": 4, "b": largest}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), **tokens)


TOKENIZERS = {
    "equal": ("bert", {"mask_token": "<mask>", "pad_token": "<pad>"}, None),
    "another padding": ("bert", {"mask_token": "<mask>", "pad_token": "<s>"}, None),
    "another padding of positions": ("roberta", {"mask_token": "<mask>", "pad_token": "<s>"}, "pads with 0"),
    "the largest id": ("bert", {"mask_token": "<mask>", "largest": 39}, None),
    # the largest token id must fit, even if there are few tokens
    "a larger id": ("bert", {"mask_token": "<mask>", "largest": 40}, "token id 40"),
    "a large id": ("bert", {"mask_token": "<mask>", "largest": 10**6}, "token id 1000000"),
    "no mask": ("bert", {}, "mask token"),
}


@pytest.mark.parametrize(("name", "tokens", "named"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers(name, tokens, named):
    pair = Teacher(make_model(name, "ForMaskedLM")), word_tokenizer(**tokens)
    if named is None:
        check_tokenizer(*pair)
    else:
        check_error(lambda: check_tokenizer(*pair), ValueError, named)
