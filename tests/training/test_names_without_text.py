"""Trainings in folders whose names are no text: bytes that are not UTF-8, which Python shows as lone surrogates."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.integrations.transformers.arguments import job_of
from lightning_smartinfinity.settings.transfer import JOB_NAME
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.universal import convert_by_command
from tests.training.worker import Run, train

CAFE = os.fsdecode(b"caf\xe9")


def test_a_training(tmp_path: Path) -> None:
    """Parameters and state lie there, and checkpoints of both kinds are saved, scrubbed, loaded and exported."""
    folder = tmp_path / CAFE
    recipe, on_storage = Recipe(odd=True, max_steps=3), {"zero": {"offload_param": {"device": "nvme"}}}
    straight, _, expected = train(Run(out=str(folder / "a"), recipe=recipe, save_at=(1,), options=on_storage))
    saved = folder / "a/step-1.ckpt"
    universal = convert_by_command(saved, folder / "universal")
    for number, path in enumerate((saved, universal)):
        assert main(["scrub", str(path), "--quiet"]) == 0
        again = Run(out=str(folder / f"b{number}"), recipe=recipe, resume=str(path), options=on_storage)
        resumed, _, found = train(again)
        assert resumed.losses == straight.losses[1:]
        assert all(torch.equal(found.masters[name], master) for name, master in expected.masters.items())
        assert main(["export", str(path), str(folder / f"{number}.ckpt"), "--to", "lightning"]) == 0
        LitTiny.load_from_checkpoint(folder / f"{number}.ckpt", recipe=recipe)


def test_the_job_of_an_output_folder() -> None:
    """A job's name is text, and differs for folders that differ in such bytes alone."""
    first, second = (job_of(os.fsdecode(b"/runs/caf" + byte)) for byte in (b"\xe9", b"\xe8"))
    assert JOB_NAME.holds(first) and JOB_NAME.holds(second) and first != second
    assert job_of("/runs/one") == "one-0436b62a"
