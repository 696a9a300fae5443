"""Train, save, reload and evaluate a small Luna and a small Mega on handwritten digits, in four minutes.

    python examples/digits_demo.py

scikit-learn contains the 1,797 images of 8x8 pixels. Each is read as a sequence of 64 real numbers (`input_values`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import AutoModelForSequenceClassification, TrainingArguments
from transformers.hf_argparser import HfArg

from luna_mega import training as lib

# Mega is like the image models of the paper: batch norm before every sub-layer, Laplace attention, no dropout.
MODELS = {
    "luna": "num_attention_heads=4,projection_length=16,dropout=0.25",
    "mega": "nffn_hidden_size=128,shared_representation_size=32,use_chunking=true,chunk_size=16,final_norm=true,"
    "relative_positional_bias=simple,attention_activation=laplace,normalization_type=batchnorm,dropout_prob=0.0,"
    "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0,nffn_activation_dropout_prob=0.0,"
    "classifier_hidden_size=128,classifier_activation=gelu",
}
# The default initializer_range, 0.02, is too small for a narrow model.
SIZES = "hidden_size=64,num_hidden_layers=2,intermediate_size=128,pooling=mean,initializer_range=0.1"
EPOCHS, RATES = {"luna": 40, "mega": 12}, {"luna": 3e-3, "mega": 1e-2}
STEPS = {"warmup_steps": 50, "weight_decay": 0.01, "lr_scheduler_type": "cosine", "do_train": True, "do_eval": True}
STEPS |= {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "no"}
STEPS |= {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 120, "dataloader_pin_memory": False}


@dataclass
class Arguments:
    model_type: str = HfArg(default="both", help="model to train: luna, mega or both")
    output_dir: str = HfArg(default="outputs/digits", help="folder for the models and their results")
    epochs: float = HfArg(default=0.0, help=f"number of epochs; 0 = {EPOCHS}")
    learning_rate: float = HfArg(default=0.0, help=f"peak learning rate; 0 = {RATES}")
    seed: int = HfArg(default=0, help="seed of the split, the weights and the order of the images")
    # The accuracy varies by 0.02 between processors, whose rounding differs.
    min_accuracy: float = HfArg(default=0.92, help="test accuracy below which the demo fails")
    push_to_hub: bool = HfArg(default=False, help="push the models as digits-luna and digits-mega")


def load_data(seed: int) -> list[Dataset]:
    """Return 80 % of each class for training and 20 % for the test; `input_values` `[64]` are from -1 (white) to 1."""
    digits = load_digits()
    values = (digits.data.astype(np.float32) / 16 - 0.5) / 0.5
    parts = train_test_split(values, digits.target, test_size=0.2, stratify=digits.target, random_state=seed)
    return [Dataset.from_dict({"input_values": parts[i], "labels": parts[i + 2]}) for i in range(2)]


def run_model(name: str, options: Arguments) -> dict[str, float]:
    """Train, save, evaluate and reload one model; return its metrics."""
    place = {"output_dir": f"{options.output_dir}/{name}", "hub_model_id": f"digits-{name}"}
    steps = {"num_train_epochs": options.epochs or EPOCHS[name], "learning_rate": options.learning_rate or RATES[name]}
    own = {"seed": options.seed, "push_to_hub": options.push_to_hub}
    training = TrainingArguments(**place, **steps, **own, **STEPS)
    data = lib.SourceArguments(dataset_path="digits of scikit-learn")
    model = lib.CheckpointArguments(model_type=name, config_overrides=f"{SIZES},{MODELS[name]}")
    run = lib.Run(data, model, training)
    training.include_num_input_tokens_seen = "no"  # images have no tokens
    train_set, test_set = load_data(options.seed)
    config = lib.make_config(model, None, 64, **lib.label_fields("0123456789"))
    network = lib.make_model(AutoModelForSequenceClassification, model, config)
    parts = {"train_dataset": train_set, "eval_dataset": test_set}
    trainer = lib.OrderedTrainer(network, training, **parts, compute_metrics=lib.accuracy)

    def evaluate() -> dict[str, float]:
        metrics = lib.score(trainer)
        reloaded = AutoModelForSequenceClassification.from_pretrained(training.output_dir)
        with torch.no_grad():
            again = reloaded(input_values=torch.tensor(test_set["input_values"][:])).logits.numpy()
        difference = float(np.abs(again - trainer.predict(test_set).predictions).max())
        if difference > 1e-4:
            lib.fail(f"the logits of the model reloaded from {training.output_dir} differ by {difference:.2g}")
        return metrics

    return run.fit(trainer, evaluate=evaluate)


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    (options,) = lib.parse_arguments((Arguments,), argv)
    lib.check_choice(options, "model_type", [*MODELS, "both"])
    lib.check_least(options, 0, "epochs", "learning_rate")
    torch.set_num_threads(1)  # two are slower for such small models, 10 times on a busy machine
    results = {name: run_model(name, options) for name in MODELS if options.model_type in (name, "both")}
    for name, result in results.items():
        if result["eval_accuracy"] < options.min_accuracy:
            lib.fail(f"{name}: test accuracy {result['eval_accuracy']:.4f} is below {options.min_accuracy}")
    return results


if __name__ == "__main__":
    main()
