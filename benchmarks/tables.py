"""Markdown tables and plots of the rows that `run.py` measures."""

SIZES = ("b", "beams", "l", "n", "states", "directions", "function", "chunk", "causal", "masked", "shared", "values")


def key(row, without=()):
    return tuple((field, row[field]) for field in SIZES if field in row and field not in without)


def _ratios(case, row, mine):
    """Return the time of every pass and the memory of the last pass, relative to those of this package."""
    if row is mine or "error" in mine or "error" in row:
        return []
    fields = [*(f"{name}_ms" for name in case.passes), "both_mb"]
    return [row[field] / max(mine[field], 1e-9) for field in fields]


def markdown(case, rows):
    """Return a Markdown table with one row per size, or for models one table per pass with one row per model.

    If the case has baselines, return one table per baseline.
    """
    if case.baselines:
        return "\n".join(_relative(case, rows, baseline) for baseline in case.baselines)
    if case.unit is not None:
        return "\n".join(_speeds(case, rows, name, title) for name, title in case.passes.items())
    fields = [field for field in SIZES if any(field in row for row in rows)]
    others = [name for name in dict.fromkeys(row["variant"] for row in rows) if name != case.ours]
    passes = ", ".join(case.passes)
    head = [*fields, f"{case.ours}: {passes} (ms), peak (MB)"] + ["of the floor"] * (case.floor is not None)
    for other in others:
        head += [other, f"{other} / {case.ours}: {passes}, memory"]
    lines = [head, ["---"] * len(head)]
    for size in dict.fromkeys(key(row) for row in rows):
        found = {row["variant"]: row for row in rows if key(row) == size}
        mine = found[case.ours]
        line = [str(dict(size).get(field, "")) for field in fields] + [_figures(case, mine)]
        if case.floor is not None:
            percents = [mine.get(f"{name}_percent_of_floor") for name in ("forward", "backward")]
            line.append(", ".join(f"{percent:.0f} %" for percent in percents if percent is not None))
        for other in others:
            row = found.get(other)
            ratios = [] if row is None else _ratios(case, row, mine)
            line += ["" if row is None else _figures(case, row), ", ".join(f"{ratio:.2f}x" for ratio in ratios)]
        lines.append(line)
    return join(lines)


def _figures(case, row):
    if "error" in row:
        return row["error"]
    return ", ".join([*(f"{row[f'{name}_ms']:.1f}" for name in case.passes), f"{row['both_mb']:.0f}"])


def _speeds(case, rows, name, title):
    sizes = list(dict.fromkeys(key(row) for row in rows))
    columns = [" ".join(f"{field} = {value:,}" for field, value in size) for size in sizes]
    lines = [["", "parameters (M)", *columns], ["---"] * (2 + len(sizes))]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        found = {key(row): row for row in rows if row["variant"] == variant}
        millions = next(row["parameters"] for row in found.values()) / 1e6
        lines.append([variant, f"{millions:.1f}", *(_speed(case, found.get(size), name) for size in sizes)])
    units = {"bytes": "peak bytes per token (peak MB)", "ms": "milliseconds"}
    return f"{title}: {units.get(case.unit, f'{case.unit} a second (peak MB)')}\n\n{join(lines)}"


def _relative(case, rows, baseline):
    """Return speed (above 1: faster) and peak memory (below 1: smaller) of every model relative to the baseline."""
    sizes = list(dict.fromkeys(key(row) for row in rows))
    found = {(row["variant"], key(row)): row for row in rows}
    lengths = [f"{dict(size)['n']:,}" for size in sizes]
    head = ["", "parameters (M)", *(f"speed at {n}" for n in lengths), *(f"memory at {n}" for n in lengths)]
    lines = [head, ["---"] * len(head)]
    for variant in case.variants:
        pairs = [(found[variant, size], found[baseline, size]) for size in sizes]
        cells = [_quotient(row, "both_ms", one, row) for row, one in pairs]
        cells += [_quotient(row, "both_mb", row, one) for row, one in pairs]
        lines.append([variant, f"{pairs[0][0]['parameters'] / 1e6:.1f}", *cells])
    batch, absolute = dict(sizes[0]).get("b", 1), []
    for size, n in zip(sizes, lengths, strict=True):
        row = found[baseline, size]
        steps = row.get("error") or f"{1000 / row['both_ms']:.2f} steps a second, {row['both_mb']:,.0f} MB"
        absolute.append(f"{n}: {steps}")
    title = f"{case.passes['both']}, batch {batch}, relative to {baseline} ({'; '.join(absolute)})"
    return f"{title}\n\n{join(lines)}"


def _quotient(row, field, above, below):
    failed = "error" in above or "error" in below
    return row.get("error", "") if failed else f"{above[field] / max(below[field], 1e-9):.2f}x"


def _speed(case, row, name):
    if row is None or "error" in row:
        return "" if row is None else row["error"]
    items, peak = row.get("b", 1) * row.get("n", 1), row[f"{name}_mb"]
    if case.unit == "bytes":
        return f"{peak * 2**20 / items:,.0f} ({peak:,.0f})"
    if case.unit == "ms":
        return f"{row[f'{name}_ms']:.1f}"
    speed = 1000 * items / row[f"{name}_ms"]
    return f"{speed:,.{0 if speed >= 100 else 2}f} ({peak:,.0f})"


def join(lines):
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(case, rows, path):
    """Draw time and memory over the length; no plot if all rows have errors."""
    rows = [row for row in rows if "error" not in row]
    if not rows:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    name, title = list(case.passes.items())[-1]
    plotted = ((f"{name}_ms", f"{title}, ms"), (f"{name}_mb", "peak memory, MB"))
    x, label = ("b", "batch") if case.unit == "images" else ("n", "length n")
    for axis, (field, title) in zip(axes, plotted, strict=True):
        for line in dict.fromkeys((row["variant"], *key(row, without=x)) for row in rows):
            points = [(row[x], row[field]) for row in rows if (row["variant"], *key(row, without=x)) == line]
            name = " ".join([line[0], *(f"{field}={value}" for field, value in line[1:])])
            axis.plot(*zip(*points, strict=True), "-o" if line[0] == case.ours else "--s", label=name)
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel=title, title=case.name)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
