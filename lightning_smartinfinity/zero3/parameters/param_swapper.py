"""Implements DeepSpeed's parameter swapper: partitions are on storage while they are not in use.

DeepSpeed's own (``AsyncPartitionedParameterSwapper``) compiles an op when it is built, loses short writes and keeps its
files forever. The public names here are DeepSpeed's; tests/zero3/test_contract_swapper.py lists all those it uses.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.layout.tensors import lent_tensor
from lightning_smartinfinity.pipeline.state.part_transfers import PartTransfers
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.storage.tensors.tensor_store import StoredTensor, TensorStore
from lightning_smartinfinity.zero3.ranks.collectives import failing_together, raising_together
from lightning_smartinfinity.zero3.settings import ParameterSettings
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["ParameterSwapper", "least_budget", "stored_parameter", "swapper_for", "swapping_with"]

# A partition that does not fill a block in any precision stays in memory.
_LEAST_NUMEL = BLOCK_BYTES // 2
_STORED = "smart_infinity_stored"
# Reading ahead leaves one part in this many of the budget free. The pool can then keep released memory for reuse.
# Otherwise most of it would return to the system, which clears it when it is allocated again.
_SHARE_LEFT_FREE = 4


def stored_parameter(param: ZeroParameter) -> StoredTensor | None:
    """Return where this rank's partition of a parameter is stored; None if it stays in memory."""
    stored: StoredTensor | None = getattr(param, _STORED, None)
    return stored


def least_budget(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the least budget with which parameters can be gathered together, in bytes.

    Args:
        sizes: Each parameter's number of elements, and bytes per element.
    """
    world_size = dist.get_world_size()
    return _holders() * sum(whole_blocks(-(-numel // world_size) * itemsize) for numel, itemsize in sizes)


def _holders() -> int:
    """Return how many times a gathered partition's bytes count against the budget.

    With a GPU, the budget applies to host memory and GPU memory separately. A CPU holds the partition and the gathered
    parameter, which share memory if there is a single rank.
    """
    world_size = dist.get_world_size()
    on_cpu = torch.device(get_accelerator().current_device_name()).type == "cpu"
    return world_size + 1 if on_cpu and world_size > 1 else world_size


@dataclass
class _Held:
    """A partition in host memory; while it has a ticket, it is still being read."""

    param: ZeroParameter
    memory: torch.Tensor
    ticket: int | None = None


class ParameterSwapper:
    """Keeps this rank's parameters on storage, and the host memory that they are read into.

    The swapper and its files exist until no parameter and no strategy refers to it, its last user calls :meth:`leave`,
    or the interpreter exits.

    All ranks make the same calls in the same order. A failure on one rank raises on all.

    Args:
        settings: Folders and buffers.

    Attributes:
        users: The strategies that build, train or evaluate models with it.
    """

    def __init__(self, settings: ParameterSettings) -> None:
        self.settings = settings
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._memory = native.MemoryPool()
        self._store: TensorStore | None = None
        self._parts: PartTransfers | None = None
        self._parts_of_update: PartTransfers | None = None
        self._held: dict[int, _Held] = {}
        self._largest_bytes = 0
        self._itemsize = 0
        self._warned = False
        self.closed = False
        # The first is called with parameters that are about to be read; the second forbids reading a parameter ahead.
        self.before_reading: Callable[[Sequence[ZeroParameter]], None] | None = None
        self.leaves_for_later: Callable[[ZeroParameter], bool] | None = None

    # ---- calls of this package

    @property
    def store(self) -> TensorStore:
        """The open store.

        Raises:
            StorageError: The store was closed or cannot be opened; raised on every rank.
        """
        if self.closed:
            raise StorageError(
                "The parameters of this model were removed from storage when its strategy was closed.",
                "Close the strategy when the model is no longer needed, or build and load the model anew.",
            )
        if self._store is None:
            with raising_together():
                self._store = self._open()
        assert self._store is not None
        return self._store

    @property
    def parts(self) -> PartTransfers:
        """Access to parts of parameters. Callers must call :meth:`release_prefetched` before they write."""
        store = self.store
        if self._parts is None:
            self._parts = PartTransfers(store)
        return self._parts

    @property
    def parts_of_update(self) -> PartTransfers:
        """The same as :attr:`parts`, for the thread that transfers an update's parameters."""
        store = self.store
        if self._parts_of_update is None:
            self._parts_of_update = PartTransfers(store)
        return self._parts_of_update

    @property
    def storage_bytes(self) -> int:
        """Bytes of parameters on storage."""
        return 0 if self._store is None or self.closed else self._store.storage_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of all buffers, in bytes."""
        return self._memory.nbytes + sum(
            parts.nbytes for parts in (self._parts, self._parts_of_update) if parts is not None
        )

    @property
    def limit_bytes(self) -> int:
        """Limit of partitions in host memory, in bytes; exceeded only if more are in use at once."""
        if self.settings.budget is not None:
            return self.settings.budget // _holders()
        numel = self.settings.buffer_numel
        return self.settings.buffer_count * (self._largest_bytes if numel is None else numel * self._itemsize)

    def traffic(self) -> Traffic:
        """Return the cumulative counters."""
        return Traffic() if self._store is None else Traffic.over_shared_channel(self._store.counters())

    def release_prefetched(self) -> None:
        """Discard partitions that were read ahead but not used: parameters on storage are about to change."""
        waiting = [h.param for h in self._held.values() if h.param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        self.remove_partition_and_release_buffers(waiting)

    def read_partition(self, param: ZeroParameter) -> torch.Tensor:
        """Return a copy of this rank's partition in host memory."""
        stored = stored_parameter(param)
        assert stored is not None
        values = torch.empty(stored.nbytes, dtype=torch.uint8)
        with self._together():
            self.parts.get(stored, 0, values)
            self.parts.synchronize()
        return values.view(param.dtype)

    def write_partition(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """Replace this rank's partition by values in host memory that have the parameter's dtype."""
        stored = stored_parameter(param)
        assert stored is not None and values.dtype == param.dtype
        self.release_prefetched()
        with self._together():
            self.parts.put(stored, 0, values.contiguous().view(torch.uint8))
            self.parts.synchronize()

    def leave(self, user: object) -> None:
        """End a strategy's use. The end of the last use removes the parameters; using them then raises an error."""
        self.users.discard(user)
        if self.users:
            return
        self.closed = True
        if self._store is not None:
            self._store.close()
        self._held.clear()
        self._memory.limit = 0

    # ---- DeepSpeed's calls while a model is built

    def swappable_tensor(self, param: ZeroParameter = None, numel: int | None = None) -> bool:
        """Return whether a partition of this many elements is on storage; false if DeepSpeed keeps the parameter."""
        count = int(param.ds_tensor.ds_numel if numel is None else numel)
        # All partitions together may have up to world_size - 1 more elements than the parameter.
        fewest = (count - 1) * dist.get_world_size() + 1
        return count >= _LEAST_NUMEL and fewest > self.settings.persistence_numel

    def get_buffer(self, param: ZeroParameter, numel: int) -> torch.Tensor:
        """Return memory for a new partition, which DeepSpeed fills."""
        nbytes = numel * param.dtype.itemsize
        self._largest_bytes = max(self._largest_bytes, nbytes)
        self._itemsize = max(self._itemsize, param.dtype.itemsize)
        self._make_room(nbytes)
        held = self._held[param.ds_id] = _Held(param, lent_tensor(self._memory, nbytes))
        partition = _partition_in(held, nbytes)
        if numel * dist.get_world_size() != param.ds_numel:
            partition.zero_()  # DeepSpeed does not write to the padding
        return partition

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Reserve nothing: updated parameters pass through the handler's staging buffer."""

    def swap_into_buffer(self, param: ZeroParameter, dest_buffer: torch.Tensor) -> None:
        """Read a partition that will stay in memory from now on."""
        stored = stored_parameter(param)
        assert stored is not None
        dest_buffer.copy_(self.read_partition(param))
        delattr(param, _STORED)

    # ---- DeepSpeed's calls that write

    def swap_out_and_release(
        self, params: Sequence[ZeroParameter], async_op: bool = False, force_buffer_release: bool = False
    ) -> None:
        """Write partitions and release their memory."""
        try:
            with self._together():
                tickets: list[int] = []
                try:
                    for param in params:
                        tickets.append(self._start_write(param))
                finally:  # also if a write cannot be started, such as on a full disk
                    self._finish(tickets)
        finally:
            self.remove_partition_and_release_buffers(params)

    # ---- DeepSpeed's calls that read

    def available_swap_in_buffers(self) -> int:
        """Return how many partitions may be read ahead; the number is the same on all ranks."""
        if self.settings.budget is not None:
            return max(0, self._free_to_read_ahead() // BLOCK_BYTES)  # an upper bound: swap_in selects by bytes
        return max(0, self._free_bytes() // self._largest_bytes) if self._largest_bytes else 0

    def swap_in(
        self,
        params: Sequence[ZeroParameter],
        async_op: bool = True,
        swap_in_buffers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Read partitions, or start reading them."""
        assert swap_in_buffers is None, "reads go into no other buffers"
        # DeepSpeed reads ahead along its trace, which lists a parameter once for each use.
        params = list(dict.fromkeys(params))
        if async_op:
            later = self.leaves_for_later
            params = [param for param in params if later is None or not later(param)]
            self._start_reads(params if self.settings.budget is None else self._fitting(params))
            return
        with self._together():
            self._make_room(sum(whole_blocks(_nbytes(param)) for param in params))
            self._start_reads(params)
            self._finish_reads()

    def synchronize_reads(self) -> None:
        """Wait until all reads have finished."""
        with self._together():
            self._finish_reads()

    def remove_partition_and_release_buffers(self, params: Iterable[ZeroParameter]) -> None:
        """Release the memory of partitions, which are then on storage only."""
        for param in params:
            if param.ds_status is ZeroParamStatus.INFLIGHT:
                # DeepSpeed is gathering it. Its memory is freed when it is partitioned again.
                continue
            held = self._held.pop(param.ds_id, None)
            if held is not None and held.ticket is not None:
                self.store.cancel(held.ticket)  # the data is no longer needed
                with suppress(StorageError):
                    self.store.finish(held.ticket)
            # With an empty tensor, accidental use raises.
            param.ds_tensor.data = torch.empty(0, dtype=param.dtype)
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    # ---- helpers

    def _open(self) -> TensorStore:
        settings = self.settings
        store = TensorStore(
            settings.folders,
            job=settings.job,
            direct_io=settings.direct_io,
            io_engine=settings.io_engine,
            io_timeout=settings.io_timeout,
        )
        # A forked child runs exit handlers too; the files are its parent's.
        weakref.finalize(self, _close_in, os.getpid(), store)
        return store

    def _together(self) -> AbstractContextManager[None]:
        return failing_together(None)

    def _held_bytes(self) -> int:
        return sum(held.memory.numel() for held in self._held.values())

    def _free_bytes(self) -> int:
        return self.limit_bytes - self._held_bytes()

    def _free_to_read_ahead(self) -> int:
        return self._free_bytes() - self.limit_bytes // _SHARE_LEFT_FREE

    def _fitting(self, params: Sequence[ZeroParameter]) -> list[ZeroParameter]:
        """Return as many of the first parameters as there is room for."""
        ends = accumulate(whole_blocks(_nbytes(param)) for param in params)
        free = self._free_to_read_ahead()
        return [param for param, end in zip(params, ends, strict=True) if end <= free]

    def _make_room(self, nbytes: int) -> None:
        if self._held_bytes() + nbytes > self.limit_bytes:
            self.release_prefetched()
        needed = self._held_bytes() + nbytes
        if needed > self.limit_bytes and not self._warned:
            self._warned = True
            setting, remedy = self._named_limit()
            warnings.warn(
                f"{needed} bytes of parameters are in use at once; {setting} has {self.limit_bytes}. "
                f"Host memory beyond that is taken: {remedy}, or gather fewer at a time.",
                stacklevel=2,
            )
        self._memory.limit = self.limit_bytes

    def _named_limit(self) -> tuple[str, str]:
        """Return the setting that the limit comes from, and the remedy if it is too low."""
        settings = self.settings
        if settings.budget is not None:
            return f"TransferConfig(parameter_bytes={settings.budget})", "raise it"
        buffers = {"offload_param": {"buffer_count": settings.buffer_count, "buffer_size": settings.buffer_numel}}
        return f"zero={buffers}", "lower stage3_max_reuse_distance"

    def _start_write(self, param: ZeroParameter) -> int:
        held = self._held[param.ds_id]
        stored = stored_parameter(param)
        if stored is None:
            stored = self.store.add(_nbytes(param))
            setattr(param, _STORED, stored)
        return self.store.write(stored, held.memory, io_class=native.IoClass.WRITE_BEHIND)

    def _finish(self, tickets: Iterable[int]) -> None:
        first: BaseException | None = None
        for ticket in tickets:
            try:
                self.store.finish(ticket)
            except BaseException as error:  # also after an interrupt: nothing else finishes the others
                if first is None or not isinstance(error, Exception):
                    first = error
        if first is not None:
            raise first

    def _start_reads(self, params: Sequence[ZeroParameter]) -> None:
        if self.before_reading is not None:
            self.before_reading(params)
        for param in params:
            stored = stored_parameter(param)
            assert stored is not None and param.ds_id not in self._held, param.ds_summary()
            held = _Held(param, lent_tensor(self._memory, stored.nbytes))
            # Waiting for a read raises its urgency.
            held.ticket = self.store.read(stored, held.memory, io_class=native.IoClass.GATHER)
            self._held[param.ds_id] = held
            param.ds_tensor.status = PartitionedParamStatus.INFLIGHT

    def _finish_reads(self) -> None:
        reading = [held for held in self._held.values() if held.ticket is not None]
        try:
            tickets = [held.ticket for held in reading if held.ticket is not None]
            for held in reading:
                held.ticket = None
            self._finish(tickets)
        except BaseException:  # also after an interrupt: nothing else releases what is still being read
            self.remove_partition_and_release_buffers([held.param for held in reading])
            raise
        for held in reading:
            held.param.ds_tensor.data = _partition_in(held, _nbytes(held.param))
            held.param.ds_tensor.status = PartitionedParamStatus.AVAILABLE


def _nbytes(param: ZeroParameter) -> int:
    return int(param.ds_tensor.ds_numel) * int(param.dtype.itemsize)


def _partition_in(held: _Held, nbytes: int) -> torch.Tensor:
    return held.memory[:nbytes].view(held.param.dtype)


def _close_in(process: int, store: TensorStore) -> None:
    if os.getpid() == process:
        store.close()


# One swapper for each set of folders and job, because a model outlives the strategy that it was built with.
_SWAPPERS: weakref.WeakValueDictionary[tuple[tuple[Path, ...], str], ParameterSwapper] = weakref.WeakValueDictionary()


def swapper_for(settings: ParameterSettings, user: object) -> ParameterSwapper:
    """Return the process's swapper for the settings' folders and job; create it if there is none.

    Args:
        settings: Folders and buffers.
        user: The strategy that uses it until it calls :meth:`ParameterSwapper.leave`, or no longer exists.
    """
    key = (settings.folders, settings.job)
    swapper = _SWAPPERS.get(key)
    if swapper is None or swapper.closed:
        swapper = _SWAPPERS[key] = ParameterSwapper(settings)
    swapper.settings = settings
    swapper.users.add(user)
    return swapper


@contextmanager
def swapping_with(swapper: ParameterSwapper) -> Iterator[None]:
    """Make every ``deepspeed.zero.Init`` created in this context use ``swapper``."""
    original = partition_parameters.AsyncPartitionedParameterSwapper
    partition_parameters.AsyncPartitionedParameterSwapper = lambda ds_config, model_dtype: swapper
    try:
        yield
    finally:
        partition_parameters.AsyncPartitionedParameterSwapper = original
