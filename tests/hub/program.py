"""Load the folders of a folder with the installed versions, run and train the models, and print the results as JSON.

Usage: python program.py FOLDER. A model is in FOLDER/TYPE/CLASS with its Auto class.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4]])


def results(folder: Path) -> dict:
    """Return logits, generated tokens, and losses of `Trainer`."""
    load = getattr(transformers, folder.name).from_pretrained
    model = load(folder, trust_remote_code=True).eval()
    labels = IDS[:, 0] % 2 if folder.name.endswith("Classification") else IDS
    with torch.no_grad():
        source = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        output = model(input_ids=IDS, **source)
    found = {"logits": output.logits.tolist(), "losses": []}
    if model.can_generate():
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        found["tokens"] = [model.generate(IDS, num_beams=beams, **options).tolist() for beams in (1, 2)]
        assert output["cache"] is output.cache is output.past_key_values is not None
    rows = [{"input_ids": row, "labels": label} for row, label in zip(IDS, labels, strict=True)]
    with tempfile.TemporaryDirectory() as run:
        options = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True}
        arguments = transformers.TrainingArguments(run, per_device_train_batch_size=2, disable_tqdm=True, **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        found["losses"] += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found["losses"].append(trainer.evaluate()["eval_loss"])
        model.save_pretrained(Path(run, "again"))
        again = load(Path(run, "again"), trust_remote_code=True)
        assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    return found


if __name__ == "__main__":
    folders = sorted(Path(sys.argv[1]).glob("*/*"))
    print(json.dumps({folder.parent.name + folder.name: results(folder) for folder in folders}))
