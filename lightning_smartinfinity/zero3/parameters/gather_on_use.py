"""Builds models while ZeRO-3 partitions them: a partitioned parameter is gathered when code uses it.

``deepspeed.zero.Init`` empties a parameter as soon as its module's constructor ends. Later writes to it, by a parent's
constructor or an initialisation function, would silently be lost. Within :func:`gathering_on_use` the parameter is
gathered first and partitioned again later, with the values of rank 0.

While a model is built, its parameters have the same dtype as in plain Lightning: torch's default, or the one that the
model requests. Only the partition has the dtype of the Trainer's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import (
    DeepSpeedTensorOverride,
    Init,
    ZeroParamStatus,
    is_zero_param,
)
from torch.overrides import TorchFunctionMode

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.callers import building
from lightning_smartinfinity.zero3.parameters.gathering import whole_data
from lightning_smartinfinity.zero3.parameters.live_parameters import require_budget_for
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper
from lightning_smartinfinity.zero3.parameters.partitioned_parameter import ANSWERS, UNAFFECTED, answering
from lightning_smartinfinity.zero3.untyped import ZeroInit, ZeroParameter

__all__ = ["gathering_on_use"]

# Bytes of parameters that may stay gathered at once, beyond those that a single operation needs.
_GATHERED_BYTES = 64 * 1024 * 1024
# Bytes of a 2-byte partition and the 4-byte parameter that it is gathered into, as a multiple of the partition's.
_WITH_A_COPY = 3
# References to an otherwise unused parameter's storage: the parameter, and the storage object that reads the count.
_OWN_REFERENCES = 2

Tensor = torch.Tensor
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]


@contextmanager
def gathering_on_use(module: torch.nn.Module | None = None) -> Iterator[None]:
    """Make torch operations work on partitioned parameters within a ``zero.Init``, in the same way on all ranks.

    Gathered memory is bounded, except that a parameter stays gathered as long as another object (a view, its ``data``)
    refers to its memory.

    Args:
        module: Module that is being built, for the names in errors.

    Raises:
        UnsupportedError: A parameter was given another shape.
    """
    pool = _Pool(module)
    _keep_dtypes()
    with ExitStack() as patches:
        patches.enter_context(answering())
        patches.enter_context(building())
        patches.enter_context(wrapped(Init, "_all_gather", pool.around_all_gather))
        patches.enter_context(wrapped(Init, "_partition", pool.around_partition))
        patches.enter_context(wrapped(Init, "_post_init_method", pool.around_post_init))
        # torch does not pass these two functions to a TorchFunctionMode.
        patches.enter_context(wrapped(torch.nn.Parameter, "__new__", pool.around_new))
        patches.enter_context(wrapped(Tensor, "set_", pool.around_call))
        with _GatherOnUse(pool):
            yield
        # Skipped after an error, because the other ranks may not get here.
        pool.partition_all()


class _GatherOnUse(TorchFunctionMode):
    """Gathers the parameters that an operation is about to use."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        found = list(_zero_params((args, kwargs)))
        partitioned = [param for param in found if _is_partitioned(param)]
        if partitioned:
            if func in ANSWERS:
                # The tensor is the first argument, or the keyword `input` or `self`.
                rest = {key: value for key, value in kwargs.items() if key not in ("input", "self")}
                return ANSWERS[func](partitioned[0], *args[1:], **rest)
            if func == _DTYPE:
                return self._pool.dtype_of(partitioned[0])
            if func in UNAFFECTED:
                return func(*args, **kwargs)
        self._pool.hold(found)
        return func(*args, **kwargs)


class _Pool:
    """The parameters that are gathered on use, in the order of their last use."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._module = module
        self._held: dict[int, ZeroParameter] = {}
        # The dtype that each parameter was built with, by ds_id.
        self._dtypes: dict[int, torch.dtype] = {}

    def dtype_of(self, param: ZeroParameter) -> torch.dtype:
        """Return the dtype of the parameter while it is gathered."""
        dtype: torch.dtype = self._dtypes.get(param.ds_id, param.ds_tensor.dtype)
        return dtype

    def hold(self, params: Sequence[ZeroParameter]) -> None:
        """Gather these parameters if they are partitioned."""
        wanted = [param for param in params if _is_partitioned(param)]
        for param in params:
            if param.ds_id in self._held:
                self._held[param.ds_id] = self._held.pop(param.ds_id)
        if not wanted:
            return
        self._make_room(sum(_num_bytes(param) for param in wanted), _most_bytes(wanted[0]))
        for param in wanted:
            param.all_gather()
            self._held[param.ds_id] = param

    def partition_all(self) -> None:
        """Partition all parameters again, even if other objects refer to their memory."""
        for param in list(self._held.values()):
            self._partition(param)

    def around_all_gather(
        self,
        original: Callable[..., object],
        init: ZeroInit,
        param_list: Iterable[ZeroParameter],
        *args: object,
        **kw: object,
    ) -> object:
        """Give gathered parameters the dtype that they were built with."""
        param_list = list(param_list)
        with torch._C.DisableTorchFunction():
            gathered = [param for param in param_list if _is_partitioned(param)]
            result = original(init, param_list, *args, **kw)
            for param in gathered:
                if param.ds_status is ZeroParamStatus.AVAILABLE and param.dtype != self.dtype_of(param):
                    param.data = param.data.to(self.dtype_of(param))
            return result

    def around_partition(
        self,
        original: Callable[..., object],
        init: ZeroInit,
        param_list: Iterable[ZeroParameter],
        *args: object,
        **kw: object,
    ) -> object:
        """Partition for other callers (GatheredParameters, apply), except the parameters in this pool."""
        with torch._C.DisableTorchFunction():
            others = [param for param in param_list if param.ds_id not in self._held]
            for param in others:
                if param.ds_tensor is not None and param.dtype != param.ds_tensor.dtype:
                    param.data = param.data.to(param.ds_tensor.dtype)
            return original(init, others, *args, **kw)

    def around_post_init(self, original: Callable[..., None], init: ZeroInit, module: torch.nn.Module) -> None:
        """Cast the parameters of a finished constructor to the Trainer's precision, and partition them."""
        built: list[tuple[ZeroParameter, torch.dtype]] = []
        for name, param in module.named_parameters(recurse=False):
            if is_zero_param(param):
                continue
            if isinstance(init.param_swapper, ParameterSwapper):
                owner = f"{type(module).__name__}.{name}"
                require_budget_for(init.param_swapper.settings, owner, param.numel(), init.dtype.itemsize)
            if param.is_floating_point() and param.dtype != init.dtype:
                built.append((param, param.dtype))
                param.data = param.data.to(init.dtype)
        original(init, module)
        self._dtypes |= {param.ds_id: dtype for param, dtype in built}

    def around_call(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Gather the arguments of a single function, as :class:`_GatherOnUse` does for operations."""
        self.hold(list(_zero_params((args, kwargs))))
        return original(*args, **kwargs)

    def around_new(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Gather parameters that a new parameter is made of, and pass their memory, a tensor of torch's own class."""
        self.hold(list(_zero_params((args, kwargs))))
        return original(*(whole_data(arg) if is_zero_param(arg) else arg for arg in args), **kwargs)

    def _make_room(self, num_bytes: int, most_bytes: int) -> None:
        surplus = num_bytes + sum(map(_num_bytes, self._held.values())) - most_bytes
        oldest = []
        for param in self._held.values():
            if surplus <= 0:
                break
            oldest.append(param)
            surplus -= _num_bytes(param)
        self._partition_unused(oldest)

    def _partition_unused(self, params: list[ZeroParameter]) -> None:
        """Partition those of the parameters whose memory no other object refers to on any rank."""
        if not params:
            return
        unused = torch.tensor([_is_unused(param) for param in params], dtype=torch.int32)
        if dist.get_world_size() > 1:
            unused = unused.to(get_accelerator().current_device_name())
            dist.all_reduce(unused, op=dist.ReduceOp.MIN)
        for param, flag in zip(params, unused.tolist(), strict=True):
            if flag:
                self._partition(param)

    def _partition(self, param: ZeroParameter) -> None:
        with torch._C.DisableTorchFunction():
            del self._held[param.ds_id]
            if param.shape != param.ds_shape:
                raise UnsupportedError(
                    f"Parameter {self._name_of(param)} was given the shape {tuple(param.shape)}; ZeRO-3 has "
                    f"partitioned it with the shape {tuple(param.ds_shape)}.",
                    "Replace the whole parameter, module.name = torch.nn.Parameter(...), or give it its final shape in "
                    "the constructor of its module.",
                )
            param.data = param.data.to(param.ds_tensor.dtype).contiguous()
            dist.broadcast(param.data.view(-1).view(torch.uint8), 0, group=param.ds_process_group)
            param.partition(has_been_updated=True)

    def _name_of(self, param: ZeroParameter) -> str:
        names = self._module.named_parameters() if self._module is not None else ()
        return next((repr(name) for name, other in names if other is param), "that is not in the model yet")


def _keep_dtypes() -> None:
    # zero.Init casts every new tensor to the precision of the Trainer, even if the model requests another dtype:
    # positions beyond 256 would collapse in bf16. Casting parameters when they are partitioned is enough.
    init = partition_parameters.top_level_context
    init.tensor_overrides = {DeepSpeedTensorOverride.device}
    init._add_tensor_creation_wrappers()


def _zero_params(value: object) -> Iterator[ZeroParameter]:
    """Yield ZeRO-3's parameters among these arguments, including those in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        if "ds_id" in value.__dict__:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _zero_params(item)
    elif isinstance(value, dict):
        yield from _zero_params(list(value.values()))


def _is_partitioned(param: ZeroParameter) -> bool:
    return param.ds_status is ZeroParamStatus.NOT_AVAILABLE


def _num_bytes(param: ZeroParameter) -> int:
    return int(param.ds_numel * param.ds_tensor.element_size())


def _most_bytes(param: ZeroParameter) -> int:
    """Return how many bytes of parameters may stay gathered, counted in the dtype of the partitions."""
    swapper = param.nvme_swapper
    if not isinstance(swapper, ParameterSwapper) or swapper.settings.budget is None:
        return _GATHERED_BYTES
    return min(_GATHERED_BYTES, swapper.settings.budget // _WITH_A_COPY)


def _is_unused(param: ZeroParameter) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(torch._C._storage_Use_Count(param.untyped_storage()._cdata) <= _OWN_REFERENCES)
