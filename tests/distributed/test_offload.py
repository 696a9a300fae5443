"""Models whose weights are offloaded to the CPU or to disk, and names and options of tools that distribute models."""

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


OTHERS = [pytest.param(name, marks=cases.WEEKLY) for name in cases.CASES if name not in cases.SOME]


@pytest.mark.parametrize("name", slow_but(cases.A_FEW[1:3], cases.SOME) + OTHERS)
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


@pytest.mark.parametrize("name", cases.SHARDED)
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


TENSOR_PARALLEL = [
    ("luna: causal LM", 1, {"tp_plan": "auto"}),
    ("luna: causal LM", 2, {"tp_plan": "auto"}),
    ("mega: seq2seq", 2, {"tp_plan": {"lm_head": "colwise_gather_output"}}),
    ("megalodon: causal LM", 2, {"tp_size": 2}),
]


def error_of(folder, model_class, options):
    """Return the message of the error of loading a model."""
    with pytest.raises(ValueError) as error:
        model_class.from_pretrained(folder, distributed_config=DistributedConfig(**options))
    return str(error.value)


@pytest.mark.parametrize(("name", "processes", "options"), TENSOR_PARALLEL)
def test_tensor_parallelism_raises_an_error(ranks, name, processes, options, tmp_path):
    """Without a plan, transformers would load the complete model on every rank."""
    model = cases.make(name)
    model.save_pretrained(tmp_path)
    plan, size = options.get("tp_plan"), processes
    expected = f"`tp_plan={plan!r}` with `tp_size={size}`: {type(model).__name__} does not support tensor parallelism; "
    expected += "use FSDP2 (`fsdp_size`) or `device_map`"
    call = str(tmp_path), type(model), options
    messages = ranks(processes, error_of, *call) if processes > 1 else [error_of(*call)]
    assert messages == [expected] * processes


@pytest.mark.parametrize("name", ["luna: causal LM", "mega: causal LM", "megalodon: causal LM"])
def test_fields_that_tools_read(name, tmp_path):
    config = cases.make(name).config
    assert config.auto_map == {} and config.layer_types == ["linear_attention"] * config.num_hidden_layers
    assert not {"auto_map", "layer_types"} & config.to_dict().keys()
    with pytest.raises(TypeError):
        config.auto_map["AutoModel"] = "would change every configuration"
