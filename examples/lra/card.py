"""Data set card of a folder that `prepare.py` made."""

from collections.abc import Sequence
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


def draw_sheet(folder: Folder, labels: Sequence[str]) -> str:
    """Write `sheet.png`, a row of pictures for each label, and return the line of the card that shows it."""
    rows = pq.read_table(min(folder.path.glob("*.parquet"))).to_pylist()
    files = [[BytesIO(row["image"]["bytes"]) for row in rows if row["label"] == label] for label in range(len(labels))]
    columns = min(_COLUMNS, *map(len, files))
    if not columns:
        return ""
    framed = [[np.pad(np.asarray(Image.open(file)), 1, constant_values=128) for file in row[:columns]] for row in files]
    sheet = np.concatenate([np.concatenate(row, axis=1) for row in framed])
    Image.fromarray(sheet).save(folder.path / "sheet.png", optimize=True)
    return f"![From top to bottom: {', '.join(labels)}](sheet.png)"
