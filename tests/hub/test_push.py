"""Pushes: training scripts, failures of the network and of the server, and repositories that exist."""

from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from torch.testing import assert_close

from luna_mega.training.publishing import describe_source
from tests.hub import client as on_client
from tests.hub.contract import SEQUENCES
from tests.hub.loopback import metadata_errors
from tests.modeling.luna import make

INPUTS = {"input_ids": [[0, 5, 6, 7, 2], [0, 8, 2, 1, 1]]}
REPOSITORY = "tester/small"


def saved(folder, tokenizer, **fields):
    """Save a model with tokenizer; return the folder."""
    make("ForSequenceClassification", **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, tokenizer):
    return saved(tmp_path / "small", tokenizer)


def check_pushed(client, folder):
    """Check that the repository has the model of a folder."""
    found, expected = (client(on_client.outputs, place, SEQUENCES, INPUTS)["logits"] for place in (REPOSITORY, folder))
    assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.slow
def test_training_script(hub, client, stranger, folder, tmp_path, with_code):
    output = tmp_path / "trained"
    client(on_client.train, folder, output, hub_model_id=REPOSITORY)
    files = hub.repositories[REPOSITORY].files
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(files)
    assert not any(name.startswith("checkpoint") for name in files)
    card = files["README.md"].decode()
    assert metadata_errors(card) == [] and files["README.md"] == (output / "README.md").read_bytes()
    data = ModelCard(card).data
    assert (data.datasets, data.license, data.license_name) == (["nyu-mll/glue"], "other", "my-license")
    assert data.base_model is None and data.tags == ["luna", "generated_from_trainer", "luna-mega"]
    assert "This model was fine-tuned from `small` on the nyu-mll/glue dataset." in card
    assert str(tmp_path) not in card
    assert files["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert files["model.safetensors"] != (folder / "model.safetensors").read_bytes()
    check_pushed(client, output)
    stranger(on_client.outputs, REPOSITORY, SEQUENCES, INPUTS, trust_remote_code=True)


HUB = dict.fromkeys(["dataset", "dataset_tags"], "a/b") | {"dataset_args": "c"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"dataset_path": "some/data"}, {"dataset": "data"}),
        ({"train_files": ["some/a.txt", "some/b.txt"]}, {"dataset": "`a.txt and b.txt`"}),
        ({"dataset_name": "."}, {"dataset": "data"}),
        ({"dataset_name": "a/b", "dataset_config": "c"}, HUB),
    ],
)
def test_dataset_in_the_card(options, expected, tmp_path, monkeypatch):
    """Only names on the Hub become metadata; for local paths, the card has the last component."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    data = SimpleNamespace(**dict.fromkeys(("dataset_name", "dataset_config", "dataset_path")) | options)
    assert describe_source(data) == expected


def test_training_script_whose_push_fails(hub, client, folder, tmp_path):
    output = tmp_path / "trained"
    hub.fail("POST .*/commit/main", 500)
    error = client.error(on_client.train, folder, output, hub_model_id=REPOSITORY, hub_strategy="end")
    assert error.startswith("SystemExit: error: the push failed") and "\n" not in error
    assert "500 Internal Server Error" in error and f"`hf upload {REPOSITORY} {output} . " in error
    assert not hub.repositories[REPOSITORY].files
    assert (output / "README.md").is_file()
    hub.faults.clear()
    client(on_client.push_folder, output, REPOSITORY)
    check_pushed(client, output)


def test_training_script_that_cannot_push_does_not_train(hub, client, folder, tmp_path):
    arguments = folder, output = folder, tmp_path / "trained"
    error = client.error(on_client.train_without_token, *arguments)
    assert "SystemExit: error: --push_to_hub: Token is required" in error
    assert "training_args.bin" in client.error(on_client.train, *arguments, hub_token="hf_secret")
    with hub.stopped():
        assert "Connection refused" in client.error(on_client.train, *arguments)
    assert not output.exists() and not hub.repositories


@pytest.mark.parametrize(
    ("request_", "kind", "message"),
    [
        ("PUT /lfs/.*", "cut", "Error while uploading 'model.safetensors'"),
        ("POST .*/lfs/objects/batch", 500, "500 Internal Server Error"),
        ("POST .*/commit/main", "cut", "Server disconnected"),
        (None, None, "ConnectError"),
    ],
)
def test_interrupted_upload(hub, client, folder, tokenizer, tmp_path, request_, kind, message):
    """The client reports the interruption, the repository does not change, and the next push succeeds."""
    client(on_client.push_model, folder, REPOSITORY)
    repository = hub.repositories[REPOSITORY]
    before = dict(repository.files), list(repository.commits)
    other = saved(tmp_path / "other", tokenizer, hidden_size=32)
    if request_ is None:
        with hub.stopped():
            assert message in client.error(on_client.push_model, other, REPOSITORY)
    else:
        hub.fail(request_, kind)
        assert message in client.error(on_client.push_model, other, REPOSITORY)
    assert (repository.files, repository.commits) == before
    hub.faults.clear()
    client(on_client.push_model, other, REPOSITORY)
    check_pushed(client, other)
    assert repository.files["model.safetensors"] != before[0]["model.safetensors"]


def test_upload_is_retried(hub, client, folder):
    hub.fail("PUT /lfs/.*", 503, times=2)
    client(on_client.push_model, folder, REPOSITORY)
    assert sum(request.startswith("PUT") for request in hub.requests) == 3
    check_pushed(client, folder)


@pytest.mark.parametrize("token", [False, "hf_wrong"])
def test_no_token_or_a_wrong_one(hub, client, folder, token):
    error = client.error(on_client.push_model, folder, REPOSITORY, token=token)
    assert "401" in error and "Invalid username or password" in error
    assert not hub.repositories


def test_private_repository(hub, client, folder):
    client(on_client.push_model, folder, REPOSITORY, private=True)
    assert hub.repositories[REPOSITORY].private
    assert "409" in client.error(on_client.create, REPOSITORY)
    error = client.error(on_client.outputs, REPOSITORY, SEQUENCES, INPUTS, token=False)
    assert "is not a valid model identifier" in error and "private" in error, error
    check_pushed(client, folder)
