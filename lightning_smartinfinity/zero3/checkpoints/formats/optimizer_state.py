"""Optimizer state in DeepSpeed's own ZeRO-3 checkpoint format, written and read window by window.

Tools such as ``zero_to_fp32`` read ``fp32_flat_groups`` and ``optimizer_state_dict``. Entries that DeepSpeed's format
does not define (step counts per parameter, names) are stored next to these, under ``smart_infinity``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum
from numpy.typing import NDArray

from lightning_smartinfinity import __version__
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, numbers_of
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import CHECKPOINT_VERSION, EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.saved_residual import (
    SavedResidual,
    describe_residual,
    write_residual,
)
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import require_rank
from lightning_smartinfinity.zero3.checkpoints.formats.stock_checkpoint import WITHOUT_ARRAYS, describe_stock
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, TensorStream, room_for
from lightning_smartinfinity.zero3.optimizer.hyperparameters import warn_of_changes
from lightning_smartinfinity.zero3.optimizer.parameter_groups import saved_numbers
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.ranks.collectives import raising_together, show_on_rank_zero
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig, ParamGroup, SavedState

__all__ = [
    "FILE",
    "ArrayWriter",
    "check_extra",
    "is_described",
    "load_state_dict",
    "loading_state",
    "require_resumable",
    "restore_groups",
    "state_dict",
    "write_arrays",
]

FILE = "smart_infinity_file"
"""Key of the path of the file that a state was read from."""

_FP32_BYTES = 4


def state_dict(optimizer: StorageOptimizer) -> SavedState:
    """Return this rank's optimizer state. Masters and other arrays are tensors without memory, one per sub-group.

    :func:`write_arrays` writes their values into the saved file.
    """
    layout = optimizer.partition.layout
    steps, with_arrays = optimizer.update.drained_handler().steps, _saves_arrays(optimizer)
    return {
        # Numbers, because loading DeepSpeed's objects would need the user's consent.
        ZERO_STAGE: int(ZeroStageEnum.weights),
        LOSS_SCALER: numbers_of(optimizer.loss_scaler),
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        PARTITION_COUNT: optimizer.partition_count,
        OPTIMIZER_STATE_DICT: {
            "state": _describe_arrays(optimizer, steps) if with_arrays else {},
            "param_groups": _groups_with_sub_groups(optimizer),
        },
        FP32_FLAT_GROUPS: [room_for(sub_group.numel) for sub_group in layout.sub_groups],
        EXTRA_KEY: {
            "version": CHECKPOINT_VERSION,
            "package": __version__,
            "optimizer": optimizer.rule.name,
            "dtype": str(optimizer.dtype),
            "save_id": optimizer.save_id,
            "rank": dist.get_rank(optimizer.dp_process_group),
            "weights_only": optimizer.saves_weights_only,
            WITHOUT_ARRAYS: not with_arrays,
            "parameters": [(parameter.name, parameter.numel) for parameter in layout.parameters],
            "steps": steps.tolist(),
            **describe_residual(optimizer),
        },
    }


def is_described(state: object) -> bool:
    """Return whether a state came from :func:`state_dict`."""
    return isinstance(state, Mapping) and EXTRA_KEY in state


def write_arrays(optimizer: StorageOptimizer, file: TensorFile) -> None:
    """Write masters and other arrays into a file that holds the result of :func:`state_dict`."""
    write = ArrayWriter(optimizer, file)
    with show_on_rank_zero("Saving the optimizer state", write.nbytes) as advance:
        optimizer.update.drained_handler().state.scan(lambda window: advance(write(window)))
    write_residual(optimizer, file, file.state[OPTIMIZER_STATE_DICT][EXTRA_KEY])


class ArrayWriter:
    """Writes windows, given in order, into a file that holds the result of :func:`state_dict`.

    The constructor is collective.

    Args:
        optimizer: Optimizer of this strategy.
        file: The file.

    Attributes:
        nbytes: Saved bytes of all windows.
    """

    def __init__(self, optimizer: StorageOptimizer, file: TensorFile) -> None:
        self._streams = _streams(optimizer, file, with_arrays=_saves_arrays(optimizer))
        self.nbytes = _FP32_BYTES * optimizer.partition.layout.numel * len(self._streams)

    def __call__(self, window: Window) -> int:
        """Write a window, and return the number of saved bytes."""
        for number, stream in self._streams.items():
            stream.write(window.arrays[number])
        return sum(window.arrays[number].nbytes for number in self._streams)


def load_state_dict(optimizer: StorageOptimizer, state_dict: SavedState, *, load_optimizer_states: bool) -> None:
    """Write a checkpoint's masters to storage and to the partition, and optionally restore the rest of its state.

    Args:
        optimizer: Optimizer of this strategy.
        state_dict: State that ``SmartInfinityCheckpointEngine`` has read; its arrays are not used.
        load_optimizer_states: Whether to also restore arrays, counts, groups and residual; if not, arrays, counts and
            residual are reset.

    Raises:
        CheckpointError: The checkpoint belongs to another model, optimizer or number of processes, or is damaged.
    """
    path, group = state_dict[FILE], optimizer.dp_process_group

    @contextmanager
    def together() -> Iterator[None]:
        with raising_together(group), reading_checkpoint(path):
            yield

    with ExitStack() as opened:
        with together():
            file = TensorFile(Path(path))
            opened.callback(file.close)
            extra = _checked(optimizer, state_dict, path, ds_config=file.state.get("ds_config", {}))
            with_arrays = load_optimizer_states and not extra.get(WITHOUT_ARRAYS)
            streams = _streams(optimizer, file, with_arrays=with_arrays)
            residual = SavedResidual(optimizer, file, _saved_extra(file), wanted=load_optimizer_states)
        steps = np.asarray(extra["steps"], dtype=np.int64) * load_optimizer_states
        with loading_state(optimizer, _Filler(optimizer, streams)) as fill:
            optimizer.update.drained_handler().state.replace(fill, steps=steps, together=together)
        with together():
            residual.restore()
    if load_optimizer_states:
        restore_groups(optimizer, state_dict[OPTIMIZER_STATE_DICT]["param_groups"], ours=EXTRA_KEY in state_dict)
    optimizer.save_id = extra["save_id"]
    optimizer.loss_scaler = loss_scaler_of(state_dict[LOSS_SCALER])
    optimizer.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
    optimizer.overflow = state_dict["overflow"]


def require_resumable(extra: SavedState | None, path: str | Path) -> None:
    """Raise if a checkpoint holds weights only.

    Args:
        extra: Entries that this strategy added to DeepSpeed's format; None if stock DeepSpeed saved the checkpoint.
        path: Path of the checkpoint, for the error.
    """
    if extra is not None and extra["weights_only"]:
        raise CheckpointError(
            f"{path} holds weights only (save_weights_only=True): no training can be resumed from it.",
            "Evaluate with it, or start a new fit from the file that lightning.pytorch.utilities.deepspeed's "
            "convert_zero_checkpoint_to_fp32_state_dict makes of it.",
        )


def check_extra(optimizer: StorageOptimizer, extra: SavedState, path: str | Path) -> None:
    """Check that an optimizer can resume from this strategy's checkpoint, on any number of processes.

    Args:
        optimizer: Optimizer of this strategy.
        extra: Entries that this strategy added to DeepSpeed's format.
        path: Path of the checkpoint, for the error.

    Raises:
        CheckpointError: The optimizer or the precision differs, or the checkpoint holds weights only.
    """
    require_resumable(extra, path)
    if extra["optimizer"] != optimizer.rule.name:
        raise CheckpointError(
            f"{path} was saved with {extra['optimizer']}, the model is configured with {optimizer.rule.name}.",
            "Train with the same optimizer.",
        )
    if extra["dtype"] != str(optimizer.dtype):
        raise CheckpointError(
            f"The parameters of {path} are {extra['dtype']}, this run's are {optimizer.dtype}.",
            "Use the precision that it was saved with.",
        )


@contextmanager
def loading_state(
    optimizer: StorageOptimizer, fill: Callable[[Window], object]
) -> Iterator[Callable[[Window], object]]:
    """Yield a function that fills windows and shows the progress, for ``StateAccess.replace``.

    Args:
        optimizer: Optimizer of this strategy.
        fill: Function that fills one window.
    """
    nbytes = _FP32_BYTES * optimizer.partition.layout.numel * len(optimizer.rule.arrays)
    with show_on_rank_zero("Loading the optimizer state", nbytes) as advance:

        def filling(window: Window) -> None:
            fill(window)
            advance(sum(array.nbytes for array in window.arrays))

        yield filling


def _saved_extra(file: TensorFile) -> SavedState:
    extra: SavedState = file.state[OPTIMIZER_STATE_DICT].get(EXTRA_KEY, {})
    return extra


class _Filler:
    """Fills windows from a checkpoint, and the partition in memory with the masters.

    Args:
        optimizer: Optimizer of this strategy.
        streams: Streams over the saved arrays, by array number; other arrays start from their first values.
    """

    def __init__(self, optimizer: StorageOptimizer, streams: Mapping[int, TensorStream]) -> None:
        self._layout = optimizer.partition.layout
        self._optimizer = optimizer
        self._streams = streams
        # The padding in a stock checkpoint was never initialised.
        self._padding = [(p.offset + p.real_numel, p.offset + p.numel) for p in self._layout.parameters]

    def __call__(self, window: Window) -> None:
        for number, values in enumerate(window.arrays):
            if number in self._streams:
                self._streams[number].read(values)
            else:
                values.fill(self._optimizer.first_values[number - 1])
        for begin, end in self._padding:
            if begin < window.end and window.begin < end:
                for values in window.arrays:
                    values[max(0, begin - window.begin) : end - window.begin] = 0
        # Not through DeepSpeed's flat partitions: parameters on storage have none.
        self._optimizer.partition.write(window.begin, torch.from_numpy(window.arrays[0]))


def _saves_arrays(optimizer: StorageOptimizer) -> bool:
    """Return whether to save arrays other than masters; false for weights only, or before the rule keeps state."""
    counts = optimizer.update.drained_handler().steps.tolist()
    return not optimizer.saves_weights_only and any(map(optimizer.rule.holds_state, counts))


def _streams(optimizer: StorageOptimizer, file: TensorFile, *, with_arrays: bool) -> dict[int, TensorStream]:
    """Return streams over the file's arrays, or over the masters alone, by array number in the rule.

    The file's sub-groups may have other bounds; the order of elements is the same.
    """
    state = file.state[OPTIMIZER_STATE_DICT]
    masters = state[FP32_FLAT_GROUPS]
    streams = {0: file.stream(masters)}
    if with_arrays:
        sub_groups = [state[OPTIMIZER_STATE_DICT]["state"][index] for index in range(len(masters))]
        for name in optimizer.rule.kept_arrays(state[OPTIMIZER_STATE_DICT]["param_groups"]):
            number = optimizer.rule.arrays.index(name)
            streams[number] = file.stream([arrays[name] for arrays in sub_groups])
    return streams


def _describe_arrays(optimizer: StorageOptimizer, steps: NDArray[np.int64]) -> dict[int, dict[str, torch.Tensor]]:
    described, names = {}, optimizer.rule.kept_arrays(optimizer.optimizer.param_groups)
    for sub_group in optimizer.partition.layout.sub_groups:
        arrays = {name: room_for(sub_group.numel) for name in names}
        if optimizer.rule.counts_updates:
            arrays["step"] = torch.tensor(float(steps[sub_group.first : sub_group.last].max(initial=0)))
        described[sub_group.index] = arrays
    return described


def _groups_with_sub_groups(optimizer: StorageOptimizer) -> list[ParamGroup]:
    groups = [{**group, "params": []} for group in optimizer.optimizer.param_groups]
    for sub_group, group in optimizer.sub_group_to_group_id.items():
        groups[group]["params"].append(sub_group)
    return groups


def restore_groups(optimizer: StorageOptimizer, saved: Sequence[SavedState], *, ours: bool) -> None:
    """Restore the settings of the parameter groups, unless the training has the script's hyperparameters.

    Args:
        optimizer: Optimizer of this strategy.
        saved: The checkpoint's groups.
        ours: Whether this strategy saved them, or stock DeepSpeed.
    """
    groups = [optimizer.optimizer.param_groups[number] for number in saved_numbers(optimizer, saved)]
    if optimizer.own_hyperparameters:
        return
    warn_of_changes(saved, groups, in_checkpoint=True)
    for group, values in zip(groups, saved, strict=True):
        # DeepSpeed's own optimizers have settings that torch's do not have.
        group.update({key: value for key, value in values.items() if key != "params" and (ours or key in group)})


def _checked(
    optimizer: StorageOptimizer, state_dict: SavedState, path: str | Path, *, ds_config: DeepSpeedConfig
) -> SavedState:
    extra: SavedState | None = state_dict.get(EXTRA_KEY)
    if extra is None:
        extra = describe_stock(optimizer, state_dict, ds_config=ds_config)
    else:
        check_extra(optimizer, extra, path)
        require_rank(extra.get("rank"), dist.get_rank(optimizer.dp_process_group), Path(path))
        _check_layout(optimizer, extra)
    saved_numbers(optimizer, state_dict[OPTIMIZER_STATE_DICT]["param_groups"])
    return extra


def _check_layout(optimizer: StorageOptimizer, extra: SavedState) -> None:
    expected = [(parameter.name, parameter.numel) for parameter in optimizer.partition.layout.parameters]
    saved = [tuple(item) for item in extra["parameters"]]
    if saved != expected:
        raise CheckpointError(
            f"The checkpoint's parameters differ from the model's: {_first_difference(saved, expected)}.",
            "Build the model and its parameter groups as they were when it was saved.",
        )


def _first_difference(saved: list[tuple[str, int]], expected: list[tuple[str, int]]) -> str:
    for index, (a, b) in enumerate(zip(saved, expected, strict=False)):
        if a != b:
            return f"parameter {index} is {a[0]!r} with {a[1]} elements there and {b[0]!r} with {b[1]} here"
    return f"{len(saved)} parameters there and {len(expected)} here"
