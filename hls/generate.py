"""Writes files and command lines that follow from the kernels' description; run from the root of the repository.

Usage::

    python -m hls.generate test-xclbin FILE
    python -m hls.generate config FILE
    python -m hls.generate toolchain
    python -m hls.generate compile-line --kernel NAME [--target hw] [--folder build/card]
    python -m hls.generate link-line --output FILE [--target hw] [--folder build/card]
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hls.card_build import compile_line, connectivity_config, link_line, missing_toolchain
from hls.description import SMARTSSD
from hls.xclbin import xclbin


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a file or print a command line; ``toolchain`` fails if v++ is missing, and says what is needed."""
    options = _parser().parse_args(arguments)
    if options.what == "toolchain":
        sys.exit(missing_toolchain(SMARTSSD) or 0)
    if options.what == "test-xclbin":
        options.file.write_bytes(xclbin(SMARTSSD))
    elif options.what == "config":
        options.file.write_text(connectivity_config(SMARTSSD))
    else:
        sys.stdout.write(shlex.join(_line(options)) + "\n")


def _line(options: argparse.Namespace) -> list[str]:
    if options.what == "link-line":
        return link_line(SMARTSSD, target=options.target, folder=options.folder, output=options.output)
    kernels = {kernel.name: kernel for kernel in SMARTSSD.kernels}
    return compile_line(SMARTSSD, kernels[options.kernel], target=options.target, folder=options.folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hls.generate", description="Generate from the kernels.")
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("test-xclbin", "config"):
        commands.add_parser(name).add_argument("file", type=Path)
    commands.add_parser("toolchain")
    compile_options, link_options = commands.add_parser("compile-line"), commands.add_parser("link-line")
    compile_options.add_argument("--kernel", required=True, choices=[kernel.name for kernel in SMARTSSD.kernels])
    link_options.add_argument("--output", required=True)
    for each in (compile_options, link_options):
        each.add_argument("--target", default="hw", choices=["hw", "hw_emu"])
        each.add_argument("--folder", default="build/card")
    return parser


if __name__ == "__main__":
    main()
