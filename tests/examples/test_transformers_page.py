"""Runs the blocks of docs/transformers.md as they stand there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main
from tests.examples.pages import LOADED, commands_in, page, run_python, scripts_in

PAGE = page("docs/transformers.md")


@pytest.mark.long
def test_the_blocks_run_in_order(page_folder: Path) -> None:
    """Models are fine-tuned, resumed, exported and loaded by transformers alone; the resumed training ends the same."""
    scripts, commands = scripts_in(PAGE), commands_in(PAGE)
    assert len(scripts) == 4 and len(commands) == 1
    (page_folder / "page.py").write_text("\n".join(scripts))
    run_python(page_folder, "page.py")
    assert main(shlex.split(commands[0])) == 0
    names = ("my-model", "my-model-tuned", "my-model-resumed", "my-model-exported", "my-model-accelerated")
    before, tuned, resumed, exported, looped = run_python(page_folder, "-c", LOADED, *names).splitlines()
    assert tuned == resumed == exported and len({before, tuned, looped}) == 3
    assert {file.name for file in (page_folder / "my-adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not list((page_folder / "nvme").iterdir()), "state stayed on storage"
