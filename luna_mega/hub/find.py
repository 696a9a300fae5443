"""Names of models and datasets that a user types: folders, or names on the Hub."""

import re
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from luna_mega.errors import ConversionError, reason


def find_model(name: str) -> str:
    """Return the folder or the name on the Hub from which a model, tokenizer or configuration is loaded.

    Call it on every name that a user passes, before the first `from_pretrained` or `cached_file`, and load from the
    result: `AutoConfig.from_pretrained(find_model(name))`. A model card should contain `name`, not the result.
    transformers connects six times, with pauses, for each file of a model. This function sends one request.

    Returns:
        `name`, or its folder in the cache if the Hub cannot be reached.

    Raises:
        ConversionError: There is no such folder, and no such model on the Hub, or the Hub cannot be reached.
    """
    if Path(name).is_dir():
        return name
    if Path(name).exists():
        raise ConversionError(f"{name}: is a file; pass a folder or a name on the Hub")
    if error := _connect(name, "model"):
        try:
            return snapshot_download(name, local_files_only=True)
        except LocalEntryNotFoundError:
            raise _unreachable(name, error) from error
    return name


def find_dataset(name: str, cache: Path) -> bool:
    """Check that `datasets.load_dataset(name)` finds a dataset, with one request; it connects six times, with pauses.

    Return whether only `cache`, its folder in the cache of datasets, has it, because the Hub cannot be reached.

    Raises:
        ConversionError: There is no such folder, and no such dataset on the Hub, or the Hub cannot be reached.
    """
    error = None if Path(name).exists() else _connect(name, "dataset")
    if error and not cache.is_dir():
        raise _unreachable(name, error) from error
    return error is not None


def _connect(name: str, kind: str) -> Exception | None:
    """Return the error if the Hub cannot be reached; raise `ConversionError` if it has no such model or dataset."""
    try:
        validate_repo_id(name)
        HfApi().repo_info(name, repo_type=kind, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HFValidationError as error:
        raise ConversionError(f"{name}: no such folder; pass a folder or a name on the Hub") from error
    except GatedRepoError:  # `from_pretrained` and `load_dataset` explain how to get access
        return None
    except RepositoryNotFoundError as error:
        advice = "log in with `hf auth login` if it is private"
        raise ConversionError(f"{name}: no such folder, and no such {kind} on the Hub; {advice}") from error
    except Exception as error:  # huggingface_hub 1 and 2 raise errors of different HTTP clients
        return error
    return None


def _unreachable(name: str, error: Exception) -> ConversionError:
    cause = re.sub(r"\[Errno -?\d+\] ", "", reason(error))
    return ConversionError(
        f"{name}: no such folder, and the Hub cannot be reached ({cause}); check the name, or connect"
    )
