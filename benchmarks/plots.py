"""Plots the figures of other benchmarks, from the files that they wrote with --json.

    pip install '.[benchmarks]'
    python benchmarks/plots.py step.json update.json scaling.json --output docs/figures

Each file becomes plots of the same name. With the same matplotlib the same figures give the same SVG, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import describe
from matplotlib import rcParams
from matplotlib.figure import Figure

STYLE = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "benchmarks",  # otherwise the names of parts are random
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "legend.frameon": False,
}
PARTS = ("forward", "backward", "update")
PHASES = ("setup", "steps", "saving", "resuming", "exporting")
Plots = Iterator[tuple[str, Figure]]  # suffix of the file's name, and the plot


def step_plots(found: dict[str, Any]) -> Plots:
    """Plot step.py: for each table the parts of a step, and its peak memory."""
    for one in found["tables"]:
        rows = one["rows"]
        clip = "on" if one["clip"] else "off"
        title = f"GPT-2 {found['size']}, bf16, {one['tokens']} tokens, clipping {clip}"
        name = f"-{one['tokens']}-tokens-clip-{clip}"
        figure, axes = _time_line(rows, f"Training step, {title}")
        axes.plot([row["bound"] for row in rows.values()], list(rows), "kD", markersize=4, label="bound")
        figure.legend(loc="outside right upper")
        yield name, figure
        figure, axes = _bars(len(rows), f"Peak resident memory of the measured steps, {title}", "GB")
        axes.barh(list(rows), [row["peak_gb"] for row in rows.values()])
        yield f"{name}-memory", figure


def gpu_step_plots(found: dict[str, Any]) -> Plots:
    """Plot gpu_step.py: the parts of a step as the host sees them, and peak memory of device and host."""
    rows, title = found["rows"], found["heading"]
    figure, _ = _time_line(rows, f"Training step, {title}")
    figure.legend(loc="outside right upper")
    yield "", figure
    figure, axes = _bars(len(rows), f"Peak memory, {title}", "GB")
    for key, label, shift in (("device_gb", "device", -0.2), ("peak_gb", "host", 0.2)):
        places = [number + shift for number in range(len(rows))]
        axes.barh(places, [row[key] for row in rows.values()], height=0.4, label=label)
    axes.set_yticks(range(len(rows)), list(rows))
    figure.legend(loc="outside right upper")
    yield "-memory", figure


def update_plots(found: dict[str, Any]) -> Plots:
    """Plot update.py: throughput of every format and engine beside the raw disk's."""
    rows = found["rows"]
    figure, axes = _bars(2 * len(rows), f"Update of {found['million']} M parameters", "GB/s, reads and writes together")
    places = range(len(rows))
    axes.barh([p - 0.2 for p in places], [row["gb_per_second"] for row in rows.values()], 0.4, label="update")
    axes.barh([p + 0.2 for p in places], [row["raw_gb_per_second"] for row in rows.values()], 0.4, label="raw disk")
    axes.set_yticks(list(places), list(rows))
    figure.legend(loc="outside right upper")
    yield "", figure


def scaling_plots(found: dict[str, Any]) -> Plots:
    """Plot scaling.py: seconds of a step against each size."""
    series = found["series"]
    columns = min(2, len(series))
    lines = math.ceil(len(series) / columns)
    figure = Figure(figsize=(4 * columns, 3 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (name, rows) in zip(grid.flat, series.items(), strict=False):
        axes.plot([row["size"] for row in rows], [row["seconds"] for row in rows], "o-")
        axes.set(xlabel=name, ylabel="seconds per step", ylim=(0, 1.1 * max(row["seconds"] for row in rows)))
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in list(grid.flat)[len(series) :]:
        axes.set_visible(False)
    figure.suptitle(f"Step of the transfer handler, up to {found['million']} M parameters")
    yield "", figure


def memory_plots(found: dict[str, Any]) -> Plots:
    """Plot memory.py: for each system the highest peak of all phases, and its limit, as the model grows."""
    for one in found["tables"]:
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        rows = [(*name.split(", "), row) for name, row in one["rows"].items()]
        for system in dict.fromkeys(system for _, system, _ in rows):
            of_system = [(size, row) for size, name, row in rows if name == system]
            sizes = [size for size, _ in of_system]
            peaks = [max(row[phase] for phase in PHASES if phase in row) for _, row in of_system]
            (line,) = axes.plot(sizes, peaks, "o-", label=system)
            if all("limit" in row for _, row in of_system):
                limits = [row["limit"] for _, row in of_system]
                axes.plot(sizes, limits, "--", color=line.get_color(), label=f"{system}, limit")
        axes.set(xlabel="parameters", ylabel="GB", title=f"Peak resident memory, clipping {one['clip']}")
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside right upper")
        yield f"-clip-{one['clip']}", figure


PLOTS: dict[str, Callable[[dict[str, Any]], Plots]] = {
    "step": step_plots,
    "update": update_plots,
    "scaling": scaling_plots,
    "memory": memory_plots,
    "gpu_step": gpu_step_plots,
}


def _time_line(rows: dict[str, Any], title: str) -> tuple[Figure, Any]:
    """Plot the parts of a step one behind the other, and its time from end to end."""
    figure, axes = _bars(len(rows), title, "seconds")
    lefts = [0.0] * len(rows)
    for part in PARTS:
        widths = [row[part] for row in rows.values()]
        axes.barh(list(rows), widths, left=lefts, label=part)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    totals = [row["total"] for row in rows.values()]
    axes.plot(totals, list(rows), "k|", markersize=12, label="step, end to end")
    return figure, axes


def _bars(number: int, title: str, unit: str) -> tuple[Figure, Any]:
    """Make axes for this many horizontal bars, the first at the top."""
    figure = Figure(figsize=(8, 1.3 + 0.3 * number), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=unit, title=title)
    axes.invert_yaxis()
    return figure, axes


def write_plots(path: Path, output: Path, form: str) -> Iterator[Path]:
    """Write the plots of one file of figures.

    Args:
        path: JSON that a benchmark wrote.
        output: Folder of the plots.
        form: ``"svg"`` or ``"png"``.

    Yields:
        The path of each plot.
    """
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("benchmark") not in PLOTS:
        raise SystemExit(f"{path} holds no figures of {', '.join(PLOTS)}.")
    for name, figure in PLOTS[found["benchmark"]](found):
        figure.supxlabel(found["machine"], fontsize=5, color="gray")
        target = output / f"{path.stem}{name}.{form}"
        figure.savefig(target, metadata={"Date": None} if form == "svg" else None, dpi=150)
        yield target


def main() -> None:
    """Write the plots and print their names below the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    written = f"JSON files that these benchmarks wrote: {', '.join(PLOTS)}"
    parser.add_argument("figures", nargs="+", type=Path, help=written)
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rcParams.update(STYLE)
    print(describe("matplotlib"))
    for path in options.figures:
        for target in write_plots(path, options.output, options.format):
            print(target)


if __name__ == "__main__":
    main()
