"""Every class with a loss, with Trainer's defaults and the tokenizers of other models.

A model trains for two steps and is saved by Trainer. The folder gives the same logits, and steps of a decoder equal the
entire sequence. `tests/hub` loads folders without the package.
"""

import copy
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from tests.marks import diagonal, slow_but
from tests.modeling import contract

WORDS = [f"w{number}" for number in range(40)]
TEXTS = [" ".join(WORDS[(7 * row + place) % 40] for place in range(3 + row % 6)) for row in range(16)]


def bert():
    """Return a tokenizer that pads with 0, and whose other special tokens are `[CLS]` and `[SEP]`."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def fast(*words, bos, eos, unk, **special):
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [(token, words.index(token)) for token in {bos, eos}]
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=ids)
    names = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **special)


def roberta():
    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>"]
    return fast(*words, bos="<s>", eos="</s>", unk="<unk>", pad_token="<pad>")


def gpt2(**special):
    """Return a tokenizer as GPT-2's: the last id begins and ends texts, and none is padding."""
    end = "<|endoftext|>"
    return fast("<mask>", *WORDS, end, bos=end, eos=end, unk=end, **special)


TOKENIZERS = {"0": bert, "1": roberta, "end": lambda: gpt2(pad_token="<|endoftext|>"), "added": gpt2}
CLASSES = [name for name in contract.CLASSES if not name.endswith("Model")]
FAST, PAIRS = diagonal(CLASSES, TOKENIZERS), [*product(CLASSES, TOKENIZERS)]


def collator_of(head, model, tokenizer):
    """Return the collator that a user of the class chooses; None = Trainer's default."""
    if head.endswith(("MaskedLM", "CausalLM")):
        return DataCollatorForLanguageModeling(tokenizer, mlm=head == "MaskedLM")
    if head == "ConditionalGeneration":
        return DataCollatorForSeq2Seq(tokenizer, model=model)
    kinds = {"TokenClassification": DataCollatorForTokenClassification}
    kinds |= {"MultipleChoice": DataCollatorForMultipleChoice, "SequenceClassification": DataCollatorWithPadding}
    return kinds[head](tokenizer) if head in kinds else None


def examples(head, tokenizer):
    """Return the rows of the training data."""
    rows = []
    for index, text in enumerate(TEXTS):
        row = dict(tokenizer(text))
        row.pop("token_type_ids", None)
        if head == "ConditionalGeneration":
            row["labels"] = tokenizer(text[:8])["input_ids"]
        elif head == "TokenClassification":
            row["labels"] = [id % 2 for id in row["input_ids"]]
        elif head == "QuestionAnswering":
            row |= {"start_positions": 1, "end_positions": 2}
        elif head == "MultipleChoice":
            row = {name: [value, value[::-1]] for name, value in row.items()} | {"labels": index % 2}
        elif head == "SequencePairClassification":
            row |= {"pair_input_ids": tokenizer(TEXTS[0])["input_ids"], "labels": index % 2}
        elif head == "SequenceClassification":
            row["labels"] = index % 2
        rows.append(row)
    return rows


@pytest.mark.parametrize(("name", "pad"), slow_but(FAST, PAIRS))
def test_training(name, pad, tmp_path):
    tokenizer, member = TOKENIZERS[pad](), contract.CLASSES[name]
    model, head = member.make(torch.float32, vocab_size=len(tokenizer)), member.head.removeprefix("For")
    if pad == "added":
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        model.resize_token_embeddings(len(tokenizer))
    if model.config.is_encoder_decoder and pad == "0":  # as T5 and Marian do
        model.config.decoder_start_token_id = tokenizer.pad_token_id
    rows = examples(head, tokenizer)
    trainers = {True: (Seq2SeqTrainer, Seq2SeqTrainingArguments), False: (Trainer, TrainingArguments)}
    kind, options = trainers[model.config.is_encoder_decoder]
    arguments = options(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    collator = collator_of(head, model, tokenizer)
    trainer = kind(model, arguments, collator, train_dataset=rows, processing_class=tokenizer)
    assert trainer.args.optim == "adamw_torch_fused"
    before = copy.deepcopy(dict(model.named_parameters()))
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    predictions = trainer.predict(rows[:3]).predictions  # without the cache
    assert all(len(x) == 3 for x in (predictions if isinstance(predictions, tuple) else [predictions]))
    batch = {name: x for name, x in trainer.data_collator(rows[3:6]).items() if name != "idx"}
    again = type(model).from_pretrained(tmp_path / "checkpoint-2")
    with torch.no_grad():
        ours, theirs = model.eval()(**batch), again(**batch)
    assert ours.loss.isfinite() and not again.training
    torch.testing.assert_close(dict(theirs.items()), dict(ours.items()))
    if member.head in contract.DECODERS:
        contract.check_division(model.double(), contract.Division((1,) * 9, (9, 4)))
