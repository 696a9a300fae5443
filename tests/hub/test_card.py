"""Model cards of converter and training: their content, and the validity of their metadata on the Hub."""

import re
from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)

import luna_mega
from luna_mega.hub.card import FIELDS, conversion_card, training_card
from tests.hub.loopback import metadata_errors
from tests.modeling.luna import HEADS, make, tiny_config

COMMAND = ["python", "run.py", "--text", "two words", "--hub_token", "hf_secret", "--hub-token=hf_secret"]
METRICS = {
    "eval_loss": 0.5,
    "eval_accuracy": 0.9123456,
    "eval_runtime": 3.0,
    "eval_samples_per_second": 9.0,
    "epoch": 1,
}


REPORT = """read       model.pt: luna_bert of the 2021 code, arch luna_base_tied_512, task masked_lm, updates: 1000
written    /home/somebody/converted: config.json"""


def converted(model_class="LunaForMaskedLM", tokenizer=False, license=None, **fields):
    source = {"file": "model.pt", "sha256": "ab" * 32, "arch": "luna_base_tied_512"}
    options = {"parameters": 1234567, "tokenizer": tokenizer, "license": license}
    return conversion_card("converted", model_class, tiny_config(**fields), source, REPORT, **options)


@pytest.fixture
def trainer(tmp_path, tokenizer):
    def build(head="ForSequenceClassification", **options):
        arguments = TrainingArguments(output_dir=str(tmp_path / "my-model"), report_to="none", **options)
        return Trainer(model=make(head), args=arguments, processing_class=tokenizer)

    return build


def parts(card: ModelCard) -> dict[str, str]:
    """Title -> text of the sections."""
    _, *sections = re.split(r"^## ", card.text, flags=re.MULTILINE)
    return {title: text.strip() for title, text in (section.split("\n", 1) for section in sections)}


def python(text):
    return re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]


def test_conversion():
    card = converted()
    assert metadata_errors(str(card)) == []
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": ["luna"]}
    sections = parts(card)
    assert "# converted\n" in card.text and "/home/somebody" not in str(card)
    assert "`model.pt`" in sections["Origin"] and "ab" * 32 in sections["Origin"]
    assert "luna_base_tied_512, task masked_lm" in sections["Origin"]
    assert "Weights: not stated." in sections["License"]
    assert "| projection_length | 6 |" in sections["Architecture"]
    assert "| parameters | 1,234,567 |" in sections["Architecture"]
    assert "2106.01540" in sections["Citation"] and "2106.01540" in card.text.split("## ")[0]


def test_conversion_with_license_and_tokenizer():
    card = converted(tokenizer=True, license="mit")
    assert card.data.license == "mit" and "Weights: mit." in card.text
    assert "AutoTokenizer.from_pretrained(path)" in card.text


def test_training(trainer):
    card = training_card(
        trainer(learning_rate=3e-4), COMMAND, "nyu-mll/glue", "sst2", metrics=METRICS, base_model="user/luna-base",
        license="apache-2.0",
    )  # fmt: skip
    assert metadata_errors(str(card)) == []
    data = card.data
    assert (data.license, data.base_model, data.datasets) == ("apache-2.0", "user/luna-base", ["nyu-mll/glue"])
    assert (data.pipeline_tag, data.model_name, data.metrics) == (
        "text-classification",
        "my-model",
        ["loss", "accuracy"],
    )
    result = data.eval_results[1]
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("nyu-mll/glue", "sst2", "validation")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9123456)
    sections = parts(card)
    assert "| accuracy | 0.9123 |" in sections["Results"] and "runtime" not in sections["Results"]
    assert "python run.py --text 'two words' --hub_token ..." in sections["Training"] and "hf_secret" not in str(card)
    assert "| learning_rate | 0.0003 |" in sections["Training"]
    assert f"| transformers | {transformers.__version__} |" in sections["Training"]
    assert "fine-tuned from `user/luna-base` on nyu-mll/glue sst2" in card.text


def test_training_on_local_data_from_scratch(trainer, tmp_path):
    """Paths of a machine are no metadata of the Hub; without an evaluation there are no results."""
    card = training_card(trainer(), COMMAND, str(tmp_path / "my data"))
    assert metadata_errors(str(card)) == []
    assert card.data.to_dict().keys() == {"library_name", "pipeline_tag", "tags"}
    assert "trained from scratch on my data." in card.text and str(tmp_path) not in str(card)
    assert "Results" not in parts(card)


def test_training_from_a_local_folder(trainer, tmp_path):
    card = training_card(trainer(), COMMAND, "nyu-mll/glue", base_model=str(tmp_path))
    assert card.data.base_model is None and f"fine-tuned from `{tmp_path.name}`" in card.text


def test_training_from_a_teacher(trainer):
    card = training_card(
        trainer(),
        COMMAND,
        "imdb",
        base_model="user/bert",
        origin="distilled",
        sections={"Distillation": "Four stages."},
    )
    assert metadata_errors(str(card)) == [] and "distilled from `user/bert` on imdb" in card.text
    assert parts(card)["Distillation"].strip() == "Four stages."


@pytest.mark.parametrize("head", HEADS)
def test_usage_runs(trainer, tmp_path, head):
    """The code in the card loads the model in a new session."""
    built = trainer(head)
    built.save_model()
    lines = python(parts(training_card(built, COMMAND, "imdb"))["Use"]).replace(
        'path = "..."', f"path = {str(built.args.output_dir)!r}"
    )
    session = {}
    exec(lines, session)
    assert type(session["model"]) is HEADS[head] and session["tokenizer"]("ab")["input_ids"] == [0, 4, 5, 2]
    assert ("logits" in session) == (head == "ForSequencePairClassification")


SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
FOREIGN = {
    "fill-mask": lambda: RobertaForMaskedLM(RobertaConfig(**SMALL, intermediate_size=16)),
    "translation": lambda: BartForConditionalGeneration(
        BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=30)
    ),
    None: lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)),
}


@pytest.mark.parametrize("task", FOREIGN)
def test_training_of_a_model_of_transformers(tmp_path, tokenizer, task):
    """Baselines trained by the example scripts have a card with the known facts and code that loads them."""
    arguments = TrainingArguments(output_dir=str(tmp_path / "baseline"), report_to="none")
    trainer = Trainer(model=FOREIGN[task](), args=arguments, processing_class=tokenizer)
    trainer.save_model()
    card = training_card(trainer, COMMAND, "imdb", metrics=METRICS)
    assert metadata_errors(str(card)) == [] and card.data.pipeline_tag == task
    assert card.data.tags == [trainer.model.config.model_type]
    sections = parts(card)
    assert sections.keys() == {"Use", "Architecture", "Results", "Training", "License"}
    assert "| num_hidden_layers | 1 |" in sections["Architecture"] and "| vocab_size | 40 |" in sections["Architecture"]
    session = {}
    exec(python(sections["Use"]).replace("...", arguments.output_dir), session)
    assert type(session["model"]) is type(trainer.model) and "luna" not in sections["Use"]


def test_only_fields_of_the_input_are_shown():
    for kind in ("tokens", "values"):
        shown = parts(converted("LunaForSequenceClassification", input_type=kind))["Architecture"]
        assert ("| vocab_size |" in shown) == (kind == "tokens")


def test_values_have_no_pipeline():
    card = converted("LunaForSequenceClassification", input_type="values")
    assert card.data.pipeline_tag is None and metadata_errors(str(card)) == []


@pytest.mark.parametrize("config", luna_mega._register.CONFIGS.values())
def test_every_family_has_its_paper_and_lines_of_the_page_of_deviations(repo_root: Path, config):
    family = config.model_type.removesuffix("_seq2seq")
    source = {"file": "model.pt", "sha256": "ab" * 32, "arch": "any"}
    name = f"{config.__name__.removesuffix('Config')}Model"
    sections = parts(conversion_card("a", name, config(), source, "", parameters=1, tokenizer=False))
    page = (repo_root / "docs" / "deviations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\|$", sections["Differences from the original code"], re.MULTILINE)[2:]
    assert len(rows) >= 2 and all(row in page for row in rows)
    assert re.search(rf"\d{family},", sections["Citation"]) and family in FIELDS
    assert all(f"| {field} |" in sections["Architecture"] for field in FIELDS[family] if "_size" not in field)


def test_card_starts_with_the_required_import(trainer):
    for card in (converted(tokenizer=True), training_card(trainer(), COMMAND, "imdb")):
        blocks = re.findall(r"```(.*?)```", card.text, re.DOTALL)
        assert blocks[0].startswith("python\nimport luna_mega") and "## Use" in card.text.partition("```")[0]
