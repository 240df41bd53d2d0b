"""How the ranks meet before they watch each other."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_smartinfinity import watching


def test_a_rank_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 meets the others all the same, so none of them waits, and all train without a watch."""
    gathered: list[Any] = []

    def gather(value: Any) -> list[Any]:
        gathered.append(value)
        return [value, value if isinstance(value, tuple) else ""]

    def listen(backlog: int) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(watching.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watching, "_gather", gather)
    monkeypatch.setattr(watching, "_listen", listen)
    with pytest.warns(UserWarning, match="rank 0 cannot listen: too many open files"):
        assert watching._meet(1.0) is None
    assert len(gathered) == 2
