"""Sharded safetensors: every command loads them and produces the results of the single file."""

import pytest
from transformers import AutoModelForMaskedLM

from luna_mega.hub.bundle import bundle
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from tests.modeling import luna, mega


@pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
def test_shards(tmp_path, family):
    """The files are those of `save_pretrained(max_shard_size=...)`; `export` has a test in tests/convert."""
    model, one, several = family.make("ForMaskedLM"), tmp_path / "one", tmp_path / "several"
    model.save_pretrained(one)
    model.save_pretrained(several, max_shard_size="5KB")
    assert len(list(several.glob("model-*.safetensors"))) > 2
    comparison = compare(one, several, tolerance=0.0)
    assert comparison.within and comparison.largest == 0
    assert describe(several).parameters == describe(one).parameters
    bundle(several, tmp_path / "bundle")
    assert compare(one, tmp_path / "bundle", tolerance=0.0).within
    AutoModelForMaskedLM.from_pretrained(several).save_pretrained(tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    next(several.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match="no model-00002-of-"):
        compare(one, several)
