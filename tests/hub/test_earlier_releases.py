"""Model folders and bundles of earlier releases load, or their code is recreated, or an error names a removed field.

Those releases wrote `earlier_releases.tar.xz`. Each folder is the result of `save_pretrained` for a tiny model with
random weights, and contains `outputs.json`: the class, its inputs and its logits. If the name ends in `_bundle`, it is
also the result of `luna-mega bundle`. Folders of the commit 20c2b5c3 are named after the removed field that they use.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import transformers

import luna_mega
import luna_mega_cli
from luna_mega.hub.folder import position_limit, stacks
from tests.errors import check_error, command_error
from tests.hub import client as on_client
from tests.marks import slow_but

NAMES = [
    *("luna_causal", "luna_masked_bundle", "luna_translation"),
    *("mega_causal", "mega_masked", "mega_translation", "megalodon_causal"),
]
FOLDERS = {
    "0.1.0": ["luna_causal", "luna_masked", "luna_masked_bundle", "mega_causal", "mega_translation"],
    "0.2.0": NAMES,
    "0.3.0": NAMES,
}
REMOVED_FIELDS = {
    *("pack_method", "position_extension", "position_table_size", "initialization", "initialization_options"),
}
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("releases")
    with tarfile.open(Path(__file__).with_name("earlier_releases.tar.xz")) as archive:
        for member in filter(tarfile.TarInfo.isreg, archive):
            (file := folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.extractfile(member).read())
    return folder


def read(folder: Path) -> tuple[str, dict[str, list], torch.Tensor]:
    """Return the Auto class, the inputs and the logits of a folder."""
    content = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    (auto_class,) = [auto for suffix, auto in AUTO_CLASSES.items() if content["class"].endswith(suffix)]
    return auto_class, content["inputs"], torch.tensor(content["logits"])


def test_every_folder_is_tested(releases):
    removed = {"20c2b5c3": sorted(f"luna_{field}" for field in REMOVED_FIELDS)}
    found = {path.name: sorted(part.name for part in path.iterdir()) for path in releases.iterdir()}
    assert found == FOLDERS | removed


@pytest.mark.parametrize(("release", "name"), [(release, name) for release in FOLDERS for name in FOLDERS[release]])
def test_folder_loads_with_the_package(releases, release, name):
    auto_class, inputs, logits = read(folder := releases / release / name)
    model, info = getattr(transformers, auto_class).from_pretrained(folder, output_loading_info=True)
    assert type(model).__module__.startswith("luna_mega.") and not any(info.values()), info
    with torch.no_grad():
        output = model.eval()(**{name: torch.tensor(value) for name, value in inputs.items()})
    torch.testing.assert_close(output.logits, logits, atol=1e-6, rtol=1e-5)
    if name.startswith("luna"):  # length and table are unchanged
        positions = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        for config in stacks(model.config).values():
            limited = config.position_embedding_type == "learned"
            assert position_limit(config) == (positions if limited else None)
        for key, table in model.state_dict().items():
            if key.endswith("embeddings.position_embeddings.weight"):
                assert len(table) == positions + model.config.position_offset


@pytest.mark.parametrize("release", slow_but(["0.1.0"], FOLDERS))
def test_bundle_loads_without_the_package(releases, release, stranger, repo_root, tmp_path):
    """The code of a bundle runs or raises a documented error; recreated bundles always run."""
    auto_class, inputs, logits = read(
        folder := shutil.copytree(releases / release / "luna_masked_bundle", tmp_path / "bundle")
    )
    result, error = stranger.attempt(on_client.outputs, folder, auto_class, inputs, trust_remote_code=True)
    if error is None:
        torch.testing.assert_close(torch.tensor(result["logits"]), logits, atol=1e-6, rtol=1e-5)
    else:
        rows = (repo_root / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
        (row,) = [row for row in rows if error.partition(": ")[2] in row]
        assert "`luna-mega bundle FOLDER`" in row
    assert luna_mega_cli.main(["bundle", str(folder)]) == 0
    result = stranger(on_client.outputs, folder, auto_class, inputs, trust_remote_code=True)
    assert result["module"].startswith("transformers_modules.")
    torch.testing.assert_close(torch.tensor(result["logits"]), logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("field", sorted(REMOVED_FIELDS))
def test_folder_that_needs_a_removed_field_is_refused(releases, field, capsys):
    folder = releases / "20c2b5c3" / f"luna_{field}"
    value = json.loads((folder / "config.json").read_text(encoding="utf-8"))[field]
    for load in (transformers.AutoConfig, transformers.AutoModelForMaskedLM, luna_mega.LunaModel):
        check_error(lambda load=load: load.from_pretrained(folder), ValueError, f"{field}={value!r} is not supported")
    assert "the last commit of luna-mega that supports it is 20c2b5c3" in command_error(capsys, "bundle", folder)
