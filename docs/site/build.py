"""Build the documentation site (`make docs`).

The site has the same folders as the repository, so that a relative link works in both. The API reference is read from a
copy of the package in its installed layout. Only the command line is imported, which needs nothing but the standard
library, for the page of its options. Equations become MathML. Anything that a page loads from another server, and any
broken link within the site, is an error.
"""

import configparser
import html
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from commands import make_page
from docstrings import complete_docstrings
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CITATION.cff",
    "LICENSE",
    "docs/**/*.*",
    "examples/**/README.md",
    "examples/*.ipynb",
]
PAGES += ["kernels/*/README.md"]
SOURCE_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[\w/]+(?:\.py(?:#\w+)?)?\)")
EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
# The page that search omits: its many words would come before the pages that a reader looks for.
NOT_SEARCHED = "CHANGELOG.md"
INLINE_CODE = re.compile(r"<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])(--[\w-]+)")


def stage(folder: Path) -> None:
    """Copy the pages, and the package in its installed layout."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in PAGES:
        for file in filter(Path.is_file, ROOT.glob(pattern)):
            if not file.is_relative_to(ROOT / "docs" / "site") or file.suffix == ".css":
                copy(file, folder / "pages" / file.relative_to(ROOT))
    with (folder / "pages" / "docs" / "api" / "functions.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{make_page()}")
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    # The site has no page for source files and their folders.
    for page in (folder / "pages").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        text = SOURCE_LINK.sub(r"\1", text)
        if page.relative_to(folder / "pages").as_posix() == NOT_SEARCHED:
            text = f"---\nsearch:\n  exclude: true\n---\n{text}"
        page.write_text(text, encoding="utf-8")
    for row in setup["options"]["package_dir"].strip().split("\n"):
        package, source = row.split(" = ")
        for file in (ROOT / source).rglob("*.py"):
            target = folder / "package" / package.replace(".", "/") / file.relative_to(ROOT / source)
            # mkdocstrings formats sections named `Examples` as code.
            text = complete_docstrings(file.read_text(encoding="utf-8")).replace(" Example:\n", " Examples:\n")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    for package in setup["options"]["packages"].split():
        # griffe skips folders without __init__.py, such as kernels/.
        (folder / "package" / package.replace(".", "/") / "__init__.py").touch()
    copy(ROOT / "docs" / "site" / "zensical.toml", folder / "zensical.toml")


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def render(page: str) -> str:
    """Replace LaTeX by MathML, which needs no script, and prevent line breaks after the hyphens of options."""

    def draw(found: re.Match) -> str:
        latex = html.unescape(found["latex"]).strip()
        if found["open"] == "(":
            return convert(latex)
        return f'<div class="equation">{convert(latex, "block")}</div>'

    page = EQUATION.sub(draw, page)
    return INLINE_CODE.sub(lambda code: OPTION.sub(r'<span style="white-space:nowrap">\1</span>', code[0]), page)


class Links(HTMLParser):
    """The anchors of a page, the addresses it links to, and the addresses it loads."""

    def __init__(self, page: str):
        super().__init__()
        self.anchors, self.linked, self.loaded = set(), set(), set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.linked.add(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.add(values["href"])
        elif "src" in values:
            self.loaded.add(values["src"])


def faults(site: Path) -> list[str]:
    """Return one line per broken link of the site and per resource that a page loads from another server."""
    pages = {file: Links(file.read_text(encoding="utf-8")) for file in site.rglob("*.html") if file.name != "404.html"}
    found = []
    for file, page in pages.items():
        for address in sorted(page.linked | page.loaded):
            parts, name = urlsplit(address), file.relative_to(site)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    found.append(f"{name} loads {address}: pages must not require the network")
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file():
                found.append(f"{name} links to {address}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {address}, which has no such anchor")
    return found


def main() -> None:
    folder = ROOT / "build" / "docs"
    stage(folder)
    if subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=folder).returncode:
        sys.exit("error: the pages have the faults above")
    site = folder / "site"
    for file in site.rglob("*.html"):
        file.write_text(render(file.read_text(encoding="utf-8")), encoding="utf-8")
    if found := faults(site):
        sys.exit("\n".join(["error: the pages have these faults", *found]))
    print(f"open {(site / 'index.html').relative_to(ROOT)}; search requires a server (python -m http.server)")


if __name__ == "__main__":
    main()
