"""Settings of how activations move to storage: ``activations``."""

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
    """How much of what forward saves for backward stays in memory, and how the rest moves to storage and back.

    Sizes are bytes of one rank, or text such as ``"8GB"``. They are kept as bytes. No result depends on them.

    Args:
        keep: Bytes of what forward saved last that stay in memory, because backward wants them first. ``"auto"``: one
            micro-batch is measured. Without ``budget_bytes`` as little stays as costs no wait in backward, or all if
            steps take longer otherwise; with it as much as fits.
        budget_bytes: Most bytes that are held for backward at once: what stays, the pool, and what is read back.
            Forward waits for storage where it would hold more, and a warning says if that is not enough. None: no
            limit, and forward never waits for storage.
        host_bytes: Size of the pool of host memory through which tensors move, in both directions. A tensor for which
            it has no room stays where it is. From a GPU, only what the pool has no room for is written, unless there is
            a budget. ``"auto"``: an eighth of what a forward saves, at least 64 MiB, and at most half of
            ``budget_bytes``.
        storage_bytes: Most bytes on storage at once; what has no room there stays in memory. None: no limit.
        min_bytes: Size of the smallest tensor that is moved.
        verify: Whether what is read back is compared with the checksum of what was written.

    Raises:
        ConfigError: A setting is unknown, out of range or not one of those above, or two of them contradict each other.
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
    """Return what the setting ``activations`` asks for: settings, or a dict of them; None stays None.

    Args:
        activations: The setting.
        owner: Class to which it was passed, for the error.
        setting: Name of the setting, for the error.

    Raises:
        ConfigError: It is something else, or a setting in it is unknown or out of range.
    """
    settings: ActivationOffload | None = check(owner, setting, activations, optional(settings_of(ActivationOffload)))
    return settings
