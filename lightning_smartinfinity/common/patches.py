"""Replaces attributes of other packages within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

__all__ = ["Shared", "replaced", "wrapped"]

_INHERITED = object()


@contextmanager
def replaced(owner: Any, name: str, by: object) -> Iterator[None]:
    """Replace an attribute within this context; afterwards restore it, or delete it if it was inherited.

    Args:
        owner: Module, class or object that has the attribute.
        name: Name of the attribute.
        by: Value within the context.
    """
    own = vars(owner).get(name, _INHERITED)
    try:
        setattr(owner, name, by)  # inside try, since an interrupt may follow at once
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Redirect calls of a method or function to ``around``, which takes the original as its first argument."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return replaced(owner, name, staticmethod(method) if name == "__new__" else method)


class Shared:
    """A context that is entered for its first user and left after its last.

    Args:
        enter: Function that returns the context, such as one of :func:`wrapped`.
    """

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self._enter = enter
        self._users, self._context = 0, ExitStack()

    def begin(self) -> None:
        """Add a user; the first one enters the context."""
        if self._users == 0:
            self._context.enter_context(self._enter())
        self._users += 1

    def end(self) -> None:
        """Remove a user; the last one leaves the context."""
        self._users -= 1
        if self._users == 0:
            self._context.close()
