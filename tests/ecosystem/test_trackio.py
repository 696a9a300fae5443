"""Trackio records a training run locally."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.modeling import luna_decoders, mega_decoders

pytest.importorskip("trackio", reason="trackio is not installed")


@pytest.mark.parametrize("family", [luna_decoders, mega_decoders], ids=["luna", "mega"])
def test_report_to_trackio(family, tmp_path, monkeypatch):
    """With `report_to="trackio"`, the database contains the losses of every step."""
    import trackio
    from trackio import sqlite_storage, utils

    for module in (trackio, sqlite_storage, utils):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 30, (8, 11))]
    options = {"project": "tiny", "run_name": "a run", "report_to": "trackio", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(tmp_path / "out", max_steps=3, logging_steps=1, save_strategy="no", **options)
    trainer = Trainer(family.make(dtype=torch.float32), arguments, train_dataset=data)
    trainer.train()
    rows = sqlite_storage.SQLiteStorage.get_logs("tiny", "a run")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses == [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] and len(losses) == 3
