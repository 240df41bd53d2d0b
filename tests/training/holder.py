"""Holds the first rank's part of a job until a line arrives: ``python -m tests.training.holder FOLDER JOB``.

It imports no more than the store, as the rest of a training takes seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_smartinfinity.storage.folders.rank_folder import RankFolder


def main() -> None:
    held = RankFolder(Path(sys.argv[1]) / sys.argv[2] / "rank-00000", create=True)
    sys.stdout.write("HOLDING\n")
    sys.stdout.flush()
    sys.stdin.readline()
    held.close(remove=True)


if __name__ == "__main__":
    main()
