"""Runs DeepSpeed's and our converter to universal checkpoints, and reads what they write."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from deepspeed.checkpoint import ds_to_universal

from lightning_smartinfinity.cli import main
from tests.helpers.assertions import assert_equal


def convert(checkpoint: str | Path) -> Path:
    """Run DeepSpeed's converter in this process, without worker processes."""
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


def convert_by_command(checkpoint: str | Path, into: Path | None = None, *options: str) -> Path:
    """Run our converter in this process, with further options of the command."""
    folder = into or Path(checkpoint).with_suffix(".universal")
    assert main(["universal", str(checkpoint), "--into", str(folder), "--quiet", *options]) == 0
    return folder


def tensors(universal: Path) -> dict[str, torch.Tensor]:
    """Return every whole tensor of a universal checkpoint, by parameter and array."""
    files = sorted((universal / "zero").glob("*/*.pt"))
    return {f"{file.parent.name}/{file.stem}": torch.load(file, weights_only=True) for file in files}


def assert_same_tensors(a: Path, b: Path) -> None:
    """Assert that two universal checkpoints hold the same tensors, bit for bit."""
    assert_equal(tensors(a), tensors(b))


def save_of_two(
    checkpoint: Path,
    shapes: Sequence[Mapping[str, torch.Size]],
    whole: Mapping[str, torch.Tensor],
    arrays: Mapping[str, float],
) -> Path:
    """Write what two processes save of a ZeRO-3 training.

    Args:
        checkpoint: Folder to save to.
        shapes: Shapes of each sub-group's parameters, by name.
        whole: Flat masters of all parameters.
        arrays: Arrays that the optimizer keeps beside the masters, each with its offset from the master.
    """
    (folder := checkpoint / "checkpoint").mkdir(parents=True)
    (checkpoint / "latest").write_text("checkpoint")
    for rank in range(2):
        masters = [torch.cat([_slice(whole[name], rank) for name in names]) for names in shapes]
        state = {
            index: {"step": torch.tensor(7.0), **{name: master + offset for name, offset in arrays.items()}}
            for index, master in enumerate(masters)
        }
        optimizer = {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
        of_zero = {
            "zero_stage": 3,
            "partition_count": 2,
            "fp32_flat_groups": masters,
            "optimizer_state_dict": optimizer,
            "ours": rank,
        }
        torch.save({"optimizer_state_dict": of_zero}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model_states = {"param_shapes": shapes, "dp_world_size": 2, "module": {}, "of_user": rank}
        torch.save(model_states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return checkpoint


def _slice(values: torch.Tensor, rank: int) -> torch.Tensor:
    numel = -(-len(values) // 2)
    part = values[rank * numel : (rank + 1) * numel]
    return torch.nn.functional.pad(part, (0, numel - len(part)), value=-1)
