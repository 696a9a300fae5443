"""Train, save, reload and evaluate a small Luna and a small Mega on handwritten digits, in two minutes.

    python examples/digits_demo.py

scikit-learn contains the 1,797 images of 8x8 pixels, so nothing is downloaded. Each image is a sequence of 64 real
numbers (`input_values`), as in the image task of Long Range Arena.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import luna_mega
from luna_mega.training.arguments import check_finite, fail
from luna_mega.training.classification import accuracy
from luna_mega.training.hub import check_login, publish
from luna_mega.training.report import save_json, show
from luna_mega.training.runs import check_model

CLASSES, PIXELS = 10, 64
CONFIGS = {
    "luna": {
        "max_position_embeddings": PIXELS,
        "hidden_size": 64,
        "initializer_range": 0.1,  # the default, 0.02, is too small for a narrow model
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "projection_length": 16,
        "pooling": "mean",
        "dropout": 0.25,
    },
    # Like the image models of the paper: batch norm before every sub-layer, Laplace attention in chunks, no dropout.
    "mega": {
        "hidden_size": 64,
        "initializer_range": 0.1,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "nffn_hidden_size": 128,
        "shared_representation_size": 32,
        "use_chunking": True,
        "chunk_size": 16,
        "relative_positional_bias": "simple",
        "attention_activation": "laplace",
        "normalization_type": "batchnorm",
        "final_norm": True,
        "dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "nffn_activation_dropout_prob": 0.0,
        "pooling": "mean",
        "classifier_hidden_size": 128,
        "classifier_activation": "gelu",
    },
}
EPOCHS = {"luna": 40, "mega": 30}
LEARNING_RATES = {"luna": 3e-3, "mega": 1e-2}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__)
    parser.add_argument("--model_type", choices=[*CONFIGS, "both"], default="both", help="model to train")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/digits"), help="folder for the models and all_results.json"
    )
    parser.add_argument("--epochs", type=float, help=f"number of epochs; None: {EPOCHS}")
    parser.add_argument("--learning_rate", type=float, help=f"peak learning rate; None = {LEARNING_RATES}")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split, the weights and the order of the images"
    )
    parser.add_argument("--min_accuracy", type=float, default=0.95, help="test accuracy below which the demo fails")
    parser.add_argument("--push_to_hub", action="store_true", help="push the models as digits-luna and digits-mega")
    arguments = parser.parse_args(argv)
    check_finite(arguments)
    for name in ("epochs", "learning_rate"):
        if (value := getattr(arguments, name)) is not None and value <= 0:
            fail(f"--{name} {value} must be above 0")
    if arguments.push_to_hub:
        check_login()
    if arguments.output_dir.exists() and not (arguments.output_dir / "all_results.json").is_file():
        if not arguments.output_dir.is_dir() or any(arguments.output_dir.iterdir()):
            fail(f"{arguments.output_dir} contains files of other programs; pass another --output_dir")
    return arguments


def load_data(seed: int) -> tuple[Dataset, Dataset]:
    """Return 80 % of each class for training and 20 % for the test; `input_values` `[64]` are from -1 (white) to 1."""
    digits = load_digits()
    values = (digits.data.astype(np.float32) / 16 - 0.5) / 0.5
    parts = train_test_split(values, digits.target, test_size=0.2, stratify=digits.target, random_state=seed)
    train_values, test_values, train_labels, test_labels = parts
    return (
        Dataset.from_dict({"input_values": train_values, "labels": train_labels}),
        Dataset.from_dict({"input_values": test_values, "labels": test_labels}),
    )


def train(model_type: str, arguments: argparse.Namespace, train_set: Dataset, test_set: Dataset) -> Trainer:
    config = AutoConfig.for_model(model_type, input_type="values", num_labels=CLASSES, **CONFIGS[model_type])
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_config(config),
        args=TrainingArguments(
            output_dir=str(arguments.output_dir / model_type),
            num_train_epochs=arguments.epochs or EPOCHS[model_type],
            learning_rate=arguments.learning_rate or LEARNING_RATES[model_type],
            lr_scheduler_type="cosine",
            warmup_steps=50,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=120,
            weight_decay=0.01,
            eval_strategy="epoch",
            logging_strategy="epoch",
            save_strategy="no",
            seed=arguments.seed,
            dataloader_pin_memory=torch.accelerator.is_available(),
            push_to_hub=arguments.push_to_hub,
            hub_model_id=f"digits-{model_type}",
        ),
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=accuracy,
    )
    trainer.train()
    check_model(trainer)
    trainer.save_model(_internal_call=True)  # `publish` pushes the model with its card
    return trainer


@torch.no_grad()
def predict(model: PreTrainedModel, test_set: Dataset) -> np.ndarray:
    """Return the logits `[N, 10]` of all test images."""
    return model.eval()(input_values=torch.tensor(test_set["input_values"][:])).logits.numpy()


def run(model_type: str, arguments: argparse.Namespace, argv: list[str] | None) -> dict[str, Any]:
    """Train, save, reload and evaluate one model; return its results."""
    start = time.perf_counter()
    set_seed(arguments.seed)
    train_set, test_set = load_data(arguments.seed)
    trainer = train(model_type, arguments, train_set, test_set)
    trained = trainer.predict(test_set)
    folder = trainer.args.output_dir
    reloaded = predict(AutoModelForSequenceClassification.from_pretrained(folder), test_set)
    difference = float(np.abs(reloaded - trained.predictions).max())
    if difference > 1e-4 or (reloaded.argmax(-1) != trained.predictions.argmax(-1)).any():
        fail(f"the logits of the model reloaded from {folder} differ by {difference:.2g}")
    scores = {"eval_accuracy": trained.metrics["test_accuracy"]}
    publish(trainer, (__file__, argv), scores, {"dataset": "digits of scikit-learn"})
    return {
        "parameters": trainer.model.num_parameters(),
        "train_images": len(train_set),
        "test_images": len(test_set),
        "epochs": trainer.state.epoch,
        "test_accuracy": trained.metrics["test_accuracy"],
        "reloaded_model_predicts_the_same": True,
        "largest_logit_difference": difference,
        "seconds": time.perf_counter() - start,
        "model": folder,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parse(argv)
    types = CONFIGS if arguments.model_type == "both" else [arguments.model_type]
    summaries = {model_type: run(model_type, arguments, argv) for model_type in types}
    path = arguments.output_dir / "all_results.json"
    save_json({"luna_mega": luna_mega.__version__, **summaries}, path)
    shown = {
        name: {key.replace("_", " "): show(value) for key, value in row.items()} for name, row in summaries.items()
    }
    print(f"\nHandwritten digits, pixel by pixel\n{pd.DataFrame(shown).to_string()}\n\n{path}")
    for model_type, summary in summaries.items():
        if summary["test_accuracy"] < arguments.min_accuracy:
            fail(f"{model_type}: test accuracy {summary['test_accuracy']:.4f} is below {arguments.min_accuracy}")
    return summaries


if __name__ == "__main__":
    main()
