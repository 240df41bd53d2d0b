"""Finds the blocks of code in pages of documentation, and runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT

__all__ = ["LOADED", "commands_in", "page", "run_python", "scripts_in"]

LOADED = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("A drive", return_tensors="pt")
    print(model(**tokens).logits.double().sum().item())
assert "lightning_smartinfinity" not in sys.modules or not hasattr(sys.modules["lightning_smartinfinity"], "zero3")
"""
"""A script that loads folders by transformers alone, and prints a sum of logits for each."""


def page(name: str) -> str:
    """Return a page's text, by its path in the repository."""
    return (Path(__file__).resolve().parents[2] / name).read_text()


def scripts_in(text: str) -> list[str]:
    """Return a page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_in(text: str) -> list[str]:
    """Return the arguments of a page's ``smart-infinity`` commands."""
    return re.findall(r"^smart-infinity (.*)$", text, re.MULTILINE)


def run_python(folder: Path, *arguments: str) -> str:
    """Run Python in the folder on one CPU thread, assert that it succeeds, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**fresh_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
