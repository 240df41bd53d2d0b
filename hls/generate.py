"""Writes files and command lines that follow from the kernels' description; run from the root of the repository.

``python -m hls.generate --help`` lists what it makes, and ``python -m hls.generate config --help`` what one of these
takes. ``--optimizer`` chooses among the designs: the one that has this update rule's kernel.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hls.card_build import compile_line, connectivity_config, link_line, missing_toolchain
from hls.csynth import read_csynth
from hls.description import EMULATED, KERNELS, SMARTSSD, design_for
from hls.resources import expected
from hls.sources import write_sources
from hls.xclbin import xclbin
from lightning_smartinfinity.common.update_rules import RULES


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a file or print a command line; ``toolchain`` fails if v++ is missing, and names the requirement."""
    options = _parser().parse_args(arguments)
    if options.what == "toolchain":
        sys.exit(missing_toolchain(SMARTSSD) or 0)
    if options.what == "sources":
        write_sources(options.folder)
    elif options.what == "test-xclbin":
        options.file.write_bytes(xclbin(EMULATED))
    elif options.what == "csynth":
        sys.stdout.write(json.dumps(_compared(options.file, options.kernel)) + "\n")
    elif options.what == "config":
        options.file.write_text(connectivity_config(design_for(options.optimizer)))
    else:
        sys.stdout.write(shlex.join(_words(options)) + "\n")


def _compared(file: Path, name: str) -> dict[str, dict[str, int | str | None]]:
    """Return pairs of each figure in Vitis HLS's report and the computed one; ``None`` for a missing figure."""
    told = read_csynth(file)
    computed = expected(next(kernel for kernel in KERNELS if kernel.name == name))
    figures = {figure: getattr(told, figure) for figure in ("bram", "uram", "ff", "lut", "dsp")}
    areas = {figure: {"reported": value, "expected": computed.get(figure)} for figure, value in figures.items()}
    return {"ii": told.ii, **areas}


def _words(options: argparse.Namespace) -> list[str]:
    if options.what == "kernels":
        return [kernel.name for kernel in design_for(options.optimizer).kernels]
    where = {name: getattr(options, name) for name in ("target", "folder", "output")}
    if options.what == "link-line":
        return link_line(design_for(options.optimizer), **where)
    kernels = {kernel.name: kernel for kernel in KERNELS}
    return compile_line(SMARTSSD, kernels[options.kernel], **where)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hls.generate", description="Generate from the kernels.")
    commands = parser.add_subparsers(dest="what", required=True)
    names = ("sources", "test-xclbin", "kernels", "config", "toolchain", "csynth", "compile-line", "link-line")
    command = {name: commands.add_parser(name) for name in names}
    command["sources"].add_argument("folder", type=Path)
    for name in ("test-xclbin", "config", "csynth"):
        command[name].add_argument("file", type=Path)
    for name in ("compile-line", "csynth"):
        command[name].add_argument("--kernel", required=True, choices=[kernel.name for kernel in KERNELS])
    for name in ("kernels", "config", "link-line"):
        command[name].add_argument("--optimizer", default=RULES[0].name, choices=[rule.name for rule in RULES])
    for name in ("compile-line", "link-line"):
        command[name].add_argument("--output", required=True)
        command[name].add_argument("--target", default="hw", choices=["hw", "hw_emu"])
        command[name].add_argument("--folder", default="build/card")
    return parser


if __name__ == "__main__":
    main()
