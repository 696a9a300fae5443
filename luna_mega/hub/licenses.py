"""Licenses with an identifier of the Hub, https://huggingface.co/docs/hub/repositories-licenses."""

import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError

from luna_mega.errors import ConversionError, shown

_IDENTIFIERS = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
    mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense
    wtfpl zlib
    """.split()
)


def license_metadata(license: str | None) -> dict[str, str]:
    """Return the metadata of a license for a model card.

    Args:
        license: Identifier of the Hub ("mit"), or "other:NAME" for any other license, with a name of lowercase letters,
            digits, "-" and "."; None for no license.

    Raises:
        ConversionError: If the license does not have this form.
    """
    if license is None:
        return {}
    if license in _IDENTIFIERS:
        return {"license": license}
    kind, _, name = license.partition(":")
    if kind == "other" and re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}", name):
        return {"license": "other", "license_name": name}
    raise ConversionError(
        f"license {shown(license)} is not one of the Hub's identifiers, such as mit, apache-2.0 or cc-by-4.0; use "
        "other:NAME for any other license, with lowercase letters, digits, - and . in NAME"
    )


def license_of(name: str) -> str | None:
    """Return the license in the card of a model, in its folder or on the Hub; None if it is unknown."""
    try:
        license = ModelCard.load(Path(name, "README.md") if Path(name).is_dir() else name).data.license
    except (HTTPError, OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return license if isinstance(license, str) else None
