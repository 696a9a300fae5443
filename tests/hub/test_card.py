"""Model cards of the converter: their content, and whether the Hub accepts their metadata."""

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import luna_mega
from luna_mega.hub.card import FIELDS, conversion_card
from tests.hub.loopback import metadata_errors
from tests.modeling.luna import HEADS, make, tiny_config

REPORT = """read       model.pt: luna_bert of the 2021 code, arch luna_base_tied_512, task masked_lm, updates: 1000
written    /home/somebody/converted: config.json"""


def converted(model_class="LunaForMaskedLM", tokenizer=False, license=None, **fields):
    source = {"file": "model.pt", "sha256": "ab" * 32, "arch": "luna_base_tied_512"}
    options = {"parameters": 1234567, "tokenizer": tokenizer, "license": license}
    return conversion_card("converted", model_class, tiny_config(**fields), source, REPORT, **options)


def parts(card: ModelCard) -> dict[str, str]:
    """Return title -> text of the sections of a card."""
    _, *sections = re.split(r"^## ", card.text, flags=re.MULTILINE)
    return {title: text.strip() for title, text in (section.split("\n", 1) for section in sections)}


def python(text):
    return re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]


def test_conversion():
    card = converted()
    assert metadata_errors(str(card)) == []
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["luna", "luna-mega"],
    }
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


@pytest.mark.parametrize("head", HEADS)
def test_usage_runs(tokenizer, tmp_path, head):
    """The code in the card starts with the required import and loads the model in a new session."""
    model = make(head)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lines = python(parts(converted(type(model).__name__, tokenizer=True))["Use"])
    assert lines.startswith("import luna_mega")
    session = {}
    exec(lines.replace('path = "..."', f"path = {str(tmp_path)!r}"), session)
    assert type(session["model"]) is HEADS[head] and session["tokenizer"]("ab")["input_ids"] == [0, 4, 5, 2]
    assert ("logits" in session) == (head == "ForSequencePairClassification")


def test_only_fields_of_the_input_are_shown():
    for kind in ("tokens", "values"):
        shown = parts(converted("LunaForSequenceClassification", input_type=kind))["Architecture"]
        assert ("| vocab_size |" in shown) == (kind == "tokens")


def test_values_have_no_pipeline():
    card = converted("LunaForSequenceClassification", input_type="values")
    assert card.data.pipeline_tag is None and metadata_errors(str(card)) == []


@pytest.mark.parametrize("config", luna_mega._register.CONFIGS.values())
def test_every_family_has_its_paper_and_lines_of_its_page(repo_root: Path, config):
    family = config.model_type.removesuffix("_seq2seq")
    source = {"file": "model.pt", "sha256": "ab" * 32, "arch": "any"}
    name = f"{config.__name__.removesuffix('Config')}Model"
    sections = parts(conversion_card("a", name, config(), source, "", parameters=1, tokenizer=False))
    page = (repo_root / "docs" / "papers" / f"{family}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*\|$", sections["Differences from the original code"], re.MULTILINE)[2:]
    assert len(rows) >= 2 and all(row in page for row in rows)
    assert re.search(rf"\d{family},", sections["Citation"]) and family in FIELDS
    assert all(f"| {field} |" in sections["Architecture"] for field in FIELDS[family] if "_size" not in field)
