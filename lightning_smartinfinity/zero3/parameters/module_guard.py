"""Raises when a module runs with something that ZeRO-3's hooks cannot handle: late parameters, torch.func, tracing.

DeepSpeed would raise an error that names no module, or crash the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from deepspeed.runtime.zero.partition_parameters import Init

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.setup.validation import check_layers
from lightning_smartinfinity.zero3.untyped import ZeroInit, ZeroModule, ZeroOffload

__all__ = ["checking_layers", "guard_modules", "naming_late_parameters", "refuse_late_parameters", "refuse_tracing"]

_BY_FUNCTIONS = (
    "Compute with functions on the parameters instead, such as torch.nn.functional.linear(x, scale * layer.weight, "
    "layer.bias), within the LightningModule or the module that was set up."
)


@contextmanager
def checking_layers() -> Iterator[None]:
    """Call :func:`check_layers` on every module that ``zero.Init`` is about to partition in this context."""

    def check(original: Callable[..., None], init: ZeroInit, module: torch.nn.Module) -> None:
        check_layers(module)
        original(init, module)

    with wrapped(Init, "_post_init_method", check):
        yield


def guard_modules(offload: ZeroOffload) -> None:
    """Check every module before its parameters are gathered for forward, and before they are partitioned after it.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose module hooks gather.
    """
    gather, release = offload.pre_sub_module_forward_function, offload.post_sub_module_forward_function

    def checked(sub_module: ZeroModule) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            raise UnsupportedError(
                f"{_named(offload, sub_module)} ran within a transform of torch.func, such as grad or vmap, which "
                "ZeRO-3's hooks do not support.",
                "Use torch.autograd.grad for gradients, and a batch in place of vmap; or transform a function that "
                "calls no module.",
            )
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            refuse_tracing(_named(offload, sub_module))
        refuse_foreign(sub_module)
        gather(sub_module)

    def checked_again(sub_module: ZeroModule) -> None:
        refuse_foreign(sub_module)
        release(sub_module)

    def refuse_foreign(sub_module: ZeroModule) -> None:
        for name, param in sub_module._parameters.items():
            if param is not None and not hasattr(param, "ds_id"):
                if isinstance(param, torch.nn.Parameter):
                    raise _late(f"{_named(offload, sub_module)} has the parameter {name!r}, which came")
                raise UnsupportedError(
                    f"{_named(offload, sub_module)} ran with a tensor of shape {tuple(param.shape)} in place of its "
                    f"parameter {name!r}, as by torch.func.functional_call. ZeRO-3's hooks gather parameters only.",
                    _BY_FUNCTIONS,
                )

    offload.pre_sub_module_forward_function = checked
    offload.post_sub_module_forward_function = checked_again


def refuse_tracing(what: str) -> NoReturn:
    """Raise UnsupportedError: a module is traced, scripted or exported.

    Args:
        what: Name of the module.
    """
    raise UnsupportedError(
        f"{what} was traced, scripted or exported, and ZeRO-3 has partitioned its parameters.",
        "Save the weights (save_pretrained, or `smart-infinity export`), load them into a module that is built anew, "
        "and trace that.",
    )


def refuse_late_parameters(model: torch.nn.Module) -> None:
    """Check that the model had every parameter when the training was set up.

    Raises:
        UnsupportedError: A module or a parameter was added or replaced since.
    """
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not hasattr(param, "ds_id"):
                owner = next(path for path, other in model.named_modules() if other is module)
                raise _late(f"Parameter {f'{owner}.{name}' if owner else name!r} of {type(module).__name__} came")


@contextmanager
def naming_late_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Raise :func:`refuse_late_parameters`'s error if a parameter lacks DeepSpeed's attributes in this context."""
    try:
        yield
    except AttributeError:
        refuse_late_parameters(model)
        raise


def _late(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} into the model, or was replaced, after the training was set up. ZeRO-3 has not partitioned it.",
        "Build every layer in the constructor or in configure_model, and leave unused ones out of forward. To replace "
        "values, write into the parameter, by copy_() or load_state_dict() without assign=True. To grow a model, end "
        "the fit, save its weights and fit the larger model.",
    )


def _named(offload: ZeroOffload, sub_module: torch.nn.Module) -> str:
    path = next((path for path, module in offload.module.named_modules() if module is sub_module), "")
    return f"{type(sub_module).__name__} {path!r}" if path else type(sub_module).__name__
