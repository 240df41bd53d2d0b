"""``python -m hls.lint``: checks the kernels of the card's design; exits with 1 if something is wrong."""

from __future__ import annotations

import sys

from hls.description import SMARTSSD
from hls.lint import lint


def main() -> int:
    """Print the findings, one per line."""
    findings = lint(SMARTSSD)
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
