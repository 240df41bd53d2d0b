"""Runs the README's blocks of code as they stand there, on a model folder that is made on the spot."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main
from tests.examples.pages import LOADED, commands_in, page, run_python, scripts_in

README = page("README.md")
COMMANDS = commands_in(README)
(SIZES,) = (command for command in COMMANDS if "--gpu-memory" in command)
COUNTING = """
import atexit, torch.utils.checkpoint
calls, original = [], torch.utils.checkpoint.checkpoint
torch.utils.checkpoint.checkpoint = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
atexit.register(lambda: print("checkpoints of activations:", len(calls)))
"""
LAYERS, STEPS = 2, 40


def test_the_blocks_run_in_order(page_folder: Path) -> None:
    """The model is fine-tuned, resumed and exported in one folder, and transformers alone loads both results alike."""
    scripts = scripts_in(README)
    commands = [command for command in COMMANDS if command != SIZES]  # see test_sizes_are_those_of_the_plan
    before = [command for command in commands if README.index(command) < README.index(scripts[0])]
    assert len(scripts) == len(commands) == 2 and len(before) == 1
    assert main(shlex.split(before[0])) == 0
    (page_folder / "readme.py").write_text("\n".join([COUNTING, *scripts]))
    # In eval mode, as from_pretrained returns a model, transformers would run none.
    assert f"checkpoints of activations: {LAYERS * STEPS}\n" in run_python(page_folder, "readme.py")
    assert main(shlex.split(commands[-1])) == 0, commands
    loaded = run_python(page_folder, "-c", LOADED, "my-model-tuned", "my-model-exported", "my-model")
    saved, exported, untrained = loaded.splitlines()
    assert exported == saved != untrained


def test_the_example_has_as_many_lines_as_it_says() -> None:
    """Lines without content do not count."""
    script = scripts_in(README)[0]
    assert "## A Hugging Face model in eighteen lines" in README
    assert len([line for line in script.splitlines() if line.strip()]) == 18


def test_it_is_short() -> None:
    """Outside of code and tables the README has at most 600 words, and six links by task."""
    text = re.sub(r"^```.*?^```|^\|.*?$|<!--.*?-->|\]\([^)]*\)", "", README, flags=re.DOTALL | re.MULTILINE)
    assert 200 < len(text.split()) <= 600
    tasks = README.split("## By task\n")[1].split("`make demo`")[0]
    assert tasks.count("](") == 6


@pytest.mark.parametrize(
    "sizes", [["1B"], pytest.param(["3B", "7B", "13B", "30B", "70B"], marks=pytest.mark.long)], ids=["quick", "long"]
)
def test_sizes_are_those_of_the_plan(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of the table is what the command beside it prints."""
    words = shlex.split(SIZES)
    options = words[words.index("--gpu-memory") :]
    assert words[: len(words) - len(options)] == ["plan", "1B", "3B", "7B", "13B", "30B", "70B"]
    # A table has a row for each of several models.
    main(["plan", *sizes, *sizes, *options])
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert f"{head}\n{line}\n" in README
    for row in rows:
        assert row in README.splitlines()
