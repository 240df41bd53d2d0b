"""Sets the class of a parameter by its status, and by whether an engine runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["Classes", "Status", "engine_at_work", "forget_classes", "is_engine_at_work", "restore_classes", "version"]

_AVAILABLE = ZeroParamStatus.AVAILABLE  # an attribute of an enum takes a while to look up
# Parameters that are whole, by id.
_WHOLE: dict[int, weakref.ref[ZeroParameter]] = {}
# An entry for each engine that runs forward or backward, one within another.
_AT_WORK: list[bool] = []


class Classes(NamedTuple):
    """The classes that a parameter takes in turn.

    Attributes:
        answering: While its values are not here, or user code runs and they may soon be gone.
        whole: While its values are here and an engine runs.
        hidden: While DeepSpeed gathers or partitions it: ``data``, ``grad`` and ``ds_status`` are plain attributes.
    """

    answering: type[ZeroParameter]
    whole: type[ZeroParameter]
    hidden: type[ZeroParameter]


class Status:
    """Switches the class of a parameter with its status. Without ``__get__`` reads stay those of an attribute."""

    def __set__(self, param: ZeroParameter, status: ZeroParamStatus) -> None:
        attributes = param.__dict__
        attributes["ds_status"] = status
        if status is _AVAILABLE:
            _become_whole(param)
        else:
            param.__class__ = attributes["_classes"].answering
            _WHOLE.pop(id(param), None)


def forget_classes(params: Iterable[ZeroParameter]) -> None:
    """Give parameters the class with plain attributes until :func:`restore_classes`, so that DeepSpeed uses them fast.

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
    param.__class__ = attributes["_classes"].whole  # on which torch calls no __torch_function__
    attributes["_version_when_gathered"] = version(param)
    _WHOLE[id(param)] = attributes["_self"]
    if not _AT_WORK:
        param.__class__ = attributes["_classes"].answering


@contextmanager
def engine_at_work() -> Iterator[None]:
    """Leave operations on whole parameters to torch within this context, for speed: an engine runs forward or backward.

    At other times user code runs, and a parameter may be whole because it is small or was validated with.
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
    """Return how often a tensor was changed in place; 0 for one that was gathered in inference mode."""
    try:
        return param._version
    except RuntimeError:  # faster than is_inference() at each gather
        return 0
