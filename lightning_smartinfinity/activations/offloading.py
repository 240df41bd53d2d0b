"""Offloads the tensors that forward saves for backward, in any training loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.packing import Packing, tensors_in
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.activations.traffic import ActivationTraffic
from lightning_smartinfinity.activations.tuning.choice import Choice
from lightning_smartinfinity.activations.tuning.hooks import HookChoice
from lightning_smartinfinity.activations.tuning.tuner import Tuner
from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, UnsupportedError
from lightning_smartinfinity.settings import (
    ActivationOffload,
    TransferConfig,
    activation_offload,
    storage_folders,
    transfer_config,
)

__all__ = ["OffloadedActivations", "paused"]

_OWNER = "OffloadedActivations"
_REFUSAL = "saved tensor hooks"  # in the error message of code in torch that refuses them


class OffloadedActivations:
    """Moves tensors that forward saves for backward to storage, and reads them back before backward uses them.

    ::

        activations = OffloadedActivations("/mnt/nvme", module=model)
        for batch in loader:
            with activations.forward(batch):
                loss = model(batch)
            loss.backward()
            optimizer.step()
        activations.close()

    Gradients are the same to the bit. As with autograd alone, a saved tensor that was changed in place makes backward
    raise; changes through ``.data`` are not detected. Hooks that are entered within :meth:`forward`, such as those of
    torch.utils.checkpoint, replace these hooks while they are in effect.

    Tensors on the CPU and on CUDA devices are offloaded. All others pass through: parameters, buffers, the batch, small
    tensors, subclasses, and everything that is saved while backward runs or a CUDA graph is captured. If thousands of
    tensors pass through and nothing is offloaded, most of the later forwards with batches of the same shapes have no
    hooks. If steps are measurably faster without hooks, and neither ``keep`` nor ``budget_bytes`` was set, forwards
    with batches of the same shapes have no hooks either.

    Args:
        folders: Storage folder, or list of folders.
        settings: How much is offloaded, as an object or a dict.
        module: Module whose parameters and buffers pass through.
        transfer: Where in the folders, and how, files are opened and used: ``job``, ``direct_io``, ``io_engine`` and
            ``io_timeout``.
        gather: Called to restore the data of a parameter that was released before backward uses it. Pass it if
            parameters are partitioned.
        notes_failures: Whether backward continues with NaN (zeros for integers) if a tensor cannot be read, and the
            failure is kept for :meth:`take_failure`. If a rank raised within backward, the others would wait for it.

    Raises:
        ConfigError: Folders or settings have the wrong type, are out of range or contradict each other.
    """

    def __init__(
        self,
        folders: str | Path | Sequence[str | Path],
        *,
        settings: ActivationOffload | Mapping[str, Any] | None = None,
        module: nn.Module | None = None,
        transfer: TransferConfig | Mapping[str, Any] | None = None,
        gather: Callable[[nn.Parameter], object] | None = None,
        notes_failures: bool = False,
    ) -> None:
        found = storage_folders(folders, owner=_OWNER, setting="folders")
        if found is None:
            raise ConfigError(f"{_OWNER}(folders=None) names no folder.", "Pass a folder, or a list of folders.")
        self._settings = activation_offload(settings, owner=_OWNER, setting="settings") or ActivationOffload()
        self.module, self._gather, self._notes_failures = module, gather, notes_failures
        self._store = ActivationStore(self._settings, found, transfer=transfer_config(transfer, owner=_OWNER))
        self._tuner = Tuner(self._settings, self._store)
        self._hook_choice = HookChoice(self._tuner, self._store)
        self._last: Forward | None = None
        self.hidden_bytes = 0
        """Bytes so far that other code is known to keep for backward, invisible to hooks."""
        _stay_uncompiled()

    def open(self) -> None:
        """Open the files. Without this call the first forward opens them.

        Raises:
            ConfigError: The I/O engine is unavailable here.
            StorageFullError: Storage has less room than ``storage_bytes``.
            StorageError: A folder cannot be used, or the offloading is closed.
        """
        self._store.files.open()

    @contextmanager
    def forward(self, *batch: object) -> Iterator[None]:
        """Offload tensors that this thread saves in this context. Backward may run after it.

        Args:
            *batch: Tensors, or nested containers of tensors, that pass through.

        Raises:
            ConfigError: The I/O engine is unavailable here.
            StorageFullError: Storage has less room than ``storage_bytes``.
            StorageError: A folder cannot be used, the offloading is closed, or this process is a forked child.
            UnsupportedError: The body calls code in torch that refuses hooks.
        """
        self._store.files.open()
        last, self._last = self._last, None
        if last is not None:
            self._hook_choice.learn(last)
            self._tuner.learn(last)
        settings, tensors = self._settings, tensors_in(batch)
        assert not isinstance(settings.min_bytes, str), "a size given as text is kept as bytes"
        kind = self._kind_of(tensors) if tensors else None
        if not self._hook_choice.begin_forward(kind):
            yield
            self._hook_choice.end_forward()
            return
        plan = self._tuner.plan
        is_measured = bool(plan.sizes) and not plan.is_chosen
        clock = self._store.start_clock() if is_measured else None
        forward = Forward(plan=plan, kind=kind, began=time.perf_counter(), clock=clock)
        packing = Packing(
            self._store,
            forward,
            min_bytes=settings.min_bytes,
            passing=[*self._state(), *tensors],
            gather=self._gather,
            notes_failures=self._notes_failures,
        )
        with self._store.lock:
            self._store.begin(forward)
        try:
            hooks = (packing.timed_pack, packing.timed_unpack) if is_measured else (packing.pack, packing.unpack)
            with saved_tensors_hooks(*hooks):
                yield
        except RuntimeError as error:
            if _REFUSAL in str(error) and not isinstance(error, SmartInfinityError):
                raise UnsupportedError(
                    f"Code within OffloadedActivations.forward() refuses hooks: {error}",
                    "Put it into `with lightning_smartinfinity.activations.paused():`.",
                ) from error
            raise
        finally:
            _remove_hooks(packing)
            with self._store.lock:
                self._store.end(forward)
        self._last = forward
        self._hook_choice.end_forward(forward, num_passed=packing.num_passed)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the pool has allocated."""
        return self._store.pool.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes held for backward: tensors that could be offloaded, and memory of the pool in use."""
        with self._store.lock:
            return self._store.held_bytes

    @property
    def storage_bytes(self) -> int:
        """Bytes on storage."""
        return self._store.storage_bytes

    def traffic(self) -> ActivationTraffic:
        """Return the cumulative counters."""
        with self._store.lock:
            return self._store.traffic()

    @property
    def choice(self) -> Choice | None:
        """Choice of what is offloaded; None until it was made, after the second or third forward."""
        return self._tuner.choice

    def take_failure(self) -> SmartInfinityError | None:
        """Return the failure of a write or read, if there was one, and forget it.

        Tensors that could not be written are still in memory, and offloading has stopped.
        """
        return self._store.files.take_failure()

    def gradients_are_gone(self) -> None:
        """Forget failed reads, because the gradients computed without the tensors were discarded."""
        self._store.files.forget_failed_reads()

    def rest(self) -> None:
        """Return the idle memory of the pool to the system, because no forward is expected soon."""
        with self._store.lock:
            self._store.pool.give_back()

    def close(self) -> None:
        """Close and thereby delete the files; idempotent. The backward of a graph that is still alive raises.

        Raises:
            StorageTimeoutError: The disk does not answer.
        """
        with self._store.lock:
            self._store.close()

    def _state(self) -> list[torch.Tensor]:
        return [] if self.module is None else [*self.module.parameters(), *self.module.buffers()]

    def _kind_of(self, batch: list[torch.Tensor]) -> tuple[object, ...]:
        is_training = None if self.module is None else self.module.training
        return (is_training, *((tensor.shape, tensor.dtype) for tensor in batch))


@functools.cache
def _stay_uncompiled() -> None:
    """Exclude the hooks from torch.compile, which would compile them if compiled code runs between two graphs."""
    from torch._dynamo import trace_rules  # takes a second, but every optimizer of torch also imports it

    trace_rules.add("lightning_smartinfinity")  # and all modules that the hooks call


def _remove_hooks(packing: Packing) -> None:
    """Remove hooks that are still installed because of an interrupt while entering or leaving them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__self__", None) is packing:
        torch._C._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def paused() -> Iterator[None]:
    """Disable the hooks in this context, for code that refuses hooks, such as torch.func.grad."""
    ours = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        if not isinstance(getattr(hooks[0], "__self__", None), Packing):
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()
        ours.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(ours):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
