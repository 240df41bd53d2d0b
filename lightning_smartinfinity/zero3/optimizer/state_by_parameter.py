"""DeepSpeed's API for one parameter's master, optimizer state and gradient: ``safe_get_*`` and ``safe_set_*``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.gather_methods import bring_in_writes
from lightning_smartinfinity.zero3.parameters.gathering import is_in_context
from lightning_smartinfinity.zero3.ranks.collectives import raising_together
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["StateByParameter"]

_MASTER = "master"
# The state of an empty or frozen parameter, which the partition does not hold.
_NO_STATE = torch.empty(0)


class StateByParameter(StorageOptimizer):
    """The optimizer with DeepSpeed's API for single parameters.

    All methods are collective, including the local ones: a write is one commit on every rank, and an error on one rank
    raises on all. Like DeepSpeed, they skip parameters that are empty or not trained. Gradients are those of the window
    so far, in fp16 multiplied by the loss scale; None for a parameter without one.
    """

    # ---- masters and optimizer state

    def _get_fp32_opt_state_partition(
        self, param: ZeroParameter, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        if not self._has_state(param):
            return _NO_STATE, 0
        if optim_state_key is None and not is_in_context(param):
            bring_in_writes([param])
        return self._own_values(param, optim_state_key), self._slice_of(param).sub_group

    def has_master(self, param: ZeroParameter) -> bool:
        """Return whether storage holds a master of the parameter now, whether or not the parameter is frozen."""
        return self.rank_state.is_open and param.ds_id in self.partition.index

    def full_master(self, param: ZeroParameter) -> torch.Tensor:
        """Return the full master (fp32, of the parameter's shape) of a parameter that has one."""
        own = self._own_values(param, None).to(param.device)
        return self._fp32_state_allgather(param, own)  # type: ignore[no-any-return]

    def _own_values(self, param: ZeroParameter, key: str | None) -> torch.Tensor:
        """Return this rank's slice of an array, padded."""
        index = self.partition.index[param.ds_id]
        own = self.partition.layout.parameters[index]
        padded = torch.zeros(own.numel, dtype=torch.float32)
        self.update.drain()
        with raising_together(self.dp_process_group):
            name = self._array_named(key, index)
            values = self.rank_state.handler.state.read_parameter(index, names=[name])[name]
            padded[: own.real_numel] = torch.from_numpy(values)
        return padded

    def set_full_hp_param(self, value: torch.Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Replace the master, and the parameter with it, or one array of the optimizer state.

        Args:
            value: The full tensor, in any floating dtype.
            param: The parameter.
            optim_state_key: Name of an array, such as ``"exp_avg"``; None: the master.

        Raises:
            ConfigError: The value does not fit, or there is no such state (yet).
            StorageError: The value could not be written; nothing has changed.
        """
        if not self._has_state(param):
            return
        values = None
        with raising_together(self.dp_process_group):
            values = self._own_slice(param, _checked(value, param.ds_numel))
        self._set(param, values, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """Do the same as :meth:`set_full_hp_param`, with this rank's slice and its padding as ``value``."""
        if not self._has_state(param):
            return
        values = None
        with raising_together(self.dp_process_group):
            values = _checked(value, param.ds_tensor.numel())[: self._slice_of(param).real_numel]
        self._set(param, values, optim_state_key)

    def _set(self, param: ZeroParameter, values: torch.Tensor | None, key: str | None) -> None:
        assert values is not None
        self.update.drain()
        index = self.partition.index[param.ds_id]
        with raising_together(self.dp_process_group):
            name = self._array_named(key, index)
            handler = self.rank_state.handler
        values = values.to("cpu", torch.float32).contiguous()
        together = partial(raising_together, self.dp_process_group)
        handler.state.modify({index: {name: values.numpy()}}, together=together)
        if key is None:
            self._write_parameter(param, values)

    @torch.no_grad()
    def _write_parameter(self, param: ZeroParameter, values: torch.Tensor) -> None:
        own = self._slice_of(param)
        with raising_together(self.dp_process_group):
            self.partition.write(own.offset, values)
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            # The gathered copy needs the new values, too. ZeRO-3 keeps small parameters gathered between steps.
            padded = torch.zeros(own.numel, dtype=torch.float32, device=param.device)
            padded[: own.real_numel].copy_(values)
            param.data.copy_(self._fp32_state_allgather(param, padded))

    def _array_named(self, key: str | None, parameter: int) -> str:
        if key is None:
            return _MASTER
        known = [name for name in self.rule.arrays if name != _MASTER]
        if key not in known:
            raise ConfigError(
                f"{self.rule.name} has no optimizer state {key!r} on storage.",
                f"Use one of: {', '.join(map(repr, known))}.",
            )
        group = self.optimizer.param_groups[self.partition.layout.parameters[parameter].group]
        begun = self.rule.holds_state(int(self.rank_state.handler.steps[parameter]))
        if not begun or key not in self.rule.kept_arrays([group]):
            raise ConfigError(
                f"{self.rule.name} has no {key!r} of this parameter yet: torch keeps none either.",
                "Ask for it after a step with settings that keep it, such as momentum.",
            )
        return key

    # ---- gradients

    def _get_fp32_grad_state_partition(
        self, param: ZeroParameter, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        index = self.partition.index[param.ds_id]
        self.arena.synchronize()
        return self.arena.gradient(index), self._slice_of(param).sub_group

    def get_fp32_grad_for_param(self, param: ZeroParameter) -> torch.Tensor | None:
        """Return the full gradient in fp32, or None if there is none in this window."""
        local = self.get_local_fp32_grad_for_param(param)
        return None if local is None else self._fp32_state_allgather(param, local)

    def get_local_fp32_grad_for_param(self, param: ZeroParameter) -> torch.Tensor | None:
        """Return this rank's slice of the gradient, padded, in fp32, or None if there is none in this window."""
        if not self._has_gradient(param):
            return None
        gradient, _ = self._get_fp32_grad_state_partition(param, release_swap_buffers=True)
        return gradient.to(param.device, torch.float32, copy=True)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: ZeroParameter) -> None:
        """Replace the full gradient, or set it if the parameter has none in this window.

        Raises:
            ConfigError: The value does not fit.
        """
        if not self._has_state(param):
            return
        self._drain_for_residual()
        with raising_together(self.dp_process_group):
            self._write_gradient(param, self._own_slice(param, _checked(value, param.ds_numel)))

    def set_local_grad_for_param(self, value: torch.Tensor, param: ZeroParameter) -> None:
        """Do the same as :meth:`set_fp32_grad_for_param`, with this rank's slice and its padding as ``value``."""
        if not self._has_state(param):
            return
        self._drain_for_residual()
        with raising_together(self.dp_process_group):
            self._write_gradient(param, _checked(value, param.ds_tensor.numel()))

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, ZeroParameter], torch.Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Replace full gradients by ``update_func(gradient, param)``; skip parameters without one."""
        for param in param_list:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update_func(gradient, param), param)

    def has_reduced_gradient(self, param: ZeroParameter) -> bool:
        """Return whether the arena has a gradient of the parameter for the next step.

        Within backward this holds only if gradients bypass buckets; a user's hook may then read them.
        """
        ready = self.bypasses_buckets or not self._in_backward
        return self.rank_state.is_open and ready and self._has_gradient(param)

    def has_used_gradient(self, param: ZeroParameter) -> bool:
        """Return whether a step has used up the parameter's gradient, which torch would keep until ``zero_grad``."""
        return self.takes_gradient(param) and bool(self._had_gradient[self.partition.index[param.ds_id]])

    def gradient_is_reset(self, param: ZeroParameter) -> None:
        """Record that user code has read or discarded a used gradient, as ``Module.zero_grad`` does."""
        if self.rank_state.is_open and param.ds_id in self.partition.index:
            self._used[self.partition.index[param.ds_id]] = False

    def takes_gradient(self, param: ZeroParameter) -> bool:
        """Return whether the parameter is trained, and its training is still open."""
        return self.rank_state.is_open and self._has_state(param)

    def _has_gradient(self, param: ZeroParameter) -> bool:
        # The same on all ranks: a gradient arrives even on a rank that has none of its elements.
        return self._has_state(param) and bool(self.arena.active[self.partition.index[param.ds_id]])

    def drop_gradient(self, param: ZeroParameter) -> None:
        """Discard a parameter's gradient, as ``param.grad = None`` does; the step then skips the parameter."""
        self.speculation.discard()
        self.update.require([param])
        self.arena.active[self.partition.index[param.ds_id]] = False

    def _write_gradient(self, param: ZeroParameter, values: torch.Tensor) -> None:
        self.speculation.discard()
        self.update.require([param])
        self.arena.replace(self.partition.index[param.ds_id], values)

    # ---- slices

    def _has_state(self, param: ZeroParameter) -> bool:
        return bool(param.requires_grad) and param.ds_id in self.partition.index

    def _slice_of(self, param: ZeroParameter) -> ParameterSlice:
        return self.partition.layout.parameters[self.partition.index[param.ds_id]]

    def _own_slice(self, param: ZeroParameter, full: torch.Tensor) -> torch.Tensor:
        own = self._slice_of(param)
        return full[self._get_param_partition_rank(param) * own.numel :][: own.real_numel]


def _checked(value: object, numel: int) -> torch.Tensor:
    """Return ``value`` flattened; raise ConfigError if it is no float tensor of ``numel`` elements."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(f"A parameter's state cannot be set to a {kind}.", "Pass a tensor of floats.")
    if value.numel() != numel:
        raise ConfigError(
            f"A tensor of shape {tuple(value.shape)} cannot replace {numel} elements.",
            "Pass as many elements as the parameter has (safe_set_full_*) or as safe_get_local_* returns "
            "(safe_set_local_*).",
        )
    return value.detach().reshape(-1)
