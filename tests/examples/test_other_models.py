"""Models of transformers as baselines in the scripts: training on inputs of maximum length, and the model card."""

import random

import pytest
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from tests.examples.runs import assert_error, sentence, steps, write

ROBERTA = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
BART = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"
BART += ",encoder_ffn_dim=16,decoder_ffn_dim=16"
LENGTH = 12


@pytest.fixture
def run(call, tmp_path):
    """Return a function that trains for two steps, evaluates, and returns the summary and the model card."""

    def main(name: str, model_type: str, overrides: str, *arguments: object) -> tuple[dict, str]:
        model = ["--model_type", model_type, "--config_overrides", overrides, "--vocab_size", 300]
        output = ["--do_train", "--do_eval", "--max_steps", 2, "--output_dir", tmp_path / "out"]
        summary = call(name, "--dataset_path", tmp_path / "data", *model, *output, *arguments)
        assert steps(tmp_path / "out") == 2
        return summary, (tmp_path / "out" / "README.md").read_text(encoding="utf-8")

    return main


@pytest.fixture
def reviews(tmp_path):
    """Write sentences, most of which exceed the maximum input length."""
    draw = random.Random(0)
    for name in ("train", "validation"):
        labels = [draw.randrange(2) for _ in range(24)]
        rows = [
            {"sentence": " ".join(sentence(label == 1, draw) for _ in range(4)), "label": label} for label in labels
        ]
        write(rows, tmp_path / "data" / f"{name}.jsonl")


def assert_card(card: str, summary: dict) -> None:
    assert "This model was trained from scratch on the data dataset." in card
    assert f"- Loss: {round(summary['eval_loss'], 4)}" in card


@pytest.mark.slow
def test_roberta_pretrained_and_fine_tuned(run, call, reviews, tmp_path, capsys):
    length = ["--text_column", "sentence", "--block_size", LENGTH]
    summary, card = run("run_mlm", "roberta", ROBERTA, *length)
    assert summary["eval_perplexity"] > 1
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "out")).__name__ == "RobertaForMaskedLM"
    config = AutoConfig.from_pretrained(tmp_path / "out")
    # The first token has the position after the padding id, 1.
    assert (config.model_type, config.max_position_embeddings) == ("roberta", LENGTH + 2)
    assert not {"input_type", "sparse_prediction"} & config.to_dict().keys()
    assert_card(card, summary)

    model = ["--model_name_or_path", tmp_path / "out", "--dataset_path", tmp_path / "data", "--task_name", "sst2"]
    tuned = ["--do_train", "--do_eval", "--max_steps", 2, "--output_dir", tmp_path / "tuned"]
    assert "eval_accuracy" in call("run_glue", *model, *tuned, "--max_seq_length", LENGTH)
    longer = [*model, "--do_eval", "--output_dir", tmp_path / "longer", "--max_seq_length", LENGTH + 1]
    capsys.readouterr()
    call("run_glue", *longer)
    assert f"--max_seq_length {LENGTH + 1} is reduced to {LENGTH}" in capsys.readouterr().out


def test_roberta_as_a_classifier_from_scratch(run, reviews, tmp_path):
    summary, card = run("run_glue", "roberta", ROBERTA, "--task_name", "sst2", "--max_seq_length", LENGTH)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "RobertaForSequenceClassification" and "eval_accuracy" in summary
    assert model.config.id2label == {0: "negative", 1: "positive"}
    assert_card(card, summary)


@pytest.mark.slow
def test_bart_translates(run, tmp_path):
    draw = random.Random(0)
    for name in ("train", "validation"):
        pairs = [{"translation": {side: sentence(True, draw) for side in ("en", "de")}} for _ in range(24)]
        write(pairs, tmp_path / "data" / f"{name}.jsonl")
    lengths = ["--max_source_length", 2 * LENGTH, "--max_target_length", 2 * LENGTH]
    summary, card = run("run_translation", "bart", BART, *lengths)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "BartForConditionalGeneration" and summary["eval_bleu"] >= 0
    translations = (tmp_path / "out" / "translations.validation.de").read_text(encoding="utf-8").splitlines()
    assert model.config.decoder_start_token_id == 2 and len(translations) == 24
    assert_card(card, summary)


def test_a_model_that_reads_tokens_does_not_read_audio(call, tmp_path):
    rows = [{"clip": [0.1, -0.1] * 40, "sampling_rate": 1000, "label": label} for label in "ab"]
    write(rows, tmp_path / "data" / "train.parquet")
    options = ["--dataset_path", tmp_path / "data", "--audio_column", "clip", "--output_dir", tmp_path / "out"]
    options += ["--do_train", "--model_type", "roberta", "--config_overrides", ROBERTA]
    assert_error(lambda: call("run_audio", *options), "the model reads tokens .input_type., not values")
