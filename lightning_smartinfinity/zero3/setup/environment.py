"""Prepares the process before DeepSpeed is first imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterator

from lightning_smartinfinity.errors import StorageError, UnsupportedError
from lightning_smartinfinity.zero3.ranks.collectives import has_ended

__all__ = [
    "forbid_jit_builds",
    "having_local_rank",
    "prepare_environment",
    "require_descriptors",
    "reuse_freed_memory",
]

# A fit of one process with two folders opens 28 descriptors. Loaders and loggers open more.
_DESCRIPTORS = 64
_DESCRIPTORS_PER_PROCESS = 8  # connections of process groups
_DESCRIPTORS_PER_FOLDER = 8

_M_MMAP_THRESHOLD = -3  # option of mallopt(3)
_LEAN_THRESHOLD = 1024 * 1024
_FAST_THRESHOLD = 32 * 1024 * 1024  # the largest that glibc chooses itself
_THRESHOLD_VARIABLE = "MALLOC_MMAP_THRESHOLD_"


def prepare_environment(device_type: str, *, local_world_size: int) -> None:
    """Make DeepSpeed use the run's accelerator, and keep it from compiling ops.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        local_world_size: Number of processes on this node.

    Raises:
        UnsupportedError: The device type is another one, or DeepSpeed already uses another accelerator in this process.
    """
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"The smart_infinity strategy does not run on {device_type!r} devices.",
            "Use accelerator='cuda' or accelerator='cpu'.",
        )
    if device_type == "cpu" and "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if device_type == "cpu":
        # DeepSpeed's CPU accelerator counts its "devices" by this variable.
        os.environ["LOCAL_SIZE"] = str(local_world_size)
    _require_accelerator(device_type)
    forbid_jit_builds()
    _forget_ended_groups()
    _map_blocks_from(_LEAN_THRESHOLD)


@contextlib.contextmanager
def having_local_rank() -> Iterator[None]:
    """Set ``LOCAL_RANK`` in this context if no launcher has set it: DeepSpeed reads it during a forward pass.

    It is unset afterwards, because accelerate would conclude that a launcher had set it.
    """
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


def require_descriptors(*, num_processes: int, num_folders: int) -> None:
    """Raise this process's limit of open files, as far as permitted, if it is too low for a training.

    Without this, gloo or Python would fail in the middle of the set-up.

    Args:
        num_processes: Number of processes on this node.
        num_folders: Number of storage folders.

    Raises:
        StorageError: The limit is too low, and cannot be raised far enough.
    """
    wanted = _DESCRIPTORS + _DESCRIPTORS_PER_PROCESS * num_processes + _DESCRIPTORS_PER_FOLDER * num_folders
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise StorageError(
            f"This process may open {hard} files at a time; a training with {_counted(num_processes, 'process', 'es')} "
            f"on this machine and {_counted(num_folders, 'storage folder', 's')} needs up to {wanted}.",
            f"Raise the limit of open files: ulimit -n {max(wanted, 1024)}.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else hard, hard))


def _counted(number: int, thing: str, ending: str) -> str:
    return f"{number} {thing}{'' if number == 1 else ending}"


def _require_accelerator(device_type: str) -> None:
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if chosen != device_type:
        raise UnsupportedError(
            f"DeepSpeed was imported for accelerator {chosen!r} before the run chose {device_type!r}.",
            f"Set the environment variable DS_ACCELERATOR={device_type} before the program starts.",
        )


def forbid_jit_builds() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives when a process group starts on a CPU.

    ``deepspeed.comm.torch.build_shm_op`` compiles the op, which needs a compiler and about 20 s, if this table marks it
    as compatible. Each process that uses it leaves 69 MB in /dev/shm. Without it DeepSpeed falls back to
    torch.distributed, which is sufficient.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _forget_ended_groups() -> None:
    """Make DeepSpeed drop its process groups if ``torch.distributed.destroy_process_group`` has ended them.

    DeepSpeed keeps them for the lifetime of the process, and drops them only when it ends them itself.
    """
    from deepspeed.utils import groups

    if groups._WORLD_GROUP is not None and has_ended(groups._WORLD_GROUP):
        groups._release_process_group_references()


def reuse_freed_memory() -> None:
    """Make the C library keep freed blocks of less than 32 MiB for reuse; call this once the model is set up.

    On a CPU, every step allocates the same blocks for activations and gradients. Without reuse, each page would cost a
    page fault in every step.
    """
    _map_blocks_from(_FAST_THRESHOLD)


def _map_blocks_from(num_bytes: int) -> None:
    """Make the C library map each block of at least this size separately, so that freeing returns it to the system.

    By default glibc raises its threshold when blocks are freed, and then keeps blocks of up to 32 MiB in its heaps: an
    fp32 model that was cut into 16-bit partitions would stay resident in addition to these. A user's own setting takes
    precedence.
    """
    if _THRESHOLD_VARIABLE not in os.environ:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, num_bytes)
