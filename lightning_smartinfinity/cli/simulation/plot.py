"""Draws the plot of ``smart-infinity simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.cli.simulation.steps import Simulated, in_figures
from lightning_smartinfinity.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "write_plot"]

_FORMS = {".svg": "matplotlib.backends.backend_svg", ".png": "matplotlib.backends.backend_agg"}
"""File suffixes, each with the module of matplotlib that writes the format."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "simulate",  # otherwise the ids of elements are random
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "legend.frameon": False,
}


def check_plot(path: Path) -> None:
    """Check that the plot can be drawn, before anything is simulated.

    Args:
        path: Path of the plot; its suffix selects the format.

    Raises:
        UnsupportedError: matplotlib cannot be imported.
        ConfigError: The format is unknown, or the folder does not exist.
    """
    if path.suffix not in _FORMS:
        raise ConfigError(f"smart-infinity simulate --plot {path} is of no known form.", "Use a name in .svg or .png.")
    try:
        for module in ("matplotlib", "matplotlib.figure", _FORMS[path.suffix]):
            import_module(module)
    except ImportError as error:  # not installed, or incomplete
        raise UnsupportedError(
            f"smart-infinity simulate --plot needs matplotlib, which cannot be imported: {error}.",
            "Install it, in the checkout of this package: pip install '.[benchmarks]'. Or leave --plot out.",
        ) from None
    if not path.parent.is_dir():
        raise _unwritable(path, "there is no such folder")


def write_plot(rows: Sequence[Simulated], path: Path) -> None:
    """Draw seconds per step against devices, or against parameters if there is only one number of devices. Each model
    size has a panel, and each combination of the other values a line.

    Args:
        rows: Simulated cases.
        path: Path of the plot, checked by :func:`check_plot`.

    Raises:
        ConfigError: The file cannot be written.
    """
    from matplotlib import figure as canvas, rc_context

    with rc_context(_STYLE):
        figure = canvas.Figure(figsize=(8, 4), layout="constrained")
        _draw(figure, rows)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)
        except OSError as error:
            raise _unwritable(path, error.strerror or str(error)) from None


def _unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"smart-infinity simulate --plot {path} cannot be written: {why}.",
        "Name a file in a folder that is there and can be written to.",
    )


def _draw(figure: Figure, rows: Sequence[Simulated]) -> None:
    by_devices = len({row.case.devices for row in rows}) > 1
    sizes = sorted({row.case.parameters for row in rows}) if by_devices else [None]
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        for series in dict.fromkeys(row.series for row in rows):
            of = [row for row in rows if row.series == series and size in (None, row.case.parameters)]
            places = [row.case.devices if by_devices else row.case.parameters / 1e9 for row in of]
            axes.plot(places, [row.time.step for row in of], "o-", markersize=3, label=series)
        axes.set(xlabel="storage devices" if by_devices else "10^9 parameters", ylabel="seconds per step")
        axes.set_ylim(bottom=0)
        if size is not None:
            axes.set_title(f"{in_figures(size)} parameters")
    panels[0].legend()
