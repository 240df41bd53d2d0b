"""Settings as frozen dataclasses, validated once at construction."""

from __future__ import annotations

import operator
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_smartinfinity.checks import (
    FLAG,
    Rule,
    as_passed,
    between,
    check,
    num_bytes,
    one_of,
    optional,
    positive,
    require,
    require_distinct,
    settings_of,
)
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native import BLOCK_BYTES, MAX_BUFFERS, MAX_THREADS
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.update_rules import RULES
from lightning_smartinfinity.wrong_names import named_settings

__all__ = [
    "CARD_TASKLET_BYTES",
    "HOST_TASKLET_BYTES",
    "IO_TIMEOUT",
    "JOB_NAME",
    "LOCAL_FOLDER",
    "MAX_CARD_NUMBER",
    "NUM_BUFFERS",
    "ActivationOffload",
    "PlanConfig",
    "SmartSSDConfig",
    "TransferConfig",
    "activation_offload",
    "launched_as",
    "plan_config",
    "resolved_folder",
    "smartssd_config",
    "storage_folders",
    "transfer_config",
]

HOST_TASKLET_BYTES = 4 * 1024 * 1024
"""Default of ``TransferConfig(tasklet_bytes=...)`` where the host updates."""

CARD_TASKLET_BYTES = 64 * 1024 * 1024
"""Default where SmartSSDs update: the published card reads 1.6 GB/s at 1 MiB, 2.2 at 4 MiB, 2.4 at 128 MiB."""

IO_TIMEOUT = 45.0
"""Default of ``TransferConfig(io_timeout=...)``. Linux resets a drive after 30 s without an answer, and tries again."""

MAX_CARD_NUMBER = 65_535
"""Largest number in ``SmartSSDConfig(devices=...)``, larger than any machine needs."""

NUM_BUFFERS = between(2, MAX_BUFFERS)
"""Rule for the number of buffers of a ring."""

_MIN_TASKLET_BYTES, _MAX_TASKLET_BYTES = 64 * 1024, 1 << 60
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")  # Path has made one slash of two
_OF_THE_FILE_SYSTEM = "lost+found"  # a folder in the root of many file systems
_MAX_TIMEOUT = 2_147_483  # XRT counts milliseconds in an int
_MOST_TOKENS = 10**9


def _is_folder_name(value: object) -> bool:
    # A name of blanks, or with a line break, cannot be told from others in a message or a listing.
    if not isinstance(value, str) or not value.isprintable() or value.strip() != value:
        return False
    return value not in ("", ".", "..", _OF_THE_FILE_SYSTEM) and "/" not in value


def _names_file(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(str(value)) and "\0" not in str(value)


def _cards(devices: object) -> tuple[str | int, ...] | None:
    """Return addresses, and numbers of any integer type as ints; None if the list names no cards."""
    named = [_card(one) for one in devices] if isinstance(devices, (list, tuple)) else []
    cards = tuple(card for card in named if card is not None)
    return cards if cards and len(cards) == len(named) else None


def _card(value: Any) -> str | int | None:
    """Return an address, or an integer of any type (also NumPy's) as an int; None if the value is neither."""
    if isinstance(value, str):
        return value or None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if 0 <= number <= MAX_CARD_NUMBER and not isinstance(value, bool) else None


def _listed(storage: Any) -> list[Any]:
    return list(storage) if isinstance(storage, (list, tuple)) else [storage]


JOB_NAME = Rule(
    f"Pass a plain name without slashes or outer blanks, and not {_OF_THE_FILE_SYSTEM}",
    _is_folder_name,
    "is not a name for a job's folder",
)
"""Rule for ``TransferConfig(job=...)``. Folders of other names are no job's."""

_XCLBIN = Rule("Pass the path of an xclbin", _names_file, "names no file")
_CARDS = Rule(
    f"Pass a list with the PCI address of one card for each storage folder, or its number from 0 to {MAX_CARD_NUMBER}",
    lambda devices: _cards(devices) is not None,
    "names no cards",
    _cards,
)
LOCAL_FOLDER = Rule(
    "Pass a local folder on a drive of this machine",
    lambda folder: _URL.match(str(folder)) is None and "\0" not in str(folder),
    "is a URL or has a null byte, and cannot be a folder",
)
"""Rule for a folder that can be storage. Python would take the URL ``s3://bucket/x`` for a folder named ``s3:``."""

_FOLDERS = Rule(
    "Pass a folder or a list of folders",
    lambda storage: (
        bool(_listed(storage)) and all(isinstance(one, (str, Path)) and str(one) for one in _listed(storage))
    ),
    "names no folder",
    _listed,
)


_FORMATS = Rule(
    f"Pass a list of {', '.join(map(repr, STATE_FORMATS))}",
    lambda names: isinstance(names, (list, tuple)) and all(name in STATE_FORMATS for name in names),
    "names no state formats",
    tuple,
)


@named_settings
@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How optimizer state moves between storage and the update.

    Sizes are bytes, or text such as ``"8GB"`` (8 * 10^9) and ``"8GiB"`` (8 * 2^30). They are kept as bytes.

    Args:
        tasklet_bytes: Size of one ring buffer: the most state in one read or write, at least 64 KiB. Any size will do:
            the state of whole blocks of elements is put in. None: 4 MiB where the host updates, 64 MiB where SmartSSDs
            do.
        num_buffers: Number of ring buffers. The ring takes at most ``num_buffers * tasklet_bytes`` bytes for a model of
            any size. The update also holds one gradient per parameter of the rank's partition; on a GPU slots for
            parameters (with Adam a sixth of the ring in 16 bit, a third in fp32); with parameters on storage a staging
            buffer as large as the ring; and what ``dram_cache_bytes`` keeps in memory.
        compute_threads: Number of threads that update, per rank. One usually keeps up with one disk. More help where
            arithmetic, not storage, is the limit, but take cores from forward and backward. No result depends on it.
        io_engine: ``"io_uring"`` (registered files and, if the limit on lockable memory allows it, registered buffers:
            least CPU time), ``"io_uring_sqpoll"`` (the same with a kernel thread that polls for requests and needs a
            core of its own), ``"threads"`` (pread and pwrite on a thread pool), ``"plain"`` (the same through the page
            cache, which is released at once: for file systems without direct I/O) or ``"auto"`` (io_uring where the
            system allows it, otherwise threads; plain for all folders if any of them has no direct I/O).
        dram_cache_bytes: Size of the optimizer state per rank that stays in host memory: whole tasklets from the start
            of the partition. They are written to storage as well, which saves only reads; with ``durability="none"``
            they lie in memory only, unless ``keep=True``, which saves writes, too. ``"auto"``: the memory free when
            training begins, less a quarter of all memory, divided among the ranks of a machine. None: what ``plan``
            chooses, or nothing without a plan; a plan leaves 0 as it is. No result depends on it.
        gradient_bytes: Size of the gradients per rank that are held in host memory; those beyond it go to storage as
            backward makes them, and come back as the update needs them. ``"auto"``: all, or if they do not fit into
            free memory, half of that. No result depends on it.
        parameter_bytes: Size of the parameters per rank that are in memory at once where parameters lie on storage
            (``zero={"offload_param": {"device": "nvme"}}``): those that are gathered, and partitions that are read
            ahead. On a GPU as much is held in its own memory, and as much in host memory. DeepSpeed's prefetching, live
            parameters and buffers follow from it. With ``plan`` a size puts them there, unless ``zero`` says where they
            lie. ``"auto"``: as ``zero`` says. No result depends on it.
        accumulate_in: ``"fp32"``, or ``"parameters"``: the dtype of the parameters, in which gradients of several
            micro-batches are added. In 16 bit that takes half of the memory, and rounds after each addition.
        durability: ``"none"`` (one place for each tasklet: a failed step cannot be rolled back), ``"step"``
            (two: a failed step is rolled back exactly, and ``recover_store`` can open the store after a kill) or
            ``"power"`` (also after a power loss: every step flushes the device). With each of them training resumes
            from checkpoints.
        direct_io: ``"on"`` (O_DIRECT or an error), ``"off"`` (through the page cache) or ``"auto"`` (O_DIRECT where
            the file system supports it, otherwise a warning).
        io_timeout: Seconds after which a read or write that a disk has not answered is given up with a
            StorageTimeoutError: above 0, and at most 2147483. After Ctrl-C or SIGTERM it is at most three seconds.
            Set-up, and flushes of checkpoints, may take longer as long as the disk completes requests.
        job: Name of this job's folder below each storage folder; two jobs on one storage need two names.
        keep: Whether the state stays on storage after the strategy is closed: ``"on-failure"`` (if a training can be
            resumed from it that did not end as it should), True (always; a later training does not replace it) or False
            (never). With ``"on-failure"`` and True, and two places for each tasklet, a Trainer writes training records,
            and ``fit(ckpt_path="storage")`` resumes the training, also after a kill. With compressed gradients that
            have a residual, storage then holds two copies of it, of 4 bytes per parameter each, and every step writes
            one of them beside the training.
        asynchronous: Whether a Trainer's ModelCheckpoint saves while training goes on, which takes room on storage for
            a third place of each tasklet, allocated at set-up; without that room saves wait. With
            ``durability="none"``, on SmartSSDs, or if compression keeps a residual, they always wait.
            ``trainer.save_checkpoint`` and saves of Fabric and transformers return when the checkpoint is whole.

    Raises:
        ConfigError: A setting is unknown, out of range or not one of those above.
    """

    tasklet_bytes: int | str | None = None
    num_buffers: int = 16
    compute_threads: int = 1
    io_engine: str = "auto"
    dram_cache_bytes: int | str | None = None
    gradient_bytes: int | str = "auto"
    parameter_bytes: int | str = "auto"
    accumulate_in: str = "fp32"
    durability: str = "step"
    direct_io: str = "auto"
    io_timeout: float = IO_TIMEOUT
    job: str = "default"
    keep: bool | str = "on-failure"
    asynchronous: bool = True

    def __post_init__(self) -> None:
        require(
            self,
            tasklet_bytes=optional(num_bytes(_MIN_TASKLET_BYTES, _MAX_TASKLET_BYTES)),
            num_buffers=NUM_BUFFERS,
            compute_threads=between(1, MAX_THREADS),
            io_engine=one_of("auto", "io_uring", "io_uring_sqpoll", "threads", "plain"),
            dram_cache_bytes=optional(optional(num_bytes(0), "auto")),
            gradient_bytes=optional(num_bytes(0), "auto"),
            parameter_bytes=optional(num_bytes(1), "auto"),
            accumulate_in=one_of("fp32", "parameters"),
            durability=one_of("none", "step", "power"),
            direct_io=one_of("auto", "on", "off"),
            io_timeout=positive(_MAX_TIMEOUT),
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
        """Bytes of one ring buffer; None: the default of the device that updates."""
        kept = self.tasklet_bytes
        assert not isinstance(kept, str), "a size given as text is kept as bytes"
        return kept

    @property
    def file_access(self) -> str:
        """How files are opened, as a value of ``direct_io``; the plain engine always uses the page cache."""
        return "off" if self.io_engine == "plain" else self.direct_io

    @property
    def places_per_tasklet(self) -> int:
        """Number of places for each tasklet's state on storage: 1 without durability, otherwise 2."""
        return 1 if self.durability == "none" else 2

    @property
    def writes_through(self) -> bool:
        """Whether state that stays in host memory is written to storage as well."""
        return self.durability != "none" or self.keep is True

    @property
    def is_resumable(self) -> bool:
        """Whether a training that was interrupted can go on from its state on storage (``ckpt_path="storage"``)."""
        return self.durability != "none" and self.keep is not False


@named_settings
@dataclass(frozen=True, kw_only=True)
class SmartSSDConfig:
    """Settings for Samsung SmartSSDs, whose accelerators update state next to the SSD.

    Args:
        xclbin: File with the kernels, built by ``make -C hls xclbin``. None: the file that the environment variable
            SMART_INFINITY_XCLBIN names.
        devices: Card of each storage folder, in the folders' order: its PCI address (``"0000:3d:00.1"``) or its number
            among the system's cards, ordered by address. None: the card on the same PCIe switch as the folder's SSD.
        gradient_route: How gradients reach a card: ``"host"`` (from host memory into its DRAM), ``"storage"`` (written
            to its SSD, from which the card reads them directly, as published) or ``"auto"``, which is ``"host"``.
        timeout: Seconds after which a kernel, or a transfer between card and SSD or card and host, is abandoned if it
            has not returned, and the host takes over: above 0, and at most 2147483.
        binding: How XRT is called: ``"native"`` (its C library, without the interpreter's lock), ``"pyxrt"`` (its
            Python module, which holds the lock) or ``"auto"``: native, or pyxrt if only that is available.

    Raises:
        ConfigError: A setting is unknown, out of range or not one of those above.
    """

    xclbin: str | Path | None = None
    devices: Sequence[str | int] | None = None
    gradient_route: str = "auto"
    timeout: float = 30.0
    binding: str = "auto"

    def __post_init__(self) -> None:
        require(
            self,
            xclbin=optional(_XCLBIN),
            devices=optional(_CARDS),
            gradient_route=one_of("auto", "host", "storage"),
            timeout=positive(_MAX_TIMEOUT),
            binding=one_of("auto", "native", "pyxrt"),
        )


@named_settings
@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Tells ``plan="auto"`` what it cannot see by itself, and what it may use.

    Sizes are bytes, or text such as ``"64GB"``.

    Args:
        model: Model that will be trained, as ``smart-infinity plan`` takes it: folder or name of a Hugging Face model,
            ``package.module:Class``, or a number of parameters such as ``"7B"``. None: the module itself is looked at,
            before it is built where ``configure_model`` builds it.
        batch: Sequences of a micro-batch, per process.
        seq: Tokens of a sequence.
        optimizer: Class of torch.optim, such as ``"SGD"``. None: that of ``fabric.setup``, or else ``"AdamW"``. An
            optimizer of another class whose state does not fit is refused when the training is set up.
        state_formats: State formats that may be chosen where that of ``state_format`` does not fit, in this order.
            Those that do not exist for the optimizer or the precision are passed over.
        host_memory: Memory that all processes of a machine may use together. None: nine tenths of what is free.
        gpu_memory: Memory of each GPU that may be used. None: nine tenths of it.
        disk: Space that may be used on the storage of a machine. None: nine tenths of what is free.

    Raises:
        ConfigError: A setting is unknown, out of range or not one of those above.
    """

    model: str | None = None
    batch: int = 1
    seq: int = 512
    optimizer: str | None = None
    state_formats: Sequence[str] = ()
    host_memory: int | str | None = None
    gpu_memory: int | str | None = None
    disk: int | str | None = None

    def __post_init__(self) -> None:
        size = optional(num_bytes(1))
        require(
            self,
            model=optional(Rule("Pass a folder, a class or a number of parameters", _names_file, "names no model")),
            batch=between(1, _MOST_TOKENS),
            seq=between(1, _MOST_TOKENS),
            optimizer=optional(one_of(*(name for rule in RULES for name in rule.optimizers))),
            state_formats=_FORMATS,
            host_memory=size,
            gpu_memory=size,
            disk=size,
        )


@named_settings
@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """How much of what forward saves for backward stays in memory, and how the rest moves to storage and back.

    Sizes are bytes of one rank, or text such as ``"8GB"``. They are kept as bytes. No result depends on them.

    Args:
        keep: Bytes of what forward saved last that stay in memory, because backward wants them first. ``"auto"``: one
            micro-batch is measured. Without ``budget_bytes`` as little stays as costs no wait in backward, with it as
            much as fits.
        budget_bytes: Most bytes that are held for backward at once: what stays, the pool, and what is read back.
            Forward waits for storage where it would hold more, and a warning says if that is not enough. None: no
            limit, and forward never waits.
        host_bytes: Size of the pool of host memory through which tensors move, in both directions. A tensor for which
            it has no room stays where it is. ``"auto"``: an eighth of what a forward saves, at least 64 MiB, and at
            most half of ``budget_bytes``.
        storage_bytes: Most bytes on storage at once; what has no room there stays in memory. None: no limit.
        min_bytes: Size of the smallest tensor that is moved.
        verify: Whether what is read back is compared with the checksum of what was written.

    Raises:
        ConfigError: A setting is unknown, out of range or not one of those above, or two of them contradict each other.
    """

    keep: int | str = "auto"
    budget_bytes: int | str | None = None
    host_bytes: int | str = "auto"
    storage_bytes: int | str | None = None
    min_bytes: int | str = 256 * 1024
    verify: bool = True

    def __post_init__(self) -> None:
        require(
            self,
            keep=optional(num_bytes(0), "auto"),
            budget_bytes=optional(num_bytes(BLOCK_BYTES)),
            host_bytes=optional(num_bytes(BLOCK_BYTES), "auto"),
            storage_bytes=optional(num_bytes(BLOCK_BYTES)),
            min_bytes=num_bytes(1),
            verify=FLAG,
        )
        for name in ("keep", "host_bytes"):
            value = getattr(self, name)
            if self.budget_bytes is not None and value != "auto" and value > self.budget_bytes:
                raise ConfigError(
                    f"ActivationOffload({name}={value}, budget_bytes={self.budget_bytes}) contradicts itself: the "
                    f"budget includes {name}.",
                    f"Lower {name}, raise budget_bytes, or leave one of them out.",
                )
        self._require_that_something_moves()

    def _require_that_something_moves(self) -> None:
        assert not isinstance(self.min_bytes, str), "a size given as text is kept as bytes"
        least = -(-self.min_bytes // BLOCK_BYTES) * BLOCK_BYTES
        needs = {"host_bytes": least, "storage_bytes": least}
        if self.host_bytes == "auto":
            needs["budget_bytes"] = 2 * least  # the pool takes half of it
        for name, needed in needs.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < needed:
                raise ConfigError(
                    f"ActivationOffload({name}={value}, min_bytes={self.min_bytes}) contradicts itself: not even the "
                    "smallest tensor that moves would fit.",
                    f"Lower min_bytes, or raise {name} to at least {needed}.",
                )


def activation_offload(
    activations: ActivationOffload | Mapping[str, Any] | None, *, owner: str, setting: str = "activations"
) -> ActivationOffload | None:
    """Return what the setting ``activations`` asks for: settings, or a dict of them; None stays None.

    Args:
        activations: The setting.
        owner: Class to which it was passed, for the error.
        setting: Name of the setting, for the error.

    Raises:
        ConfigError: It is something else, or a setting in it is unknown or out of range.
    """
    settings: ActivationOffload | None = check(owner, setting, activations, optional(settings_of(ActivationOffload)))
    return settings


def plan_config(plan: PlanConfig | Mapping[str, Any] | str | None, *, owner: str) -> PlanConfig | None:
    """Return what the setting ``plan`` asks for: settings, a dict of them, ``"auto"`` for the defaults, or None.

    Args:
        plan: The setting.
        owner: Class to which it was passed, for the error.

    Raises:
        ConfigError: It is something else, or a setting in it is unknown or out of range.
    """
    if isinstance(plan, str) and plan == "auto":
        return PlanConfig()
    rule = replace(optional(settings_of(PlanConfig)), remedy="Pass 'auto', or a PlanConfig or a dict of its settings")
    config: PlanConfig | None = check(owner, "plan", plan, rule)
    return config


def transfer_config(transfer: TransferConfig | Mapping[str, Any] | None, *, owner: str) -> TransferConfig:
    """Return what the setting ``transfer`` asks for: settings, a dict of them, or None, which means the defaults.

    Args:
        transfer: The setting.
        owner: Class to which it was passed, for the error.

    Raises:
        ConfigError: It is something else, or a setting in it is unknown or out of range.
    """
    config: TransferConfig | None = check(owner, "transfer", transfer, optional(settings_of(TransferConfig)))
    return TransferConfig() if config is None else config


def smartssd_config(smartssd: SmartSSDConfig | Mapping[str, Any] | None, *, owner: str) -> SmartSSDConfig | None:
    """Return what the setting ``smartssd`` asks for: settings, or a dict of them; None stays None.

    Args:
        smartssd: The setting.
        owner: Class to which it was passed, for the error.

    Raises:
        ConfigError: It is something else, or a setting in it is unknown or out of range.
    """
    config: SmartSSDConfig | None = check(owner, "smartssd", smartssd, optional(settings_of(SmartSSDConfig)))
    return config


_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_VARIABLE = re.compile(r"\$\w+|\$\{[^}]*\}", re.ASCII)


def storage_folders(storage: object, *, owner: str, setting: str = "storage") -> tuple[Path, ...] | None:
    """Resolve the folders that the setting ``storage`` names, or return None if the user chose none.

    Args:
        storage: The setting.
        owner: Class or command to which it was passed, for the error.
        setting: Name of the setting, for the error.

    Raises:
        ConfigError: The setting names something that is no local folder, or a folder twice.
    """
    given = check(owner, setting, storage, optional(_FOLDERS))
    if given is None:
        return None
    passed = as_passed(owner, setting, storage)
    folders = tuple(resolved_folder(folder, setting=passed, has_variables=True) for folder in given)
    require_distinct(passed, folders)
    return folders


def resolved_folder(folder: str | Path, *, setting: str, has_variables: bool = False) -> Path:
    """Return the absolute path of a folder, in which links and ``~`` (the user's home) are replaced.

    Args:
        folder: The folder, which need not exist.
        setting: The setting that names it, with its owner, for the error.
        has_variables: Whether to replace environment variables (``$SLURM_TMPDIR``), too, and ``{node}`` by the
            machine's host name, and ``{local_rank}`` by the number that the launcher gave to this process there.

    Raises:
        ConfigError: The path cannot be that of a local folder, or names a variable that is not set.
    """
    if not LOCAL_FOLDER.holds(folder):
        raise ConfigError(f"{setting} {LOCAL_FOLDER.fault}.", f"{LOCAL_FOLDER.remedy}.")
    try:
        path = _filled(os.fspath(folder), setting=setting) if has_variables else folder
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, links in a circle, a null byte
        raise ConfigError(f"{setting} cannot be a folder: {error}.", "Pass the path of a folder.") from error


def launched_as() -> str:
    """Return the number that the launcher gave to this process on its machine; "0" if there is no launcher."""
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")


def _filled(folder: str, *, setting: str) -> str:
    """Return a path with the values of the variables that it names."""
    folder = folder.replace("{node}", platform.node()).replace("{local_rank}", launched_as())
    filled = os.path.expandvars(folder)
    unset = next((name for name in _VARIABLE.findall(folder) if name.strip("${}") not in os.environ), None)
    if unset is not None:
        raise ConfigError(
            f"{setting} names the environment variable {unset}, which is not set on {platform.node()}.",
            "Set it for every process, or write the path out.",
        )
    return filled
