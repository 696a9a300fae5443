"""Pretrains as run_mlm.py does, from the local start or from parts of it: the study of docs/initialization.md.

    python examples/mlm_start.py --recipe examples/recipes/mlm/wikitext2_start.yaml --dataset_path DIR \
        --output_dir OUT --without positions

Luna gets the start by its configuration (`initialization=local` in `--config_overrides`), and what `--without` names
begins at random all the same. `--model_type roberta --local_start true` gives transformers' RoBERTa the same start, and
`--local_options` are its `initialization_options`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from common.arguments import check_choice, fail
from common.model import ModelArguments, parse_fields
from huggingface_hub.errors import StrictDataclassError
from run_mlm import MaskedLanguageModel
from torch import nn
from transformers import PreTrainedModel, RobertaForMaskedLM, Trainer
from yaml import YAMLError

from luna_mega import LunaConfig, LunaForMaskedLM
from luna_mega.modeling_luna.initialization_luna import LocalStart, blind, paired_sinusoids, rotation

PARTS = ("positions", "packed", "identity")


@dataclass
class StudyArguments(ModelArguments):
    without: str | None = field(
        default=None, metadata={"help": f"parts of Luna's local start that begin at random: {', '.join(PARTS)}"}
    )
    local_start: bool = field(default=False, metadata={"help": "give RoBERTa the local start of Luna"})
    local_options: str = field(default="", metadata={"help": "options of that start: base=16,strength=8"})


@torch.no_grad()
def leave_out(model: LunaForMaskedLM, part: str) -> None:
    """Draw one part of the local start at random."""
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
    """Give RoBERTa the positions of Luna's local start, and heads that begin by reading its neighbours."""
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


class StartStudy(MaskedLanguageModel):
    model_arguments = StudyArguments

    def check(self) -> None:
        super().check()
        model = self.model
        if model.without is not None:
            check_choice(model, "without", PARTS)
        if (model.local_start and model.model_type != "roberta") or (model.without and model.model_type != "luna"):
            fail("--local_start is for --model_type roberta, --without for luna (with initialization=local)")
        if model.local_options and not model.local_start:
            fail("--local_options are those of --local_start true; Luna has initialization_options")

    def prepare(self) -> None:
        super().prepare()
        if self.model.without and self.config.initialization != "local":
            fail("--without leaves out a part of the local start: add initialization=local to --config_overrides")
        if self.model.local_start:
            self.start_options = self.options_of_start()

    def options_of_start(self) -> LocalStart:
        """Return the options that a Luna of this vocabulary and length would begin with."""
        try:
            options = parse_fields(self.model.local_options)
            sizes = {"vocab_size": self.config.vocab_size, "max_position_embeddings": self.data.block_size}
            return LocalStart.of(LunaConfig(**sizes, initialization="local", initialization_options=options))
        except (ValueError, StrictDataclassError, YAMLError) as error:
            fail(f"--local_options: {error}")

    def build(self) -> Trainer:
        trainer = super().build()
        model: PreTrainedModel = trainer.model
        if self.model.without:
            leave_out(model, self.model.without)
        if self.model.local_start:
            start_roberta(model, self.start_options)
        return trainer


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return StartStudy(argv).run()


if __name__ == "__main__":
    main()
