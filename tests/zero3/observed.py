"""Records which functions of DeepSpeed, Lightning and this package call which during a small training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Calls", "observing"]

_WATCHED = ("deepspeed.", "lightning.", "lightning_smartinfinity.", "torch.optim.")
# Decorators: the function that they wrap counts as called by their caller.
_WRAPPERS = ("wrapped_fn", "decorate_context", "inner", "_fn", "wrapper")


class Calls:
    """Calls between functions of the watched packages, by qualified name (``Class.method``), in their order."""

    def __init__(self) -> None:
        self._made: list[tuple[int, str, str]] = []

    def note(self, invocation: int, caller: str, callee: str) -> None:
        self._made.append((invocation, caller, callee))

    def has(self, caller: str, callee: str) -> bool:
        """Return whether the first function was seen calling the second."""
        return any(call[1:] == (caller, callee) for call in self._made)

    def callers(self, callee: str) -> set[str]:
        """Return all functions that were seen calling it."""
        return {caller for _, caller, called in self._made if called == callee}

    def made_by(self, caller: str) -> list[str]:
        """Return what the first invocation of a function called, in order."""
        (first, *_) = [number for number, name, _ in self._made if name == caller] or [-1]
        return [callee for number, _, callee in self._made if number == first]

    def in_order(self, caller: str, *callees: str) -> bool:
        """Return whether the first invocation of a function called these, for the first time, in this order."""
        made = self.made_by(caller)
        return all(callee in made for callee in callees) and [*callees] == sorted(callees, key=made.index)


@contextmanager
def observing() -> Iterator[Calls]:
    """Note the calls that this thread makes."""
    calls = Calls()
    # The invocation number and the name of each running function, or None for a function that is not watched.
    stack: list[tuple[int, str] | None] = []
    count = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        if event == "return":
            if stack:
                stack.pop()
        elif event == "call":
            code = frame.f_code
            if code.co_name in _WRAPPERS:
                stack.append(stack[-1] if stack else None)
                return
            if not f"{frame.f_globals.get('__name__')}.".startswith(_WATCHED):
                stack.append(None)
                return
            if stack and stack[-1] is not None:
                calls.note(*stack[-1], code.co_qualname)
            count += 1
            stack.append((count, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)
