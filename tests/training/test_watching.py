"""How the ranks meet before they watch each other, and what SIGTERM does to a wait and to a checkpoint."""

from __future__ import annotations

import platform
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_smartinfinity import RankLostError
from lightning_smartinfinity.integrations.trainer.shutdown import give_up_soon_after_sigterm
from lightning_smartinfinity.native import ask_to_end, ending_seconds
from lightning_smartinfinity.zero3.ranks import watchdog as watching
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT


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
