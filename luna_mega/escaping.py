"""Escape untrusted text from files, names and arguments for a terminal, for YAML and for Markdown."""

import os
import re
import sys
from typing import Any

LONGEST = 200
# Text without Markdown syntax, such as links, lists or emphasis.
_WORDS = re.compile(r"[^\W_]+(?:(?:[ /_+-]|, |[.,](?=\d))[^\W_]+)*")


def terminal(text: str) -> str:
    """Return the text with invisible and control characters, except line ends, as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def tsv_field(text: str) -> str:
    """Return the text with tabs and line ends as escapes, for a field of a file with tab-separated values."""
    return re.sub(r"[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]", lambda c: c[0].encode("unicode_escape").decode(), text)


def short_line(value: Any) -> str:
    """Return a value as one line for YAML, without control characters and of at most 200 characters.

    The YAML writer adds quotes, but keeps line breaks and invisible characters.
    """
    text = terminal(" ".join(str(value).split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def markdown(value: Any) -> str:
    """Return a value for Markdown: plain words unchanged, anything else as code."""
    text = short_line(value)
    return text if _WORDS.fullmatch(text) and "www." not in text.lower() else code(text)


def code(value: Any) -> str:
    """Return a value as code within a line or a table of Markdown; backticks and pipes become escapes."""
    text = short_line(value).replace("`", r"\x60").replace("|", r"\x7c")
    return f"`{text or ' '}`"


def code_block(text: str, language: str = "") -> str:
    """Return a Markdown code block, whose fence is longer than any sequence of backticks in the text."""
    fence = "`" * max([3, *(len(row) + 1 for row in re.findall("`+", text))])
    return f"{fence}{language}\n{terminal(text)}\n{fence}"


def is_utf8(text: str) -> bool:
    """Return whether the bytes of a file name are the UTF-8 of its text, as C++ and Rust libraries assume."""
    try:
        return text.encode() == os.fsencode(text)
    except UnicodeEncodeError:
        return False


def locale_hint() -> str:
    """Return how to read arguments as UTF-8 if the locale has another encoding; an empty string if it is UTF-8."""
    encoding = sys.getfilesystemencoding()
    return "" if encoding == "utf-8" else f"the locale's encoding is {encoding}, set PYTHONUTF8=1 to use UTF-8"
