"""Teachers whose weights are not all of the model are errors of one line; wrappers without effect are removed."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

import luna_mega_cli
from luna_mega import LunaForSequenceClassification
from luna_mega.distillation import from_teacher
from tests.distillation.models import PLAIN, make_model
from tests.distillation.test_sentences import WORDS


class MyClassifier(BertForSequenceClassification):
    pass


class MyEncoder(transformers.BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.bert = transformers.BertModel(config)


class MyLinear(nn.Linear):
    pass


def classifier():
    return make_model("bert", "ForSequenceClassification", pad_token_id=0).eval()


def with_class(kind):
    return kind(classifier().config)


def with_layer(kind):
    model = classifier()
    model.bert.encoder.layer[1].output.dense = kind(24, 16)
    return model


def with_weight(change):
    model = classifier()
    dense = model.bert.encoder.layer[1].output.dense
    dense.weight = nn.Parameter(change(dense.weight.data), requires_grad=False)
    return model


MODELS = {
    "subclass": (lambda: with_class(MyClassifier), "MyClassifier is not .* an instance of BertForSequenceClassificat"),
    "own class": (lambda: with_class(MyEncoder), "MyEncoder is not a class of transformers, .*; pass `model.base_mod"),
    "wrapper": (lambda: nn.DataParallel(classifier()), "got a DataParallel; pass its folder or `model.module`"),
    "no model": (lambda: nn.Linear(2, 2), "must be a model of transformers, got a Linear; pass its folder"),
    "layer": (lambda: with_layer(MyLinear), r"layer.1.output.dense of the teacher is a MyLinear"),
    "integers": (lambda: with_weight(lambda x: (100 * x).to(torch.int8)), r"a Parameter of torch.int8, and only float"),
    "float8": (lambda: with_weight(lambda x: x.to(torch.float8_e4m3fn)), "a Parameter of torch.float8_e4m3fn"),
    "meta": (lambda: with_weight(lambda x: x.to("meta")), "is on the device meta; load it without `device_map`"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case):
    make, message = MODELS[case]
    with pytest.raises(ValueError, match=message) as error:
        from_teacher(make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models(in_place):
    model = classifier()
    compiled = torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    student = from_teacher(model if in_place else compiled, projection_length=12).model
    assert type(student) is LunaForSequenceClassification
    ids = torch.randint(3, 40, (2, 12))
    torch.testing.assert_close(student(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


@pytest.fixture
def folder(tmp_path):
    classifier().save_pretrained(tmp_path / "teacher")
    tokenizer = transformers.BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


FOLDERS = {
    "8 bits": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantized (bitsandb"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized (gptq); pass the original ch"),
    "pretraining": ({"architectures": ["BertForPreTraining"]}, "the teacher is a BertForPreTraining, whose head Luna"),
    "unknown class": ({"architectures": ["MyClassifier"]}, "the teacher is a MyClassifier, whose head Luna does not"),
    "another head": ({"architectures": ["BertForNextSentencePrediction"]}, "is a BertForNextSentencePrediction, whose"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders(case, folder, tmp_path, capsys):
    fields, message = FOLDERS[case]
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert luna_mega_cli.main(["distill", str(folder), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_adapters(folder, tmp_path, capsys):
    (folder / "adapter_config.json").write_text("{}")
    assert luna_mega_cli.main(["distill", str(folder), "--output", str(tmp_path / "out")]) == 1
    assert "contains an adapter (adapter_config.json); merge it first: `model.merge_and" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_full_disk(file, folder, tmp_path, capsys):
    """One line, and nothing is left. Words of 4,000 characters are larger than the weights."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    xlm_tokenizer(fill="a" * 4_000).save_pretrained(folder)
    sizes = {name: (folder / name).stat().st_size for name in ("model.safetensors", "tokenizer.json")}
    limit = sizes[file] - 1000
    assert file == "model.safetensors" or limit > sizes["model.safetensors"] + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        status = luna_mega_cli.main(["distill", str(folder), "--output", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert status == 1 and f"cannot write {file}" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def xlm_tokenizer(fill=""):
    """Return a tokenizer with 40 tokens, the special tokens of XLM-R among them; it pads with 1."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *[f"w{i}{fill}" for i in range(35)]]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{name}_token": word for name, word in special.items()},
        mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.mark.parametrize(("name", "own"), [*((name, 0) for name in PLAIN), ("bert", 3), ("bert", None)])
@torch.no_grad()
def test_padding_of_another_tokenizer(name, own, tmp_path):
    """The student pads with the tokenizer's token, unless positions depend on the teacher's, as in RoBERTa."""
    model = make_model(name, "Model", pad_token_id=own).eval()
    model.save_pretrained(tmp_path)
    tokenizer = xlm_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    if name not in ("bert", "distilbert", "electra"):
        with pytest.raises(ValueError, match=f"the tokenizer pads with 1 and the teacher with {own}"):
            from_teacher(str(tmp_path), projection_length=12)
        return
    student, tokenizer, _ = from_teacher(str(tmp_path), projection_length=12)
    assert student.config.pad_token_id == tokenizer.pad_token_id == 1
    batch = tokenizer(["w0 w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    expected = model(**batch).last_hidden_state[mask]
    for inputs in (batch, {"input_ids": batch["input_ids"]}):  # the mask of the latter is inferred
        torch.testing.assert_close(student(**inputs).last_hidden_state[mask], expected, rtol=0, atol=1e-5)
