"""Refuses unsupported models, optimizers and settings before anything is allocated or written."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where, optimizers_of
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.settings.rules import STRATEGY, as_passed
from lightning_smartinfinity.zero3.ranks.collectives import has_ended
from lightning_smartinfinity.zero3.settings import ParameterSettings
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig, ZeroParameter

__all__ = [
    "check_dtype",
    "check_layers",
    "check_model",
    "check_optimizer",
    "check_process_groups",
    "check_state_format",
    "check_zero_section",
    "find_ignored",
    "parameter_settings",
]

SIXTEEN_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DENSE_EXPERTS = "Build the experts from ordinary torch modules: ZeRO-3 partitions those over all ranks."


def check_zero_section(section: DeepSpeedConfig, *, owner: str = STRATEGY) -> None:
    """Make DeepSpeed validate its ``zero_optimization`` section now, not in the middle of the set-up.

    Args:
        section: The section; its keys have been checked.
        owner: Class that ``zero`` was passed to, for errors.

    Raises:
        ConfigError: A value is out of range.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        zero = DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f"{owner} was given zero={{...}} that DeepSpeed refuses: {problems}.",
            "Pass values that DeepSpeed's zero_optimization section takes.",
        ) from error
    if zero.offload_param is not None and zero.offload_param.buffer_count < 1:
        offload = {"offload_param": {"buffer_count": zero.offload_param.buffer_count}}
        raise ConfigError(f"{as_passed(owner, 'zero', offload)} is out of range.", "Pass an int of at least 1.")


def parameter_settings(
    section: DeepSpeedConfig, *, storage: tuple[Path, ...], nvme_path: Path | None, transfer: TransferConfig
) -> ParameterSettings | None:
    """Return the storage settings of parameters; None if parameters stay in memory.

    Args:
        section: The ``zero_optimization`` section, already checked.
        storage: The strategy's storage folders.
        nvme_path: Folder that the user chose instead; None: the storage folders.
        transfer: Settings of job, direct I/O and I/O engine.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(**section)
    offload = zero.offload_param
    if offload is None or offload.device != "nvme":
        return None
    return ParameterSettings(
        folders=storage if nvme_path is None else (nvme_path,),
        job=transfer.job,
        direct_io=transfer.file_access,
        io_engine=transfer.io_engine,
        io_timeout=transfer.io_timeout,
        buffer_count=offload.buffer_count,
        buffer_numel=offload.buffer_size if "buffer_size" in offload.model_fields_set else None,
        persistence_numel=int(zero.param_persistence_threshold),
        budget=None if isinstance(transfer.parameter_bytes, str) else transfer.parameter_bytes,
    )


def check_optimizer(optimizer: torch.optim.Optimizer, *, state_format: str) -> None:
    """Refuse optimizers without an update rule.

    Raises:
        UnsupportedError: The optimizer's type, one of its settings, or its combination with the state format is not
            supported.
    """
    rule = rule_for(optimizer)
    if state_format not in rule.state_formats:
        optimizers = optimizers_of(STATE_FORMATS[state_format])
        raise UnsupportedError(
            f"state_format={state_format!r} is not supported with {rule.name}: it is for {optimizers} alone.",
            f"Use state_format={' or '.join(map(repr, rule.state_formats))}, or torch.optim's {optimizers}.",
        )


def check_model(model: torch.nn.Module) -> None:
    """Refuse modules that ZeRO-3 cannot partition and train.

    Raises:
        UnsupportedError: A module produces sparse gradients; a module or parameter belongs to DeepSpeed's mixture of
            experts; a parameter has no elements, with several processes; two parameters share memory; a module is
            wrapped by torch.compile; or there is nothing to train. Also as :func:`check_layers`.
    """
    check_layers(model)
    for name, module in model.named_modules():
        if type(module).__module__.startswith("deepspeed.moe."):
            raise UnsupportedError(
                f"{type(module).__name__} {name!r} is a mixture of experts of DeepSpeed (deepspeed.moe), whose experts "
                "are not partitioned over all ranks.",
                _DENSE_EXPERTS,
            )
        if isinstance(module, _compiled_wrappers()):
            raise UnsupportedError(
                f"Module {name!r} is wrapped by torch.compile, and ZeRO-3's hooks cannot reach through the wrapper.",
                "Compile it in place: module.compile(...) instead of torch.compile(module, ...).",
            )
        if getattr(module, "sparse", False) is True:
            raise UnsupportedError(
                f"{type(module).__name__} {name!r} has sparse=True; ZeRO-3 cannot partition sparse gradients.",
                "Build it with sparse=False.",
            )
    for name, parameter in model.named_parameters():
        # DeepSpeed marks experts' parameters in this way, and reduces their gradients over only some of the ranks.
        if not getattr(parameter, "allreduce", True):
            raise UnsupportedError(
                f"Parameter {name!r} has allreduce=False, which marks it as an expert's: ranks would hold different "
                "values of it.",
                _DENSE_EXPERTS,
            )
        if _numel(parameter) == 0 and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UnsupportedError(
                f"Parameter {name!r} has no elements; DeepSpeed cannot gather such a parameter from several processes.",
                "Remove it or register it as a buffer, or train in one process.",
            )
    _check_memory(model)
    _warn_of_cast(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__} has no parameter with requires_grad=True.",
            "Unfreeze the parameters to be trained.",
        )


def check_layers(model: torch.nn.Module) -> None:
    """Refuse modules that do not support hooks, and modules whose parameters have no shape yet.

    Raises:
        UnsupportedError: A module was created by torch.jit, or is lazy and has not run.
    """
    for path, module in model.named_modules():
        name = f" {path!r}" if path else ""
        # A traced module runs with its own hooks but without its children's, so only one without children works.
        is_leaf = not list(module.children())
        is_traced_leaf = is_leaf and isinstance(module, torch.jit.TopLevelTracedModule)  # type: ignore[attr-defined]
        if isinstance(module, torch.jit.ScriptModule) and not is_traced_leaf:
            raise UnsupportedError(
                f"Module{name} was made by torch.jit.script or torch.jit.trace, and takes no hooks, by which ZeRO-3 "
                "gathers parameters.",
                "Train the module that it was made of, and script or trace after the training a copy with its weights.",
            )
        for tensor_name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise UnsupportedError(
                    f"{type(module).__name__}{name} is lazy and has not run: its {tensor_name!r} has no shape yet, "
                    "and ZeRO-3 cannot partition it.",
                    "Run the model once on a batch before the fit, in memory, or use a class that is not lazy: "
                    "torch.nn.Linear(8, 40) for torch.nn.LazyLinear(40).",
                )


def _compiled_wrappers() -> tuple[type, ...]:
    """Return the wrapper class of torch.compile; an empty tuple unless its compiler has been imported."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return (dynamo.OptimizedModule,) if dynamo is not None else ()


def _numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of the whole parameter, partitioned or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _check_memory(model: torch.nn.Module) -> None:
    """Refuse distinct parameters that share memory: ZeRO-3 would give each its own memory, and so untie them."""
    placed = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "ds_id") and parameter.device.type == "cpu" and parameter.is_contiguous()
    )
    for (_, end, name), (begin, _, other) in pairwise(place for place in placed if place[0] < place[1]):
        if begin < end:
            raise UnsupportedError(
                f"Parameters {name!r} and {other!r} share memory, which ZeRO-3 would silently undo.",
                f"Tie them by assigning one Parameter to both places, not its data ({other} = {name}).",
            )


def check_dtype(model: torch.nn.Module, config: DeepSpeedConfig) -> None:
    """Refuse a module that was partitioned in another precision, which DeepSpeed would silently keep.

    Args:
        model: Module to train or evaluate.
        config: DeepSpeed's configuration.

    Raises:
        UnsupportedError: A partition has another dtype; the message names the parameter and both dtypes.
    """
    wanted = next((dtype for key, dtype in SIXTEEN_BIT.items() if config.get(key, {}).get("enabled")), torch.float32)
    for name, parameter in model.named_parameters():
        partition = getattr(parameter, "ds_tensor", None)
        if partition is not None and partition.is_floating_point() and partition.dtype != wanted:
            raise UnsupportedError(
                f"Parameter {name!r} of {type(model).__name__} was partitioned in {partition.dtype} before; this "
                f"precision needs {wanted}.",
                "Use the precision that it was first set up with, or build it anew and load a checkpoint.",
            )


def check_process_groups(model: torch.nn.Module) -> None:
    """Refuse a module that was partitioned over a process group that has ended: it cannot be gathered any more.

    Raises:
        UnsupportedError: ``torch.distributed.destroy_process_group`` was called since.
    """
    groups = {param.ds_process_group for param in model.parameters() if hasattr(param, "ds_process_group")}
    if any(has_ended(group) for group in groups):
        raise UnsupportedError(
            f"{type(model).__name__} was partitioned over a process group that has been destroyed since.",
            "Build it anew and load a checkpoint, or destroy process groups after its last use.",
        )


def check_state_format(state_format: str, config: DeepSpeedConfig) -> None:
    """Refuse a state format that needs parameters of another dtype.

    Args:
        state_format: The strategy's state format.
        config: DeepSpeed's configuration.

    Raises:
        ConfigError: The format stores half of the master as the parameter, and parameters have another dtype.
    """
    dtype = STATE_FORMATS[state_format].required_parameters
    if dtype is not None and not config.get(dtype, {}).get("enabled"):
        others = names_where(lambda form: form.required_parameters is None)
        raise ConfigError(
            f"state_format={state_format!r} needs parameters in {dtype}: they are the upper half of the masters.",
            f"Use precision='{dtype}-mixed' or '{dtype}-true', or state_format={others}.",
        )


def find_ignored(
    parameters: Sequence[ZeroParameter], frozen: Sequence[ZeroParameter], *, names: Mapping[ZeroParameter, str]
) -> UnsupportedError | None:
    """Return an error if the user changed parameters during the fit in a way that a step would ignore.

    Args:
        parameters: Parameters that are trained.
        frozen: Parameters that were frozen when the fit began.
        names: Names of all of them.
    """
    for param in frozen:
        if param.requires_grad:
            return UnsupportedError(
                f"Parameter {names.get(param)!r} was unfrozen in the fit; it has no place on storage.",
                "Unfreeze it before fit, and freeze it in on_fit_start if it is to be trained later.",
            )
    own_gradient = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # param.grad would first examine the caller
    with torch._C.DisableTorchFunctionSubclass():
        ignored = next((param for param in parameters if own_gradient(param) is not None), None)
    if ignored is not None:
        return UnsupportedError(
            f"Parameter {names.get(ignored)!r} has a gradient that was never reduced over the ranks: "
            "loss.backward() was called, within training_step or for a graph that was differentiated before.",
            "Call self.manual_backward(loss) or fabric.backward(loss) instead.",
        )
    return None


def _warn_of_cast(model: torch.nn.Module) -> None:
    """Warn if parameters' dtypes differ: DeepSpeed uses one dtype, and silently casts an fp32 norm in a bf16 model."""
    names: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            names.setdefault(parameter.dtype, name)
    if len(names) > 1:
        listed = ", ".join(f"{name!r} is {dtype}" for dtype, name in names.items())
        warnings.warn(
            f"The parameters have several dtypes ({listed}), but ZeRO-3 casts all of them to that of the precision.",
            stacklevel=2,
        )
