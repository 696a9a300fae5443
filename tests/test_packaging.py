"""The package is complete and minimal, and works for every installation method; versions and workflows fit it."""

import ast
import configparser
import functools
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import luna_mega
from luna_mega import compat
from luna_mega.kernels.recurrence import native
from tests.distributed.ranks import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
ENCODED = ("luna_mega", "convert", "modeling_common", "kernels", "examples", "benchmarks")
SCRIPT_FOLDERS = ["requirements", "docs", "tests", "examples", "benchmarks"]
LIBRARY = "luna_mega/kernels/recurrence/_native.so"

# Runs in each installation. One process collects all results, because every start imports torch and transformers.
PROBE = """
import json, pickle
import transformers
import luna_mega, luna_mega_cli
import luna_mega.convert
from luna_mega.kernels import api
from luna_mega.kernels.recurrence import native
from luna_mega.modeling_luna import modeling_luna

config = luna_mega.LunaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                              intermediate_size=32, projection_length=4, max_position_embeddings=12)
print(json.dumps({
    "files": [module.__file__ for module in (luna_mega, luna_mega_cli, api, modeling_luna, luna_mega.convert)],
    "auto": type(transformers.AutoModelForMaskedLM.from_config(config)).__name__,
    "pickles": pickle.loads(pickle.dumps(luna_mega.LunaModel)) is luna_mega.LunaModel,
    "library": native.library is not None,
}))
"""


def packaged_folders() -> dict[str, str]:
    """Return the folder of each package in the checkout."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = setup["options"]["package_dir"].strip().split("\n")
    return dict(row.split(" = ") for row in rows)


def run(*command: str | Path, cwd: Path, **environment: str | None) -> str:
    """Run a command; variables that are None are not passed on. Return its output."""
    variables = {**os.environ, "PYTHONPATH": None, **environment}
    env = {name: value for name, value in variables.items() if value is not None}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """Copy the tracked files that packaging needs, because builds leave files in their folder; return the copy."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    copy.mkdir()
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, copy)
    for folder in [*packaged_folders().values(), *SCRIPT_FOLDERS]:
        shutil.copytree(
            ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    return copy


@pytest.fixture(scope="session")
def built(checkout) -> dict[str, Path]:
    """Build the source distribution and a wheel without a C compiler; return their paths by suffix.

    An earlier build has left its library in the folder.
    """
    earlier = checkout / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / LIBRARY
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    (empty := checkout.parent / "empty").mkdir()
    build = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", "../dist", "."]
    run(*build, cwd=checkout, PATH=str(empty), CC=None)
    assert earlier.with_name("native.py").exists()
    return {suffix: next((checkout.parent / "dist").glob(f"*{suffix}")) for suffix in (".tar.gz", ".whl")}


@pytest.fixture(scope="session")
def wheel(built) -> Path:
    """Build the wheel from the source distribution, with the C library if there is a compiler."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    folder = built[".tar.gz"].with_name("wheel")
    run(*pip, "--wheel-dir", folder, built[".tar.gz"], cwd=folder.parent)
    return next(folder.iterdir())


@pytest.fixture(scope="session")
def installed(checkout, wheel) -> Callable[[str], Path]:
    """Return a function that installs luna_mega in a new environment and returns its interpreter.

    The argument is the method of installation. All other packages are shared with this environment.
    """
    ways = {"wheel": [wheel], "editable": ["--no-build-isolation", "--editable", checkout], "none": None}

    @functools.cache
    def install(way: str) -> Path:
        folder = checkout.parent / way
        venv.create(folder, symlinks=True)
        python = folder / "bin" / "python"
        # Paths in sys.path: .pth files in them are not processed, so the editable install of this environment is not
        # used.
        own_site = next(folder.glob("lib/python*/site-packages"))
        (own_site / "shared.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
        if arguments := ways[way]:
            pip = [sys.executable, "-m", "pip", "--python", python, "install"]
            run(*pip, "--no-deps", "--no-index", "--force-reinstall", *arguments, cwd=checkout.parent)
        return python

    return install


def test_links_lead_to_the_packages():
    """Editors and type checkers find `luna_mega.kernels` by a link to `kernels`; each such package has one.

    An __init__.py in `kernels` would hide the PyPI package `kernels`, if Python is started in the checkout.
    """
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for package, folder in packaged_folders().items():
        path = ROOT / package.replace(".", "/")
        if path.is_file():
            pytest.skip("this checkout has no links: git wrote files with their targets")
        assert path.resolve() == ROOT / folder


def test_wheel(checkout, built):
    """It contains exactly the files of the packages."""
    expected = {
        f"{package.replace('.', '/')}/{file.relative_to(checkout / folder).as_posix()}"
        for package, folder in packaged_folders().items()
        for file in (checkout / folder).rglob("*")
        if file.is_file() and "egg-info" not in str(file) and file.suffix not in (".c", ".h", ".pyc", ".so")
    }
    dist_info = f"luna_mega-{luna_mega.__version__}.dist-info/"
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = set(wheel.namelist())
        read = {name: wheel.read(dist_info + name).decode() for name in ("METADATA", "WHEEL", "entry_points.txt")}
    assert {name for name in names if not name.startswith(dist_info)} == expected
    assert f"{dist_info}licenses/LICENSE" in names and "\nTag: py3-none-any\n" in read["WHEEL"]
    assert "luna-mega = luna_mega_cli:main" in read["entry_points.txt"]
    metadata = Parser().parsestr(read["METADATA"])
    assert (metadata["Name"], metadata["Version"]) == ("luna-mega", luna_mega.__version__)
    assert {"accelerate>=1.3", "datasets>=4", "evaluate>=0.4.6"} <= set(metadata.get_all("Requires-Dist"))


@pytest.mark.slow
def test_wheel_with_the_library(built, wheel):
    """It is for one platform and all versions of Python."""
    platform = re.sub("[-.]", "_", sysconfig.get_platform())
    assert wheel.name == f"luna_mega-{luna_mega.__version__}-py3-none-{platform}.whl"
    with zipfile.ZipFile(wheel) as complete, zipfile.ZipFile(built[".whl"]) as without:
        assert set(complete.namelist()) == {*without.namelist(), LIBRARY}


def test_a_damaged_library_is_not_loaded(tmp_path):
    """The operators then run on PyTorch (`tests/kernels`)."""
    if not (file := Path(native.__file__).with_name("_native.so")).exists():
        pytest.skip("there is no C library")
    library, damaged = file.read_bytes(), tmp_path / "_native.so"
    assert native.load(file)[0] is not None
    # The loader maps a truncated file into memory without an error, but reading its end raises SIGBUS. The header of
    # the other file names a processor that does not exist.
    for content in (library[: len(library) // 2], library[:18] + b"\xfe\xfe" + library[20:]):
        damaged.write_bytes(content)
        found, reason = native.load(damaged)
        assert found is None and "; " in reason


def test_source_distribution_contains_exactly_the_packages_and_examples(checkout, built):
    """The source distribution has every file of the wheel, and of the tests, documentation and benchmarks none."""
    with tarfile.open(built[".tar.gz"]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    metadata = {"PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "setup.py"}
    files = [
        file
        for folder in {*packaged_folders().values(), "examples"}
        for file in (checkout / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    expected = {file.relative_to(checkout).as_posix() for file in files} | metadata | {"CHANGELOG.md", "CITATION.cff"}
    assert {name for name in names if "luna_mega.egg-info" not in name} == expected


def test_citation():
    """The citation has the fields that its format requires, and the version and date of the changelog."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    heading = f"## [{luna_mega.__version__}] - {citation['date-released']}\n"
    assert re.search(r"^## \[\d.*\n", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0] == heading


def test_text_has_an_encoding():
    """Files and pipes of text are not in the encoding of the locale, which is ASCII in some containers.

    The packages read it as utf-8-sig: editors on Windows start a file with U+FEFF, which UTF-8 keeps as part of the
    first word. ruff finds `open` without an encoding (PLW1514), but not these methods.
    """
    found, read = [], 0
    for file in (file for folder in ENCODED for file in (ROOT / folder).rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)):
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            method, encoding = getattr(call.func, "attr", ""), given.get("encoding", "")
            if method == "read_text":
                read += 1
                found += [f"{file}:{call.lineno}"] * (not call.args and encoding != "'utf-8-sig'")
            elif method == "write_text" or "text" in given and method in ("run", "Popen", "check_output"):
                found += [f"{file}:{call.lineno}"] * (not encoding and len(call.args) < 2)
    assert not found and read > 5


def test_workflows():
    """Their targets, scripts and files exist, and actions are pinned; a release is published after all tests."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run", ROOT / "Makefile"]
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r"run: make ([a-z-]+)", text)) <= set(targets)
        named = {*re.findall(r"\.venv/bin/python ([\w/.]+\.py)", text), *re.findall(r"\btests/[\w/.]+", text)}
        assert sorted(path for path in named if not (ROOT / path).exists()) == []
        uses = re.findall(r"^ +-? ?uses: (.*)", text, re.MULTILINE)
        assert all(re.fullmatch(r"\./\S+|[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use) for use in uses)
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(release["publish"]["needs"]) == set(release) - {"publish"}
    tests = {"./.github/workflows/ci.yml", "./.github/workflows/full.yml"}
    assert {job["uses"] for job in release.values() if "uses" in job} == tests


def test_versions_are_those_of_the_package():
    """setup.cfg requires the oldest supported versions, and CI pins the oldest and the newest ones."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]["test"]["strategy"]
    pythons = matrix["matrix"]["python"]
    assert pythons == re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert pythons[0] == ".".join(map(str, compat.PYTHON)) and f"python_requires = >={pythons[0]}\n" in setup
    assert matrix["matrix"]["constraints"] == ["ci.txt", "ci-oldest.txt"]
    for name, (lowest, above) in compat.SUPPORTED.items():
        assert re.search(rf"^    {name}>={lowest}(,<6|; .*)?$", setup, flags=re.MULTILINE), name
        files = [(ROOT / "requirements" / file).read_text("utf-8") for file in ("ci-oldest.txt", "ci.txt")]
        oldest, newest = (re.search(rf"^{name}==([\d.]+)", text, re.MULTILINE)[1] for text in files)
        assert oldest.startswith(f"{lowest}.")
        if name == "transformers":  # `make test-newest` tests the newest torch and its Triton
            major, minor, _ = map(int, newest.split("."))
            assert above == f"{major}.{minor + 1}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "place", "command"),
    [
        ("wheel", "outside", "luna-mega"),
        ("wheel", "root", "python -m luna_mega_cli"),
        ("editable", "outside", "python -m luna_mega_cli"),
        ("editable", "root", "luna-mega"),
        ("none", "root", "python -m luna_mega_cli"),
        ("none", "without links", "python -m luna_mega_cli"),
    ],
)
def test_installed_package_works(way, place, command, checkout, installed, tmp_path):
    cwd = checkout if place == "root" else tmp_path
    if place == "without links":  # as git with core.symlinks=false, and Python's zipfile, write a checkout
        cwd = checkout = shutil.copytree(checkout, tmp_path / "checkout", symlinks=True)
        for link in filter(Path.is_symlink, (checkout / "luna_mega").iterdir()):
            target = link.readlink()
            link.unlink()
            link.write_text(str(target), encoding="utf-8")
    facts = json.loads(run(installed(way), "-c", PROBE, cwd=cwd).splitlines()[-1])
    # In the checkout, only the editable installation builds the library.
    assert facts.pop("library") or (way != "editable" and place != "outside")
    home = installed(way).parent.parent if (way, place) == ("wheel", "outside") else checkout
    assert all(Path(file).is_relative_to(home) for file in facts.pop("files"))
    assert facts == {"auto": "LunaForMaskedLM", "pickles": True}
    program, *words = command.split()
    assert "CHECKPOINT" in run(installed(way).with_name(program), *words, "convert", "--help", cwd=cwd)


@pytest.mark.slow
def test_quickstart_in_an_empty_environment(checkout, tmp_path):
    """The quickstart runs after `pip install '.[examples]'` without pins and without this environment.

    Only torch has the version of this environment, because other versions are gigabytes to download.
    """
    venv.create(tmp_path / "empty", with_pip=True)
    python, hidden = tmp_path / "empty" / "bin" / "python", {"PIP_CONSTRAINT": None, "HF_HUB_OFFLINE": "1"}
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    if subprocess.run([*pip, "--dry-run", "--no-deps", "packaging"], capture_output=True).returncode:
        pytest.skip("pip reaches no package index")
    (work := tmp_path / "work").mkdir()
    for requirement in (f"torch=={version('torch')}", f"{checkout}[examples]"):
        run(*pip, requirement, cwd=work, **hidden)
    printed = run(python, ROOT / "tests" / "quickstart.py", ROOT / "README.md", cwd=work, **hidden)
    assert printed.count("loading work") == 10
