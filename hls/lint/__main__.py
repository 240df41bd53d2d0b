"""``python -m hls.lint``: checks the kernels of every design; exits with 1 if something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hls.description import DESIGNS
from hls.lint import lint
from hls.sources import write_sources


def main() -> int:
    """Print the findings, one per line."""
    with TemporaryDirectory() as folder:
        write_sources(Path(folder))
        findings = [finding for design in DESIGNS for finding in lint(design, Path(folder))]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
