"""The built package is complete and minimal, and works for every installation method and working directory."""

import configparser
import functools
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import luna_mega
from tests.distributed.ranks import PATIENCE

ROOT = Path(__file__).resolve().parent.parent
SCRIPT_FOLDERS = ["requirements", "docs", "tests", "examples", "benchmarks"]

# Runs in each installation. One process collects all results, because every start imports torch and transformers.
PROBE = """
import importlib.util, json, multiprocessing, pickle, sys
from importlib.resources import files
import transformers
import luna_mega
import luna_mega.convert
from luna_mega.kernels import api
from luna_mega.modeling_luna import modeling_luna

config = luna_mega.LunaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                              intermediate_size=32, projection_length=4, max_position_embeddings=12)
kernels = importlib.util.find_spec("kernels")
with multiprocessing.get_context("spawn").Pool(1) as pool:
    spawned = pool.apply(getattr, (config, "hidden_size"))
print(json.dumps({
    "files": [module.__file__ for module in (luna_mega, api, modeling_luna, luna_mega.convert)],
    "auto": type(transformers.AutoModelForMaskedLM.from_config(config)).__name__,
    "class_pickles": pickle.loads(pickle.dumps(luna_mega.LunaModel)) is luna_mega.LunaModel,
    "config_pickles": pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict(),
    "spawned": spawned,
    "data": [files("luna_mega").joinpath("py.typed").is_file(),
             files("luna_mega.kernels.luna_attention").joinpath("README.md").is_file()],
    "kernels": kernels and kernels.origin,
    "transformers_sees_kernels": transformers.utils.import_utils.is_kernels_available(),
}))
"""

# A mock of the PyPI package `kernels`: every name is a class whose instances are identity decorators.
FAKE_KERNELS = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, decorated): return decorated

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""


def packaged_folders() -> dict[str, str]:
    """Return the folder of each package in the checkout."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = setup["options"]["package_dir"].strip().split("\n")
    return dict(row.split(" = ") for row in rows)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
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
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def built(checkout) -> dict[str, Path]:
    """Build the source distribution, and the wheel from it; return their paths by suffix."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "../dist", ".", cwd=checkout)
    return {suffix: next((checkout.parent / "dist").glob(f"*{suffix}")) for suffix in (".tar.gz", ".whl")}


@pytest.fixture(scope="session")
def installed(checkout, built) -> Callable[[str], Path]:
    """Return a function that installs luna_mega in a new environment and returns its interpreter.

    The argument is the method of installation. All other packages are shared with this environment.
    """
    ways = {"wheel": [built[".whl"]], "editable": ["--no-build-isolation", "--editable", checkout], "none": None}

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


@pytest.fixture(scope="session")
def fake_kernels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(FAKE_KERNELS, encoding="utf-8")
    (folder / "kernels.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    (folder / "kernels.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    return folder


def test_kernels_stays_a_namespace_folder():
    """An __init__.py in `kernels` would hide the PyPI package `kernels`, if Python is started in the checkout."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_wheel_contains_exactly_the_files_of_the_packages(checkout, built):
    expected = {
        f"{package.replace('.', '/')}/{file.relative_to(checkout / folder).as_posix()}"
        for package, folder in packaged_folders().items()
        for file in (checkout / folder).rglob("*")
        if file.is_file() and "egg-info" not in str(file) and "__pycache__" not in file.parts
    }
    names = zipfile.ZipFile(built[".whl"]).namelist()
    dist_info = f"luna_mega-{luna_mega.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(dist_info)} == expected
    assert f"{dist_info}licenses/LICENSE" in names


def test_wheel_metadata(built):
    with zipfile.ZipFile(built[".whl"]) as wheel:
        read = {name.split("/")[1]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(read["METADATA"])
    assert (metadata["Name"], metadata["Version"]) == ("luna-mega", luna_mega.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    requirements = metadata.get_all("Requires-Dist")
    trainer = {"accelerate>=1.3", "datasets>=4", "evaluate>=0.4.6"}
    assert {"torch>=2.11", "transformers<6,>=5.24"} | trainer <= set(requirements)
    assert not metadata.get_all("Project-URL")
    assert any("triton>=3.6" in row and "Linux" in row and "extra" in row for row in requirements)
    assert read["top_level.txt"].split() == ["luna_mega", "luna_mega_cli"]
    assert "luna-mega = luna_mega_cli:main" in read["entry_points.txt"]


def test_source_distribution_contains_exactly_the_packages_and_examples(checkout, built):
    """The source distribution has every file of the wheel, and of the tests, documentation and benchmarks none."""
    with tarfile.open(built[".tar.gz"]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    metadata = {"PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"}
    files = [
        file
        for folder in {*packaged_folders().values(), "examples"}
        for file in (checkout / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    expected = {file.relative_to(checkout).as_posix() for file in files} | metadata | {"CHANGELOG.md", "CITATION.cff"}
    assert {name for name in names if "luna_mega.egg-info" not in name} == expected


def test_citation(checkout):
    """The citation has the fields that its format requires, and the version and date of the changelog."""
    citation = yaml.safe_load((checkout / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"authors", "cff-version", "message", "title"} <= citation.keys()
    assert citation["version"] == luna_mega.__version__ and len(citation["references"]) == 3
    heading = f"## [{luna_mega.__version__}] - {citation['date-released']}\n"
    changelog = (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## .*\n", changelog, re.MULTILINE)[0] == heading


def test_import_does_not_import_what_only_scripts_need():
    """`import luna_mega` imports no more of the dependencies than transformers does."""
    names = "{'accelerate', 'datasets', 'evaluate'}"
    code = (
        f"import sys, transformers.modeling_utils; before = {names} & sys.modules.keys(); import luna_mega.hub.bundle; "
        f"assert {names} & sys.modules.keys() == before != {names}"
    )
    run(sys.executable, "-c", code, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "place", "with_kernels"),
    [
        ("wheel", "outside", False),
        ("wheel", "root", True),
        ("editable", "outside", True),
        ("editable", "root", True),
        ("none", "root", False),
    ],
)
def test_installed_package_works(way, place, with_kernels, checkout, installed, fake_kernels, tmp_path):
    cwd = checkout if place == "root" else tmp_path
    environment = {"PYTHONPATH": str(fake_kernels)} if with_kernels else {}
    facts = json.loads(run(installed(way), "-c", PROBE, cwd=cwd, **environment).splitlines()[-1])
    home = installed(way).parent.parent if (way, place) == ("wheel", "outside") else checkout
    assert all(Path(file).is_relative_to(home) for file in facts.pop("files"))
    assert facts == {
        "auto": "LunaForMaskedLM",
        "class_pickles": True,
        "config_pickles": True,
        "spawned": 16,
        "data": [True, True],
        "kernels": str(fake_kernels / "kernels" / "__init__.py") if with_kernels else None,
        "transformers_sees_kernels": with_kernels,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "place", "command"),
    [
        ("wheel", "outside", ["luna-mega", "convert"]),
        ("wheel", "root", ["python", "-m", "luna_mega_cli", "convert"]),
        ("editable", "outside", ["python", "-m", "luna_mega_cli", "convert"]),
        ("editable", "root", ["luna-mega", "convert"]),
        ("none", "root", ["python", "-m", "luna_mega_cli", "convert"]),
    ],
)
def test_command_line_starts(way, place, command, checkout, installed, tmp_path):
    program = installed(way).with_name(command[0])
    assert "CHECKPOINT" in run(program, *command[1:], "--help", cwd=checkout if place == "root" else tmp_path)
