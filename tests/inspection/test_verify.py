"""`luna-mega verify` compares a model with outputs that the original code recorded, and fails for a wrong converter."""

import json
import random
import re
import shutil
import subprocess
import sys
import types
import venv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from luna_mega import MegaForMaskedLM
from luna_mega.inspection import verify as module
from luna_mega.inspection.verify import verify
from luna_mega_cli import main
from tests.errors import command_error
from tests.inspection.records import read_record, write_record

PAGE = (Path(__file__).parents[2] / "docs" / "conversion.md").read_text(encoding="utf-8")
CONVERTED = {
    "luna/bert_heads": "A.",
    "luna/lra21_listops_tied_layers": "A.",
    "luna/lra23_meanpool_tied_layers": "B.",
    "luna/s2s_tied": "A.",
    "mega/07_lm_postnorm_laplace_simple_trunc": "",
    "mega/08_lm_adaptive_tied_factor2_base": "",
    "mega/11_lra_text_mp_postnorm_softmax": "",
    "mega/12_lra_image_laplace_batchnorm_chunk_trunc": "",
    "mega/14_sc_raw_base": "",
    "mega/15_flash_mt_softmax_trunc0": "",
    "mega/16_image_batchnorm_linear_nopos_rep": "",
    "megalodon/05_sharded_mp2": "C.",
}
LOADED = ["mega/hf_clm_softmax_chunk", "mega/hf_mlm_softmax_chunk_short", "mega/hf_qa"]
# Faults of a converter.
FAULTS = {
    "half": lambda name, x: x / 2,
    "no bias": lambda name, x: torch.zeros_like(x) if name.endswith("bias") else x,
    "transposed": lambda name, x: x.mT.reshape(x.shape) if x.dim() == 2 else x,
    "one row off": lambda name, x: x.roll(1, 0) if x.dim() > 1 else x,
    "reversed": lambda name, x: x.flip(0) if x.dim() == 1 else x,
}
# Without effect on outputs: softmax ignores what is added to all scores; the prior of no token, a counter of batches.
NO_EFFECT = re.compile(r".*key\.bias|.*prior_.*|.*num_batches_tracked")


def convert(parity_folder, name, output):
    source = parity_folder(*name.split("/"))
    file = source / "checkpoint.pt"
    assert main(["convert", str(file if file.exists() else source), "--output", str(output)]) == 0
    return output, write_record(output.with_suffix(".recorded"), read_record(source, CONVERTED[name]), output)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_wrong_converter_is_noticed(name, parity_folder, tmp_path, capsys):
    """A converted checkpoint equals the original, and no longer does so if a fault changes one random tensor of it."""
    folder, record = convert(parity_folder, name, tmp_path / "model")
    found = verify(folder, record)
    assert found.within and {"logits"} < found.outputs.keys() and any("states." in name for name in found.outputs)
    assert all(row["largest"] > 0.1 for row in found.outputs.values())
    file = folder / "model.safetensors"
    right = load_file(file)
    for fault, change in FAULTS.items():
        weights = {key: x for key, x in right.items() if x.is_floating_point() and not NO_EFFECT.fullmatch(key)}
        wrong = {key: y for key, x in weights.items() if not torch.equal(y := change(key, x).contiguous(), x)}
        if wrong:
            key = random.Random(f"{name} {fault}").choice(sorted(wrong))
            save_file(right | {key: wrong[key]}, file, {"format": "pt"})
            capsys.readouterr()
            assert main(["verify", str(folder), str(record)]) == 1, (fault, key)
            printed = capsys.readouterr()
            assert "MORE THAN 1e-05" in printed.out or "NaN or Inf in the model" in printed.err


@pytest.fixture
def masked_lm(parity_folder):
    folder = parity_folder("mega", "hf_mlm_softmax_chunk_short")
    return folder, read_record(folder)


@pytest.mark.parametrize("name", LOADED)
def test_folders_of_transformers_4(name, parity_folder, tmp_path, capsys):
    folder = parity_folder(*name.split("/"))
    record = write_record(tmp_path / "recorded", read_record(folder), folder)
    assert main(["verify", str(folder), str(record), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["within"] is True and found["source"] == "a fixture" and "hidden_states.2" in found["outputs"]
    assert main(["verify", str(folder), str(record), "--tolerance", "0"]) == 1
    assert re.search(r"largest difference \d.\de-\d+, largest output \d.\de\+\d+: MORE THAN 0", capsys.readouterr().out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_record_in_float64_is_compared_in_float64(dtype, masked_lm, tmp_path):
    folder, record = masked_lm
    with torch.no_grad():
        output = MegaForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()(
            record["input_ids"], record["attention_mask"], output_hidden_states=True
        )
    record |= {"logits": output.logits.to(dtype), "hidden_states.1": output.hidden_states[1].to(dtype)}
    file = write_record(tmp_path / "recorded", record, folder)
    assert verify(folder, file, tolerance=1e-12).within is False
    for name in ("hidden_states.0", "hidden_states.2"):  # recorded in float32
        del record[name]
    file = write_record(tmp_path / "recorded", record, folder)
    assert verify(folder, file, tolerance=1e-12).within is (dtype == torch.float64)


CHANGES = {
    "constant": ({"logits": torch.ones_like}, "logits is constant: it varies by 0.0e+00"),
    "nearly constant": ({"logits": lambda x: 1 + x * 1e-7}, "logits is constant: it varies by "),
    "equal positions": ({"hidden_states.1": lambda x: x[:1, :1].expand_as(x)}, "hidden_states.1 is constant"),
    "empty": ({"logits": None} | {f"hidden_states.{index}": None for index in range(3)}, "no outputs; record"),
    "misspelled": ({"logit": "logits", "logits": None}, "logit: not in a MegaForMaskedLM, which has the inputs"),
    "misspelled input": ({"attention_masks": "attention_mask"}, "attention_masks: not in a MegaForMaskedLM"),
    "NaN": ({"hidden_states.2": lambda x: x / 0}, "hidden_states.2 has NaN or Inf in the record"),
    "padding only": ({"attention_mask": torch.zeros_like}, "has only padding; record inputs"),
    "time-major": ({"hidden_states.1": lambda x: x.transpose(0, 1)}, "record it with the batch first"),
    "no inputs": ({"input_ids": None}, "the model cannot read attention_mask: "),
    "invalid inputs": ({"input_ids": lambda x: x + 1000}, "the model cannot read input_ids, attention_mask: "),
    "extra layer": ({"hidden_states.3": "hidden_states.2"}, "hidden_states.3: not in a MegaForMaskedLM"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_with_which_nothing_can_be_compared_raises(change, masked_lm, tmp_path, capsys):
    folder, record = masked_lm
    changes, message = CHANGES[change]
    for name, new in changes.items():
        if new is None:
            del record[name]
        else:
            record[name] = (record[new] if isinstance(new, str) else new(record[name])).contiguous().clone()
    file = write_record(tmp_path / "recorded", record, folder)
    assert message in command_error(capsys, "verify", folder, file)


def test_a_record_of_something_else_raises(parity_folder, masked_lm, tmp_path, capsys):
    folder, record = masked_lm
    for metadata, origin in ((None, "without a SHA-256"), ({"sha256": "0" * 64}, f"with the SHA-256 {'0' * 64}")):
        save_file(record, tmp_path / "recorded", metadata)
        message = command_error(capsys, "verify", folder, tmp_path / "recorded")
        assert f"{origin}, but" in message and "`sha256` in the metadata" in message
    for other in (parity_folder("luna", "bert_heads") / "checkpoint.pt", folder):
        message = command_error(capsys, "verify", folder, other)
        assert f"{other}: not a file of recorded outputs; write one with the original code" in message
    assert "use a model folder" in command_error(capsys, "verify", folder / "config.json", tmp_path / "recorded")


def test_padding_is_not_compared_and_parts_equal_the_output(masked_lm, tmp_path, monkeypatch):
    folder, record = masked_lm
    dropped = record["attention_mask"] == 0
    assert dropped.any()
    expected = verify(folder, write_record(tmp_path / "recorded", record, folder)).outputs
    for name in expected:
        record[name] = record[name].masked_fill(dropped[..., None], torch.nan)
    file = write_record(tmp_path / "recorded", record, folder)
    assert verify(folder, file).outputs == expected
    monkeypatch.setattr(module, "_SLICE", 2 * record["logits"][:, 0].numel())
    found = verify(folder, file).outputs
    assert found.keys() == expected.keys() and found["logits"] == pytest.approx(expected["logits"], abs=1e-5)


def program(word: str) -> str:
    """Return the program of the page that contains a word."""
    (found,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in code)
    return found


class Recorded(torch.nn.Module):
    """Module of fairseq that returns what the genuine one computed."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *arguments, **inputs):
        for layer in self.decoder.layers if hasattr(self, "decoder") else ():
            layer()
        return self.output


def test_program_for_fairseq(parity_folder, tmp_path, monkeypatch):
    name = "mega/07_lm_postnorm_laplace_simple_trunc"
    folder, _ = convert(parity_folder, name, tmp_path / "model")
    shutil.copy(parity_folder(*name.split("/")) / "checkpoint.pt", tmp_path / "checkpoint_best.pt")
    io = load_file(parity_folder(*name.split("/")) / "io.safetensors")
    model = Recorded((io["logits"], {}))
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(Recorded((io[f"hidden.{n}"].transpose(0, 1), None)) for n in (1, 2))
    utils = types.ModuleType("fairseq.checkpoint_utils")
    task = types.SimpleNamespace(source_dictionary=range(100))
    utils.load_model_ensemble_and_task = lambda files: ([model], None, task)
    monkeypatch.setitem(sys.modules, "fairseq", types.ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, "fairseq.checkpoint_utils", utils)
    monkeypatch.setattr(torch, "randint", lambda *arguments: io["src_tokens"])
    monkeypatch.chdir(tmp_path)
    exec(compile(program("fairseq"), "conversion.md", "exec"), {})
    found = verify(folder, "recorded.safetensors")
    assert found.within and list(found.outputs) == ["hidden_states.1", "hidden_states.2", "logits"]


@pytest.mark.slow
def test_program_for_transformers_4(parity_folder, tmp_path, capsys):
    """The program runs with transformers 4 in a separate environment, which uses the torch of this one."""
    venv.create(tmp_path / "v4", with_pip=True)
    python = tmp_path / "v4" / "bin" / "python"
    (packages,) = tmp_path.glob("v4/lib/python*/site-packages")
    (packages / "this.pth").write_text(
        "\n".join(path for path in sys.path if "site-packages" in path), encoding="utf-8"
    )
    requirement = re.search(r"'(transformers<[\d.]+)'", PAGE)[1]
    done = subprocess.run([python, "-m", "pip", "install", requirement], capture_output=True, encoding="utf-8")
    if done.returncode:
        pytest.skip(f"cannot install {requirement}: {done.stderr.strip().splitlines()[-1]}")
    fixture = parity_folder("mega", "hf_mlm_softmax_chunk_short")
    code = program("transformers import Mega").replace("mnaylor/mega-base-wikitext", str(fixture))
    subprocess.run([python, "-c", code], cwd=tmp_path, check=True)
    assert main(["verify", str(tmp_path / "mega"), str(tmp_path / "recorded.safetensors")]) == 0
    assert "transformers 4.46" in capsys.readouterr().out
