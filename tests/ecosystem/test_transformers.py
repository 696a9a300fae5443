"""Features of transformers that other tests do not cover: options of Trainer, streaming."""

import pytest
import torch
from transformers import (
    DataCollatorWithPadding,
    TextStreamer,
    Trainer,
    TrainingArguments,
)

from tests.marks import diagonal
from tests.modeling import luna, mega, megalodon_decoders
from tests.modeling.decoders import PLAIN, make_plain

FAMILIES = {"luna": luna, "mega": mega, "megalodon": megalodon_decoders}
QUIET = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
OPTIONS = {
    "bfloat16": {"bf16": True},
    "batch size found": {"auto_find_batch_size": True},
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "Adafactor": {"optim": "adafactor"},
    "accumulation": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
}


def rows(count=32):
    """Return sequences of several lengths, whose second token determines the label."""
    draw, made = torch.Generator().manual_seed(0), []
    for index in range(count):
        ids = torch.randint(6, 40, (4 + index % 6,), generator=draw)
        ids[1] = 4 + index % 2
        made.append({"input_ids": ids.tolist(), "labels": index % 2})
    return made


def train(model, tokenizer, folder, **options):
    options = {"learning_rate": 1e-2, "per_device_train_batch_size": 8, "max_steps": 12} | QUIET | options
    data = rows()
    trainer = Trainer(
        model,
        TrainingArguments(folder, **options),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"], trainer


@pytest.mark.slow
@pytest.mark.parametrize("family, option", diagonal(FAMILIES, OPTIONS))
def test_trainer(family, option, tokenizer, tmp_path):
    model = FAMILIES[family].make("ForSequenceClassification", num_labels=2, vocab_size=40).float()
    before, after, trainer = train(model, tokenizer, tmp_path, **OPTIONS[option])
    assert after < before
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert trainer.state.global_step == 12


@pytest.mark.parametrize(("family", "encoder_decoder"), PLAIN)
def test_streaming(family, encoder_decoder, tokenizer, capsys):
    """A streamer prints the text that `generate` returns, token by token."""
    model = make_plain(family, is_encoder_decoder=encoder_decoder, vocab_size=len(tokenizer))
    inputs = tokenizer("w1 w2 w3 w4", return_tensors="pt")
    streamer = TextStreamer(tokenizer, skip_prompt=not encoder_decoder, skip_special_tokens=True)
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False, streamer=streamer)
    new = ids[0] if encoder_decoder else ids[0, 4:]
    assert capsys.readouterr().out.split() == tokenizer.decode(new, skip_special_tokens=True).split()
