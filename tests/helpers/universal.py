"""DeepSpeed's converter, and what it writes."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from deepspeed.checkpoint import ds_to_universal


def convert(checkpoint: str | Path) -> Path:
    """Run the converter in this process, without processes of its own."""
    folder = Path(checkpoint).with_suffix(".universal")
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(Path(checkpoint) / "checkpoint"),
            output_folder=str(folder),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    return folder


def tensors(universal: Path) -> dict[str, torch.Tensor]:
    """Every whole tensor of a universal checkpoint, by parameter and array."""
    files = sorted((universal / "zero").glob("*/*.pt"))
    return {f"{file.parent.name}/{file.stem}": torch.load(file, weights_only=True) for file in files}


def assert_same_tensors(a: Path, b: Path) -> None:
    """Two universal checkpoints hold the same, to the bit."""
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
