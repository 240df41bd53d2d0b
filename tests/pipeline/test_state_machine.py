"""The handler's calls in and out of order, and access to the state outside of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.storage import recover_store
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, running

OUT_OF_ORDER: list[tuple[str, Callable[[Run], object]]] = [
    ("commit", lambda run: run.handler.commit()),
    ("roll_back", lambda run: run.handler.roll_back()),
    ("wait", lambda run: run.handler.step.wait()),
]
NOT_IN_A_STEP: list[tuple[str, Callable[[Run], object]]] = [
    ("begin_step", lambda run: run.handler.begin_step(run.collect(1))),
    ("scan", lambda run: run.handler.state.scan(print)),
    ("replace", lambda run: run.handler.state.replace(print, steps=run.handler.steps)),
    ("read_parameter", lambda run: run.handler.state.read_parameter(0)),
    ("modify", lambda run: run.handler.state.modify({})),
    ("initialize", lambda run: run.handler.initialize(run.outputs())),
]


@pytest.mark.parametrize("call", [call for _, call in OUT_OF_ORDER], ids=[name for name, _ in OUT_OF_ORDER])
def test_calls_that_need_a_step(tmp_path: Path, call: Callable[[Run], object]) -> None:
    """Calling commit, rollback or wait outside of a step is a programming error."""
    with running(tmp_path, Case()) as run, pytest.raises(AssertionError, match="no step has begun"):
        call(run)


@pytest.mark.parametrize("call", [call for _, call in NOT_IN_A_STEP], ids=[name for name, _ in NOT_IN_A_STEP])
def test_calls_that_no_step_may_precede(tmp_path: Path, call: Callable[[Run], object]) -> None:
    """Calls that are not allowed within a step are programming errors, and the step continues."""
    with running(tmp_path, Case()) as run:
        run.handler.begin_step(run.collect(1))
        with pytest.raises(AssertionError, match="a step is in flight"):
            call(run)
        run.handler.commit()


def test_finish_without_a_step(tmp_path: Path) -> None:
    """finish() without a step returns at once, and it may be called twice."""
    with running(tmp_path, Case()) as run:
        run.handler.finish()
        run.handler.begin_step(run.collect(1))
        run.handler.finish()
        run.handler.finish()
        run.handler.commit()


@pytest.mark.parametrize("staged", [False, True])
def test_wait_for_some_parameters(tmp_path: Path, staged: bool) -> None:
    """wait(range) returns when those parameters are updated, without waiting for the whole step."""
    case = Case(dtype=torch.bfloat16, num_buffers=2, staged=staged)
    with running(tmp_path / "undisturbed", case) as run:
        run.step(1)
        expected = [run.slice(index).clone() for index in range(len(case.shapes))]
    with running(tmp_path / "slow", case) as run:
        inject(run.device.pipeline, seed=3, max_delay_us=3_000)
        run.handler.begin_step(run.collect(1))
        for index in (0, 1, 3, 2, 6):
            run.handler.step.wait(slice(index, index + 1))
            assert torch.equal(run.slice(index), expected[index])
        run.handler.commit()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_tasklets_in_order_of_first_use(tmp_path: Path, staged: bool, seed: int) -> None:
    """Working the tasklets in any order gives the same bits, and parameters can be waited for in any other order."""
    random = np.random.default_rng(seed)
    case = Case(dtype=torch.bfloat16, num_buffers=2, staged=staged)
    with running(tmp_path / "plain", case) as run:
        run.step(1)
        expected, slices = run.state(), [run.slice(index).clone() for index in range(len(case.shapes))]
    with running(tmp_path / "ordered", case) as run:
        inject(run.device.pipeline, seed=seed, max_delay_us=1_000)
        run.handler.begin_step(replace(run.collect(1), first_uses=random.permutation(len(case.shapes))))
        for indices in random.permutation(len(case.shapes)).reshape(-1, 1):
            run.handler.step.wait([int(index) for index in indices])
            assert all(torch.equal(run.slice(index), slices[index]) for index in indices)
        run.handler.commit()
        assert_equal(run.state(), expected)


def test_a_commit_that_was_interrupted_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C comes after the record was written, the next commit does not write a second generation."""
    with running(tmp_path, Case()) as run:
        commit = run.store.commit

        def interrupted(**record: Any) -> None:
            commit(**record)
            raise KeyboardInterrupt

        run.handler.begin_step(run.collect(1))
        monkeypatch.setattr(run.store, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.handler.commit()
        monkeypatch.setattr(run.store, "commit", commit)
        run.handler.commit()
        assert run.handler.generation == 1
        expected = run.state()
    with running(tmp_path / "plain", Case()) as run:
        run.step(1)
        assert_equal(run.state(), expected)


def test_plan_is_a_snapshot(tmp_path: Path) -> None:
    """A step uses the hyperparameters and active parameters of begin_step, whatever changes afterwards."""
    with running(tmp_path / "plain", Case()) as run:
        run.step(1)
        expected = run.state()
    with running(tmp_path / "moved", Case(num_buffers=2)) as run:
        run.handler.begin_step(run.collect(1))
        for group in run.optimizer.param_groups:
            group["lr"] = 100.0
        run.arena.reset()
        run.handler.commit()
        assert_equal(run.state(), expected)


def test_hyperparameters_out_of_range(tmp_path: Path) -> None:
    """A bad hyperparameter is refused before the step begins. Groups without gradients are not checked."""
    with running(tmp_path, Case()) as run:
        before, plan = run.state(), run.collect(1)
        run.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ConfigError, match=r"AdamW\(lr=nan\)"):
            run.handler.begin_step(plan)
        assert not run.handler.in_flight
        assert_equal(run.state(), before)
        run.arena.active[[i for i, shape in enumerate(run.case.shapes) if shape[2] == 0]] = False
        run.handler.begin_step(plan)
        run.handler.commit()


def test_initial_state(tmp_path: Path) -> None:
    """Initially masters are the widened parameters, all else is zero, and the generation is 0."""
    for staged in (False, True):
        with running(tmp_path / str(staged), Case(dtype=torch.bfloat16, staged=staged, num_buffers=2)) as run:
            state = run.state()
            assert torch.equal(state["master"], torch.cat(run.partition).float())
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any() and not state["steps"].any()
            assert run.handler.generation == 0


def test_initialize_again_starts_over(tmp_path: Path) -> None:
    """initialize() on a trained store writes the initial state as the next generation."""
    with running(tmp_path, Case()) as run:
        first = run.state()
        run.steps(range(3))
        for tensor, values in zip(
            run.partition, first["partition"].split([t.numel() for t in run.partition]), strict=True
        ):
            tensor.copy_(values)
        run.handler.initialize(run.outputs())
        assert_equal(run.state(), first)
        assert run.handler.generation == 4


def test_one_parameter(tmp_path: Path) -> None:
    """Replacing some arrays of some parameters makes one new generation and leaves all else as it was."""
    with running(tmp_path, Case()) as run:
        run.steps(range(2))
        before = run.state()
        assert set(run.handler.state.read_parameter(3, names=["exp_avg"])) == {"exp_avg"}
        values = {name: np.arange(5_997, dtype=np.float32) + k for k, name in enumerate(("master", "exp_avg_sq"))}
        run.handler.state.modify({3: values, 0: {"exp_avg": np.array([7.0], np.float32)}})
        assert run.handler.generation == 3
        read = run.handler.state.read_parameter(3)
        assert np.array_equal(read["master"], values["master"])
        assert np.array_equal(read["exp_avg_sq"], values["exp_avg_sq"])
        expected = {name: tensor.clone() for name, tensor in before.items()}
        begin = run.layout.parameters[3].offset
        for name, array in values.items():
            expected[name][begin : begin + 5_997] = torch.from_numpy(array)
        expected["exp_avg"][0] = 7.0
        assert_equal(run.state(), expected)


def test_modified_state_is_stepped_from(tmp_path: Path) -> None:
    """A step after a modification starts from the replaced arrays, with one place or two."""
    for durability in ("none", "step"):
        with running(tmp_path / durability, Case(dtype=torch.bfloat16, durability=durability)) as run:
            run.step(1)
            run.handler.state.modify({1: {"master": np.zeros(12_000, np.float32)}})
            run.slice(1).zero_()
            run.step(3)
            state = run.handler.state.read_parameter(1)
            assert np.abs(state["master"]).max() < 0.05
            torch.testing.assert_close(run.slice(1), torch.from_numpy(state["master"]).bfloat16(), rtol=0, atol=0)


def test_kept_store_goes_on_in_another_handler(tmp_path: Path) -> None:
    """Another handler recovers a closed store and continues with the same bits."""
    with running(tmp_path / "whole", Case()) as run:
        run.steps(range(4))
        expected = run.state()
    run = Run(tmp_path / "halves", Case(num_devices=2))
    run.steps(range(2))
    partition = [tensor.clone() for tensor in run.partition]
    run.close(remove=False)
    with running(tmp_path / "halves", Case(num_devices=2), recover=True) as run:
        for tensor, values in zip(run.partition, partition, strict=True):
            tensor.copy_(values)
        assert run.handler.generation == 2
        run.steps(range(2, 4))
        assert_equal(run.state(), expected)


def test_close_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """close() stops the step, is idempotent, and leaves the last committed generation."""
    run = Run(tmp_path, Case())
    run.handler.begin_step(run.collect(1))
    run.close(remove=False)
    run.close(remove=False)
    store = recover_store([tmp_path / "disk0"])
    assert store.generation == 0
    store.close(remove=True)
    assert list((tmp_path / "disk0").iterdir()) == []


def test_counters_outlive_the_device(tmp_path: Path) -> None:
    """Traffic and memory can still be read after close(), for instance by a monitor."""
    run = Run(tmp_path, Case())
    run.step(1)
    traffic, ring = run.handler.traffic(), run.handler.ring_bytes
    run.close()
    assert run.handler.traffic().shared_read_bytes == traffic.shared_read_bytes
    assert run.handler.ring_bytes == ring


def test_power_durability_flushes_state_before_the_record(tmp_path: Path) -> None:
    """With durability power all files are flushed before the commit record is written."""
    with running(tmp_path, Case(durability="power", num_devices=2)) as run:
        events: list[str] = []
        commit_path = Path(run.store.manifest.folders[0]) / "default" / "rank-00000" / "commit.bin"
        before = commit_path.read_bytes()

        class Watched:
            def __init__(self, file: native.StateFile) -> None:
                self.path = file.path
                self.close = file.close
                self._sync = file.sync

            def sync(self) -> None:
                events.append("record too early" if commit_path.read_bytes() != before else "flushed")
                self._sync()

        run.store.files = tuple(Watched(file) for file in run.store.files)  # type: ignore[misc, assignment]
        run.step(1)
        assert events == ["flushed", "flushed"]
        assert commit_path.read_bytes() != before


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_an_incremental_step(tmp_path: Path, seed: int, staged: bool) -> None:
    """Tasklets opened one by one and completed later give the bits of an ordinary step."""
    random = np.random.default_rng(seed)
    case = Case(dtype=torch.bfloat16 if seed % 2 else torch.float32, staged=staged)
    with running(tmp_path / "plain", case) as run:
        run.step(1)
        expected = run.state()
    with running(tmp_path / "incremental", case.but(num_buffers=2)) as run:
        inject(run.device.pipeline, seed=seed, max_delay_us=1_000)
        plan = run.collect(1)
        run.handler.begin_incremental(replace(plan, active=np.ones_like(plan.active)))
        for tasklet in random.permutation(_complete_tasklets(run, plan.active)):
            run.handler.step.extend([int(tasklet)])
        assert not run.handler.step.is_complete
        assert run.handler.step.complete(plan)
        assert run.handler.step.is_complete
        run.handler.step.wait([1])
        run.handler.commit()
        assert_equal(run.state(), expected)


def test_a_completed_step_goes_on_with_what_is_used_first(tmp_path: Path) -> None:
    """Backward opens the last layers' tasklets first. On completion the order becomes that of first use."""
    with running(tmp_path, Case()) as run:
        plan = run.collect(1)
        uses = np.random.default_rng(0).permutation(len(run.layout.parameters))
        preferred: list[list[int]] = []
        run.device.prefer = preferred.append  # type: ignore[method-assign, assignment]
        run.handler.begin_incremental(replace(plan, active=np.ones_like(plan.active)))
        opened = _complete_tasklets(run, plan.active)[::-1]
        run.handler.step.extend(opened)
        assert run.handler.step.complete(replace(plan, first_uses=uses))
        run.handler.commit()
        tasklets = run.layout.in_order_of_use(range(len(run.layout.tasklets)), uses)
        listed = [*opened, *(tasklet for tasklet in tasklets if tasklet not in opened)]
        assert [listed[position] for position in preferred[0]] == [t for t in tasklets if t in listed]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("changed", ["a gradient scale", "a learning rate", "a parameter that turns out inactive"])
def test_a_step_that_began_otherwise_is_rolled_back(tmp_path: Path, changed: str, staged: bool) -> None:
    """An incremental step that does not fit the final plan is refused, rolled back and repeated exactly."""
    with running(tmp_path / "plain", Case()) as run:
        plan = run.collect(1)
        run.handler.begin_step(replace(plan, gradient_scale=0.125) if "scale" in changed else plan)
        run.handler.commit()
        expected = run.state()
    with running(tmp_path / "incremental", Case(num_buffers=2, staged=staged)) as run:
        before, plan = run.state(), run.collect(1)
        everything = replace(plan, active=np.ones_like(plan.active))
        if changed == "a learning rate":
            groups = [{**group, "lr": 1.0} for group in run.optimizer.param_groups]
            everything = replace(everything, groups=groups)
        final = replace(plan, gradient_scale=0.125) if "scale" in changed else plan
        run.handler.begin_incremental(everything)
        opened = range(len(run.layout.tasklets)) if "inactive" in changed else _complete_tasklets(run, plan.active)
        run.handler.step.extend(list(opened))
        assert not run.handler.step.complete(final)
        run.handler.roll_back()
        assert_equal(run.state(), before)
        run.handler.begin_step(final)
        run.handler.commit()
        assert_equal(run.state(), expected)


def _complete_tasklets(run: Run, active: Any) -> list[int]:
    """Return the tasklets whose parameters are all active."""
    missing = {
        tasklet
        for index, is_active in enumerate(active)
        if not is_active
        for tasklet in run.layout.tasklets_of(slice(index, index + 1))
    }
    complete = [tasklet for tasklet in range(len(run.layout.tasklets)) if tasklet not in missing]
    assert complete
    return complete
