"""Keeps the parameters that are in memory at once within ``TransferConfig(parameter_bytes=...)``.

A parameter is *live* from the start of its gather until it is partitioned again. Live parameters are measured by their
partitions on storage: if these fit into the swapper's limit, so do the gathered parameters, which take up to
``world_size`` times as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import skip_in_prefetch
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, least_budget
from lightning_smartinfinity.zero3.settings import ParameterSettings
from lightning_smartinfinity.zero3.untyped import ZeroModule, ZeroOffload, ZeroParameter

__all__ = ["RELEASE_PARAM", "keep_within_budget", "require_budget_for", "require_parameter_budget"]

RELEASE_PARAM = "_PartitionedParameterCoordinator__release_param"
"""The coordinator's method that partitions a parameter, unless a module is using it."""


def require_budget_for(settings: ParameterSettings, name: str, numel: int, itemsize: int) -> None:
    """Check that a parameter fits into the budget, if there is one.

    Args:
        settings: Settings of parameters on storage.
        name: The parameter's name, for the error.
        numel: Number of its elements.
        itemsize: Bytes per element.

    Raises:
        ConfigError: The parameter does not fit.
    """
    least = least_budget([(numel, itemsize)])
    if settings.budget is not None and least > settings.budget:
        raise _too_little(settings.budget, f"{name!r} takes {numel * itemsize} bytes", least)


def require_parameter_budget(settings: ParameterSettings, model: torch.nn.Module, *, in_16_bit: bool) -> None:
    """Check that parameters gathered at once (a module's and its parents') fit into the budget, if there is one.

    Args:
        settings: Settings of parameters on storage.
        model: The model. Its parameters may be partitioned.
        in_16_bit: Whether parameters will be bf16 or fp16.

    Raises:
        ConfigError: A parameter, or parameters used together, need more. The message names the least sufficient budget.
    """
    if settings.budget is None:
        return
    names = {param: name for name, param in model.named_parameters()}
    sizes = {
        param: (int(getattr(param, "ds_numel", param.numel())), 2 if in_16_bit else param.element_size())
        for param in names
    }
    needs = {held: least_budget(sizes[param] for param in held) for held in _held_together(model)}
    least = max(needs.values(), default=0)
    if least <= settings.budget:
        return
    single = max(sizes, key=lambda param: least_budget([sizes[param]]))
    if least_budget([sizes[single]]) > settings.budget:
        held: tuple[torch.nn.Parameter, ...] = (single,)
    else:
        held = max(needs, key=needs.__getitem__)
    nbytes = sum(numel * itemsize for numel, itemsize in (sizes[param] for param in held))
    named = ", ".join(repr(names[param]) for param in held)
    how = "takes" if len(held) == 1 else "are used together, and take"
    raise _too_little(settings.budget, f"{named} {how} {nbytes} bytes", least)


def _too_little(budget: int, need: str, least: int) -> ConfigError:
    return ConfigError(
        f"TransferConfig(parameter_bytes={budget}) is too little for this model: {need}.", f"Pass at least {least}."
    )


def _held_together(
    module: ZeroModule, above: tuple[torch.nn.Parameter, ...] = ()
) -> Iterator[tuple[torch.nn.Parameter, ...]]:
    """Yield the parameters that are gathered while a module runs: its own, and those of the modules that call it."""
    is_leaf = z3_leaf_module(module)
    held = tuple(dict.fromkeys((*above, *module.parameters(recurse=is_leaf))))
    yield held
    for child in () if is_leaf else module.children():
        yield from _held_together(child, held)


def keep_within_budget(offload: ZeroOffload) -> None:
    """Keep live parameters within the budget, if parameters on storage have one.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose coordinator gathers.
    """
    swappers = {param.nvme_swapper for param in offload.module.parameters()}
    swapper = next((each for each in swappers if isinstance(each, ParameterSwapper)), None)
    if swapper is None or swapper.settings.budget is None:
        return
    live = _LiveParameters(offload, swapper)
    skip_in_prefetch(offload.get_param_coordinator(), live.does_not_fit, before_use=live.make_room)


class _LiveParameters:
    """The live parameters of a model, in the order in which they were gathered; the same on all ranks."""

    def __init__(self, offload: ZeroOffload, swapper: ParameterSwapper) -> None:
        self._coordinator = offload.get_param_coordinator()
        self._in_flight = offload.module.ds_inflight_param_registry
        self._swapper = swapper
        self._live: dict[ZeroParameter, None] = {}
        self._is_full = False

    def make_room(self, needed: Iterable[ZeroParameter]) -> None:
        """Partition prefetched parameters until the parameters of the next module fit."""
        wanted = dict.fromkeys(sorted(needed, key=_number))
        self._live = {param: None for param in self._live if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE}
        missing = [param for param in wanted if param not in self._live]
        surplus = sum(map(_nbytes, (*self._live, *missing))) - self._swapper.limit_bytes
        # Parameters gathered last are usually used last.
        for param in list(reversed(self._live)):
            if surplus <= 0:
                break
            if param not in wanted and self._release(param):
                del self._live[param]
                surplus -= _nbytes(param)
        self._live |= dict.fromkeys(missing)
        self._is_full = False

    def does_not_fit(self, param: ZeroParameter) -> bool:
        """Return whether there is no room to prefetch a parameter; true for all parameters after the first misfit."""
        if param in self._live:
            return False
        used = sum(map(_nbytes, self._live))
        self._is_full = self._is_full or used + _nbytes(param) > self._swapper.limit_bytes
        if not self._is_full:
            self._live[param] = None
        return self._is_full

    def _release(self, param: ZeroParameter) -> bool:
        if param.ds_active_sub_modules or param.is_external_param:
            return False
        if param in self._in_flight:
            self._in_flight.pop(param).wait()
        getattr(self._coordinator, RELEASE_PARAM)(param)
        return param.ds_status is ZeroParamStatus.NOT_AVAILABLE


def _number(param: ZeroParameter) -> int:
    return int(param.ds_id)


def _nbytes(param: ZeroParameter) -> int:
    return whole_blocks(int(param.ds_tensor.ds_numel) * int(param.dtype.itemsize))
