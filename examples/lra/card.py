"""Data set card of a folder that `prepare.py` made."""

from io import BytesIO

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from lra.shards import SPLITS, Folder

_COLUMNS = 8
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
    fields = {"task": task, "title": title, "text": text, "command": command}
    card = _CARD.format(**fields, files=files, counts=counts, checksums=checksums)
    (folder.path / "README.md").write_text(card, encoding="utf-8")


def draw_sheet(folder: Folder) -> str:
    """Write `sheet.png`, the first pictures of each label in a row, and return the line of the card that shows it."""
    rows = pq.read_table(min(folder.path.glob("*.parquet"))).to_pylist()
    kinds = []
    for label in (0, 1):
        files = [BytesIO(row["image"]["bytes"]) for row in rows if row["label"] == label]
        kinds.append([np.pad(np.asarray(Image.open(file)), 1, constant_values=128) for file in files[:_COLUMNS]])
    columns = min(map(len, kinds))
    if columns:
        sheet = np.concatenate([np.concatenate(pictures[:columns], axis=1) for pictures in kinds])
        Image.fromarray(sheet).save(folder.path / "sheet.png", optimize=True)
    return "![Above, label 0; below, label 1](sheet.png)" if columns else ""
