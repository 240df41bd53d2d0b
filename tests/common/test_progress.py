"""Long work shows how far it has come; short work shows nothing."""

from __future__ import annotations

import re

import pytest

from lightning_smartinfinity.common import progress
from lightning_smartinfinity.common.progress import showing_progress


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A body that takes less than the delay prints nothing."""
    with showing_progress("Writing", 1000, shown=True) as advance:
        advance(1000)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("shown", [True, False])
def test_long_work_shows_bytes_of_total(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    """The bar names the work, the bytes done and the total, on the process that shows it only."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    monkeypatch.setattr(progress, "_LINES_APART", 0.0)
    with showing_progress("Writing", 4_000_000_000, shown=shown) as advance:
        for _ in range(4):
            advance(1_000_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert bool(err) is shown
    assert not shown or re.search(r"Writing: 100%.* 4\.00G/4\.00G .*B/s\]", err)
