"""Data set card of a folder that `prepare.py` made."""

from lra.shards import SPLITS, Folder

_CARD = """---
configs:
- config_name: default
  data_files:
{files}
tags:
- long-range-arena
- {task}
---

# {title}

{text}

Made by an example of luna-mega:

```bash
{command}
```

| split | rows |
|---|---|
{counts}

| file | SHA-256 |
|---|---|
{checksums}
"""


def write_card(folder: Folder, task: str, title: str, text: str, command: str, sizes: dict[str, int]) -> None:
    """Write `README.md`: what the splits are, the command that makes them, and the checksums of the files."""
    splits = [split for split in reversed(SPLITS) if sizes[split]]
    files = "\n".join(f"  - split: {split}\n    path: {split}-*.parquet" for split in splits)
    counts = "\n".join(f"| {split} | {sizes[split]:,} |" for split in splits)
    known = sorted(folder.content["files"].items())
    checksums = "\n".join(f"| {name} | {file['sha256']} |" for name, file in known)
    fields = {
        "files": files,
        "task": task,
        "title": title,
        "text": text,
        "command": command,
    }
    (folder.path / "README.md").write_text(_CARD.format(**fields, counts=counts, checksums=checksums), encoding="utf-8")
