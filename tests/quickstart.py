"""Check a new environment: the example of README.md without downloads, then each kind of model in the steps of a user.

    python tests/quickstart.py README.md

runs in an empty folder and requires the package with its extra `examples`.
"""

import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

import luna_mega

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
LUNA = {**SIZES, "num_attention_heads": 2, "projection_length": 4, "max_position_embeddings": 64}
MEGA = {**SIZES, "shared_representation_size": 8, "ema_projection_size": 2, "nffn_hidden_size": 16}
MEGALODON = {**SIZES, "shared_representation_size": 8, "value_size": 16, "ema_projection_size": 2, "chunk_size": 8}
MEGALODON |= {"num_attention_heads": 2, "norm_num_groups": 4}
DECODER = {"is_decoder": True}
KINDS = [
    ("LunaForMaskedLM", "LunaConfig", LUNA),
    ("LunaForSequenceClassification", "LunaConfig", LUNA),
    ("LunaForCausalLM", "LunaConfig", LUNA | DECODER),
    ("LunaForConditionalGeneration", "LunaSeq2SeqConfig", LUNA),
    ("MegaForMaskedLM", "MegaConfig", MEGA),
    ("MegaForSequenceClassification", "MegaConfig", MEGA),
    ("MegaForCausalLM", "MegaConfig", MEGA | DECODER | {"use_chunking": True, "chunk_size": 8}),
    ("MegaForConditionalGeneration", "MegaSeq2SeqConfig", MEGA),
    ("MegalodonForSequenceClassification", "MegalodonConfig", MEGALODON),
    ("MegalodonForCausalLM", "MegalodonConfig", MEGALODON),
]
# Suffix of the class -> Auto class and pipeline task. transformers 5 has no pipeline for encoder-decoders.
HEADS = {
    "ForMaskedLM": (AutoModelForMaskedLM, "fill-mask"),
    "ForSequenceClassification": (AutoModelForSequenceClassification, "text-classification"),
    "ForCausalLM": (AutoModelForCausalLM, "text-generation"),
    "ForConditionalGeneration": (AutoModelForSeq2SeqLM, None),
}
TEXT = "so good"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with the special tokens of RoBERTa."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(special + letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = dict(zip(("bos", "pad", "eos", "unk", "mask"), special, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    )


def make_model(name: str, config: str, fields: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(luna_mega, name)(getattr(luna_mega, config)(vocab_size=261, **fields)).eval()


def run_operator_example(page: Path) -> None:
    """Run the Python block of a page that uses an operator without a model, and so needs no network."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "luna_mega.kernels" in block]
    exec(compile(code, page, "exec"), {})


def check_kind(name: str, config: str, fields: dict, tokenizer: PreTrainedTokenizerFast) -> None:
    """Run forward, generate, beam search, Trainer, save, load and pipeline for a class."""
    model = make_model(name, config, fields)
    auto_class, task = next(value for suffix, value in HEADS.items() if name.endswith(suffix))
    batch = tokenizer([TEXT, "bad"], return_tensors="pt", padding=True)
    labels = torch.tensor([0, 1]) if "Classification" in name else batch["input_ids"]
    assert model(**batch, labels=labels).loss.isfinite()
    if model.can_generate():
        for beams in (1, 2):
            tokens = model.generate(**batch, max_new_tokens=4, do_sample=False, num_beams=beams)
            assert tokens.shape[0] == 2
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(batch["input_ids"], labels, strict=True)]
    arguments = TrainingArguments(output_dir="trained", max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("saved")
    loaded = auto_class.from_pretrained("saved").eval()
    with torch.no_grad():
        assert type(loaded) is type(model)
        assert loaded(**batch, labels=labels).logits.equal(model.eval()(**batch, labels=labels).logits)
    if task is not None:
        text = f"{TEXT}<mask>" if task == "fill-mask" else TEXT
        options = {"max_new_tokens": 4} if task == "text-generation" else {}
        assert pipeline(task, model="saved")(text, **options)


def main() -> None:
    page = Path(sys.argv[1]).resolve()
    tokenizer = make_tokenizer()
    run_operator_example(page)
    for kind in KINDS:
        check_kind(*kind, tokenizer)
        print(f"{kind[0]}: forward, {'generate, ' if 'ForC' in kind[0] else ''}training, saving and loading work")


if __name__ == "__main__":
    main()
