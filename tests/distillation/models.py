"""Tiny encoders of every family, their tokenizers and folders."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizer, PreTrainedTokenizerFast

_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
# Name -> (prefix of the class names, fields of the configuration).
ENCODERS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "camembert": ("Camembert", {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}),
    "electra": ("Electra", {"embedding_size": 12}),
}
HEADS = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
    "ForMultipleChoice",
)  # fmt: skip
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *[f"w{i}" for i in range(25)]]
POOLING = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


def make_model(name: str, head: str = "Model", **fields: Any) -> transformers.PreTrainedModel:
    """Return a model with random weights that are large enough for each layer to affect the result."""
    torch.manual_seed(0)
    stem, own = ENCODERS[name]
    model = getattr(transformers, stem + head)(getattr(transformers, f"{stem}Config")(**_SIZES | own | fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def bert_tokenizer(**options: Any) -> BertTokenizer:
    return BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}, **options)


def xlm_tokenizer(fill: str = "") -> PreTrainedTokenizerFast:
    """Return a tokenizer with 40 tokens, including the special tokens of XLM-R; the padding token is 1."""
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


def run_card(folder: Path) -> tuple[Any, ModelCard]:
    """Run the code in the model card of a folder in its parent; return its model, and the card."""
    card = ModelCard.load(folder / "README.md")
    (block,) = re.findall("(?s)```python\n(.*?)```", card.text)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["model"], card


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def change(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    write(path, json.loads(path.read_text(encoding="utf-8")) | fields)


def save_teacher(
    folder: Path,
    name: str = "bert",
    head: str = "Model",
    modules: tuple[str, ...] = (),
    tokenizer: transformers.PreTrainedTokenizerBase | None = None,
    **fields: Any,
) -> Path:
    """Save a model with a tokenizer, and with the named modules of sentence-transformers."""
    make_model(name, head, **{"pad_token_id": 0} | fields).save_pretrained(folder)
    (tokenizer or bert_tokenizer()).save_pretrained(folder)
    if modules:
        paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(modules, 1))]
        kinds = zip(paths, ("Transformer", *modules), strict=True)
        entries = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ]
        write(folder / "modules.json", entries)
        write(folder / "1_Pooling" / "config.json", POOLING)
    return folder
