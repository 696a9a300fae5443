"""The report in Markdown, from the rows of all sections."""

from collections import Counter


def right(rows: list[dict]) -> bool:
    """Return whether everything ran and is right."""
    return bool(rows) and not any(row.get("ok") is False or "dropped" in row for row in rows)


def markdown(rows: list[dict], seconds: float, stopped: str | None = None) -> str:
    """Return the report: the machine, failures and omissions, and the timings of each section."""
    by_section = {}
    for row in rows:
        by_section.setdefault(row["section"], []).append(row)
    machine = next((row for row in rows if "versions" in row), {})
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    said = "all ran and is right" if right(rows) and not stopped else "NOT all ran and is right"
    parts = [f"## {machine.get('device', 'Unknown device')}\n\n{versions}. {seconds:.0f} s: {said}."]
    if stopped:
        parts.append(f"{stopped[0].upper()}{stopped[1:]} before its end.")
    parts.append(
        _grid(("section", "cases", "right", "wrong", "left out", "seconds of all"), map(_counts, by_section.items()))
    )
    if wrong := [row for row in rows if row.get("ok") is False]:
        parts.append("### Wrong\n\n" + "\n".join(f"* {row['section']}, {row['case']}: {_reason(row)}" for row in wrong))
    if dropped := Counter((row["section"], row["dropped"]) for row in rows if "dropped" in row):
        lines = (f"* {name}: {number} cases, {reason}" for (name, reason), number in dropped.items())
        parts.append("### Left out\n\n" + "\n".join(lines))
    for name, tabulate in (
        ("parity", _parity), ("tune", _tune), ("ops", _ops), ("models", _models), ("decoding", _decoding),
        ("memory", _memory),
    ):  # fmt: skip
        if shown := [row for row in by_section.get(name, ()) if "dropped" not in row]:
            parts.append(tabulate(shown))
    return "\n\n".join(part for part in parts if part) + "\n"


def _counts(pair):
    name, rows = pair
    cases = {row["case"] for row in rows}
    wrong = {row["case"] for row in rows if row.get("ok") is False}
    dropped = {row["case"] for row in rows if "dropped" in row}
    seconds = f"{sum(row.get('seconds', 0) for row in rows):.0f}"
    return name, len(cases), len(cases - wrong - dropped), len(wrong), len(dropped), seconds


def _reason(row):
    if isinstance(row.get("error"), str):
        return row["error"]
    hidden = ("section", "case", "ok", "seconds")
    return ", ".join(f"{name} {_cell(value)}" for name, value in row.items() if name not in hidden)[:300]


def _grid(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value):
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value).replace("|", "/")


def _parity(rows):
    """Show the largest error of every op in each dtype, relative to the norm."""
    worst = {}
    for row in rows:
        if isinstance(row.get("error"), float):
            call, _, mode = row["case"].rpartition(", ")
            key = call.split()[0], mode
            worst[key] = max(worst.get(key, 0.0), row["error"])
    modes = list(dict.fromkeys(mode for _, mode in worst))
    lines = ([op, *(f"{worst[op, m]:.1e}" if (op, m) in worst else "" for m in modes)] for op, _ in worst)
    lines = dict.fromkeys(map(tuple, lines))
    return "### Largest error against float64, outputs and gradients\n\n" + _grid(("op", *modes), lines)


def _tune(rows):
    lines = []
    for row in rows:
        if isinstance(row.get("default_ms"), float) and isinstance(row.get("fastest_ms"), float):
            gain = row["default_ms"] / row["fastest_ms"]
            words = " ".join(f"{name}={value}" for name, value in row["fastest"].items())
            words = words if row["default_ms"] != row["fastest_ms"] else "default"
            lines.append((row["kernel"], row["case"], row["default_ms"], row["fastest_ms"], f"{gain:.2f}x", words))
    head = ("kernel", "call", "default ms", "fastest ms", "gain", "configuration")
    return "### Configurations\n\n" + _grid(head, lines)


def _ops(rows):
    """Show milliseconds, percent of the floor, and how often ours is as fast as each variant."""
    measured = [row for row in rows if "variant" in row]
    ours = {(row["op"], row["size"]): row for row in measured if row["variant"] == "luna_mega"}
    lines = []
    for row in measured:
        words = row["op"], row["size"], row["variant"]
        if "error" in row:
            lines.append((*words, row["error"], *[""] * 7))
            continue
        mine = ours.get((row["op"], row["size"]), {})
        ratios = (
            f"{row[name] / mine[name]:.2f}x" if name in mine and row is not mine else ""
            for name in ("forward_ms", "both_ms")
        )
        percents = (f"{row[name]:.0f} %" for name in ("forward_percent", "backward_percent"))
        times = (row[name] for name in ("forward_ms", "backward_ms", "both_ms", "both_mb"))
        lines.append((*words, *times, *percents, *ratios))
    head = ("op", "size", "variant", "forward ms", "backward ms", "both ms", "MB", "of floor, forward", "backward")
    rates = next((row for row in rows if "flops" in row), None)
    text = (
        ""
        if rates is None
        else f"Copies {rates['bytes'] / 1e12:.2f} TB/s, products {rates['flops'] / 1e12:.0f} TFLOP/s.\n\n"
    )
    return f"### Ops\n\n{text}" + _grid((*head, "ours is faster, forward", "both"), lines)


def _models(rows):
    measured = [row for row in rows if "model" in row]
    fastest = {}
    for row in measured:
        if row["model"].startswith("roberta") and "error" not in row:
            best = fastest.setdefault(row["n"], dict(row))
            for name in ("infer_ms", "train_ms"):
                best[name] = min(best[name], row[name])
    lines = []
    for row in measured:
        if "error" in row:
            lines.append((row["model"], row["n"], row["b"], row["error"], *[""] * 6))
            continue
        best = fastest.get(row["n"])
        names = () if best is None or row["model"].startswith("roberta") else ("infer_ms", "train_ms")
        ratios = [f"{best[name] / row[name]:.2f}x" for name in names] or ["", ""]
        times = (row[name] for name in ("infer_ms", "infer_mb", "train_ms", "train_mb"))
        lines.append((row["model"], row["n"], row["b"], *times, f"{row['tokens_per_s']:.0f}", *ratios))
    head = (
        "model",
        "n",
        "batch",
        "inference ms",
        "MB",
        "training ms",
        "MB",
        "tokens/s",
        "against the fastest RoBERTa",
        "",
    )
    return "### Models, a training step of equal tokens\n\n" + _grid(head, lines)


def _decoding(rows):
    lines = []
    for row in (row for row in rows if "model" in row):
        words = row["model"], row["context"], row["b"], row.get("ms")
        percent = f"{100 * row['floor_ms'] / row['graph_ms']:.0f} %" if "graph_ms" in row else ""
        lines.append((*words, row.get("graph_ms", row.get("error")), row["floor_ms"], percent))
    head = ("model", "context", "batch", "step ms", "in a CUDA graph", "floor (weights read once)", "of floor")
    return "### Generation\n\n" + _grid(head, lines)


def _memory(rows):
    lines = [(row["op"], *row["peak_mb"].values()) for row in rows if "peak_mb" in row]
    lengths = next((list(row["peak_mb"]) for row in rows if "peak_mb" in row), [])
    return "### Peak MB of forward and backward, float32\n\n" + _grid(("op", *(f"n={n}" for n in lengths)), lines)
