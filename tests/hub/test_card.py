"""Model cards of the converter: their content, whether the Hub accepts them, and that untrusted text stays text."""

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, strategies as st
from markdown_it import MarkdownIt
from tests.hub.loopback import metadata_errors

import luna_mega
from luna_mega.errors import ConversionError
from luna_mega.escaping import LONGEST, code, code_block, markdown, short_line, terminal
from luna_mega.hub.card import FIELDS, conversion_card, license_metadata
from tests.modeling.luna import HEADS, make, tiny_config

REPORT = """read       model.pt: luna_bert of the 2021 code, arch luna_base_tied_512, task masked_lm, updates: 1000
written    /home/somebody/converted: config.json"""


def converted(model_class="LunaForMaskedLM", words=None, tokenizer=False, license=None, **fields):
    """Return a card; `words` are its file, architecture, report and name."""
    file, arch, report, name = words or ("model.pt", "luna_base_tied_512", REPORT, "converted")
    source = {"file": file, "sha256": "ab" * 32, "arch": arch}
    options = {"parameters": 1234567, "tokenizer": tokenizer, "license": license}
    return conversion_card(name, model_class, tiny_config(**fields), source, report, **options)


def parts(card: ModelCard) -> dict[str, str]:
    """Return title -> text of the sections of a card."""
    _, *sections = re.split(r"^## ", card.text, flags=re.MULTILINE)
    return {title: text.strip() for title, text in (section.split("\n", 1) for section in sections)}


def test_conversion():
    card = converted()
    assert metadata_errors(str(card)) == []
    expected = {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": ["luna", "luna-mega"]}
    assert card.data.to_dict() == expected
    sections = parts(card)
    assert "# converted\n" in card.text and "/home/somebody" not in str(card)
    assert "`model.pt`" in sections["Origin"] and "ab" * 32 in sections["Origin"]
    assert "luna_base_tied_512, task masked_lm" in sections["Origin"]
    assert "Weights: not stated." in sections["License"]
    assert "| projection_length | 6 |" in sections["Architecture"] and "| vocab_size |" in sections["Architecture"]
    assert "| parameters | 1,234,567 |" in sections["Architecture"]
    assert "2106.01540" in sections["Citation"] and "2106.01540" in card.text.split("## ")[0]
    card = converted(tokenizer=True, license="mit")
    assert card.data.license == "mit" and "Weights: mit." in card.text
    assert "AutoTokenizer.from_pretrained(path)" in card.text


def test_values_have_no_pipeline_and_no_vocabulary():
    card = converted("LunaForSequenceClassification", input_type="values")
    assert card.data.pipeline_tag is None and metadata_errors(str(card)) == []
    assert "| vocab_size |" not in parts(card)["Architecture"]


@pytest.mark.parametrize("head", HEADS)
def test_usage_runs(tokenizer, tmp_path, head):
    """The code in the card starts with the required import and loads the model in a new session."""
    model = make(head)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    use = parts(converted(type(model).__name__, tokenizer=True))["Use"]
    lines = re.search(r"```python\n(.*?)```", use, flags=re.DOTALL)[1]
    assert lines.startswith("import luna_mega")
    session = {}
    exec(lines.replace('path = "..."', f"path = {str(tmp_path)!r}"), session)
    assert type(session["model"]) is HEADS[head] and session["tokenizer"]("ab")["input_ids"] == [0, 4, 5, 2]
    assert ("logits" in session) == (head == "ForSequencePairClassification")


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


@pytest.mark.parametrize("license", ["mit", "apache-2.0", "other:my-license-1.0", None])
def test_licences(license):
    stated = license_metadata(license)
    other = {"license": "other", "license_name": "my-license-1.0"}
    assert stated == ({} if license is None else other if ":" in license else {"license": license})


@pytest.mark.parametrize("license", ["MIT", "nonsense", "other", "other:", "other:My License", "mit\n# x", "", "mit "])
def test_unknown_licenses(license):
    with pytest.raises(ConversionError, match="not one of the Hub's identifiers.*other:NAME"):
        license_metadata(license)


# Syntax of Markdown, HTML and YAML, and characters that terminals interpret.
ALIVE = [
    "# Heading", "x\n# Heading", "x\n\n<script>alert(1)</script>\n\n", "<img src=x onerror=alert(1)>",
    "[a](http://evil)", "![a](https://evil/x.png)", "http://evil.example", "www.evil.example", "a@evil.example", "`",
    "``", "```", "```\n# x", "~~~", "| a | b |", "a|b", "\\|", "\\", "---\nlicense: mit\n---", "\n---\n", "- a",
    "1. a", "> a", "*a*", "__a__", "x\r# y", "x\u2028# y", "x\x85y", "&lt;b&gt;", "\x1b[31mred", "\u202egnp.exe",
    "\x00", "\x07", "\udcff", "\ud800", "license: mit", "no", "null", "[", "{", "!!python/object:os", "&a *a", "'",
    '"', "%", "a: b", "\t", "\ufeff", "a" * 300, "<!-- ", "]: http://evil", "[x]: http://evil", "$x$", "</details>",
    ":smile:", "word", "two words", "0.5", "~",
]  # fmt: skip
UNTRUSTED = st.lists(st.sampled_from(ALIVE) | st.text(max_size=3), min_size=1, max_size=3).map("".join)
METADATA = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def check_forms(text):
    for form in (short_line, markdown, code):
        line = form(text)
        assert line.isprintable() and line.encode().decode() == line and len(line) <= 4 * LONGEST
    screen = terminal(text)
    assert all(character.isprintable() or character == "\n" for character in screen)
    assert screen == screen.encode().decode()
    (paragraph,) = [token for token in MarkdownIt().parse(f"x {markdown(text)} y") if token.type == "inline"]
    assert {token.type for token in paragraph.children} <= {"text", "code_inline"}
    (block,) = MarkdownIt().parse(code_block(text, "sh"))
    assert (block.type, block.content.rstrip("\n"), block.info) == ("fence", terminal(text).rstrip("\n"), "sh")


def test_forms_of_each_text():
    for text in ALIVE:
        check_forms(text)


@given(UNTRUSTED)
def test_forms(text):
    check_forms(text)


@pytest.mark.parametrize("text", ["my-model", "luna_base_512", "nyu-mll/glue sst2", "0.9123", "1,234,567", "3e-05"])
def test_plain_words_are_unchanged(text):
    assert markdown(text) == terminal(text) == short_line(text) == text


def anatomy(card: str) -> tuple[list, Counter]:
    """Return the blocks of a page in order, and counts of the active elements in their lines."""
    tokens = MarkdownIt().enable("table").parse(METADATA.sub("", card, count=1))
    inner = [child for token in tokens if token.type == "inline" for child in token.children]
    assert not [text for text in inner if text.type == "text" and re.search(r"://|www\.|@", text.content, re.I)]
    alive = Counter(child.type for child in inner if child.type not in ("text", "code_inline", "softbreak"))
    return [(token.type, token.tag, token.level) for token in tokens], alive


@given(st.tuples(*[UNTRUSTED] * 4))
def test_card_injection(words):
    """With malicious strings, pages keep their blocks and links, and metadata keep the strings."""
    file, arch, report, name = words
    options = {"tokenizer": True, "license": "mit"}
    card = converted(words=(file, arch, f"read  x\nnote  {' '.join(report.split())}\nwritten  here", name), **options)
    text, plain = str(card), converted(words=["word1", "word2", "read  x\nnote  word3\nwritten  here", "w"], **options)
    assert anatomy(text) == anatomy(str(plain))
    metadata = yaml.safe_load(METADATA.match(text)[1])
    assert text.encode() and metadata == card.data.to_dict() and metadata["license"] == "mit"
    assert metadata.keys() <= {"license", "library_name", "tags", "pipeline_tag"}
