"""Saves on two ranks while the disk fills up late on rank 0: ``python -m tests.training.failed_save_worker FOLDER``.

In the first cases one of the files beside DeepSpeed's subfolder does not fit. In the last one another process saves to
the same path. Every rank writes the error that it caught, and whether the old checkpoint is as it was, to
``rank-<n>.json``, and then saves once more.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.runtime.engine

from lightning_smartinfinity import SmartInfinityError
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.storage.folders.staging_folder import locked
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit


def full_at(name: str) -> AbstractContextManager[object]:
    """Let a disk be full when the file of this name is written."""
    write = Path.write_text

    def refused(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *args, **kwargs)

    return mock.patch.object(Path, "write_text", refused)


def full_at_scripts(_: Path) -> AbstractContextManager[object]:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "zero_to_fp32.py")
    return mock.patch.object(deepspeed.runtime.engine, "copyfile", side_effect=error)


CASES: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "zero_to_fp32.py": full_at_scripts,
    "latest": lambda _: full_at("latest"),
    NOTE_NAME: lambda _: full_at(NOTE_NAME),
    "another process": lambda path: locked(path / ".saving", path),
}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def main() -> None:
    root = Path(sys.argv[1])
    path, seen = root / "a.ckpt", {}
    trainer = fit(LitTiny(Recipe(depth=1)), root, max_steps=1, devices=2, precision="32-true")
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    before = contents(path)
    for case, fault in CASES.items():
        trainer.strategy.barrier()
        with fault(path) if trainer.global_rank == 0 else nullcontext():
            trainer.strategy.barrier()
            try:
                trainer.save_checkpoint(path)
                met = "nothing"
            except SmartInfinityError as error:
                met = f"{type(error).__name__}: {error}"
            trainer.strategy.barrier()
        trainer.strategy.barrier()
        seen[case] = {"met": met, "same": contents(path) == before}
    trainer.strategy.barrier()
    trainer.save_checkpoint(path)
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
