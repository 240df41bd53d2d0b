"""Sets the class of a parameter by its status, and by whether an engine runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = [
    "Classes",
    "Status",
    "engine_at_work",
    "forget_classes",
    "is_engine_at_work",
    "restore_classes",
    "training_of",
    "version",
]

_AVAILABLE = ZeroParamStatus.AVAILABLE  # bound here for speed: looking up an enum's attribute is slow
# Gathered parameters, by id.
_WHOLE: dict[int, weakref.ref[ZeroParameter]] = {}
# One entry for each engine that runs forward or backward; engines may be nested.
_AT_WORK: list[bool] = []


def training_of(param: ZeroParameter) -> Any:
    """Return the ``StateByParameter`` of the training that a parameter belongs to; None if it belongs to none of ours.

    The training may be over; :meth:`StateByParameter.has_master` is then false.
    """
    return getattr(param.__dict__.get("_z3_optimizer"), "by_parameter", None)


class Classes(NamedTuple):
    """The classes that a parameter switches between.

    Attributes:
        answering: While it is partitioned, or user code runs and it may be partitioned soon.
        whole: While it is gathered and an engine runs.
        hidden: While DeepSpeed gathers or partitions it: ``data``, ``grad`` and ``ds_status`` are plain attributes.
    """

    answering: type[ZeroParameter]
    whole: type[ZeroParameter]
    hidden: type[ZeroParameter]


class Status:
    """Switches a parameter's class with its status; without ``__get__``, reads are plain attribute reads."""

    def __set__(self, param: ZeroParameter, status: ZeroParamStatus) -> None:
        attributes = param.__dict__
        attributes["ds_status"] = status
        if status is _AVAILABLE:
            _become_whole(param)
        else:
            param.__class__ = attributes["_classes"].answering
            _WHOLE.pop(id(param), None)


def forget_classes(params: Iterable[ZeroParameter]) -> None:
    """Give parameters the class with plain attributes until :func:`restore_classes`, so that DeepSpeed runs fast.

    No user code may run in this thread in between.
    """
    for param in params:
        param.__class__ = param.__dict__["_classes"].hidden


def restore_classes(params: Iterable[ZeroParameter]) -> None:
    """Give parameters the classes that follow from their status."""
    for param in params:
        attributes = param.__dict__
        if attributes["ds_status"] is not _AVAILABLE:
            param.__class__ = attributes["_classes"].answering
            _WHOLE.pop(id(param), None)
        elif _WHOLE.get(id(param)) is attributes["_self"]:
            param.__class__ = attributes["_classes"][bool(_AT_WORK)]
        else:
            _become_whole(param)


def _become_whole(param: ZeroParameter) -> None:
    attributes = param.__dict__
    param.__class__ = attributes["_classes"].whole  # torch calls no __torch_function__ on this class
    attributes["_version_when_gathered"] = version(param)
    _WHOLE[id(param)] = attributes["_self"]
    if not _AT_WORK:
        param.__class__ = attributes["_classes"].answering


@contextmanager
def engine_at_work() -> Iterator[None]:
    """Leave operations on gathered parameters to torch within this context, in which an engine runs, for speed.

    At other times user code runs, and parameters are gathered only by chance: small ones, or after a validation.
    """
    _AT_WORK.append(True)
    try:
        if len(_AT_WORK) == 1:
            _switch_classes()
        yield
    finally:
        _AT_WORK.pop()
        if not _AT_WORK:
            _switch_classes()


def is_engine_at_work() -> bool:
    """Return whether an engine runs forward or backward."""
    return bool(_AT_WORK)


def _switch_classes() -> None:
    kind = bool(_AT_WORK)
    for key, ref in list(_WHOLE.items()):
        param = ref()
        if param is None:
            del _WHOLE[key]
        else:
            param.__class__ = param.__dict__["_classes"][kind]


def version(param: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for a tensor gathered in inference mode."""
    try:
        return param._version
    except RuntimeError:  # faster than is_inference() at each gather
        return 0
