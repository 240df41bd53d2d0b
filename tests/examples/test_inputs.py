"""Mistakes on the command line and in files of JSON lines are answered in a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Example = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    ("script", "option", "value", "answer"),
    [
        ("finetune_causal_lm", "--batch-size", "0", "0 is below 1"),
        ("finetune_causal_lm", "--accumulate", "0", "0 is below 1"),
        ("finetune_causal_lm", "--loss-chunks", "0", "0 is below 1"),
        ("finetune_causal_lm", "--max-steps", "0", "0 is below 1"),
        ("finetune_causal_lm", "--lora", "-1", "-1 is below 1"),
        ("finetune_causal_lm", "--keep", "-2", "-2 is below -1"),
        ("finetune_encoder", "--batch-size", "0", "0 is below 1"),
        ("finetune_encoder", "--per-label", "many", "invalid number value: 'many'"),
    ],
)
def test_numbers_that_make_no_training(
    script: str, option: str, value: str, answer: str, example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option is named, before anything is loaded."""
    given = ["model", "chats.jsonl", "out"] if script == "finetune_causal_lm" else []
    with pytest.raises(SystemExit):
        example(script).main([*given, option, value])
    assert f"argument {option}: {answer}" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "reader"), [("chats", "read_chats"), ("documentation", "read_labelled")])
def test_a_file_in_another_encoding(module: str, reader: str, example: Example, tmp_path: Path) -> None:
    """The file is named, with the place of the first byte that is not UTF-8."""
    (tmp_path / "text.jsonl").write_bytes('{"text": "für"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"text\.jsonl is not in UTF-8: .* at byte 11"):
        getattr(example(module), reader)(tmp_path / "text.jsonl")
