"""The format version of what this package adds to checkpoints and universal folders, checked before all else is read.

It is stored with each rank's optimizer state, in the entry :data:`EXTRA_KEY`, and covers the model states, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT

from lightning_smartinfinity.common.versions import unreadable
from lightning_smartinfinity.errors import CheckpointError, SmartInfinityError
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import check_records
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_without_memory

__all__ = ["CHECKPOINT_VERSION", "EXTRA_KEY", "require_readable"]

EXTRA_KEY = "smart_infinity"
"""Key of the entries that DeepSpeed's own format does not define."""

CHECKPOINT_VERSION = 2
"""Format version of what this strategy adds to checkpoints and universal folders; a change raises it."""

_OLDEST_VERSION = 1


def require_readable(file: Path) -> None:
    """Check that this version of the package reads a checkpoint.

    Damaged files, and files of stock DeepSpeed, are left to the functions that read all of them.

    Args:
        file: A file with optimizer state: of a rank, or of a universal checkpoint.

    Raises:
        CheckpointError: Another version of the package wrote it in a format that is not read.
        StorageTimeoutError: The disk does not answer.
    """
    extra = _extra_in(file)
    version, reads = extra.get("version"), (_OLDEST_VERSION, CHECKPOINT_VERSION)
    if isinstance(version, int) and not reads[0] <= version <= reads[1]:
        problem, remedy = unreadable(str(file), version=version, reads=reads, writer=str(extra.get("package", "")))
        raise CheckpointError(problem, f"{remedy}.")


def _extra_in(file: Path) -> Mapping[str, Any]:
    """Return the entries of this package in an intact file with optimizer state; none if it cannot be read."""
    try:
        check_records(file, tensors=False)  # a flipped bit in the version is damage
        saved = load_without_memory(file)
        extra = (saved if EXTRA_KEY in saved else saved[OPTIMIZER_STATE_DICT]).get(EXTRA_KEY)
    except CheckpointError:
        return {}
    except SmartInfinityError:
        raise
    except DAMAGE:
        return {}
    return extra if isinstance(extra, Mapping) else {}
