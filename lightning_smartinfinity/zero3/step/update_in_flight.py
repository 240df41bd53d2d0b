"""The update of a step, which may run beside what comes after the step.

With ``overlap="forward"`` ``step()`` returns when the update has begun. A parameter is gathered, and its place in the
gradient arena written again, once its own tasklets are done; whatever else reads or writes parameters or state
finishes the update first. So every value is that of ``overlap="none"``, bit for bit.

Which parameters somebody has asked for since the step is known alike on all ranks; how far the update has come is not,
and decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.transfer.handler import TransferHandler
from lightning_smartinfinity.transfer.step_plan import StepPlan
from lightning_smartinfinity.zero3.parameters.prefetch import skip_in_prefetch
from lightning_smartinfinity.zero3.parameters.stored_partition import release_prefetched

__all__ = ["UpdateInFlight"]

_GATHERING = ("all_gather", "all_gather_coalesced")


class UpdateInFlight:
    """One optimizer's update, from :meth:`begin` to :meth:`settle`.

    A failure is agreed upon by all ranks in :meth:`settle`, which undoes the step on each of them and raises. A rank
    that meets it earlier, where it waits for a parameter, goes on with what is in memory until then: the others are
    about to gather the parameter too, and would wait for this rank for ever. In one process it raises at once.

    Args:
        optimizer: A :class:`SmartInfinityOptimizer`, complete by the time of :meth:`watch`.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._lock = threading.RLock()  # autograd's threads gather, too
        self._begun = False
        self._training_over = False
        self._failure: SmartInfinityError | None = None
        # Why the step in flight is being undone, until it is.
        self._undoing: BaseException | None = None
        # Indices of the parameters that nobody has asked for, and of those that still have to be waited for.
        self._untouched: set[int] = set()
        self._awaited: set[int] = set()
        self._waits_once = True
        self._uses: dict[int, None] = {}

    @property
    def is_in_doubt(self) -> bool:
        """Whether an error has ended the training with a step in flight: other ranks may not be here to agree on it."""
        return self._begun and self._training_over

    def training_over(self) -> None:
        """The training has ended, or was broken off. As :meth:`quiesce` otherwise."""
        self._training_over = True
        self.quiesce()

    def watch(self, parameters: Iterable[Any]) -> None:
        """From now on, gather each of these parameters, or read it from storage, only once it is updated.

        What DeepSpeed would gather or read ahead is passed over as long as it is untouched.
        """
        for param in parameters:
            for name in _GATHERING:
                method = getattr(param, name)
                original = method.original if isinstance(method, _Awaited) else method
                setattr(param, name, _Awaited(param, original, self.require))
            if param.nvme_swapper is not None:
                param.nvme_swapper.before_reading = self.require
                param.nvme_swapper.leaves_for_later = self.is_untouched

        coordinator = self._optimizer.parameter_offload.get_param_coordinator()
        skip_in_prefetch(coordinator, self.is_untouched, before_use=self._optimizer.speculation.before_use)

    def begin(self, plan: StepPlan) -> None:
        """Start a step and return at once; nothing is in flight but what backward has begun of it.

        Raises:
            SmartInfinityError: It could not begin, in a training of one process.
        """
        try:
            if not self._optimizer.speculation.take(plan):
                self._handler.begin_step(plan)
        except SmartInfinityError as error:
            self._failure = error
        except BaseException as error:
            self._undo(error)
            raise
        self._begun, self._training_over = True, False
        self._untouched = set(range(len(self._optimizer.layout.parameters)))
        self._awaited = set(self._untouched)
        # Copies to a device have only been started when a wait is over: every stream that gathers waits for them.
        self._waits_once = not plan.outputs.waits_per_stream
        self._uses.clear()
        if self._failure is not None:
            self._settle_alone()

    def is_untouched(self, param: Any) -> bool:
        """Whether the parameter is of the step in flight, and nobody has asked for it yet: alike on all ranks."""
        if self._optimizer.speculation.holds(param):
            return True
        return self._begun and self._optimizer.parameter_index.get(param.ds_id) in self._untouched

    def first_uses(self) -> NDArray[np.int64]:
        """int64[num_parameters]: the order in which parameters were asked for since :meth:`begin`."""
        uses = np.full(len(self._optimizer.layout.parameters), len(self._uses), np.int64)
        uses[list(self._uses)] = np.arange(len(self._uses))
        return uses

    def require(self, parameters: Iterable[Any]) -> None:
        """Return when these parameters are those of the step that was begun last, and their gradients used.

        Raises:
            StorageError, DeviceError, CudaError: The step failed, in a training of one process, and was undone.
        """
        index, parameters = self._optimizer.parameter_index, list(parameters)
        wanted = sorted({index[param.ds_id] for param in parameters if param.ds_id in index})
        self._uses.update(dict.fromkeys(wanted))
        self._optimizer.speculation.before_use(parameters)
        if not self._begun and self._undoing is None:
            return
        with self._lock:
            self._go_on_undoing()
            self._untouched.difference_update(wanted)
            wanted = [parameter for parameter in wanted if parameter in self._awaited]
            if self._begun and wanted and self._failure is None and self._optimizer.rank_state.is_open:
                self._wait(wanted)

    def settle(self) -> None:
        """Finish the step in flight, if there is one, and commit it on all ranks. Collective.

        What backward has begun, before there is a step, is undone.

        Ctrl-C leaves it in flight, to be settled later.

        Raises:
            ConfigError: A hyperparameter was out of range on some rank; the step was taken on none.
            StorageError, DeviceError, CudaError: It failed on some rank, or could not be committed there, and was
                undone on all.
        """
        with self._lock:
            self.quiesce()
            if not self._begun or not self._optimizer.rank_state.is_open:
                return
            try:
                self._commit()
            except SmartInfinityError as error:
                self._undo(error)
                raise
            self._end()

    def quiesce(self) -> None:
        """Return when nothing of the step in flight moves any more. Not collective; never raises StorageError."""
        with self._lock:
            self._optimizer.speculation.lose()
            self._go_on_undoing()
            if self._begun and self._failure is None and self._optimizer.rank_state.is_open:
                try:
                    self._handler.drain()
                except SmartInfinityError as error:
                    self._failure = error

    def abandon(self, error: BaseException) -> None:
        """Undo the step in flight, if there is one, on this rank."""
        self._undo(error)

    @property
    def _handler(self) -> TransferHandler:
        handler: TransferHandler = self._optimizer.rank_state.handler
        return handler

    def _wait(self, wanted: Sequence[int]) -> None:
        try:
            self._handler.step.wait(wanted)
        except SmartInfinityError as error:
            self._failure = error
            self._settle_alone()
            return
        if self._waits_once:
            self._awaited.difference_update(wanted)

    def _settle_alone(self) -> None:
        if dist.get_world_size(self._optimizer.dp_process_group) == 1:
            self.settle()

    def _commit(self) -> None:
        """Commit on all ranks: where one fails to, those that have committed take it back, and all raise."""
        together = self._optimizer.failing_together
        if self._failure is None:
            # An interrupt may have come when it was done but for our knowing.
            if self._handler.in_flight:
                self._handler.commit(together=together)
            return
        with together():
            raise self._failure

    def _end(self) -> None:
        self._begun, self._failure = False, None
        self._untouched.clear()
        self._awaited.clear()

    def _undo(self, error: BaseException) -> None:
        self._undoing = error  # what Ctrl-C breaks off is taken up again by whoever comes next
        self._end()
        # What is gathered or read ahead may be of the step.
        self._optimizer._partition_all_parameters()
        release_prefetched(self._optimizer)
        self._optimizer.rank_state.abandon_step(error)
        self._undoing = None

    def _go_on_undoing(self) -> None:
        if self._undoing is not None:
            self._undo(self._undoing)


class _Awaited:
    """A method of a parameter's that gathers it, or several; they are waited for first."""

    def __init__(self, param: Any, original: Callable[..., Any], require: Callable[[Iterable[Any]], None]) -> None:
        self.original = original
        self._param = param
        self._require = require

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What is gathered comes first; all_gather calls it param_list and, without it, gathers its own parameter.
        given = args[0] if args else kwargs.pop("param_list", None)
        params = [self._param] if given is None else list(given)
        self._require(params)
        return self.original(params, *args[1:], **kwargs)
