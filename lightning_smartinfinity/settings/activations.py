"""Settings for moving activations to storage: ``activations``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native import BLOCK_BYTES
from lightning_smartinfinity.settings.rules import FLAG, check, num_bytes, optional, require, settings_of
from lightning_smartinfinity.settings.wrong_names import named_settings

__all__ = ["ActivationOffload", "activation_offload"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Settings for the tensors that forward saves for backward: how many stay in memory, and how the others move.

    Sizes are bytes per rank, or text such as ``"8GB"``, which is converted to bytes. Results do not depend on them.

    Args:
        keep: Bytes of the tensors saved last that stay in memory, because backward needs them first. ``"auto"``: one
            micro-batch is measured. Without ``budget_bytes``, the fewest bytes stay that cause no wait in backward, or
            all if steps would otherwise take longer. With ``budget_bytes``, as many stay as fit.
        budget_bytes: Most bytes held for backward at once: tensors that stay, the pool, and tensors that are read back.
            Forward waits for storage before it would exceed the budget; if waiting is not enough, a warning is shown.
            None: no limit, and forward never waits for storage.
        host_bytes: Size of the pool of host memory through which tensors move, in both directions. A tensor that does
            not fit into it stays where it is. From a GPU, without a budget, only tensors beyond the pool's room are
            written to storage. ``"auto"``: an eighth of the bytes that a forward saves, at least 64 MiB, and at most
            half of ``budget_bytes``.
        storage_bytes: Most bytes on storage at once; further tensors stay in memory. None: no limit.
        min_bytes: Size of the smallest tensor that is moved.
        verify: Whether to verify the checksum of each tensor that is read back.

    Raises:
        ConfigError: A setting is unknown or has a forbidden value, or two settings contradict each other.
    """

    keep: int | str = "auto"
    budget_bytes: int | str | None = None
    host_bytes: int | str = "auto"
    storage_bytes: int | str | None = None
    min_bytes: int | str = 256 * 1024
    verify: bool = True

    def __post_init__(self) -> None:
        require(
            self,
            keep=optional(num_bytes(0), "auto"),
            budget_bytes=optional(num_bytes(BLOCK_BYTES)),
            host_bytes=optional(num_bytes(BLOCK_BYTES), "auto"),
            storage_bytes=optional(num_bytes(BLOCK_BYTES)),
            min_bytes=num_bytes(1),
            verify=FLAG,
        )
        for name in ("keep", "host_bytes"):
            value = getattr(self, name)
            if self.budget_bytes is not None and value != "auto" and value > self.budget_bytes:
                raise ConfigError(
                    f"ActivationOffload({name}={value}, budget_bytes={self.budget_bytes}) contradicts itself: the "
                    f"budget includes {name}.",
                    f"Lower {name}, raise budget_bytes, or leave one of them out.",
                )
        self._require_that_something_moves()

    def _require_that_something_moves(self) -> None:
        assert not isinstance(self.min_bytes, str), "a size given as text is kept as bytes"
        least = -(-self.min_bytes // BLOCK_BYTES) * BLOCK_BYTES
        needs = {"host_bytes": least, "storage_bytes": least}
        if self.host_bytes == "auto":
            needs["budget_bytes"] = 2 * least  # the pool takes half of it
        for name, needed in needs.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < needed:
                raise ConfigError(
                    f"ActivationOffload({name}={value}, min_bytes={self.min_bytes}) contradicts itself: not even the "
                    "smallest tensor that moves would fit.",
                    f"Lower min_bytes, or raise {name} to at least {needed}.",
                )


def activation_offload(
    activations: ActivationOffload | Mapping[str, Any] | None, *, owner: str, setting: str = "activations"
) -> ActivationOffload | None:
    """Return the setting ``activations`` as an object; it may be an object, a dict of its settings, or None (kept).

    Args:
        activations: The setting.
        owner: Class to which it was passed, for the error.
        setting: Name of the setting, for the error.

    Raises:
        ConfigError: The value is none of these, or a setting in it is unknown or out of range.
    """
    settings: ActivationOffload | None = check(owner, setting, activations, optional(settings_of(ActivationOffload)))
    return settings
