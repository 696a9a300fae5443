"""Check a new environment: the example of README.md without downloads, then each kind of model in the steps of a user.

    python tests/quickstart.py README.md

runs in an empty folder and requires the package with its extra `examples`.
"""

import re
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

import luna_mega

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
LUNA = {**SIZES, "num_attention_heads": 2, "projection_length": 4, "max_position_embeddings": 64}
MEGA = {**SIZES, "shared_representation_size": 8, "ema_projection_size": 2, "nffn_hidden_size": 16}
MEGALODON = {**SIZES, "shared_representation_size": 8, "value_size": 16, "ema_projection_size": 2, "chunk_size": 8}
MEGALODON |= {"num_attention_heads": 2, "norm_num_groups": 4}
CHUNKS = {"is_decoder": True, "use_chunking": True, "chunk_size": 8}
KINDS = {f"Luna{head}": LUNA for head in ("ForMaskedLM", "ForSequenceClassification", "ForConditionalGeneration")}
KINDS |= {f"Mega{head}": MEGA for head in ("ForMaskedLM", "ForSequenceClassification", "ForConditionalGeneration")}
KINDS |= {f"Megalodon{head}": MEGALODON for head in ("ForSequenceClassification", "ForCausalLM")}
KINDS |= {"LunaForCausalLM": LUNA | {"is_decoder": True}, "MegaForCausalLM": MEGA | CHUNKS}
# Suffix of the class -> pipeline task. transformers 5 has no pipeline for encoder-decoders.
TASKS = {"MaskedLM": "fill-mask", "SequenceClassification": "text-classification", "CausalLM": "text-generation"}
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


def run_operator_example(page: Path) -> None:
    """Run the Python block of a page that uses an operator without a model, and so needs no network."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if "luna_mega.kernels" in block]
    exec(compile(code, page, "exec"), {})


def check_kind(name: str, fields: dict, tokenizer: PreTrainedTokenizerFast) -> None:
    """Run forward, generate, beam search, Trainer, save, load and pipeline for a class."""
    torch.manual_seed(0)
    model_class, head = getattr(luna_mega, name), name.partition("For")[2]
    model = model_class(model_class.config_class(vocab_size=len(tokenizer), **fields)).eval()
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
    auto_class = getattr(transformers, f"AutoModelFor{head.replace('ConditionalGeneration', 'Seq2SeqLM')}")
    loaded = auto_class.from_pretrained("saved").eval()
    with torch.no_grad():
        assert type(loaded) is type(model)
        assert loaded(**batch, labels=labels).logits.equal(model.eval()(**batch, labels=labels).logits)
    if task := TASKS.get(head):
        text = f"{TEXT}<mask>" if task == "fill-mask" else TEXT
        options = {"max_new_tokens": 4} if task == "text-generation" else {}
        assert pipeline(task, model="saved")(text, **options)
    print(f"{name}: forward, {'generate, ' * model.can_generate()}training, saving and loading work")


if __name__ == "__main__":
    run_operator_example(Path(sys.argv[1]).resolve())
    for name, fields in KINDS.items():
        check_kind(name, fields, make_tokenizer())
