"""Access to one parameter's master, optimizer state and gradient."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath, UsedGradients
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.parameters.gather_methods import bring_in_writes
from lightning_smartinfinity.zero3.parameters.gathering import is_in_context
from lightning_smartinfinity.zero3.ranks.collectives import raising_together
from lightning_smartinfinity.zero3.untyped import ZeroOptimizer, ZeroParameter

__all__ = ["StateByParameter"]

_MASTER = "master"
# The state of an empty or frozen parameter, which the partition does not hold.
_NO_STATE = torch.empty(0)


class StateByParameter:
    """Masters, optimizer state and gradients by parameter, for DeepSpeed's ``safe_get_*`` and ``safe_set_*``.

    All methods that return or set tensors are collective, including those for slices: a write is one commit on every
    rank, and an error on one rank raises on all. Like DeepSpeed, they skip parameters that are empty or not trained.
    Gradients are those of the window so far, in fp16 multiplied by the loss scale.

    Args:
        optimizer: DeepSpeed's optimizer.
        rank_state: The rank's open state.
        update: The update of the step in flight.
        speculation: The speculative update.
        gradients: The way of gradients into the arena.
        used_gradients: Gradients that a step has used up.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        rank_state: RankState,
        update: UpdateInFlight,
        speculation: Speculation,
        gradients: GradientPath,
        used_gradients: UsedGradients,
    ) -> None:
        self._optimizer, self._rank_state = optimizer, rank_state
        self._update, self._speculation = update, speculation
        self._gradients, self._used_gradients = gradients, used_gradients
        self._partition = rank_state.partition
        self._group = self._partition.group

    # ---- masters and optimizer state

    def state_slice(self, param: ZeroParameter, key: str | None) -> tuple[torch.Tensor, int]:
        """Return this rank's slice of an array, padded (fp32), and its sub-group.

        Args:
            param: The parameter.
            key: Name of an array, such as ``"exp_avg"``; None: the master.
        """
        if not self._has_state(param):
            return _NO_STATE, 0
        if key is None and not is_in_context(param):
            bring_in_writes([param])
        return self._own_values(param, key), self._slice_of(param).sub_group

    def has_master(self, param: ZeroParameter) -> bool:
        """Return whether storage holds a master of the parameter now, whether or not the parameter is frozen."""
        return self._rank_state.is_open and param.ds_id in self._partition.index

    def full_master(self, param: ZeroParameter) -> torch.Tensor:
        """Return the full master (fp32, of the parameter's shape) of a parameter that has one."""
        return self._gathered(param, self._own_values(param, None).to(param.device))

    def set_state(self, param: ZeroParameter, value: torch.Tensor, key: str | None, *, is_slice: bool = False) -> None:
        """Replace the master, and the parameter with it, or one array of the optimizer state.

        Args:
            param: The parameter.
            value: The full tensor, in any floating dtype, or this rank's slice with its padding.
            key: Name of an array, such as ``"exp_avg"``; None: the master.
            is_slice: Whether ``value`` is this rank's slice.

        Raises:
            ConfigError: The value does not fit, or there is no such state (yet).
            StorageError: The value could not be written; nothing has changed.
        """
        if not self._has_state(param):
            return
        with raising_together(self._group):
            values = self._own_slice(param, value, is_slice=is_slice)
        self._update.drain()
        index = self._partition.index[param.ds_id]
        with raising_together(self._group):
            name = self._array_named(key, index)
            handler = self._rank_state.handler
        values = values.to("cpu", torch.float32).contiguous()
        together = partial(raising_together, self._group)
        handler.state.modify({index: {name: values.numpy()}}, together=together)
        if key is None:
            self._write_parameter(param, values)

    def discard_update_of(self, params: Iterable[ZeroParameter]) -> None:
        """Discard an update of these parameters that has begun within backward: rolling it back would undo writes."""
        self._speculation.before_use(params)

    def _own_values(self, param: ZeroParameter, key: str | None) -> torch.Tensor:
        index = self._partition.index[param.ds_id]
        own = self._partition.layout.parameters[index]
        padded = torch.zeros(own.numel, dtype=torch.float32)
        self._update.drain()
        with raising_together(self._group):
            name = self._array_named(key, index)
            values = self._rank_state.handler.state.read_parameter(index, names=[name])[name]
            padded[: own.real_numel] = torch.from_numpy(values)
        return padded

    @torch.no_grad()
    def _write_parameter(self, param: ZeroParameter, values: torch.Tensor) -> None:
        own = self._slice_of(param)
        with raising_together(self._group):
            self._partition.write(own.offset, values)
        if param.ds_status is ZeroParamStatus.AVAILABLE:
            # The gathered copy needs the new values, too. ZeRO-3 keeps small parameters gathered between steps.
            padded = torch.zeros(own.numel, dtype=torch.float32, device=param.device)
            padded[: own.real_numel].copy_(values)
            param.data.copy_(self._gathered(param, padded))

    def _array_named(self, key: str | None, parameter: int) -> str:
        if key is None:
            return _MASTER
        rule = self._optimizer.rule
        known = [name for name in rule.arrays if name != _MASTER]
        if key not in known:
            raise ConfigError(
                f"{rule.name} has no optimizer state {key!r} on storage.",
                f"Use one of: {', '.join(map(repr, known))}.",
            )
        group = self._optimizer.optimizer.param_groups[self._partition.layout.parameters[parameter].group]
        begun = rule.holds_state(int(self._rank_state.handler.steps[parameter]))
        if not begun or key not in rule.kept_arrays([group]):
            raise ConfigError(
                f"{rule.name} has no {key!r} of this parameter yet: torch keeps none either.",
                "Ask for it after a step with settings that keep it, such as momentum.",
            )
        return key

    # ---- gradients

    @property
    def loss_scale(self) -> float:
        """The scale of the loss that gradients come from."""
        return float(self._optimizer.loss_scale)

    def gradient_slice(self, param: ZeroParameter) -> tuple[torch.Tensor, int]:
        """Return this rank's slice of a gradient in the arena, padded, and its sub-group."""
        self._rank_state.arena.synchronize()
        index = self._partition.index[param.ds_id]
        return self._rank_state.arena.gradient(index), self._slice_of(param).sub_group

    def full_gradient(self, param: ZeroParameter) -> torch.Tensor | None:
        """Return the full gradient in fp32, or None if there is none in this window."""
        local = self.local_gradient(param)
        return None if local is None else self._gathered(param, local)

    def local_gradient(self, param: ZeroParameter) -> torch.Tensor | None:
        """Return this rank's slice of the gradient, padded, in fp32, or None if there is none in this window."""
        if not self._has_gradient(param):
            return None
        return self.gradient_slice(param)[0].to(param.device, torch.float32, copy=True)

    def set_gradient(self, param: ZeroParameter, value: torch.Tensor, *, is_slice: bool = False) -> None:
        """Replace the gradient, or set it if the parameter has none in this window.

        Args:
            param: The parameter.
            value: The full tensor, in any floating dtype, or this rank's slice with its padding.
            is_slice: Whether ``value`` is this rank's slice.

        Raises:
            ConfigError: The value does not fit.
        """
        if not self._has_state(param):
            return
        self._update.drain_for_residual()
        with raising_together(self._group):
            values = self._own_slice(param, value, is_slice=is_slice)
            self._about_to_change(param)
            self._rank_state.arena.replace(self._partition.index[param.ds_id], values)

    def drop_gradient(self, param: ZeroParameter) -> None:
        """Discard a parameter's gradient, as ``param.grad = None`` does; the step then skips the parameter."""
        self._about_to_change(param)
        self._rank_state.arena.active[self._partition.index[param.ds_id]] = False

    def has_reduced_gradient(self, param: ZeroParameter) -> bool:
        """Return whether the arena has a gradient of the parameter for the next step.

        Within backward this holds only if gradients bypass buckets; a user's hook may then read them.
        """
        ready = self._gradients.bypasses_buckets or not self._gradients.in_backward
        return self._rank_state.is_open and ready and self._has_gradient(param)

    def has_used_gradient(self, param: ZeroParameter) -> bool:
        """Return whether a step has used up the parameter's gradient, which torch would keep until ``zero_grad``."""
        return self.takes_gradient(param) and self._used_gradients.holds(self._partition.index[param.ds_id])

    def gradient_is_reset(self, param: ZeroParameter) -> None:
        """Record that user code has read or discarded a used gradient, as ``Module.zero_grad`` does."""
        if self.has_master(param):
            self._used_gradients.reset(self._partition.index[param.ds_id])

    def takes_gradient(self, param: ZeroParameter) -> bool:
        """Return whether the parameter is trained, and its training is still open."""
        return self._rank_state.is_open and self._has_state(param)

    def _has_gradient(self, param: ZeroParameter) -> bool:
        # The same on all ranks: a gradient arrives even on a rank that has none of its elements.
        return self._has_state(param) and bool(self._rank_state.arena.active[self._partition.index[param.ds_id]])

    def _about_to_change(self, param: ZeroParameter) -> None:
        self._speculation.discard()
        self._update.require([param])

    # ---- slices

    def _has_state(self, param: ZeroParameter) -> bool:
        return bool(param.requires_grad) and param.ds_id in self._partition.index

    def _slice_of(self, param: ZeroParameter) -> ParameterSlice:
        return self._partition.layout.parameters[self._partition.index[param.ds_id]]

    def _own_slice(self, param: ZeroParameter, value: object, *, is_slice: bool) -> torch.Tensor:
        """Return this rank's elements of a value, without padding; raise ConfigError if the value does not fit."""
        own = self._slice_of(param)
        if is_slice:
            return _checked(value, param.ds_tensor.numel())[: own.real_numel]
        full = _checked(value, param.ds_numel)
        return full[self._optimizer._get_param_partition_rank(param) * own.numel :][: own.real_numel]

    def _gathered(self, param: ZeroParameter, own: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = self._optimizer._fp32_state_allgather(param, own)
        return full


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
