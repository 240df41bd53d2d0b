"""Interrupts Python on a chosen line, as Ctrl-C does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any


class Interrupt:
    """Raises KeyboardInterrupt before one of the lines that some modules execute.

    Args:
        line: Number of the line, counted from the first that is executed.
        modules: The modules.
    """

    def __init__(self, line: int, modules: Iterable[ModuleType]) -> None:
        self._left = line
        self._files = {module.__file__ for module in modules}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._files or self._left < 0:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        return self.trace

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Interrupt the body, which runs in this thread."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)
