"""Pretrain a masked language model, from scratch or from a checkpoint, on plain text.

    python examples/run_mlm.py --recipe examples/recipes/mlm/wikitext2_small.yaml --dataset_path DIR --output_dir OUT

All fields of TrainingArguments are options. A recipe contains defaults, which the command line overrides.
"""

from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)

from luna_mega.training.arguments import RunArguments, fail, one_line, parse_arguments
from luna_mega.training.hub import publish
from luna_mega.training.masking import (
    MaskedTextArguments as DataArguments,
    Masking,
    check_data,
    load_texts,
    make_blocks,
)
from luna_mega.training.models import ModelArguments, make_config, make_model, make_tokenizer
from luna_mega.training.runs import begin_run, check_run, make_callbacks, score, train
from luna_mega.training.seeded import Redrawn
from luna_mega.training.streams import Stream, StreamingTrainer, check_streaming, some_texts

TITLE = "masked language model"


def token_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood of each masked token, and whether the prediction is correct, `[B, T, 2]`."""
    masked = labels != -100
    logits, targets = logits[masked].float(), labels[masked]
    scores = logits.new_zeros(*labels.shape, 2)
    loss = cross_entropy(logits, targets, reduction="none")
    scores[masked] = torch.stack([loss, logits.argmax(-1) == targets], dim=-1)
    return scores


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return perplexity and accuracy over the masked tokens."""
    loss, right = prediction.predictions[prediction.label_ids != -100].mean(axis=0, dtype=np.float64)
    return {"perplexity": float(np.exp(loss)), "accuracy": float(right)}


def parse(argv: list[str] | None) -> tuple[DataArguments, ModelArguments, TrainingArguments, RunArguments]:
    """Parse the options; exit if they contradict each other."""
    kinds = (DataArguments, ModelArguments, TrainingArguments, RunArguments)
    data, model, training, run = parse_arguments(kinds, argv)
    check_run(TITLE, data, model, training, run, streams=True, predicts=False)
    check_streaming(training, run)
    check_data(data)
    return data, model, training, run


def load_data(
    data: DataArguments, model: ModelArguments, training: TrainingArguments, run: RunArguments
) -> tuple[dict[str, Any], PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the splits as masked blocks, the tokenizer, and the configuration of the model."""
    splits = load_texts(data, training, run)
    texts = some_texts(splits["train"], data.text_column) if "train" in splits else ()
    tokenizer = make_tokenizer(model, texts, data.block_size)
    if tokenizer.mask_token_id is None:
        fail("the tokenizer has no mask_token, which masked language models require; pass another --tokenizer_name")
    config = make_config(model, tokenizer, data.block_size, sparse_prediction=True)
    blocks = make_blocks(splits, tokenizer, data, training.seed)
    masking = Masking(tokenizer, data.mlm_probability)
    if run.streaming and "train" in blocks:
        shuffled = blocks["train"].shuffle(training.seed, buffer_size=run.shuffle_buffer)
        blocks["train"] = Stream(shuffled, masking, training)
    elif "train" in blocks:
        blocks["train"] = Redrawn(blocks["train"], masking, training.seed)
    return blocks, tokenizer, config


def make_trainer(
    network: PreTrainedModel,
    data: DataArguments,
    training: TrainingArguments,
    blocks: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> StreamingTrainer:
    """Return the Trainer, which evaluates masked tokens."""
    return StreamingTrainer(
        network,
        training,
        train_dataset=blocks.get("train"),
        eval_dataset=blocks.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer) if data.short_seq_prob else default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=token_scores,
        callbacks=make_callbacks(data),
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    data, model, training, run = parse(argv)
    begin_run(data, model, training, run)

    with training.main_process_first(desc="reading the data"), one_line():
        blocks, tokenizer, config = load_data(data, model, training, run)

    network = make_model(AutoModelForMaskedLM, model, config)
    trainer = make_trainer(network, data, training, blocks, tokenizer)

    metrics = train(trainer, run) | score(trainer)
    publish(trainer, run)
    return metrics


if __name__ == "__main__":
    main()
