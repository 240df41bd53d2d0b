"""Settings for the transfer of optimizer state: ``transfer``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native import MAX_BUFFERS, MAX_THREADS
from lightning_smartinfinity.settings.rules import (
    FLAG,
    Rule,
    between,
    check,
    in_seconds,
    num_bytes,
    one_of,
    optional,
    require,
    settings_of,
    steps_or_time,
)
from lightning_smartinfinity.settings.smartssd import TIMEOUT
from lightning_smartinfinity.settings.wrong_names import named_settings

__all__ = [
    "CARD_TASKLET_BYTES",
    "HOST_TASKLET_BYTES",
    "IO_TIMEOUT",
    "JOB_NAME",
    "NUM_BUFFERS",
    "TransferConfig",
    "transfer_config",
]

HOST_TASKLET_BYTES = 4 * 1024 * 1024
"""Default of ``TransferConfig(tasklet_bytes=...)`` if the host updates."""

CARD_TASKLET_BYTES = 64 * 1024 * 1024
"""Default if SmartSSDs update: the published card reads 1.6 GB/s at 1 MiB, 2.2 at 4 MiB, 2.4 at 128 MiB."""

IO_TIMEOUT = 45.0
"""Default of ``TransferConfig(io_timeout=...)``. After 30 s without an answer, Linux resets a drive and retries."""

NUM_BUFFERS = between(2, MAX_BUFFERS)
"""Rule for the number of buffers of a ring."""

_MIN_TASKLET_BYTES, _MAX_TASKLET_BYTES = 64 * 1024, 1 << 60

_OF_THE_FILE_SYSTEM = "lost+found"  # a folder in the root of many file systems


def _is_folder_name(value: object) -> bool:
    # In a message or a listing, a name of blanks or with a line break looks like other names.
    if not isinstance(value, str) or not value.isprintable() or value.strip() != value:
        return False
    return value not in ("", ".", "..", _OF_THE_FILE_SYSTEM) and "/" not in value


JOB_NAME = Rule(
    f"Pass a plain name without slashes or outer blanks, and not {_OF_THE_FILE_SYSTEM}",
    _is_folder_name,
    "is not a name for a job's folder",
)
"""Rule for ``TransferConfig(job=...)``. Folders with other names belong to no job."""


INTERVAL_SHARE = 20
"""The training's time divided by this is the most that writing state in memory to storage may take."""


@named_settings
@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Settings for the transfer of optimizer state between storage and the update.

    Sizes are bytes, or text such as ``"8GB"`` (8 * 10^9) and ``"8GiB"`` (8 * 2^30), which is converted to bytes.

    Args:
        tasklet_bytes: Size of one ring buffer, the largest read or write of state; at least 64 KiB. Any size works: a
            buffer holds as many whole blocks of elements as fit. None: 4 MiB if the host updates, 64 MiB if SmartSSDs
            update.
        num_buffers: Number of ring buffers. The ring uses at most ``num_buffers * tasklet_bytes`` bytes for a model of
            any size. ``"auto"``: for each drive of the rank's share 64 MiB of buffers, from 8 to 16; one more for each
            update thread beyond the first; but all rings together take at most 1/32 of the memory of the machine or the
            container, unless that is less than 8 buffers each. SmartSSDs: 16. Results do not depend on it. The update
            also holds one gradient per parameter of the rank's partition; on a GPU, slots for parameters (with Adam a
            sixth of the ring in 16 bit, a third in fp32); with parameters on storage, a staging buffer as large as the
            ring; and the state that ``dram_cache_bytes`` keeps in memory.
        compute_threads: Number of update threads per rank. More threads help if arithmetic, not storage, is the
            bottleneck, but they use cores that forward and backward need. ``"auto"``: half of the rank's share of the
            cores if a GPU trains, a quarter if the CPU does; at least 1, at most 8. Cores beyond the process's affinity
            mask or the CPU quota of its control groups do not count. Results do not depend on it.
        io_engine: ``"io_uring"`` (registered files and, if the limit on lockable memory allows it, registered buffers:
            the least CPU time), ``"threads"`` (pread and pwrite on a thread pool), ``"plain"`` (the same through the
            page cache, whose pages are released at once: for file systems without direct I/O) or ``"auto"`` (io_uring
            if the system allows it, otherwise threads; plain for all folders if any of them lacks direct I/O).
        dram_cache_bytes: Size of the optimizer state per rank that stays in host memory: whole tasklets from the start
            of the partition. ``durability`` decides when they are written to storage. ``"auto"``: the memory free when
            training begins, minus a quarter of all memory, divided among the ranks of a machine; 0 if a storage folder
            is in memory (tmpfs). None: chosen by ``plan``, or ``"auto"`` without a plan; a plan does not change 0.
            Results do not depend on it.
        gradient_bytes: Size of the gradients per rank that are held in host memory. Backward writes further gradients
            to storage, and the update reads them from there. ``"auto"``: all gradients, or half of the free memory if
            they do not fit into it. Results do not depend on it.
        parameter_bytes: Size of the parameters per rank that are in memory at once if parameters are on storage
            (``zero={"offload_param": {"device": "nvme"}}``): gathered ones, and partitions that are read ahead. With a
            GPU, the GPU's memory and host memory each hold that much. DeepSpeed's limits on prefetching, live
            parameters and buffers are computed from it. With ``plan``, a size also puts parameters on storage, unless
            ``zero`` sets their place. ``"auto"``: DeepSpeed's limits, as set in ``zero``. Results do not depend on it.
        accumulate_in: Dtype in which gradients of several micro-batches are added: ``"fp32"``, or ``"parameters"`` for
            the parameters' dtype. In 16 bit, gradients use half of the memory and are rounded after each addition.
        durability: How much of a training a kill may lose. ``"interval"``: state in host memory is written to storage
            only every ``persist_every``; the generation written then stays whole on storage until the next one is, and
            an interrupted training resumes from it. State on storage has a third place for that. Where some process has
            no state in host memory or no room for third places, and if SmartSSDs update, it acts as
            ``"step"``. ``"step"`` (all state is written in every step: a kill loses at most one step, and a failed step
            is rolled back), ``"power"`` (also after a power loss: every step flushes the device) or ``"none"`` (one
            place for each tasklet, and state in host memory is never written: training resumes from checkpoints only).
        persist_every: With ``durability="interval"``, how often state in host memory is written to storage: a number of
            optimizer steps, or a time such as ``"10min"`` or ``"90s"``. Either is extended so that writing takes at
            most a twentieth of the training's time.
        flush_timeout: With ``durability="interval"``, seconds that writing state in host memory to storage may take
            when a training is interrupted, by an error, Ctrl-C or SIGTERM. State that needs longer is not written, and
            the training resumes from the generation before. So it does if several processes end after different steps.
        direct_io: ``"on"`` (O_DIRECT or an error), ``"off"`` (through the page cache) or ``"auto"`` (O_DIRECT if the
            file system supports it, otherwise a warning).
        io_timeout: Seconds after which an unanswered read or write is abandoned with a StorageTimeoutError: above 0,
            and at most 2147483. After Ctrl-C or SIGTERM the limit is at most three seconds. Set-up, and flushes of
            checkpoints, may take longer as long as the disk completes requests.
        job: Name of this job's folder in each storage folder; two jobs on one storage need two names.
        keep: Whether the state stays on storage after the strategy is closed: ``"on-failure"`` (if the training did not
            complete and can be resumed from it), True (always; a later training does not replace it) or False (never).
            With ``"on-failure"`` or True, and two places for each tasklet, Trainers write training records, and
            ``fit(ckpt_path="storage")`` resumes the training, also after a kill. If compression keeps a residual,
            storage then holds two copies of it, of 4 bytes per parameter each, and every step writes one of them during
            the training.
        asynchronous: Whether a Trainer's ModelCheckpoint saves while training continues. This needs a third place on
            storage for each tasklet, allocated at set-up; without that space, training waits for saves. With
            ``durability="none"``, on SmartSSDs, or if compression keeps a residual, it always waits.
            ``trainer.save_checkpoint`` and saves of Fabric and transformers return when the checkpoint is complete.

    Raises:
        ConfigError: A setting is unknown or has a forbidden value.
    """

    tasklet_bytes: int | str | None = None
    num_buffers: int | str = "auto"
    compute_threads: int | str = "auto"
    io_engine: str = "auto"
    dram_cache_bytes: int | str | None = None
    gradient_bytes: int | str = "auto"
    parameter_bytes: int | str = "auto"
    accumulate_in: str = "fp32"
    durability: str = "interval"
    persist_every: int | str = "10min"
    flush_timeout: float = 20.0
    direct_io: str = "auto"
    io_timeout: float = IO_TIMEOUT
    job: str = "default"
    keep: bool | str = "on-failure"
    asynchronous: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.io_engine, str) and self.io_engine == "io_uring_sqpoll":
            raise ConfigError(
                "TransferConfig(io_engine='io_uring_sqpoll') was removed: its kernel thread took a core of its own.",
                "Use io_engine='io_uring'.",
            )
        require(
            self,
            tasklet_bytes=optional(num_bytes(_MIN_TASKLET_BYTES, _MAX_TASKLET_BYTES)),
            num_buffers=optional(NUM_BUFFERS, "auto"),
            compute_threads=optional(between(1, MAX_THREADS), "auto"),
            io_engine=one_of("auto", "io_uring", "threads", "plain"),
            dram_cache_bytes=optional(optional(num_bytes(0), "auto")),
            gradient_bytes=optional(num_bytes(0), "auto"),
            parameter_bytes=optional(num_bytes(1), "auto"),
            accumulate_in=one_of("fp32", "parameters"),
            durability=one_of("none", "interval", "step", "power"),
            persist_every=steps_or_time(),
            flush_timeout=TIMEOUT,
            direct_io=one_of("auto", "on", "off"),
            io_timeout=TIMEOUT,
            job=JOB_NAME,
            keep=optional(FLAG, "on-failure"),
            asynchronous=FLAG,
        )
        if self.io_engine == "plain" and self.direct_io == "on":
            raise ConfigError(
                "TransferConfig(io_engine='plain', direct_io='on') contradicts itself: the plain engine is for files in"
                " the page cache.",
                "Use io_engine='auto', or direct_io='off'.",
            )

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes of one ring buffer; None means the default of the device that updates."""
        kept = self.tasklet_bytes
        assert not isinstance(kept, str), "a size given as text is kept as bytes"
        return kept

    @property
    def file_access(self) -> str:
        """The effective value of ``direct_io``: the plain engine always uses the page cache."""
        return "off" if self.io_engine == "plain" else self.direct_io

    @property
    def places_per_tasklet(self) -> int:
        """Number of places for each tasklet's state on storage: 1 without durability, otherwise 2."""
        return 1 if self.durability == "none" else 2

    @property
    def interval(self) -> int | float | None:
        """``persist_every`` in steps, as an int, or in seconds, as a float; None without ``durability="interval"``."""
        if self.durability != "interval":
            return None
        return self.persist_every if isinstance(self.persist_every, int) else in_seconds(self.persist_every)

    @property
    def ignored(self) -> list[str]:
        """The settings of ``durability="interval"`` that another durability ignores, as they were given."""
        names = () if self.durability == "interval" else ("persist_every", "flush_timeout")
        given = {name: getattr(self, name) for name in names}
        return [f"{name}={value!r}" for name, value in given.items() if value != getattr(TransferConfig, name)]

    @property
    def manifest_durability(self) -> str:
        """The ``durability`` in manifests: the files of ``"interval"`` are those of ``"step"``, written less often."""
        return "step" if self.durability == "interval" else self.durability

    @property
    def writes_through(self) -> bool:
        """Whether state that stays in host memory is also written to storage."""
        return self.durability != "none" or self.keep is True

    @property
    def is_resumable(self) -> bool:
        """Whether an interrupted training can resume from its state on storage (``ckpt_path="storage"``)."""
        return self.durability != "none" and self.keep is not False


def transfer_config(transfer: TransferConfig | Mapping[str, Any] | None, *, owner: str) -> TransferConfig:
    """Return the setting ``transfer`` as an object; it may be an object, a dict, or None (the defaults).

    Args:
        transfer: The setting.
        owner: Class to which it was passed, for the error.

    Raises:
        ConfigError: The value is none of these, or a setting in it is unknown or out of range.
    """
    config: TransferConfig | None = check(owner, "transfer", transfer, optional(settings_of(TransferConfig)))
    return TransferConfig() if config is None else config
