"""transformers' own common model tests pass for the classes of all families, see `run_contract.py`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN_CONTRACT = Path(__file__).with_name("run_contract.py")
EXIT_UNAVAILABLE = 77
# A smaller number means that tests were disabled; the oldest version runs the fewest. "with": including the generation
# tests.
FEWEST_PASSED = {"without": 840, "with": 930}


@pytest.mark.slow
def test_common_model_tests_of_transformers():
    command = [sys.executable, str(RUN_CONTRACT), "--show-capture=no", "--tb=short"]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if result.returncode == EXIT_UNAVAILABLE:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout[-10000:] + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    generation = re.match(r"transformers \S+, (with|without) ", result.stdout)
    assert passed and generation and int(passed[1]) >= FEWEST_PASSED[generation[1]], result.stdout[-1000:]
