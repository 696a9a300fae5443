"""Small models of every class and batches for them, which are trained on one process and on several."""

import tempfile
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import luna_mega
from tests.modeling import decoders, luna, mega, megalodon_decoders

ROWS, WIDTH = 4, 9  # size of a global batch
LENGTHS = [[9, 4, 7, 2], [5, 8, 3, 9], [6, 6, 2, 8], [2, 9, 9, 3], [7, 3, 8, 5]]  # lengths of the rows, for each step
FAMILIES = {"luna": luna, "mega": mega, "megalodon": megalodon_decoders}
DROPOUT = {"luna": luna.NO_DROPOUT, "mega": mega.NO_DROPOUT, "megalodon": {}}
HEADS = [head for head in luna.HEADS if head not in ("ForSequenceClassification", "ForMaskedLM")]
ADAPTIVE = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]} | {
    "adaptive_input_factor": 2,
    "adaptive_softmax_factor": 2,
}
SEPARATE = {"decoder_vocab_size": 35, "num_decoder_layers": 1, "tie_word_embeddings": False}
LUNA = {
    **{head: (head, {}) for head in HEADS},
    **{f"pooling {name}": ("ForSequenceClassification", {"pooling": name}) for name in luna.POOLINGS},
    "values": ("ForSequenceClassification", luna.VALUES | {"pooling": "packed_mean", "pre_norm": True}),
    **{f"masked LM, {name}": ("ForMaskedLM", fields) for name, fields in luna.VARIANTS.items()},
    "masked LM, sparse": ("ForMaskedLM", {"sparse_prediction": True, "unpad_inputs": True}),
    "masked LM, odd vocabulary": ("ForMaskedLM", {"vocab_size": 41}),
    "masked LM, layerdrop": ("ForMaskedLM", {"layerdrop": 1e-9}),
    "untied keys": ("ForTokenClassification", {"tie_key_value": False}),
    "causal LM": ("ForCausalLM", {"vocab_size": 41}),
    "causal LM, pre-norm": ("ForCausalLM", {"pre_norm": True, "tie_word_embeddings": False}),
    "seq2seq": ("ForConditionalGeneration", {"vocab_size": 41}),
    "seq2seq, every layer its P": ("ForConditionalGeneration", {"contextual_projection": False}),
    "seq2seq, two vocabularies": ("ForConditionalGeneration", SEPARATE),
}
MEGA = {
    **{head: (head, {}) for head in HEADS},
    "pooling cls": ("ForSequenceClassification", {}),
    "values": ("ForSequenceClassification", mega.VALUES | {"normalization_type": "syncbatchnorm"}),
    **{f"masked LM, {name}": ("ForMaskedLM", fields) for name, fields in mega.VARIANTS.items() if "batch" not in name},
    "masked LM, synchronized batch norm": ("ForMaskedLM", {"normalization_type": "syncbatchnorm", "final_norm": True}),
    "masked LM, token types": ("ForMaskedLM", {"add_token_type_embeddings": True, "tie_word_embeddings": False}),
    "causal LM": ("ForCausalLM", {"use_chunking": True, "chunk_size": 4, "vocab_size": 41}),
    "causal LM, adaptive": ("ForCausalLM", ADAPTIVE),
    "causal LM, adaptive, tied projections": ("ForCausalLM", ADAPTIVE | {"tie_adaptive_projections": True}),
    "causal LM, adaptive, untied": ("ForCausalLM", ADAPTIVE | {"tie_word_embeddings": False}),
    "seq2seq": ("ForConditionalGeneration", {"vocab_size": 41}),
    "seq2seq, two vocabularies": ("ForConditionalGeneration", SEPARATE),
}
CASES = {f"luna: {name}": case for name, case in LUNA.items()} | {f"mega: {name}": case for name, case in MEGA.items()}
CASES |= {
    "megalodon: causal LM": ("ForCausalLM", {"vocab_size": 41}),
    "megalodon: causal LM, tied": ("ForCausalLM", {"vocab_size": 41, "tie_word_embeddings": True, "swiglu": True}),
    "megalodon: pooling mean": ("ForSequenceClassification", {"vocab_size": 41, "pooling": "mean"}),
}
# One case for each class.
CLASSES = list({(name.split(":")[0], head): name for name, (head, _) in CASES.items()}.values())
# Cases that FSDP handles differently from DDP: every class, but not every variant of a layer.
SHARDED = [name for name in CASES if "masked LM" not in name or name.endswith(("tied", "sparse", "odd vocabulary"))]
A_FEW = ["luna: masked LM, tied", "luna: seq2seq", "mega: masked LM, synchronized batch norm", "mega: causal LM"]
SOME = [
    *(*A_FEW, "luna: pooling packed_mean", "luna: seq2seq, two vocabularies", "mega: causal LM, adaptive"),
    "megalodon: causal LM, tied",
]
# Marks of cases that repeat a slow one with another class.
WEEKLY = [pytest.mark.slow, pytest.mark.exhaustive]


def make(name: str, checkpointing: bool = False, **others) -> PreTrainedModel:
    """Return the model of a case in training mode without dropout; `others` override fields of its configuration."""
    family, (head, fields) = name.split(":")[0], CASES[name]
    sides = {"ForCausalLM": {"is_decoder": True}, "ForConditionalGeneration": {"is_encoder_decoder": True}}
    config = FAMILIES[family].tiny_config(**DROPOUT[family] | sides.get(head, {}) | fields | others)
    torch.manual_seed(0)
    model = getattr(luna_mega, f"{family.capitalize()}{head}")(config)
    return enable_checkpointing(model.train()) if checkpointing else model.train()


def enable_checkpointing(model: PreTrainedModel) -> PreTrainedModel:
    # The old name causes a warning in new versions of transformers; old versions do not have the new name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """Return the global batch of a step with labels; the rows have different numbers of tokens."""
    (head, fields), lengths = CASES[name], LENGTHS[step]
    if head in ("ForCausalLM", "ForConditionalGeneration"):
        ids, mask = decoders.padded(lengths, WIDTH, "right", seed=step)
        labels = {"labels": ids.masked_fill(~mask.bool(), -100)}
        if head == "ForConditionalGeneration":
            ids, mask = decoders.padded(lengths[::-1], WIDTH, "right", seed=step + 10)
        return {"input_ids": ids, "attention_mask": mask} | labels
    inputs = luna.head_inputs(head, lengths, width=WIDTH)
    inputs |= luna.labels(head, inputs)
    if head in ("ForMaskedLM", "ForTokenClassification"):
        inputs["labels"] = inputs["labels"].masked_fill(~inputs["attention_mask"].bool(), -100)
    if "input_type" in fields:
        inputs["input_values"] = inputs.pop("input_ids") / 40.0
    return inputs


def own_rows(complete: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rows of a batch for this process, truncated to the longest source or target among them.

    Batches of question answering are not truncated, because the loss includes padding, as in all models of
    transformers.
    """
    rows = slice(dist.get_rank() * ROWS // dist.get_world_size(), (dist.get_rank() + 1) * ROWS // dist.get_world_size())
    own = {name: value[rows] for name, value in complete.items()}
    kept = [value for name, value in own.items() if "attention_mask" in name]
    kept += [value != -100 for name, value in own.items() if name == "labels" and value.dim() == 2]
    longest = WIDTH if "start_positions" in own else max(int(value.sum(dim=-1).max()) for value in kept)
    own = {name: value[..., :longest] if value.shape[-1] == WIDTH else value for name, value in own.items()}
    # losses of transformers require contiguous tensors
    return {name: value.contiguous() for name, value in own.items()}


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor], complete: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of the rows `inputs` of a batch `complete`; DDP and FSDP average it over processes.

    The loss of a text is a mean over labels, whose number differs between processes. Each process divides by the number
    of labels of all processes, and multiplies by the number of processes, by which DDP divides. Other losses are means
    over rows, whose number is the same in all processes.
    """
    labels = complete.get("labels")
    if labels is not None and labels.dim() == 2:
        counted = labels[:, 1:] if unwrap(model).config.is_decoder else labels
        processes = ROWS // len(inputs["labels"])
        return model(**inputs, num_items_in_batch=(counted != -100).sum()).loss * processes
    outputs = model(**inputs)
    if "loss" in outputs:
        return outputs.loss
    pooled = outputs.get("packed_last_hidden_state", outputs.get("pooler_output"))
    return outputs.last_hidden_state[:, 0].square().mean() + pooled[:, 0].square().mean()


def unwrap(model: nn.Module) -> PreTrainedModel:
    return model.module if isinstance(model, DistributedDataParallel) else model


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ddp(model: PreTrainedModel) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp_of_accelerate(model: PreTrainedModel) -> nn.Module:
    """Return the model wrapped with FSDP2 as accelerate does on accelerators; on CPUs, accelerate uses DDP."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    state, device = SimpleNamespace(fsdp_plugin=plugin), torch.device("cpu")
    accelerator = SimpleNamespace(state=state, mixed_precision="no", device=device, is_main_process=True)
    return fsdp2_prepare_model(accelerator, model)


def fsdp_of_transformers(model: PreTrainedModel) -> nn.Module:
    """Return the model wrapped with FSDP2 as transformers does for `fsdp_size`."""
    folders = [None]
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
            folders = [folder]
        dist.broadcast_object_list(folders)
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        loaded = type(model).from_pretrained(folders[0], distributed_config=config).train()
        dist.barrier()
    return enable_checkpointing(loaded) if is_checkpointing(model) else loaded


def is_checkpointing(model: PreTrainedModel) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def train(name: str, wrap: Callable | None, steps: int, checkpointing: bool = False) -> list[tuple[float, dict]]:
    """Return the loss and the gradients by name for every step."""
    # A process group exists, so that synchronized batch norm would wait for its other processes.
    options = {"normalization_type": "batchnorm"} if wrap is None and "syncbatchnorm" in CASES[name][1].values() else {}
    model = make(name, checkpointing, **options)
    wrapped = model if wrap is None else wrap(model)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    results = []
    for step in range(steps):
        complete = batch(name, step)
        loss = loss_of(wrapped, complete if wrap is None else own_rows(complete), complete)
        loss.backward()
        loss = loss.detach()
        if wrap is not None:
            dist.all_reduce(loss)
            loss = loss / dist.get_world_size()
        named = unwrap(wrapped).named_parameters()
        gradients = {key: full_tensor(p.grad).clone() for key, p in named if p.grad is not None}
        results.append((float(loss), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return results


def compare(names: Iterable[str], wrap: Callable, steps: int, checkpointings: tuple[bool, ...] = (False, True)):
    """Return (on rank 0) the maximum differences from one process for each case, and warnings and errors as text.

    A difference of gradients is divided by the largest gradient if that is above 1.
    """
    results = {}
    for name in names:
        expected = train(name, None, steps) if dist.get_rank() == 0 else None
        for checkpointing in checkpointings:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                actual = train(name, wrap, steps, checkpointing)
            if expected is not None:
                faults = {str(warning.message) for warning in caught if "returned a view" not in str(warning.message)}
                results[name, checkpointing] = *differences(expected, actual), sorted(faults)
    return results


def differences(expected: list[tuple[float, dict]], actual: list[tuple[float, dict]]) -> tuple[float, float]:
    of_losses, of_gradients = [], []
    for (loss, gradients), (other_loss, others) in zip(expected, actual, strict=True):
        assert gradients.keys() == others.keys()
        largest = max(1.0, *(float(x.abs().max()) for x in gradients.values()))
        of_losses.append(abs(loss - other_loss))
        of_gradients += [float((gradients[key] - others[key]).abs().max()) / largest for key in gradients]
    return max(of_losses), max(of_gradients)
