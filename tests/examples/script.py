"""Runs a script of examples/ in a folder: ``python -m tests.examples.script FOLDER SCRIPT ARGUMENTS...``.

Packages below ``FOLDER/site`` count as installed.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch

from tests.examples.conftest import EXAMPLES


def main() -> None:
    """Run the script in the folder."""
    folder, script, *arguments = sys.argv[1:]
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)  # models this small run best on one thread
    sys.path[:0] = [str(EXAMPLES), os.path.abspath("site")]
    sys.argv = [str(EXAMPLES / script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
