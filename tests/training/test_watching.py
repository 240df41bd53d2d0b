"""How the ranks meet before they watch each other, and what SIGTERM does to a wait and to a checkpoint."""

from __future__ import annotations

import platform
import signal
import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from lightning_smartinfinity import RankLostError
from lightning_smartinfinity.integrations.trainer.shutdown import give_up_soon_after_sigterm
from lightning_smartinfinity.native import ask_to_end, ending_seconds
from lightning_smartinfinity.zero3.ranks import watchdog as watching
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT


def test_a_rank_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 meets the others all the same, so none of them waits, and all train without a watch."""
    gather = Mock(side_effect=lambda value: [value, value if isinstance(value, tuple) else ""])
    monkeypatch.setattr(watching.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watching, "_gather", gather)
    monkeypatch.setattr(watching, "_listen", Mock(side_effect=OSError("too many open files")))
    with pytest.warns(UserWarning, match=r"rank 0 cannot listen: too many open files.* timeout=timedelta"):
        assert watching._meet(1.0, None) is None
    assert gather.call_count == 2


def test_a_machine_that_does_not_come() -> None:
    """The error of those that have waited for it names their machine, and how long ranks wait."""
    with (
        pytest.raises(RankLostError, match=f"from {platform.node()}: .*1/2 clients joined.*30 minutes, or .* timeout="),
        watching.awaiting_ranks(),
    ):
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1))


def test_who_does_not_know_the_token_is_sent_away() -> None:
    """Rank 0 takes no connection of a stranger for a rank's, even if it comes first and names one."""
    token, rank = b"t" * 16, (1).to_bytes(4, "big")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    hellos = (b"x" * 16 + rank, b"t" * 15 + b"x" + rank, token + rank)
    callers = [watching._connect("127.0.0.1", port, hello=hello) for hello in hellos]
    (connected,) = watching._accept(listener, 1, token).values()
    connected.sendall(b"welcome")
    for caller, heard in zip(callers, (b"", b"", b"welcome"), strict=True):
        caller.settimeout(LIMIT)
        assert caller.recv(7) == heard
        caller.close()
    connected.close()


def test_the_end_of_an_earlier_training_leaves_the_watch_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that is closed late does not end the watch that another one has begun since."""
    native, group = Mock(), Mock()
    native.report.return_value.lost = native.report.return_value.diverged = None
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watching.dist, "group", Mock(WORLD=group))
    monkeypatch.setattr(watching, "_watch", watching._Watch(native, ["a", "b"], weakref.ref(group), (7.0, None)))
    earlier, later = watching.begin_watch(7.0, None), watching.begin_watch(7.0, None)
    watching.end_watch(earlier)
    native.end_training.assert_not_called()
    watching.end_watch(later)
    native.end_training.assert_called_once()


def test_a_checkpoint_after_sigterm(tmp_path: Path) -> None:
    """Storage that answers has its whole limit again, so a busy disk does not lose the last checkpoint."""
    trainer = quiet_trainer(tmp_path)
    trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
    ask_to_end()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert ending_seconds() is None


@pytest.fixture
def handler_of_sigterm() -> Iterator[None]:
    """Leave the process as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler_of_sigterm")
@pytest.mark.parametrize("is_ignored", [False, True])
def test_sigterm_in_a_fit(is_ignored: bool) -> None:
    """Waits for a disk become short before the handler runs that was there, which may wait for one itself.

    A process that ignores SIGTERM goes on to ignore it.
    """
    heard: list[float | None] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if is_ignored else lambda *_: heard.append(ending_seconds()))
    give_up_soon_after_sigterm()
    assert ending_seconds() is None
    signal.raise_signal(signal.SIGTERM)
    assert heard == ([] if is_ignored else [3.0])
    assert (ending_seconds() is None) == is_ignored
