import pytest
from transformers import RobertaTokenizer

from tests.hub.client import Client
from tests.hub.server import LoopbackHub
from tests.quick import compiled_templates as compiled_templates, with_code as with_code, without_code as without_code


@pytest.fixture(scope="session")
def server():
    server = LoopbackHub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(server):
    """Return the loopback Hub without content or faults."""
    server.clear()
    return server


@pytest.fixture(scope="session")
def client(server, tmp_path_factory):
    """Start a process that has luna_mega."""
    client = Client(server, tmp_path_factory.mktemp("home"))
    yield client
    client.pool.shutdown()


@pytest.fixture(scope="session")
def stranger(server, tmp_path_factory):
    """Start a process in which luna_mega cannot be imported."""
    client = Client(server, tmp_path_factory.mktemp("home"), package=False)
    yield client
    client.pool.shutdown()


@pytest.fixture
def tokenizer():
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", "<mask>"]
    return RobertaTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[])
