"""Names of models and datasets: folders, names on the Hub, and one request if the Hub cannot be reached."""

import pytest
from huggingface_hub import constants

from luna_mega.errors import ConversionError
from luna_mega.hub.find import find_dataset, find_model
from tests.hub.loopback import Repository

REPOSITORY = "tester/teacher"


@pytest.fixture
def online(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return hub


def sent(hub):
    """Return the list of requests about models and datasets; the client may send other requests when it starts."""
    return [request for request in hub.requests if "/api/models" in request or "/api/datasets" in request]


@pytest.fixture
def cache(online, monkeypatch, tmp_path):
    """Return a Hub cache that contains `REPOSITORY`."""
    online.repositories[REPOSITORY] = Repository()
    (commit,) = online.repositories[REPOSITORY].commits
    folder = tmp_path / "cache" / "models--tester--teacher"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["nofolder/", "./nofolder", "a/b/c", "a  b", "no/such/folder"])
def test_other_names_are_no_names_on_the_hub(name, online):
    with pytest.raises(ConversionError, match="no such folder; pass a folder or a name on the Hub"):
        find_model(name)
    assert not sent(online)


def test_folder_and_file(tmp_path, online):
    assert find_model(str(tmp_path)) == str(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConversionError, match="is a file; pass a folder"):
        find_model(str(tmp_path / "file"))
    assert not sent(online)


def test_name_on_the_hub(cache, online):
    assert find_model(REPOSITORY) == REPOSITORY
    with pytest.raises(ConversionError, match="tester/teachr: no such folder, and no such model on the Hub"):
        find_model("tester/teachr")
    assert len(sent(online)) == 2


@pytest.mark.parametrize("fault", [500, 429, "stopped", "offline"])
def test_one_request_if_the_hub_cannot_be_reached(fault, cache, online, monkeypatch):
    if fault == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif fault == "stopped":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        online.fail(".*", fault)
    with pytest.raises(ConversionError, match=r"teachr: no such folder, and the Hub cannot be reached \([^\[]+\);"):
        find_model("tester/teachr")
    assert find_model(REPOSITORY).endswith(online.repositories[REPOSITORY].commits[-1])
    with pytest.raises(ConversionError, match=r"a/data: no such folder, and the Hub cannot be reached \([^\[]+\);"):
        find_dataset("a/data", cache)
    (cache / "a___data").mkdir()
    assert find_dataset("a/data", cache)
    assert len(sent(online)) == (4 if isinstance(fault, int) else 0)


def test_dataset(tmp_path, online):
    assert not find_dataset(str(tmp_path), tmp_path)
    with pytest.raises(ConversionError, match="a/data: no such folder, and no such dataset on the Hub"):
        find_dataset("a/data", tmp_path)
    assert len(sent(online)) == 1
