"""Records of the original code from the parity fixtures, with the names that `luna-mega verify` reads."""

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Names in `io.safetensors` without the name of the batch, and the names of the same tensors in a record.
NAMES = {
    r"(?:0\.)?src_tokens|ids": "input_ids",
    r"1\.src_tokens|src1_tokens": "pair_input_ids",
    r"prev_output_tokens": "decoder_input_ids",
    r"enc\.hidden\.(\d+)\.x|encoder_hidden\.(\d+)": "encoder_hidden_states.",
    r"dec\.hidden\.(\d+)\.x|decoder_hidden\.(\d+)": "decoder_hidden_states.",
    r"enc\.hidden\.(\d+)\.p": "encoder_packed_hidden_states.",
    r"(?:dec\.|0\.)?hidden\.(\d+)\.p": "packed_hidden_states.",
    r"(?:0\.)?hidden\.(\d+)(?:\.x)?": "hidden_states.",
    r"block\.(\d+)": "hidden_states.",
    r"out_proj": "last_hidden_state",
    r"(input_ids|pixel_values|attention_mask|token_type_ids)": "",
    r"((?:start_|end_)?logits|pooler_output|hidden_states\.\d+)": "",
}


def read_record(folder: Path, batch: str = "") -> dict[str, torch.Tensor]:
    """Return the inputs and outputs of a batch of a fixture."""
    io, found = load_file(folder / "io.safetensors"), {}
    for name, tensor in io.items():
        for pattern, start in NAMES.items():
            if match := re.fullmatch(f"{re.escape(batch)}(?:{pattern})", name):
                end = next(filter(None, match.groups()), "")
                new = f"{start}{int(end) + 1 if 'block' in name else end}"
                if tensor.is_floating_point():
                    new = new.replace("input_ids", "input_values")
                found[new] = tensor
    if "lprobs" in io and "logits" not in io:  # of an adaptive softmax
        found["logits"] = io["lprobs"]
    for name in ("input_ids", "input_values"):
        if name in found:  # the original pads the last chunk
            length = found[name].shape[1]
            found |= {
                key: x[:, :length].contiguous() for key, x in found.items() if re.fullmatch(r"hidden_states\.\d+", key)
            }
    return found


def write_record(file: Path, record: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write a record of the checkpoint of a model folder."""
    report = folder / "conversion_report.json"
    if report.exists():
        sha256 = json.loads(report.read_text(encoding="utf-8"))["source"]["sha256"]
    else:
        sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    save_file(record, file, metadata={"sha256": sha256, "source": "a fixture"})
    return file
