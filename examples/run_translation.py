"""Trains a translation model, from scratch or from a checkpoint, and scores what it translates with sacreBLEU.

    python examples/run_translation.py --recipe examples/recipes/translation/multi30k_luna.yaml \
        --dataset_name bentrevett/multi30k --output_dir outputs/multi30k_luna

Every field of Seq2SeqTrainingArguments is an option; the values of a recipe are defaults that the command line
overrides.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common.arguments import check_choice, check_least, fail
from common.averaging import average, choose_checkpoints
from common.data import LimitArguments, SourceArguments, check_source, load_splits
from common.model import make_config, make_model
from common.optimizers import ClipEach, apollo
from common.schedules import milestone_schedule
from common.script import Script
from common.training import OrderedTrainer, write_lines
from common.translation import PairCollator, Tokenizers, encode, make_tokenizers, read_pairs
from datasets import Dataset
from sacrebleu.metrics import BLEU
from transformers import AutoModelForSeq2SeqLM, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer


@dataclass
class DataArguments(SourceArguments, LimitArguments):
    source_lang: str = field(default="en", metadata={"help": "language that is translated: its name in the data"})
    target_lang: str = field(default="de", metadata={"help": "language that it is translated into"})
    test_paths: list[str] | None = field(
        default=None, metadata={"help": "local folders: --do_predict translates their split test, not the data set's"}
    )
    max_source_length: int = field(default=128, metadata={"help": "tokens of a source, </s> among them"})
    max_target_length: int = field(default=128, metadata={"help": "tokens of a target, </s> among them"})
    num_beams: int = field(
        default=5, metadata={"help": "beams of the evaluation at the end; --generation_num_beams is for training"}
    )
    length_penalty: float = field(default=1.0, metadata={"help": "power of the length that scores are divided by"})
    milestones: list[int] | None = field(
        default=None,
        metadata={"help": "steps that lower the learning rate; with lr_scheduler_type constant_with_warmup"},
    )
    milestone_factor: float = field(default=0.1, metadata={"help": "factor on the learning rate at a milestone"})
    warmup_init_lr: float = field(default=0.0, metadata={"help": "learning rate of the first step; with milestones"})
    apollo: bool = field(
        default=False, metadata={"help": "optimizer: Apollo, with adam_beta1 and adam_epsilon; needs pytorch_optimizer"}
    )
    clip_each: float | None = field(
        default=None, metadata={"help": "norm that the gradient of every parameter is clipped to, each by itself"}
    )
    average_checkpoints: int = field(
        default=0, metadata={"help": "evaluate and save the mean of N checkpoints, of this or of an earlier run"}
    )
    average_by: str = field(default="last", metadata={"help": "which: last, or best by metric_for_best_model"})


class TranslationTrainer(OrderedTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer that scores translations against the references as they were given, with sacreBLEU."""

    def __init__(self, *args, tokenizers: Tokenizers, data: DataArguments, **kwargs):
        super().__init__(*args, compute_metrics=self.score, **kwargs)
        self.tokenizers, self.data = tokenizers, data
        self.bleu = BLEU(trg_lang=data.target_lang)
        if data.apollo:
            self.optimizer_cls_and_kwargs = apollo(self.args)  # no argument of Seq2SeqTrainer
        if data.clip_each is not None:
            self.add_callback(ClipEach(data.clip_each))

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.data.milestones is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        start = self.data.warmup_init_lr / self.args.learning_rate
        self.lr_scheduler = milestone_schedule(
            optimizer or self.optimizer, warmup, self.data.milestones, self.data.milestone_factor, start
        )
        return self.lr_scheduler

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, *args, **kwargs):
        self.references = list(dataloader.dataset["target"])
        self.gather_function = self.accelerator.gather_for_metrics  # Seq2SeqTrainer's own counts the last ones twice
        loss_only = prediction_loss_only or not self.args.predict_with_generate
        return super().evaluation_loop(dataloader, description, loss_only, *args, **kwargs)

    def score(self, prediction: EvalPrediction) -> dict[str, float]:
        tokenizer = self.tokenizers.target
        ids = np.where(prediction.predictions < 0, tokenizer.pad_token_id, prediction.predictions)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        self.translations = [" ".join(text.split()) for text in texts]
        return {"bleu": self.bleu.corpus_score(self.translations, [self.references]).score}

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.tokenizers.target is not self.tokenizers.source:
            self.tokenizers.target.save_pretrained(Path(output_dir or self.args.output_dir, "target"))


class Translation(Script):
    data_arguments, training_arguments = DataArguments, Seq2SeqTrainingArguments
    metric = "eval_bleu"

    def check(self) -> None:
        super().check()
        data, training = self.data, self.training
        self.title = f"{data.source_lang}-{data.target_lang} translation"
        if training.do_train or training.do_eval or not data.test_paths:
            check_source(data)
        check_least(data, 2, "max_source_length", "max_target_length")
        check_least(data, 1, "num_beams")
        check_choice(data, "average_by", ("last", "best"))
        if data.milestones and training.lr_scheduler_type != "constant_with_warmup":
            fail(f"--milestones: not with --lr_scheduler_type {training.lr_scheduler_type}, but constant_with_warmup")
        if data.milestones and data.milestones != sorted(data.milestones):
            fail(f"--milestones {data.milestones} must be in order")
        if data.warmup_init_lr and not (data.milestones and 0 < data.warmup_init_lr < training.learning_rate):
            fail(f"--warmup_init_lr {data.warmup_init_lr} needs --milestones, and a higher --learning_rate")
        if data.clip_each is not None and (data.clip_each <= 0 or training.max_grad_norm or training.fp16):
            fail(f"--clip_each {data.clip_each} must be above 0, with --max_grad_norm 0 and without --fp16")
        if data.average_checkpoints and self.average.ema_decay:
            fail("--average_checkpoints and --ema_decay are two averages of the weights: pass one of them")
        if data.average_checkpoints > (training.save_total_limit or data.average_checkpoints):
            fail(f"--average_checkpoints {data.average_checkpoints} is above --save_total_limit")

    def load(self) -> dict[str, Dataset]:
        """Return the pairs of the splits that are needed and, by name, of the test sets."""
        data, training, folders = self.data, self.training, {}
        if training.do_predict and data.test_paths:
            folders = {Path(path).resolve().name: path for path in data.test_paths}
        limits = self.limits(test=() if folders else ("test",))
        if folders and (len(folders) < len(data.test_paths) or folders.keys() & limits.keys()):
            fail(f"--test_paths: the folders need names of their own, other than {' and '.join(limits)}")
        splits = {}
        if limits:
            splits = load_splits(limits, data.dataset_path, data.dataset_name, data.dataset_config)
        for name, path in folders.items():
            splits[name] = load_splits({"test": data.max_predict_samples}, path, None, None)["test"]
        return {name: read_pairs(split, name, data.source_lang, data.target_lang) for name, split in splits.items()}

    def prepare(self) -> None:
        data, model = self.data, self.model
        # The collator takes what it needs; the texts are for the score, the lengths for the batches.
        self.training.remove_unused_columns = False
        self.training.generation_num_beams = self.training.generation_num_beams or 1
        splits = self.load()
        texts = [*splits["train"]["source"], *splits["train"]["target"]] if "train" in splits else []
        length = max(data.max_source_length, data.max_target_length)
        tokenizers = make_tokenizers(model, texts, length)
        start = {"is_encoder_decoder": True, "decoder_start_token_id": tokenizers.target.eos_token_id}
        config = make_config(model, tokenizers.source, length, **({} if model.model_name_or_path else start))
        if not config.is_encoder_decoder:
            fail(f"{model.model_name_or_path} is no encoder-decoder")
        if len(tokenizers.target) > (size := getattr(config, "decoder_vocab_size", None) or config.vocab_size):
            fail(f"the target's tokenizer has {len(tokenizers.target)} entries, the decoder only {size}")
        for name, pairs in splits.items():
            self.splits[name] = encode(pairs, name, tokenizers, data.max_source_length, data.max_target_length)
        self.tokenizers, self.config = tokenizers, config

    def build(self) -> Trainer:
        data, tokenizers, config, model = self.data, self.tokenizers, self.config, self.model
        net = make_model(AutoModelForSeq2SeqLM, model, config)
        net.generation_config.update(
            # generate counts the token that the decoder starts with.
            max_length=data.max_target_length + 1,
            num_beams=data.num_beams,
            length_penalty=data.length_penalty,
        )
        return self.make_trainer(
            net,
            TranslationTrainer,
            processing_class=tokenizers.source,
            data_collator=PairCollator(tokenizers.source, net),
            tokenizers=tokenizers,
            data=data,
        )

    def before_evaluation(self) -> dict[str, Any]:
        """Give the model the mean of checkpoints, and evaluation its beams."""
        summary = {"averaged": self.average_weights()} if self.data.average_checkpoints else {}
        self.training.predict_with_generate, self.training.generation_num_beams = True, self.data.num_beams
        return summary

    def average_weights(self) -> str:
        """Give the model the mean of several checkpoints, and save it; return their names."""
        data, training, trainer = self.data, self.training, self.trainer
        metric = training.metric_for_best_model or "eval_loss"
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        trainer.accelerator.wait_for_everyone()
        folder = training.output_dir if training.do_train else self.base_model
        chosen = choose_checkpoints(folder, data.average_checkpoints, metric if data.average_by == "best" else None)
        trainer.accelerator.unwrap_model(trainer.model).load_state_dict(average(chosen), strict=False)
        trainer.save_model(_internal_call=True)
        return ", ".join(path.name for path in chosen)

    def evaluate(self) -> dict[str, Any]:
        history = list(self.trainer.state.log_history)
        summary = super().evaluate() | {"translations": self.write_translations("validation")}
        self.trainer.state.log_history = history  # the curve is of training, not of beams and means of checkpoints
        return summary | {"bleu_signature": str(self.trainer.bleu.get_signature())}

    def predict(self) -> dict[str, Any]:
        """Translate the test sets; return their scores, and the paths of the translations."""
        summary = {}
        for name in [name for name in self.splits if name not in ("train", "validation")]:
            metrics = self.trainer.predict(self.splits[name], metric_key_prefix=name).metrics
            summary |= {f"{name}_{key}": metrics[f"{name}_{key}"] for key in ("loss", "bleu", "runtime")}
            summary[f"{name}_translations"] = self.write_translations(name)
        return summary | {"bleu_signature": str(self.trainer.bleu.get_signature())}

    def write_translations(self, name: str) -> str:
        """Write the translations that were made last, those of the split `name`, in the order of the data."""
        ordered = sorted(zip(self.splits[name]["row"], self.trainer.translations, strict=True))
        file = f"translations.{name}.{self.data.target_lang}"
        return write_lines(self.trainer, file, (text for _, text in ordered))

    def describe(self) -> dict[str, Any]:
        vocabulary = {"vocabulary": len(self.trainer.tokenizers.source)} if self.training.do_train else {}
        return super().describe() | vocabulary


def main(argv: list[str] | None = None) -> dict[str, Any]:
    return Translation(argv).run()


if __name__ == "__main__":
    main()
