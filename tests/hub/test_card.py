"""Model cards of the converter and of training scripts: their content, and that untrusted text stays text."""

import contextlib
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given, strategies as st
from markdown_it import MarkdownIt

from luna_mega._register import CONFIGS, model_classes
from luna_mega.cards import FIELDS, WITHOUT_PACKAGE, auto_class_of, conversion_card, describe_source, license_metadata
from luna_mega.errors import ConversionError
from luna_mega.escaping import LONGEST, code, code_block, markdown, short_line, terminal
from tests.hub.contract import FIELDS as CONTRACT, make
from tests.modeling.luna import tiny_config

REPORT = """read       model.pt: luna_bert of the 2021 code, arch luna_base_tied_512, task masked_lm, updates: 1000
written    /home/somebody/converted: config.json"""


def converted(
    model_class="LunaForMaskedLM", words=("model.pt", "luna_base", REPORT, "converted"), config=None, **options
):
    """Return a card; `words` are its file, architecture, report and name."""
    file, arch, report, name = words
    source = {"file": file, "sha256": "ab" * 32, "arch": arch}
    options = {"parameters": 1234567, "tokenizer": True} | options
    return conversion_card(name, model_class, config or tiny_config(), source, report, **options)


def test_conversion():
    card = converted(tokenizer=False)
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "fill-mask", "tags": ["luna", "luna-mega"]
    }  # fmt: skip
    assert "# converted\n" in card.text and "/home/somebody" not in str(card) and "Weights: not stated." in card.text
    for words in ("`model.pt`", "ab" * 32, "2021 code, arch luna_base", "| parameters | 1,234,567 |", WITHOUT_PACKAGE):
        assert words in card.text
    assert "Weights: mit." in converted(license="mit").text
    values = converted("LunaForSequenceClassification", config=tiny_config(input_type="values"))
    assert values.data.pipeline_tag is None and "| vocab_size |" not in values.text


CLASSES = [(config, name) for config in CONFIGS.values() for name in model_classes(config)]


@pytest.mark.parametrize(("config", "name"), CLASSES)
def test_every_class(config, name, tokenizer, tmp_path):
    """The code in the card starts with the required import and loads the model in a new session; the rest fits."""
    auto_class = auto_class_of(model_class := model_classes(config)[name])
    model = make(config.model_type, auto_class) if auto_class else model_class(config(**CONTRACT[config.model_type]))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text, family = converted(name, config=model.config).text, config.model_type.removesuffix("_seq2seq")
    lines = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)[1]
    assert lines.startswith("import luna_mega")
    session = {}
    with contextlib.suppress(OSError):  # images need the processor, which the converter writes
        exec(lines.replace('path = "..."', f"path = {str(tmp_path)!r}"), session)
    assert type(session["model"]) is type(model) and ("processor" in lines or "tokenizer" in session)
    assert ("logits" in session) == name.endswith("PairClassification")
    assert f"docs/papers/{family}.md" in text and re.search(rf"\d{family},", text)
    if model.config.input_type == "tokens":
        assert all(f"| {field} |" in text for field in FIELDS[family] if field not in ("image_size", "patch_size"))


def test_licenses():
    assert license_metadata(None) == {} and license_metadata("apache-2.0") == {"license": "apache-2.0"}
    assert license_metadata("other:my-license-1.0") == {"license": "other", "license_name": "my-license-1.0"}
    for license in ("MIT", "nonsense", "other", "other:", "other:My License", "mit\n# x", "", "mit "):
        with pytest.raises(ConversionError, match="not one of the Hub's identifiers.*other:NAME"):
            license_metadata(license)


HUB = dict.fromkeys(["dataset", "dataset_tags"], "a/b") | {"dataset_args": "c"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"dataset_path": "some/data"}, {"dataset": "data"}),
        ({"train_files": ["some/a.txt", "some/b.txt"]}, {"dataset": "`a.txt and b.txt`"}),
        ({"dataset_name": "."}, {"dataset": "data"}),
        ({"dataset_name": "a/b", "dataset_config": "c"}, HUB),
    ],
)
def test_dataset_in_the_card(options, expected, tmp_path, monkeypatch):
    """Only names on the Hub become metadata; for local paths, the card has the last component."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    data = SimpleNamespace(**dict.fromkeys(("dataset_name", "dataset_config", "dataset_path")) | options)
    assert describe_source(data) == expected


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


@given(UNTRUSTED)
def test_forms(text):
    check_forms(text)


def test_forms_of_plain_words_and_of_each_text():
    for text in ALIVE:
        check_forms(text)
    for text in ("my-model", "luna_base_512", "nyu-mll/glue sst2", "0.9123", "1,234,567", "3e-05", "a" * LONGEST):
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
    words = file, arch, f"read  x\nnote  {' '.join(report.split())}\nwritten  here", name
    plain = converted(words=("word1", "word2", "read  x\nnote  word3\nwritten  here", "w"), license="mit")
    text = str(card := converted(words=words, license="mit"))
    assert anatomy(text) == anatomy(str(plain))
    metadata = yaml.safe_load(METADATA.match(text)[1])
    assert text.encode() and metadata == card.data.to_dict() and metadata["license"] == "mit"
    assert metadata.keys() <= {"license", "library_name", "tags", "pipeline_tag"}
