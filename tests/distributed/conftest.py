from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Run functions on the ranks of a process group: `ranks(2, function, *arguments)` returns a result per rank."""
    ranks = Ranks()
    yield ranks
    ranks.stop()
