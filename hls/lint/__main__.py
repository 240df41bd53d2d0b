"""``python -m hls.lint``: checks the kernels of every design; exits with 1 if something is wrong."""

from __future__ import annotations

import sys

from hls.description import DESIGNS
from hls.lint import lint


def main() -> int:
    """Print the findings, one per line."""
    findings = [finding for design in DESIGNS for finding in lint(design)]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
