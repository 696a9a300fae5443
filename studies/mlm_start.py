"""Pretrain Luna without parts of its local initialization, or RoBERTa with it; see docs/initialization_study.md.

    python studies/mlm_start.py --recipe studies/recipes/wikitext2_start.yaml --dataset_path DIR \
        --output_dir OUT --without positions

The script pretrains like run_mlm.py. Luna is initialized by its configuration (`initialization=local` in
`--config_overrides`); the part `--without` is random instead. With `--model_type roberta --local_start true`, RoBERTa
is initialized in the same way, with `--local_options` as `initialization_options`.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, PreTrainedConfig, RobertaForMaskedLM
from transformers.hf_argparser import HfArg

from luna_mega import LunaConfig, LunaForMaskedLM
from luna_mega.modeling_luna.initialization_luna import LocalStart, blind, paired_sinusoids, rotation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import run_mlm

from luna_mega.training.arguments import check_choice, fail, one_line
from luna_mega.training.models import ModelArguments, make_model, parse_fields
from luna_mega.training.report import finish
from luna_mega.training.runs import begin_run, score, train

PARTS = ("positions", "packed", "identity")


@dataclass
class StudyArguments(ModelArguments):
    without: str | None = HfArg(default=None, help=f"part to initialize at random: {', '.join(PARTS)}")
    local_start: bool = HfArg(default=False, help="use the local initialization of Luna for RoBERTa")
    local_options: str = HfArg(default="", help="options of the local initialization of RoBERTa: base=16,strength=8")


@torch.no_grad()
def leave_out(model: LunaForMaskedLM, part: str) -> None:
    """Replace one part of the local initialization by random values."""
    embeddings, deviation = model.luna.embeddings, model.config.initializer_range
    if part == "positions":
        model._init_weights(embeddings.position_embeddings)
    elif part == "packed":
        nn.init.normal_(embeddings.packed_embeddings, std=deviation)
    else:
        for layer in model.luna.encoder.layers:
            for projection in layer.attention.children():
                model._init_weights(projection)


@torch.no_grad()
def start_roberta(model: RobertaForMaskedLM, start: LocalStart) -> None:
    """Initialize positions and heads of RoBERTa like Luna with local initialization."""
    config, table = model.config, model.roberta.embeddings.position_embeddings.weight
    width, heads, first = config.hidden_size, config.num_attention_heads, config.pad_token_id + 1
    base = start.base or start.length or len(table) - first
    positions = paired_sinusoids(torch.arange(len(table) - first), width, base)
    table[first:] = math.sqrt(2) * config.initializer_range * positions
    gain = 2 * start.strength / math.sqrt(width // heads)
    for layer in model.roberta.encoder.layer:
        attention = layer.attention.self
        attention.query.weight.add_(gain * rotation(width, base, heads, start.offsets))
        if start.mask_token_id is not None:
            blind(attention.query.weight, model.roberta.embeddings.word_embeddings.weight[start.mask_token_id])
        attention.key.weight.add_(torch.eye(width))


def check_study(model: StudyArguments) -> None:
    """Exit if the options of the study do not match the model."""
    if model.without is not None:
        check_choice(model, "without", PARTS)
    if (model.local_start and model.model_type != "roberta") or (model.without and model.model_type != "luna"):
        fail("--local_start is for --model_type roberta, --without for luna (with initialization=local)")
    if model.local_options and not model.local_start:
        fail("--local_options requires --local_start true; for Luna, set initialization_options")


def read_start(model: StudyArguments, config: PreTrainedConfig, block_size: int) -> LocalStart | None:
    """Return the options of the local initialization for this vocabulary and length; None without `--local_start`."""
    if model.without and config.initialization != "local":
        fail("--without requires local initialization; add initialization=local to --config_overrides")
    if not model.local_start:
        return None
    with one_line("--local_options"):
        options = parse_fields(model.local_options)
        sizes = {"vocab_size": config.vocab_size, "max_position_embeddings": block_size}
        return LocalStart.of(LunaConfig(**sizes, initialization="local", initialization_options=options))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    data, model, training, run = run_mlm.parse(argv, StudyArguments)
    check_study(model)
    begin_run(__file__, argv, data, model, training, run)

    with training.main_process_first(desc="reading the data"), one_line():
        blocks, tokenizer, config = run_mlm.load_data(data, model, training, run)
        local_start = read_start(model, config, data.block_size)

    network = make_model(AutoModelForMaskedLM, model, config)
    trainer = run_mlm.make_trainer(network, data, training, blocks, tokenizer)  # sets the seed for what is drawn next
    if model.without:
        leave_out(network, model.without)
    if local_start:
        start_roberta(network, local_start)

    share = run_mlm.head_share(data, config)
    summary = train(trainer, run, run_mlm.TITLE, run_mlm.METRIC, share) | score(trainer)
    return finish(trainer, run, summary)


if __name__ == "__main__":
    main()
