"""Draw results.png, performance.png and operators.png from the tables of the pages: `python docs/site/plots.py`."""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def table(page: str, heading: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """Return the first table below a heading: its header, and the first cell of a row -> the numbers of the others."""
    section = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    header, _, *rows = ([cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines)
    found = {name: [NUMBER.match(cell) for cell in cells] for name, *cells in rows}
    return header[1:], {
        name: [float(number[0].replace(",", "")) if number else None for number in numbers]
        for name, numbers in found.items()
    }


def number(text: str) -> float:
    return float(NUMBER.search(text)[0].replace(",", ""))


def draw(axes: plt.Axes, x: list[float], y: list[float | None], style: str, label: str) -> None:
    """Draw a curve through the points that were measured."""
    points = [pair for pair in zip(x, y, strict=True) if pair[1] is not None]
    axes.plot(*zip(*points, strict=True), style, label=label)


def draw_performance() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    header, rows = table("performance.md", "Encoders")
    for (name, values), style in zip(rows.items(), ("C0o-", "C1s-", "C0o--", "C1s--"), strict=True):
        draw(left, [number(cell) for cell in header], values, style, name)
    left.axhline(1, color="gray", linewidth=1)
    left.set(title="training step", xlabel="tokens per sequence", ylabel="speed relative to RoBERTa with SDPA")
    header, rows = table("performance.md", "Decoding")
    steps = [(number(name), values) for name, values in rows.items() if name[0].isdigit()]
    for column, (name, style) in enumerate(zip(header, ("C0o-", "C1s-", "C2^-", "C3v-"), strict=True)):
        draw(right, [context for context, _ in steps], [values[column] for _, values in steps], style, name)
    right.set(title="decoding step on a CPU", xlabel="tokens of context", ylabel="milliseconds", yscale="log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.legend(fontsize="small")
    figure.savefig(DOCS / "performance.png", dpi=100)


def draw_results() -> None:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    styles = {"Mega": "C1s", "Luna": "C0o", "Transformer": "C2^", "bag of words": "kx"}
    tasks: list[str] = []
    points: dict[str, list[tuple[float, int]]] = {kind: [] for kind in styles}
    for heading in ("Text classification", "Long Range Arena, small"):
        header, rows = table("results.md", heading)
        names = [name.split(",")[0].split(" of ")[0].replace("RoBERTa", "Transformer") for name in header]
        names = ["bag of words" if name == "bag" else name for name in names]
        for task, values in rows.items():
            if "accuracy" in task or heading != "Text classification":
                tasks.append(task.split(",")[0])
                for kind in styles:
                    if (value := values[names.index(kind)]) is not None:
                        points[kind].append((value, len(tasks) - 1))
    for kind, style in styles.items():
        axes.plot(*zip(*points[kind], strict=True), style, label=kind)
    axes.set(yticks=range(len(tasks)), yticklabels=tasks, xlabel="accuracy (%)")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", fontsize="small")
    figure.savefig(DOCS / "results.png", dpi=100)


def draw_operators() -> None:
    """Draw the time of a training step over the length, for 16 states."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    header, rows = table("operators.md", "Speed")
    lengths = [number(text) for text in header]
    for axes, kind in zip(panels, ("complex", "real"), strict=True):
        for name, values in rows.items():
            method, states, size = name.split(", ")
            if states == kind and size == "16":
                draw(axes, lengths, values, "o-" if method == "diagonal_ssm" else "s--", method)
        axes.set(xscale="log", yscale="log", xlabel="positions", title=f"16 {kind} states per channel")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("forward and backward, ms of processor time")
    figure.savefig(DOCS / "operators.png", dpi=100)


if __name__ == "__main__":
    draw_operators()
    draw_performance()
    draw_results()
