"""Real checkpoints carry the random states of every rank. test_resume_points.py covers the point of saving."""

from __future__ import annotations

from pathlib import Path

from tests.training.random_worker import Job, Left, launch, run


def of_resume(left: Left) -> list[str]:
    return [message for message in left.warnings if "resum" in message]


def test_a_fresh_process_goes_on_with_the_random_numbers_of_the_first(tmp_path: Path) -> None:
    """Losses are equal bit for bit at an epoch's end and, with a stateful loader, within an epoch.

    Else one warning appears.
    """
    plain = run(Job(str(tmp_path / "plain"), seed=1, save=("epoch-0-4", "batch-1-2")))
    stateful = run(
        Job(str(tmp_path / "stateful"), seed=1, save=("batch-1-2",), module={"stateful": True, "counts_steps": True})
    )
    (at_end,), (within,), (replayed,) = launch(
        Job(str(tmp_path / "a"), seed=2, resume=str(tmp_path / "plain" / "epoch-0-4.ckpt")),
        Job(
            str(tmp_path / "b"),
            seed=2,
            module={"stateful": True, "counts_steps": True},
            resume=str(tmp_path / "stateful" / "batch-1-2.ckpt"),
        ),
        Job(str(tmp_path / "c"), seed=2, resume=str(tmp_path / "plain" / "batch-1-2.ckpt")),
    )
    assert at_end.losses == plain.losses[4:]
    assert within.losses == stateful.losses[6:]
    assert not of_resume(at_end)
    assert not of_resume(within)
    assert len(of_resume(replayed)) == 1


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    """Each of two ranks continues its own random numbers."""
    straight, resumed = launch(
        Job(str(tmp_path / "straight"), seed=1, devices=2, save=("epoch-0-2",)),
        Job(str(tmp_path / "resumed"), seed=2, devices=2, resume=str(tmp_path / "straight" / "epoch-0-2.ckpt")),
    )
    assert straight[0].losses != straight[1].losses
    assert [left.losses for left in resumed] == [left.losses[2:] for left in straight]
    assert not any(of_resume(left) for left in resumed)
