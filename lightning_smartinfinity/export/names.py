"""Maps a model's weights to the names and shapes that they have in files of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_smartinfinity.common.transformers_models import Model
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.export.routes import ExportPlan, Range, rounded
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import Contents, TensorSpec

__all__ = ["plan_for"]


def plan_for(model: Model, contents: Contents, *, dtype: torch.dtype | None) -> ExportPlan:
    """Return the plan of an export for transformers.

    Args:
        model: The model. Its weights may be on any device, including "meta".
        contents: The available weights, by the model's names.
        dtype: Dtype for trained parameters; None keeps the dtype of training.

    Raises:
        UnsupportedError: There are adapters of PEFT, or weights that the model does not have, or has in another shape;
            or loading changes weights in a way that cannot be reverted window by window.
    """
    _require_adapters_merged(model, contents)
    expected = _expected(model)
    present = contents.specs()
    _require_known(model, present, expected, contents)
    specs = {name: present.get(name, expected[name]) for name in expected}
    repeated = _repeated(model, contents)
    kept = [name for name in specs if name not in repeated and not _is_ignored(model, name)]
    tensors, ranges = _in_files(model, {name: rounded(specs[name], dtype) for name in kept})
    here = {name for name, origin in ranges.items() if origin.origin in present}
    return ExportPlan(
        tensors={name: tensors[name] for name in tensors if name in here},
        ranges={name: ranges[name] for name in tensors if name in here},
        others={name: tensors[name] for name in tensors if name not in here},
    )


def _expected(model: Model) -> dict[str, TensorSpec]:
    """Return shape and dtype of all weights of the model, by name."""
    params = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: TensorSpec(torch.Size(getattr(p, "ds_shape", p.shape)), p.dtype) for name, p in params.items()}
    for prefix, child in model.named_modules():
        for name, value in child._buffers.items():
            if value is not None and name not in child._non_persistent_buffers_set:
                shapes[f"{prefix}.{name}" if prefix else name] = TensorSpec(value.shape, value.dtype)
    return shapes


def _require_adapters_merged(model: Model, contents: Contents) -> None:
    adapters = [name for name in contents.parameters if ".lora_" in name or ".modules_to_save." in name]
    if adapters:
        raise UnsupportedError(
            f"{type(model).__name__} holds adapters of PEFT, {adapters[0]!r} for one.",
            "Save them by PEFT itself within deepspeed.zero.GatheredParameters, or export --to lightning.",
        )


def _require_known(
    model: Model, present: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], contents: Contents
) -> None:
    for name in [*present, *contents.others]:
        if name not in expected:
            raise UnsupportedError(
                f"{type(model).__name__} of transformers has no {name!r}, which the module holds.",
                "Export --to lightning, or pass the model as transformers built it.",
            )
        if present[name].shape != expected[name].shape:
            raise UnsupportedError(
                f"{name!r} has the shape {tuple(present[name].shape)}, and {tuple(expected[name].shape)} by the "
                "model's configuration.",
                "Change the configuration together with the weights, or export --to lightning.",
            )


def _repeated(model: Model, contents: Contents) -> set[str]:
    """Return names that are left out, because from_pretrained ties them to another name with the same values."""
    targets = set(model.all_tied_weights_keys)
    names: dict[str, list[str]] = {}
    for name in [*contents.parameters, *contents.aliases]:
        names.setdefault(contents.aliases.get(name, name), []).append(name)
    repeated = {name for same in names.values() for name in same if name in targets and not targets.issuperset(same)}
    # Names that the checkpoint left out are tied as the model defines.
    missing = targets - contents.parameters.keys() - contents.aliases.keys()
    return repeated | missing


def _is_ignored(model: Model, name: str) -> bool:
    patterns: Iterable[str] = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _in_files(model: Model, specs: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], dict[str, Range]]:
    """Revert from_pretrained's conversion of this model's weights, on tensors without memory.

    A result that is a contiguous view of one tensor can be written window by window, from the view's offset on.
    """
    from transformers.core_model_loading import revert_weight_conversion

    given = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    origins = {value.untyped_storage()._cdata: name for name, value in given.items()}
    with _default_conversions(model), _KeepingViews():
        reverted = revert_weight_conversion(model, given)
    tensors, ranges = {}, {}
    for name, value in reverted.items():
        origin = origins.get(value.untyped_storage()._cdata)
        if origin is None or not value.is_contiguous():
            raise UnsupportedError(
                f"from_pretrained computes weights of {type(model).__name__} from {name!r} and others, and this cannot "
                "be reverted window by window.",
                "Export --to lightning, and call the model's own save_pretrained where it fits in memory.",
            )
        tensors[name] = TensorSpec(value.shape, value.dtype)
        ranges[name] = Range(origin, int(value.storage_offset()))
    return tensors, ranges


@contextmanager
def _default_conversions(model: Model) -> Iterator[None]:
    """Hide the conversions that from_pretrained noted: with ZeRO-3 they name legacy weights that its file lacks."""
    noted = model.__dict__.pop("_weight_conversions", None)
    try:
        yield
    finally:
        if noted is not None:
            model._weight_conversions = noted


class _KeepingViews(TorchFunctionMode):
    """Makes ``contiguous`` return its argument, a view: after two splits, the result is mostly contiguous again."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
