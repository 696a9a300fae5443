"""Pretrain a masked language model without Trainer: an Accelerate loop with sharded checkpoints and exact resuming.

    torchrun --nproc-per-node 2 examples/run_mlm_accelerate.py --dataset_path DIR --output_dir OUT \
        --use_cpu true --fsdp true
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/run_mlm_accelerate.py --dataset_path DIR ...

Batch, masks and dropout of a step depend only on the step number. A run that is resumed with `--resume true` therefore
continues exactly, also with another number of processes, except for dropout.
"""

import json
import math
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForMaskedLM, PreTrainedModel, get_linear_schedule_with_warmup, set_seed
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import rotate_checkpoints, sort_checkpoints

from luna_mega.training.arguments import check_launch, check_least, fail, one_line, parse_arguments
from luna_mega.training.data import SourceArguments, load_splits
from luna_mega.training.hub import check_login, push_folder
from luna_mega.training.masking import Masking, cut_blocks
from luna_mega.training.models import ModelArguments, make_config, make_model, make_tokenizer
from luna_mega.training.report import print_table, save_json
from luna_mega.training.runs import DIVERGED, count_broken
from luna_mega.training.seeded import draw
from luna_mega.training.speed import throughput


@dataclass
class Arguments(SourceArguments):
    output_dir: str = HfArg(default="outputs/mlm", help="output folder for checkpoints, losses and the model")
    text_column: str = HfArg(default="text", help="column with the text; a txt file has one text per line")
    block_size: int = HfArg(default=512, help="tokens of an input, including <s>")
    mlm_probability: float = HfArg(default=0.15, help="share of the tokens to predict")
    preprocessing_num_workers: int | None = HfArg(default=None, help="number of processes for tokenization")
    max_steps: int = HfArg(default=1000, help="number of optimizer steps")
    batch_size: int = HfArg(default=32, help="inputs of an optimizer step over all processes")
    gradient_accumulation_steps: int = HfArg(default=1, help="number of forward passes of an optimizer step")
    learning_rate: float = HfArg(default=5e-4, help="learning rate after the warmup; it decreases to 0 at max_steps")
    warmup_steps: int = HfArg(default=0, help="number of warmup steps")
    save_steps: int = HfArg(default=100, help="steps between checkpoints, of which the last two are kept")
    resume: bool = HfArg(default=False, help="resume from the last checkpoint in output_dir, if it exists")
    seed: int = HfArg(default=42, help="seed of weights, data order, masks and dropout")
    use_cpu: bool = HfArg(default=False, help="use the CPU even if there is a GPU")
    fsdp: bool = HfArg(default=False, help="use FSDP2 even if Accelerate does not support it, as on CPUs")
    timeout: int = HfArg(default=60, help="seconds after which all processes exit if one does not respond")
    peak_flops: float | None = HfArg(default=None, help="peak FLOP/s of one device; default: measured on a CPU")
    push_to_hub: str | None = HfArg(default=None, help="repository on the Hub for the trained model")


class Loop:
    """Distributed model, optimizer and schedule, with checkpoints."""

    def __init__(self, accelerator: Accelerator, model: PreTrainedModel, options: Arguments):
        self.accelerator, self.options, self.step = accelerator, options, 0
        processes, by_accelerate = accelerator.num_processes, accelerator.distributed_type == DistributedType.FSDP
        self.by_hand = options.fsdp and processes > 1 and not by_accelerate
        if self.by_hand:
            mesh, model = init_device_mesh(accelerator.device.type, (processes,)), model.to(accelerator.device)
            for module in [module for module in model.modules() if type(module).__name__ in model._no_split_modules]:
                fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
            model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
        if not self.by_hand:
            model, prepared = accelerator.prepare(model, optimizer)
            optimizer = prepared.optimizer
        self.model, self.optimizer = model.train(), optimizer
        self.schedule = get_linear_schedule_with_warmup(optimizer, options.warmup_steps, options.max_steps)

    def update(self, parts: list[dict[str, torch.Tensor]]) -> float:
        """Run an optimizer step on the `parts` of this process; return the mean loss over all processes."""
        accelerator = self.accelerator
        torch.manual_seed(draw(self.options.seed, self.step, accelerator.process_index).initial_seed())  # dropout
        parts = [{name: tensor.to(accelerator.device) for name, tensor in part.items()} for part in parts]
        tokens = accelerator.reduce(sum((part["labels"] != -100).sum() for part in parts))
        loss = torch.zeros((), device=accelerator.device)
        for index, part in enumerate(parts):
            accumulates = index < len(parts) - 1 and not self.by_hand
            with accelerator.no_sync(self.model) if accumulates else nullcontext():
                part_loss = self.model(**part, num_items_in_batch=tokens).loss
                accelerator.backward(part_loss * accelerator.num_processes)  # gradients are averaged
            loss += part_loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        if not math.isfinite(mean := accelerator.reduce(loss).item()):
            fail(f"the loss of step {self.step} is {mean}; no model was saved. {DIVERGED}")
        return mean

    def state(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict(), "step": self.step}

    def save(self) -> None:
        """Write a folder that is renamed when all processes have finished; keep the last two checkpoints."""
        folder = Path(self.options.output_dir, f"checkpoint-{self.step}")
        dcp.save(self.state(), checkpoint_id=folder.with_suffix(".tmp"))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            folder.with_suffix(".tmp").rename(folder)
            rotate_checkpoints(self.options.output_dir, save_total_limit=2)

    def load(self, folder: str) -> None:
        """Load a checkpoint that was saved by any number of processes."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        model, optimizer = state["model"], state["optimizer"]
        states.set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]

    def save_model(self) -> None:
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(self.model, options=options)
        if broken := count_broken(weights):
            fail(f"{broken} tensors of weights are not finite; no model was saved. {DIVERGED}")
        if self.accelerator.is_main_process:
            unwrapped = self.accelerator.unwrap_model(self.model)
            unwrapped.save_pretrained(self.options.output_dir, state_dict=weights)


@lru_cache(maxsize=1)
def shuffle(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def read_parts(
    blocks: Dataset, masking: Masking, options: Arguments, step: int, rank: int, processes: int
) -> list[dict[str, torch.Tensor]]:
    """Return the parts of a process; the batch of a step does not depend on the number of processes."""
    count, seed = options.gradient_accumulation_steps, options.seed
    size, parts = options.batch_size // (processes * count), []
    for part in range(count):
        first, masked = step * options.batch_size + (part * processes + rank) * size, []
        for position in range(first, first + size):
            epoch, place = divmod(position, len(blocks))
            index = shuffle(len(blocks), seed + epoch)[place]
            masked.append(masking(blocks[index], draw(seed, epoch, index)))
        parts.append({name: torch.stack([block[name] for block in masked]) for name in masked[0]})
    return parts


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options, source = parse_arguments((Arguments, ModelArguments), argv)
    if options.push_to_hub:
        check_login()
    check_least(options, 1, "max_steps", "batch_size", "gradient_accumulation_steps", "save_steps", "timeout")
    check_least(options, 2, "block_size")
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=options.timeout))
    accelerator = Accelerator(cpu=options.use_cpu, kwargs_handlers=[limit])
    processes, output = accelerator.num_processes, Path(options.output_dir)
    check_launch(processes)
    if options.batch_size % (processes * options.gradient_accumulation_steps):
        parts = f"{processes} processes x {options.gradient_accumulation_steps} parts"
        fail(f"--batch_size {options.batch_size} must be a multiple of {parts}")
    set_seed(options.seed)
    with accelerator.main_process_first(), one_line():
        for path in output.glob("checkpoint-*.tmp"):  # from a run that was killed while saving
            shutil.rmtree(path)
        if (found := sort_checkpoints(options.output_dir)) and not options.resume:
            fail(f"{found[-1]} already exists; pass --resume true, or another --output_dir")
        split = load_splits({"train": None}, options, [options.text_column])["train"]
        tokenizer = make_tokenizer(source, split[options.text_column], options.block_size)
        blocks = cut_blocks(split, "train", tokenizer, options)
    config = make_config(source, tokenizer, options.block_size, sparse_prediction=True)
    loop = Loop(accelerator, make_model(AutoModelForMaskedLM, source, config), options)
    if found:
        loop.load(found[-1])
    log, masking, first, seconds = output / "losses.jsonl", Masking(tokenizer, options.mlm_probability), loop.step, 0.0
    if accelerator.is_main_process:
        lines = log.read_text(encoding="utf-8-sig").splitlines(keepends=True)[:first] if log.is_file() else []
        output.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(lines))
    while loop.step < options.max_steps:
        start = time.perf_counter()
        loss = loop.update(read_parts(blocks, masking, options, loop.step, accelerator.process_index, processes))
        seconds += time.perf_counter() - start
        if accelerator.is_main_process:
            with log.open("a") as file:
                file.write(json.dumps({"step": loop.step, "loss": loss}) + "\n")
        if loop.step % options.save_steps == 0 or loop.step == options.max_steps:
            loop.save()
    loop.save_model()
    model = accelerator.unwrap_model(loop.model)
    summary = {"parameters": model.num_parameters(), "processes": processes, "steps": loop.step}
    if steps := loop.step - first:
        rate = steps * options.batch_size * options.block_size / seconds
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        device = (processes, accelerator.device, dtype, options.peak_flops)
        summary |= {"loss": loss, **throughput(model, options.block_size, rate, *device, options.mlm_probability)}
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output)
        save_json(summary, output / "all_results.json")
        print_table("masked language model", summary)
        if options.push_to_hub:
            push_folder(options.push_to_hub, output)
    accelerator.end_training()
    return summary


if __name__ == "__main__":
    main()
