"""Enables ZeRO-3 in Hugging Face's transformers while a model is built, so that it loads pretrained weights correctly.

By default ``from_pretrained`` builds on the meta device, from which nothing can be partitioned. The files that it maps
leave memory again as they are read.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig

__all__ = [
    "MappedFiles",
    "loading_pretrained",
    "releasing_pages",
]


# Linux writes changed pages to swap, if there is any, and drops pages that it can read again: no content is lost.
_MADV_PAGEOUT = 21
_BATCH_BYTES = 64 * 1024 * 1024


class MappedFiles:
    """Mapped files whose pages are paged out after every 64 MiB read."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._nbytes = 0

    def add(self, path: str | os.PathLike[str]) -> None:
        """Record that a file may be mapped."""
        self._paths.add(os.path.realpath(path))

    def count(self, nbytes: int) -> None:
        """Record that this number of bytes was read, and is no longer needed."""
        self._nbytes += nbytes
        if self._nbytes >= _BATCH_BYTES:
            self._nbytes = 0
            self._page_out()

    def _page_out(self) -> None:
        with suppress(OSError, AttributeError):  # no /proc, or a C library without madvise
            madvise = ctypes.CDLL(None).madvise
            for begin, end in self._mappings():
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)

    def _mappings(self) -> Iterator[tuple[int, int]]:
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            # Lines of anonymous memory have no path. Their last field, the inode number, is none of our paths.
            addresses, *_, path = line.split(maxsplit=5)
            if path in self._paths:
                begin, end = addresses.split("-")
                yield int(begin, 16), int(end, 16)


_MODELING = "transformers.modeling_utils"

# A subclass of transformers.PreTrainedModel. Any: transformers need not be installed.
_ModelClass: TypeAlias = Any


@contextmanager
def loading_pretrained(config: DeepSpeedConfig) -> Iterator[None]:
    """Enable ZeRO-3 in transformers within this context, whether it is imported already or later in the context.

    Args:
        config: DeepSpeed's configuration.
    """
    with ExitStack() as contexts:
        enable = _Once(lambda: contexts.enter_context(_zero3_enabled(config)))
        if _MODELING in sys.modules:
            enable()
        else:
            contexts.enter_context(_calling_after_import(enable))
        yield


@contextmanager
def _zero3_enabled(config: DeepSpeedConfig) -> Iterator[None]:
    modeling_utils = sys.modules[_MODELING]
    integration: Any = import_module("transformers.integrations.deepspeed")
    before = integration._hf_deepspeed_config_weak_ref
    zero3 = _Zero3(config)  # transformers keeps a weak reference
    integration.set_hf_deepspeed_config(zero3)
    try:
        # zero.Init is entered already: transformers must not enter another one.
        with (
            modeling_utils.set_zero3_state(),
            _without_needless_initialisation(modeling_utils.PreTrainedModel),
            _with_empty_state_dicts(modeling_utils.PreTrainedModel),
            releasing_pages(),
        ):
            yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


class _Zero3:
    """The part of ``HfDeepSpeedConfig`` that transformers uses; the original needs accelerate."""

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _without_needless_initialisation(model_class: _ModelClass) -> Iterator[None]:
    """Skip random initialisation of weights that are loaded later, as transformers does under its own zero.Init."""
    original = model_class.__dict__.get("get_init_context")
    initialization = sys.modules.get("transformers.initialization")
    if original is None or initialization is None:  # before version 5
        yield
        return

    def get_init_context(cls: type, /, *args: object, **kwargs: object) -> list[AbstractContextManager[object]]:
        contexts: list[AbstractContextManager[object]] = original.__func__(cls, *args, **kwargs)
        return [*contexts, initialization.no_init_weights()]

    model_class.get_init_context = classmethod(get_init_context)
    try:
        yield
    finally:
        model_class.get_init_context = original


@contextmanager
def _with_empty_state_dicts(model_class: _ModelClass) -> Iterator[None]:
    """Make state dicts within ``from_pretrained``, which needs only names, hold ZeRO-3's empty parameters.

    Without this, a state dict would gather the whole model.
    """
    original = model_class.__dict__["from_pretrained"]

    def from_pretrained(cls: type, /, *args: object, **kwargs: object) -> object:
        state_dict = torch.nn.Module.state_dict

        def empty_state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return state_dict(self, *args, **kwargs)

        torch.nn.Module.state_dict = empty_state_dict  # type: ignore[method-assign]
        try:
            return original.__func__(cls, *args, **kwargs)
        finally:
            torch.nn.Module.state_dict = state_dict  # type: ignore[method-assign]

    model_class.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        model_class.from_pretrained = original


@contextmanager
def releasing_pages() -> Iterator[None]:
    """Page out weight files while weights are loaded from them: transformers maps each file as a whole."""
    files = MappedFiles()
    modeling_utils = import_module(_MODELING)

    def load_state_dict(original: Callable[..., object], path: str, *args: object, **kwargs: object) -> object:
        files.add(path)
        return original(path, *args, **kwargs)

    def load_one(
        original: Callable[..., None], module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: object
    ) -> None:
        original(module, state, prefix, *rest)
        own = (state.get(prefix + name) for name in module._parameters)
        files.count(sum(value.nbytes for value in own if isinstance(value, torch.Tensor)))

    with (
        wrapped(modeling_utils, "load_state_dict", load_state_dict),
        wrapped(torch.nn.Module, "_load_from_state_dict", load_one),
    ):
        yield


class _Once:
    """Calls a function on the first call only."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


@contextmanager
def _calling_after_import(function: Callable[[], None]) -> Iterator[None]:
    """Call a function as soon as ``transformers.modeling_utils`` has been imported within this context."""
    finder = _Finder(function)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODELING:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._function()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
