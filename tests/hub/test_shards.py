"""Every command loads sharded safetensors and produces the results of the single file."""

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from luna_mega import LunaForMaskedLM
from luna_mega.hub.bundle import bundle
from luna_mega.hub.folder import read_folder, weight_files
from tests.modeling import luna


def test_shards(tmp_path):
    """Shards of `save_pretrained(max_shard_size=...)` give the results of one file; a missing shard raises."""
    model, one, several = luna.make("ForMaskedLM"), tmp_path / "one", tmp_path / "several"
    model.save_pretrained(one)
    model.save_pretrained(several, max_shard_size="5KB")
    assert len(list(several.glob("model-*.safetensors"))) > 2
    bundle(several, tmp_path / "bundle")
    for folder in (several, tmp_path / "bundle"):
        loaded = read_folder(folder).load().state_dict()
        assert all(tensor.equal(loaded[name]) for name, tensor in model.state_dict().items())
    AutoModelForMaskedLM.from_pretrained(several).save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    next(several.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match="no model-00002-of-"):
        read_folder(several)


SHARDS, ONE_FILE = {"max_shard_size": "5KB"}, {}
# Options of two saves to one folder -> the save that `from_pretrained` reads. transformers deletes shards of an earlier
# save, but neither their index nor a single file, which takes precedence over an index.
SAVES = [
    (SHARDS, ONE_FILE, 1),
    (SHARDS, {"max_shard_size": "10KB"}, 1),
    ({"max_shard_size": "10KB"}, SHARDS, 1),
    (ONE_FILE, SHARDS, 0),
]


def check_weights_read(folder, output, expected):
    """Check that `from_pretrained` reads the expected weights, and the tools of the package the same."""
    bundle(folder, output)
    for place in (folder, output):
        loaded, files = AutoModelForMaskedLM.from_pretrained(place).state_dict(), weight_files(place)
        assert all(loaded[name].equal(tensor) for name, tensor in expected.state_dict().items())
        assert all(loaded[name].equal(tensor) for file in files for name, tensor in load_file(file).items())
    names = {file.name for file in files}
    kept = names if names == {SAFE_WEIGHTS_NAME} else names | {SAFE_WEIGHTS_INDEX_NAME}
    assert {file.name for file in output.iterdir() if ".safetensors" in file.name} == kept


@pytest.mark.parametrize(("first", "second", "position"), SAVES)
def test_a_folder_with_two_saves_is_read_as_by_transformers(first, second, position, tmp_path):
    models = [luna.make("ForMaskedLM"), LunaForMaskedLM(luna.tiny_config())]
    for model, options in zip(models, (first, second), strict=True):
        model.save_pretrained(tmp_path / "model", **options)
    check_weights_read(tmp_path / "model", tmp_path / "bundle", models[position])


def test_shards_may_have_any_name(tmp_path):
    """The index names the shards; other files are not read or copied."""
    model, folder = luna.make("ForMaskedLM"), tmp_path / "model"
    model.save_pretrained(folder, **SHARDS)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    content = json.loads(index.read_text(encoding="utf-8"))
    for name in set(content["weight_map"].values()):
        (folder / name).rename(folder / name.replace("model-", "part-"))
    content["weight_map"] = {key: name.replace("model-", "part-") for key, name in content["weight_map"].items()}
    index.write_text(json.dumps(content), encoding="utf-8")
    (folder / "model-00001-of-00009.safetensors").write_text("of another save", encoding="utf-8")
    check_weights_read(folder, tmp_path / "bundle", model)
