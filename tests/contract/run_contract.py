"""Run transformers' own common model tests against the Luna, Mega and Megalodon classes.

    python tests/contract/run_contract.py [--workers N] [pytest arguments]      # -k "" runs those in LEFT_OUT too

The tests belong to exactly the installed version of transformers: `tests/*.py` of its source distribution, downloaded
once with pip to a cache folder and run from a temporary folder together with the files `*_tester.py` of this directory.
The source distribution has no subfolders of `tests/`, so the few names that the common tests import from there are
replaced by stand-ins (`STAND_INS`). The generation tests, `tests/generation/test_utils.py`, are downloaded from the
repository at that version. If it cannot be reached, the run reports this and continues without them.

The exit status is pytest's, or 77 if the source distribution cannot be obtained. Without a network, put
`transformers-X.Y.Z.tar.gz` into the cache folder, `$LUNA_MEGA_CONTRACT_CACHE`, else `luna-mega/contract` in
`$XDG_CACHE_HOME` or `~/.cache`, and the generation tests into its `transformers-X.Y.Z`.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
EXIT_UNAVAILABLE = 77
REPOSITORY = "https://raw.githubusercontent.com/huggingface/transformers"
GENERATION_TESTS = "generation/test_utils.py"
STAND_INS = {
    "__init__.py": "",
    # All export tests of transformers are marked slow, so the default run excludes them.
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n\n\nclass ExportGenerateTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    # Used if the original file is missing, see `add_generation_tests`.
    GENERATION_TESTS: "class GenerationTesterMixin:\n    pass\n",
    # Sets every field of the base configuration to a value that is not its default.
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["LunaModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
}
""",
}
# Tests that take a third of the time and do not cover the models of this package on a CPU.
LEFT_OUT = {
    "test_bc_torch_dtype": "loads each class in seven dtypes, twice: `torch_dtype` is still read as `dtype`",
    "sdpa_kernels": "the same comparison again, with other kernels of SDPA allowed; a CPU has one",
}


class SourceUnavailableError(Exception):
    """The source distribution is neither in the cache nor available from the package index."""


def cache_folder() -> Path:
    """Return the folder in which source distributions and their unpacked tests are cached."""
    if "LUNA_MEGA_CONTRACT_CACHE" in os.environ:
        return Path(os.environ["LUNA_MEGA_CONTRACT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "luna-mega" / "contract"


def download_sdist(version: str, archive: Path) -> None:
    """Download the source distribution of transformers `version` to `archive` with pip.

    pip requires setuptools to read the metadata of the download: either that of this environment, or one that pip
    installs in an isolated environment.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "transformers", f"transformers=={version}"]
    if importlib.util.find_spec("setuptools"):
        command.append("--no-build-isolation")
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        result = subprocess.run([*command, "--dest", folder], capture_output=True, encoding="utf-8", check=False)
        fetched = Path(folder) / archive.name
        if result.returncode or not fetched.exists():
            reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
            raise SourceUnavailableError(f"pip cannot download the source of transformers {version}: {reason}")
        fetched.replace(archive)


def common_tests(version: str) -> Path:
    """Return the folder with `tests/*.py` of transformers `version`, from the cache or the package index.

    Raises:
        SourceUnavailableError: neither contains it.
    """
    name = f"transformers-{version}"
    cache = cache_folder()
    tests = cache / name / "tests"
    if (tests / "test_modeling_common.py").exists():
        return tests
    cache.mkdir(parents=True, exist_ok=True)
    archive = cache / f"{name}.tar.gz"
    if not archive.exists():
        download_sdist(version, archive)
    with tempfile.TemporaryDirectory(dir=cache) as folder, tarfile.open(archive) as tar:
        (new := Path(folder) / name / "tests").mkdir(parents=True)
        for member in filter(tarfile.TarInfo.isreg, tar):
            if (file := Path(member.name)).match(f"{name}/tests/*.py"):
                (new / file.name).write_bytes(tar.extractfile(member).read())
        shutil.rmtree(cache / name, ignore_errors=True)
        new.parent.replace(cache / name)
    return tests


def add_generation_tests(version: str, tests: Path) -> bool:
    """Add the generation tests of transformers `version` to the cache; return False if they cannot be downloaded."""
    target = tests / GENERATION_TESTS
    if not target.exists():
        try:
            with urllib.request.urlopen(f"{REPOSITORY}/v{version}/tests/{GENERATION_TESTS}", timeout=20) as response:
                content = response.read()
        except OSError:
            return False
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)
    return True


def assemble(tests: Path, folder: Path) -> list[Path]:
    """Create the package `tests` in `folder` from common tests, stand-ins and testers; return the testers' paths."""
    package = folder / "tests"
    shutil.copytree(tests, package)
    for path, text in STAND_INS.items():
        (package / path).parent.mkdir(exist_ok=True)
        if not (package / path).exists():
            (package / path).write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    shutil.copy(HERE / "encoder_testing.py", package)
    testers = []
    for name in ("luna", "mega", "megalodon"):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
        testers.append(Path(shutil.copy(HERE / f"{name}_tester.py", package / name / f"test_modeling_{name}.py")))
    return testers


def run(workers: int, pytest_arguments: list[str]) -> int:
    """Run the tests against the installed transformers; return the exit status."""
    version = importlib.metadata.version("transformers")
    try:
        tests = common_tests(version)
    except SourceUnavailableError as error:
        print(error)
        return EXIT_UNAVAILABLE
    found = "with" if add_generation_tests(version, tests) else "without (out of reach)"
    print(f"transformers {version}, {found} the generation tests", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # this variable is meant for the test run that may have started this one
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        testers = assemble(tests, Path(folder))
        command = [sys.executable, "-m", "pytest", *map(str, testers), "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        command += ["-k", " and ".join(f"not {name}" for name in LEFT_OUT)]
        if workers > 1 and importlib.util.find_spec("xdist"):
            command += ["-n", str(workers), "--dist", "worksteal"]
        return subprocess.run([*command, *pytest_arguments], cwd=folder, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes, with pytest-xdist")
    arguments, pytest_arguments = parser.parse_known_args()
    return run(arguments.workers, pytest_arguments)


if __name__ == "__main__":
    sys.exit(main())
