"""Names of models that a user types: folders, or names on the Hub."""

import re
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from luna_mega.errors import ConversionError, reason


def find_model(
    name: str, *, revision: str | None = None, cache_dir: str | Path | None = None, token: str | bool | None = None
) -> str:
    """Return the folder or the name on the Hub from which a model, tokenizer or configuration is loaded.

    Call it on every name that a user passes, before the first `from_pretrained` or `cached_file`, and load from the
    result: `AutoConfig.from_pretrained(find_model(name))`. A model card should contain `name`, not the result.
    transformers connects six times, with pauses, for each file of a model. This function sends one request. The options
    are those of `from_pretrained`.

    Returns:
        `name`, or its folder in the cache if the Hub cannot be reached.

    Raises:
        ConversionError: There is no such folder, and no such model on the Hub, or the Hub cannot be reached.
    """
    if Path(name).is_dir():
        return name
    if Path(name).exists():
        raise ConversionError(f"{name}: is a file; pass a folder or a name on the Hub")
    try:
        validate_repo_id(name)
        HfApi(token=token).model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HFValidationError as error:
        raise ConversionError(f"{name}: no such folder; pass a folder or a name on the Hub") from error
    except GatedRepoError:  # `from_pretrained` explains how to get access
        return name
    except RepositoryNotFoundError as error:
        advice = "log in with `hf auth login` if it is private"
        if "/" not in name:  # sentence-transformers completes such names
            advice = "check the path, or pass the complete name, such as sentence-transformers/all-MiniLM-L6-v2"
        raise ConversionError(f"{name}: no such folder, and no such model on the Hub; {advice}") from error
    except Exception as error:  # huggingface_hub 1 and 2 raise errors of different HTTP clients
        try:
            return snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
        except LocalEntryNotFoundError:
            cause = re.sub(r"\[Errno -?\d+\] ", "", reason(error))
            raise ConversionError(
                f"{name}: no such folder, and the Hub cannot be reached ({cause}); check the name, or connect"
            ) from error
    return name
