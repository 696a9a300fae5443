"""Untrusted text is escaped in the terminal, in the metadata and on the page of a model card."""

import random
import re
from collections import Counter

import pytest
import yaml
from markdown_it import MarkdownIt

from luna_mega.errors import ConversionError
from luna_mega.escaping import LONGEST, code, code_block, markdown, short_line, terminal
from luna_mega.hub.card import conversion_card, license_metadata
from tests.modeling.luna import tiny_config

ALIVE = [
    "# Heading", "x\n# Heading", "x\n\n<script>alert(1)</script>\n\n", "<img src=x onerror=alert(1)>",
    "[a](http://evil)", "![a](https://evil/x.png)", "http://evil.example", "www.evil.example", "a@evil.example", "`",
    "``", "```", "```\n# x", "~~~", "| a | b |", "a|b", "\\|", "\\", "---\nlicense: mit\n---", "\n---\n", "- a",
    "1. a", "> a", "*a*", "__a__", "x\r# y", "x\u2028# y", "x\x85y", "&lt;b&gt;", "\x1b[31mred", "\u202egnp.exe",
    "\x00", "\x07", "\udcff", "\ud800", "license: mit", "no", "null", "[", "{", "!!python/object:os", "&a *a", "'",
    '"', "%", "a: b", "\t", "\ufeff", "a" * 300, "<!-- ", "]: http://evil", "[x]: http://evil", "$x$", "</details>",
    ":smile:", "word", "two words", "0.5", "~", "",
]  # fmt: skip


@pytest.mark.parametrize("text", ALIVE, ids=ascii)
def test_forms(text):
    for form in (short_line, markdown, code):
        line = form(text)
        assert line.isprintable() and line.encode().decode() == line and len(line) <= 4 * LONGEST
    screen = terminal(text)
    assert (
        all(character.isprintable() or character == "\n" for character in screen) and screen == screen.encode().decode()
    )
    (paragraph,) = [token for token in MarkdownIt().parse(f"x {markdown(text)} y") if token.type == "inline"]
    assert {token.type for token in paragraph.children} <= {"text", "code_inline"}
    (block,) = MarkdownIt().parse(code_block(text, "sh"))
    assert (block.type, block.content.rstrip("\n"), block.info) == ("fence", terminal(text).rstrip("\n"), "sh")


@pytest.mark.parametrize("text", ["my-model", "luna_base_512", "nyu-mll/glue sst2", "0.9123", "1,234,567", "3e-05"])
def test_plain_words_are_unchanged(text):
    assert markdown(text) == terminal(text) == short_line(text) == text


@pytest.mark.parametrize("license", ["mit", "apache-2.0", "other:my-license-1.0", None])
def test_licences(license):
    stated = license_metadata(license)
    other = {"license": "other", "license_name": "my-license-1.0"}
    assert stated == ({} if license is None else other if ":" in license else {"license": license})


@pytest.mark.parametrize("license", ["MIT", "nonsense", "other", "other:", "other:My License", "mit\n# x", "", "mit "])
def test_unknown_licenses(license):
    with pytest.raises(ConversionError, match="not one of the Hub's identifiers.*other:NAME"):
        license_metadata(license)


METADATA = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def anatomy(card: str) -> tuple[list, Counter]:
    """Return the blocks of a page in order, and counts of the active elements in their lines."""
    tokens = MarkdownIt().enable("table").parse(METADATA.sub("", card, count=1))
    inner = [child for token in tokens if token.type == "inline" for child in token.children]
    assert not [text for text in inner if text.type == "text" and re.search(r"://|www\.|@", text.content, re.I)]
    alive = Counter(child.type for child in inner if child.type not in ("text", "code_inline", "softbreak"))
    return [(token.type, token.tag, token.level) for token in tokens], alive


def converted(words, license="mit"):
    source = {"file": words[0], "sha256": "ab" * 32, "arch": words[1]}
    lines = ["read  x", f"note  {' '.join(words[2].split())}", "written  here"]
    options = {"parameters": 5, "tokenizer": True, "license": license}
    return conversion_card(words[3], "LunaForMaskedLM", tiny_config(), source, "\n".join(lines), **options)


@pytest.mark.parametrize("tries", [3, pytest.param(500, marks=pytest.mark.slow)])
def test_card_injection(tries):
    """With malicious strings, pages keep their blocks and links, and metadata keep the strings."""
    draw = random.Random(0)
    plain = [f"word{index}" for index in range(4)]
    expected = anatomy(str(converted(plain)))
    for _ in range(tries):
        words = ["".join(draw.choices(ALIVE, k=draw.randint(1, 3))) or "x" for _ in plain]
        card = converted(words)
        text = str(card)
        assert anatomy(text) == expected, words
        metadata = yaml.safe_load(METADATA.match(text)[1])
        assert text.encode() and metadata == card.data.to_dict() and metadata["license"] == "mit", words
        assert metadata.keys() <= {"license", "library_name", "tags", "pipeline_tag"}
