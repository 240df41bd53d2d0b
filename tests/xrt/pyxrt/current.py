"""Gives a pyxrt of XRT 2.13 the form of XRT's master: hardware contexts, and warnings for what they replace."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

__all__ = ["current"]


def current(pyxrt: ModuleType) -> ModuleType:
    """Return a module with the classes of a pyxrt, in which the calls deprecated in XRT's master warn.

    Registering an xclbin loads it, as XRT does where the driver knows no contexts. That is so with xocl.
    """

    class device(pyxrt.device):  # type: ignore[misc,name-defined]
        def register_xclbin(self, xclbin: Any) -> Any:
            return super().load_xclbin(xclbin)

        def load_xclbin(self, xclbin: Any) -> Any:
            _deprecated("device.load_xclbin")
            return super().load_xclbin(xclbin)

    class hw_context:
        def __init__(self, device: Any, uuid: Any) -> None:
            if device.get_xclbin_uuid().to_string() != uuid.to_string():
                raise RuntimeError("the xclbin is not registered")
            self.device, self.uuid = device, uuid

    class kernel(pyxrt.kernel):  # type: ignore[misc,name-defined]
        def __init__(self, *arguments: Any) -> None:
            if isinstance(arguments[0], hw_context):
                context, name = arguments
                super().__init__(context.device, context.uuid, name)
            else:
                _deprecated("kernel(device, uuid, name)")
                super().__init__(*arguments)

    module = ModuleType("pyxrt")
    vars(module).update(vars(pyxrt), device=device, hw_context=hw_context, kernel=kernel)
    return module


def _deprecated(call: str) -> None:
    warnings.warn(f"{call} is deprecated: use hw_context", DeprecationWarning, stacklevel=3)
