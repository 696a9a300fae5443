"""Train small models with several values of `initializer_range`, and print how soon they learn.

    python benchmarks/initialization.py                                  Luna, widths 64, 128 and 256
    python benchmarks/initialization.py --family mega --widths 64 128
    python benchmarks/initialization.py --task recall --widths 64 --steps 250

Task `find`: the first position of an encoder classifies which of 8 tokens is at a random one of 23 positions. Task
`recall`: a decoder reads 8 random keys with their values, then 16 times a key, and predicts its value (multi-query
associative recall). Every step has new data. A run ends when 95 % of the answers of 10 steps are right. The table has
the number of steps of each seed; for runs that do not get there, the accuracy of the last 10 steps.
"""

import argparse
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.utils import logging

import luna_mega

LUNA = {"num_attention_heads": 2, "dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64}
MEGA = {
    "shared_representation_size": 32, "ema_projection_size": 8, "normalization_type": "layernorm", "final_norm": True,
    "dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "nffn_activation_dropout_prob": 0.0,
}  # fmt: skip
WINDOW, ENOUGH = 10, 0.95  # number of steps, and their mean accuracy


def make(family: str, task: str, width: int, initializer_range: float | None) -> PreTrainedModel:
    """Return a model of two layers."""
    fields = {"vocab_size": 66, "hidden_size": width, "num_hidden_layers": 2, "intermediate_size": 2 * width}
    fields |= LUNA | {"projection_length": 16} if family == "luna" else MEGA | {"nffn_hidden_size": 2 * width}
    fields |= {"is_decoder": True} if task == "recall" else {"num_labels": 8}
    fields |= {} if initializer_range is None else {"initializer_range": initializer_range}
    name, head = family.capitalize(), "CausalLM" if task == "recall" else "SequenceClassification"
    config = getattr(luna_mega, f"{name}Config")(**fields)
    return getattr(luna_mega, f"{name}For{head}")(config)


def find(generator: torch.Generator, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens `[rows, 24]` and labels `[rows]`."""
    tokens = torch.randint(10, 34, (rows, 24), generator=generator)
    labels, places = (torch.randint(*limits, (rows,), generator=generator) for limits in ((0, 8), (1, 24)))
    tokens[:, 0] = 0
    tokens[torch.arange(rows), places] = labels + 2
    return tokens, labels


def recall(generator: torch.Generator, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels `[rows, 48]`: keys are 2 to 33, values 34 to 65."""
    keys = torch.stack([torch.randperm(32, generator=generator)[:8] for _ in range(rows)]) + 2
    values = torch.randint(34, 66, (rows, 8), generator=generator)
    asked = torch.randint(8, (rows, 16), generator=generator)
    pairs = torch.stack((keys, values), -1).flatten(1)
    queries = torch.stack((keys.gather(1, asked), values.gather(1, asked)), -1).flatten(1)
    tokens = torch.cat((pairs, queries), 1)
    labels = torch.full_like(tokens, -100)
    labels[:, 17::2] = tokens[:, 17::2]
    return tokens, labels


def train(model: PreTrainedModel, draw: Callable, seed: int, steps: int, rate: float) -> tuple[int, float]:
    """Return the number of steps, and the mean accuracy of the last `WINDOW`."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    accuracies: list[float] = []
    while len(accuracies) < steps and sum(accuracies[-WINDOW:]) < ENOUGH * WINDOW:
        tokens, labels = draw(generator)
        logits = model(input_ids=tokens).logits
        if labels.ndim == 2:
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        optimizer.zero_grad()
        cross_entropy(logits, labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accuracies.append((logits.argmax(-1) == labels)[labels != -100].float().mean().item())
    return len(accuracies), sum(accuracies[-WINDOW:]) / WINDOW


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="luna", choices=("luna", "mega"))
    parser.add_argument("--task", default="find", choices=("find", "recall"))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--ranges", type=float, nargs="*", default=[0.02, 0.05, 0.1], help="besides the default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150, help="maximum number of steps")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    print("| width | `initializer_range` |" + "".join(f" seed {seed} |" for seed in arguments.seeds))
    print("|---|---|" + "---|" * len(arguments.seeds), flush=True)
    draw = {"find": find, "recall": recall}[arguments.task]
    for width in arguments.widths:
        for value in (None, *arguments.ranges):
            results = []
            for seed in arguments.seeds:
                torch.manual_seed(seed)
                model = make(arguments.family, arguments.task, width, value)
                steps, accuracy = train(model, draw, seed, arguments.steps, arguments.learning_rate)
                results.append(f"{steps} steps" if accuracy >= ENOUGH else f"{100 * accuracy:.0f} %")
            name = f"default, {model.config.initializer_range:.3f}" if value is None else value
            print(f"| {width} | {name} | {' | '.join(results)} |", flush=True)


if __name__ == "__main__":
    main()
