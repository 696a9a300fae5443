"""Every command loads sharded safetensors and produces the results of the single file."""

import pytest
from transformers import AutoModelForMaskedLM

from luna_mega.convert import export_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega.hub.bundle import bundle
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from tests.modeling import luna


def test_shards(tmp_path):
    """Shards of `save_pretrained(max_shard_size=...)` give the results of one file; a missing shard raises."""
    model, one, several = luna.make("ForMaskedLM"), tmp_path / "one", tmp_path / "several"
    model.save_pretrained(one)
    model.save_pretrained(several, max_shard_size="5KB")
    assert len(list(several.glob("model-*.safetensors"))) > 2
    assert compare(one, several, tolerance=0.0, length=9).largest == 0
    assert describe(several).parameters == describe(one).parameters
    bundle(several, tmp_path / "bundle")
    assert compare(one, tmp_path / "bundle", tolerance=0.0, length=9).within
    AutoModelForMaskedLM.from_pretrained(several).save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    for folder in (one, several):
        export_checkpoint(folder, folder.with_suffix(".pt"))
    first, second = (read_checkpoint(folder.with_suffix(".pt")).tensors for folder in (one, several))
    assert first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)
    next(several.glob("model-00002-*")).unlink()
    for command in (lambda: compare(one, several), lambda: export_checkpoint(several, tmp_path / "other.pt")):
        with pytest.raises(ValueError, match="no model-00002-of-"):
            command()
