"""Models whose weights are offloaded to the CPU or to disk, and the names of layers and modules that tools read."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload, infer_auto_device_map
from transformers.distributed import DistributedConfig

from tests.distributed import cases
from tests.marks import slow_but


def outputs(model, name):
    """Return all tensors that a model returns for a batch with labels and without labels."""
    inputs = cases.batch(name, 0)
    without = {key: value for key, value in inputs.items() if key == "labels" and "seq2seq" in name or key != "labels"}
    with torch.no_grad():
        both = model(**inputs), model(**without)
    return [x for output in both for x in output.to_tuple() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", slow_but(cases.A_FEW, cases.CASES))
def test_offloading_does_not_change_outputs(name, tmp_path):
    model = cases.make(name).eval()
    expected = outputs(model, name)
    for offloaded in (
        cpu_offload(cases.make(name).eval(), execution_device="cpu"),
        disk_offload(cases.make(name).eval(), tmp_path, execution_device="cpu"),
    ):
        for actual, wanted in zip(outputs(offloaded, name), expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", ["luna: seq2seq", "luna: pooling packed_mean", "mega: causal LM, adaptive"])
def test_device_map_with_weights_on_disk(name, tmp_path):
    model = cases.make(name).eval()
    model.save_pretrained(tmp_path)
    size = sum(p.numel() for p in model.parameters()) * 4
    placed = infer_auto_device_map(model, {"cpu": size // 2}, model._no_split_modules)
    assert set(placed.values()) == {"cpu", "disk"}
    loaded = type(model).from_pretrained(tmp_path, device_map=placed, offload_folder=tmp_path / "weights")
    for actual, wanted in zip(outputs(loaded, name), outputs(model, name), strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("name", cases.CASES)
def test_names_are_of_this_instance(name, caplog):
    """A model lists only names of classes that it contains.

    An unknown class raises an error in accelerate, and an unused rule causes a warning in transformers.
    """
    model = cases.make(name)
    caplog.clear()  # the first configuration of a deprecated kind logs a message
    classes = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules and set(model._no_split_modules) <= classes
    assert model._fsdp_plan and len(set(model._fsdp_plan.values())) == 1
    if hasattr(model, "_resolve_parallel_plans"):
        model._resolve_parallel_plans(DistributedConfig(fsdp_size=2))
    assert not caplog.records


@pytest.mark.parametrize("name", ["luna: causal LM", "mega: causal LM", "megalodon: causal LM"])
def test_fields_that_tools_read(name, tmp_path):
    config = cases.make(name).config
    assert config.auto_map == {} and config.layer_types == ["linear_attention"] * config.num_hidden_layers
    assert not {"auto_map", "layer_types"} & config.to_dict().keys()
    with pytest.raises(TypeError):
        config.auto_map["AutoModel"] = "would change every configuration"
