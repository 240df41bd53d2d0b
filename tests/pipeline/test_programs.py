"""Programs of steps, failures, reads and writes: no bit depends on settings, places, or what went wrong on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_smartinfinity import StorageError, TopK
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory, TensorPartition
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.storage import StateStore
from tests.helpers.assertions import bits
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, complete_tasklets, everything, failing_elsewhere
from tests.pipeline.wandering import wander

ALL_STATE = 1 << 30
ADAGRAD = Case(
    optimizer=torch.optim.Adagrad,
    options=({"lr": 1e-2, "maximize": True}, {"lr": 3e-3, "weight_decay": 0.05}),
    defaults={"initial_accumulator_value": 0.1},
)
SGD = Case(
    optimizer=torch.optim.SGD, options=({"lr": 1e-2}, {"lr": 3e-3, "nesterov": True}), defaults={"momentum": 0.9}
)
RMSPROP = Case(
    optimizer=torch.optim.RMSprop, options=({"lr": 1e-2, "momentum": 0.9}, {"lr": 3e-3}), defaults={"centered": True}
)
BF16, FP16 = torch.bfloat16, torch.float16

# Each value of a setting is beside several values of each other one.
CASES = {
    "fp32": Case(num_devices=2),
    "fp32, large tasklets": Case(tasklet_bytes=1 << 20, num_buffers=2, durability="power"),
    "fp32, staged": Case(staged=True, num_devices=2, tasklet_bytes=70_000, num_buffers=16),
    "fp32, at intervals": Case(durability="interval", num_devices=2, cache_bytes=200_000),
    "bf16 of bf16, at intervals": Case(dtype=BF16, state_format="bf16", durability="interval", cache_bytes=ALL_STATE),
    "int8, at intervals": Case(
        dtype=FP16, state_format="int8", durability="interval", num_devices=3, cache_bytes=200_000, compute_threads=2
    ),
    "compressed, at intervals": Case(dtype=BF16, durability="interval", cache_bytes=200_000, compression=TopK(0.05)),
    "fp32, in one place": Case(durability="none", num_devices=2, cache_bytes=ALL_STATE),
    "bf16 parameters": Case(
        dtype=BF16, gradient_dtype=BF16, num_devices=3, compute_threads=2, durability="none", cache_bytes=200_000
    ),
    "fp16 parameters": Case(
        dtype=FP16, gradient_dtype=FP16, num_devices=3, num_buffers=8, compute_threads=2, cache_bytes=200_000
    ),
    "compressed": Case(dtype=BF16, num_devices=2, compression=TopK(0.05)),
    "compressed, staged": Case(staged=True, num_buffers=2, compression=TopK(0.05)),
    "bf16": Case(state_format="bf16", tasklet_bytes=100_000, num_buffers=2, cache_bytes=ALL_STATE),
    "bf16 of bf16": Case(dtype=BF16, state_format="bf16", durability="none", num_devices=3),
    "int8": Case(state_format="int8", staged=True, num_buffers=2, num_devices=2, durability="power"),
    "int8 of fp16": Case(dtype=FP16, state_format="int8", cache_bytes=200_000),
    "int8_remainder": Case(dtype=BF16, state_format="int8_remainder", staged=True, num_devices=3, cache_bytes=200_000),
    "int8_remainder, in one place": Case(dtype=BF16, state_format="int8_remainder", durability="none", num_devices=2),
    "adagrad": ADAGRAD.but(dtype=BF16, staged=True, num_buffers=2, num_devices=2),
    "sgd": SGD.but(num_devices=2, durability="none", cache_bytes=200_000),
    "rmsprop": RMSPROP.but(dtype=FP16, compute_threads=2, num_buffers=4, cache_bytes=ALL_STATE),
}


ELSEWHERE = partial(failing_elsewhere, StorageError("elsewhere", ""))


def numbers(begin: int, end: int) -> NDArray[np.float32]:
    """Return numbers that are exact in bf16."""
    return np.arange(begin, end, dtype=np.float32) % 200


def fill(window: Window) -> None:
    master, *others = window.arrays
    master[:] = numbers(window.begin, window.end)
    for number, array in enumerate(others):
        array[:] = master % 8 / 2**number  # so that RMSprop finds no negative variance


def gone(window: Window) -> None:
    """Fill or visit a window in vain."""
    window.arrays[0].fill(7)
    raise KeyError("gone")


class LatePartition(TensorPartition):
    """A partition that copies as late as its contract allows, namely when it is waited for."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._late: list[Callable[[], None]] = []

    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        put, copied = super().put, values.clone()  # the buffer may be filled again
        self._late.append(lambda: put(sub_group, offset, copied))

    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        get = super().get
        self._late.append(lambda: get(sub_group, offset, values))

    def synchronize(self) -> None:
        for copy in self._late:
            copy()
        self._late.clear()


class LateRun(Run):
    """A run whose staging buffer must not be filled again before it was copied."""

    def outputs(self) -> ParameterMemory:
        return LatePartition(self.partition) if self.case.staged else super().outputs()


class Pair:
    """A run, and the plainest run of the steps and changes that it commits.

    Args:
        folder: Of the storage of both.
        case: Of the run.
        seed: Of whatever is drawn: orders, faults, delays and places of tasklets.
    """

    def __init__(self, folder: Path, case: Case, seed: int) -> None:
        self.case, self.folder = case, folder / "run"
        self.random, self.number = np.random.default_rng(seed), 1
        plain = Case(
            optimizer=case.optimizer,
            options=case.options,
            defaults=case.defaults,
            dtype=case.dtype,
            gradient_dtype=case.gradient_dtype,
            state_format=case.state_format,
            compression=case.compression,
            tasklet_bytes=case.tasklet_bytes if case.compression else 1 << 20,  # whose largest gradients are sent
        )
        self.plain, self.run = Run(folder / "plain", plain), LateRun(self.folder, case)
        self.persisted = self.plain.state()
        self.disturb()

    def disturb(self, **faults: int) -> None:
        """Move tasklets at every step from now on, delay and cut transfers, and let one fail if that is wanted."""
        seed = int(self.random.integers(1 << 16))
        wander(self.run, seed=seed)
        inject(self.run.device.pipeline, seed=seed, max_delay_us=200, short_transfer_every=7, **faults)

    def both(self, action: Callable[[Run], object]) -> None:
        action(self.plain)
        action(self.run)

    def plan_next(self) -> StepPlan:
        """Do the next step in the plain run, and return its plan for the other one."""
        self.number += 1
        self.plain.step(self.number)
        return self.run.collect(self.number)

    @property
    def last_moment(self) -> str:
        """The name of an array that may be anything beside any others."""
        return self.case.rule.arrays[:3][-1]

    # ---- what is done

    def step(self) -> None:
        """Tasklets come in any order of first use. What changes after the beginning does not count."""
        uses = self.random.permutation(len(self.case.shapes))
        self.run.handler.begin_step(replace(self.plan_next(), first_uses=uses))
        for group in self.run.optimizer.param_groups:
            group["lr"] = 100.0
        self.run.arena.reset()
        for index in self.random.permutation(uses):
            self.run.handler.step.wait([int(index)])
            assert torch.equal(bits(self.run.slice(index)), bits(self.plain.slice(index)))
        self.run.handler.commit()

    def step_within_backward(self) -> None:
        """Tasklets are opened one by one, and completed later."""
        plan = self.plan_next()
        self.run.handler.begin_incremental(everything(plan))
        step = self.run.handler.step
        for tasklet in self.random.permutation(complete_tasklets(self.run, plan)):
            step.extend([int(tasklet)])
        assert not step.is_complete and step.complete(plan) and step.is_complete
        self.run.handler.commit()

    def modify(self) -> None:
        """Arrays of two parameters are replaced, and all else keeps every bit."""
        expected, name = self.plain.state(), self.last_moment
        changes: dict[int, dict[str, Any]] = {}
        for index in (0, 3):
            where = self.plain.layout.parameters[index]
            here = slice(where.offset, where.offset + where.real_numel)
            changes[index] = {
                "master": numbers(1, where.real_numel + 1),
                name: np.full(where.real_numel, 2, np.float32),
            }
            for array, values in changes[index].items():
                expected[array][here] = torch.from_numpy(values)
            expected["partition"][here] = torch.from_numpy(changes[index]["master"])
        for run in (self.plain, self.run):
            run.handler.state.modify(changes)
            for index, arrays in changes.items():
                run.slice(index).copy_(torch.from_numpy(arrays["master"]))
        assert_equal(self.plain.state(), expected)

    def modify_a_range(self) -> None:
        begin, name = int(self.random.integers(0, 20_000)), self.last_moment
        expected, values = self.plain.state(), self.random.random(5_000, np.float32)
        self.both(lambda run: run.handler.state.modify_range(begin, {name: values}))
        if self.case.state_format == "fp32":  # others round by blocks, of which the range cuts two
            expected[name][begin : begin + 5_000] = torch.from_numpy(values)
            assert_equal(self.plain.state(), expected)

    def replace(self) -> None:
        """All arrays and step counts become others, and the parameters with them."""
        steps = np.arange(len(self.case.shapes)) + 4
        self.both(lambda run: run.handler.state.replace(fill, steps=steps))
        for run in (self.plain, self.run):
            groups = run.layout.sub_groups
            run.set_partition([torch.from_numpy(numbers(each.offset, each.offset + each.numel)) for each in groups])
        found = self.plain.state()
        assert torch.equal(found["master"], torch.cat(self.plain.partition).float()) and found["steps"][3] == 7

    def write_back(self) -> None:
        """What was read as fp32 and is written again gives the same bits in every format."""
        state = self.plain.state()
        self.both(lambda run: self.load(run, state))
        assert_equal(self.plain.state(), state)

    def load(self, run: Run, state: dict[str, torch.Tensor]) -> None:
        def saved(window: Window) -> None:
            for array, name in zip(window.arrays, self.case.rule.arrays, strict=True):
                array[:] = state[name][window.begin : window.end].numpy()

        run.handler.state.replace(saved, steps=state["steps"].numpy())

    def initialize(self) -> None:
        """Masters are the widened parameters, and all else is as before the first step of torch's optimizer."""
        self.both(lambda run: run.initialize())
        state = self.plain.state()
        assert torch.equal(state["master"], state["partition"].float())
        first = self.case.defaults.get("initial_accumulator_value", 0)
        assert all((state[name] == first).all() for name in self.case.rule.arrays[1:]) and not state["steps"].any()

    def read(self) -> None:
        """Single parameters and ranges have what the whole state has."""
        state, begin, end = self.plain.state(), 777, 20_000
        found = self.run.handler.state.read_range(begin, end, names=self.case.rule.arrays)
        assert all(values.tobytes() == state[name][begin:end].numpy().tobytes() for name, values in found.items())
        for index, where in enumerate(self.run.layout.parameters):
            for name, values in self.run.handler.state.read_parameter(index).items():
                whole = state[name][where.offset : where.offset + where.real_numel]
                assert values.tobytes() == whole.numpy().tobytes(), (index, name)
        assert self.run.handler.state.read_parameter(3, names=["master"]).keys() == {"master"}

    def compare(self) -> None:
        state = self.run.state()
        assert_equal(state, self.plain.state())
        assert self.is_at_intervals or self.run.handler.generation == self.plain.handler.generation
        assert torch.equal(state["partition"], state["master"].to(self.case.dtype))

    def reopen(self) -> None:
        """Close the run, and recover it in another handler, which has the parameters of a checkpoint."""
        for _ in range(2):
            self.run.close(remove=False)
        self.run = LateRun(self.folder, self.case, recover=True)
        self.run.set_partition(self.plain.partition)
        self.disturb()

    # ---- what is written at intervals

    @property
    def is_at_intervals(self) -> bool:
        return self.case.durability == "interval"

    def persist(self) -> None:
        """Storage has the newest generation from now on, which the run keeps in memory as well."""
        self.run.handler.persist()
        assert self.run.handler.is_stored
        self.persisted = self.plain.state()

    def load_in_vain(self) -> None:
        """A load that fails before its first values arrive changes nothing, in memory neither."""

        def fails(window: Window) -> None:
            raise StorageError("There are no values.", "Let it go on.")

        with pytest.raises(StorageError, match="no values"):
            self.run.handler.state.replace(fails, steps=self.run.handler.steps)

    def persist_in_vain(self) -> None:
        """The generation on storage stays if a write fails, also after the records are written, or takes too long."""
        generation = self.run.handler.generation
        if self.run.handler.is_stored:
            return
        if not self.run.handler.is_spilled:
            with pytest.raises(StorageError, match="too long"):
                self.run.handler.persist(deadline=0)
            self.disturb(fail_write_at=0)
            with pytest.raises(StorageError, match=r"state\.bin"):
                self.run.handler.persist()
            self.disturb()
            assert self.run.handler.generation == generation
        with (
            mock.patch.object(StateStore, "_write_record", side_effect=StorageError("No record.", "Go on.")),
            pytest.raises(StorageError, match="No record"),
        ):
            self.run.handler.persist()
        assert not self.run.handler.is_stored and self.run.handler.is_spilled

    def lose(self) -> None:
        """What a kill leaves is the generation on storage; the plain run goes back to it."""
        self.run.close(remove=False)
        state, first = self.persisted, 0
        for each in self.plain.partition:
            each.copy_(state["partition"][first : first + each.numel()])
            first += each.numel()
        self.load(self.plain, state)
        self.reopen()
        self.compare()

    # ---- what fails, and changes nothing

    def commit_in_vain(self) -> None:
        self.roll_back(lambda step: self.run.handler.commit(together=ELSEWHERE))

    def fail_a_read(self) -> None:
        self.roll_back(lambda step: self.run.handler.finish(), fail_read_at=0)

    def fail_a_write(self) -> None:
        third = int(self.random.integers(3)) if len(self.run.layout.tasklets) > 3 else 0
        self.roll_back(lambda step: self.run.handler.finish(), fail_write_at=third)

    def roll_back(self, proceed: Callable[[Any], object], **faults: int) -> None:
        """Begin a step, let it proceed, and roll it back."""
        before = torch.cat(self.run.partition)
        self.disturb(**faults)
        self.run.handler.begin_step(self.run.collect(self.number + 100))
        with suppress(StorageError):
            proceed(self.run.handler.step)
        self.undo(before)
        self.disturb()

    def undo(self, before: torch.Tensor) -> None:
        with suppress(StorageError):  # a fault of a read is still pending if the step has read nothing
            self.run.handler.roll_back()
        if self.run.handler.in_flight:
            self.run.handler.roll_back()
        assert torch.equal(bits(torch.cat(self.run.partition)), bits(before))

    def guess_wrongly(self) -> None:
        """Steps that were begun with another scale or learning rate, or without an inactive parameter, are refused."""
        for guess in range(3):
            before, final = torch.cat(self.run.partition), self.run.collect(self.number + 100)
            begun, opened = everything(final), complete_tasklets(self.run, final)
            if guess == 0:
                final = replace(final, gradient_scale=0.125)
            elif guess == 1:
                begun = replace(begun, groups=[{**group, "lr": 1.0} for group in self.run.optimizer.param_groups])
            else:
                opened = list(range(len(self.run.layout.tasklets)))
            self.run.handler.begin_incremental(begun)
            self.run.handler.step.extend(opened)
            assert not (opened and self.run.handler.step.complete(final))
            self.undo(before)

    def change_in_vain(self) -> None:
        """Changes that fail here or on another rank, and reads that fail, leave the state alone."""
        state, steps, name = self.run.handler.state, self.run.handler.steps + 7, self.last_moment
        ones = np.ones(12_000, np.float32)
        attempts: list[Callable[[], object]] = [
            lambda: state.modify({1: {name: ones}}, together=ELSEWHERE),
            lambda: state.modify_range(5, {name: ones}, together=ELSEWHERE),
            lambda: state.replace(fill, steps=steps, together=ELSEWHERE),
            lambda: state.replace(gone, steps=steps),
            lambda: state.scan(gone),
        ]
        for attempt in attempts:
            with pytest.raises((StorageError, KeyError), match=r"elsewhere|gone"):
                attempt()
        if self.case.cache_bytes == 0:
            self.disturb(fail_read_at=0)
            with pytest.raises(StorageError, match=r"state\.bin"):
                state.scan(print)
        for attempt in (lambda: state.modify({1: {name: ones}}), lambda: state.replace(fill, steps=steps)):
            self.disturb(fail_write_at=0)
            with pytest.raises(StorageError, match=r"state\.bin"):
                attempt()
        self.disturb()

    def reopen_within_a_step(self) -> None:
        self.run.handler.begin_step(self.run.collect(self.number + 100))
        self.reopen()

    def reopen_after_a_commit_in_vain(self) -> None:
        self.run.handler.begin_step(self.run.collect(self.number + 100))
        with pytest.raises(StorageError, match="elsewhere"):
            self.run.handler.commit(together=ELSEWHERE)
        self.reopen()


DONE: list[Callable[[Pair], None]] = [
    *(3 * [Pair.step]),
    *(2 * [Pair.compare]),
    Pair.modify,
    Pair.modify_a_range,
    Pair.replace,
    Pair.write_back,
    Pair.initialize,
    Pair.read,
]
ROLLED_BACK: list[Callable[[Pair], None]] = [
    *(2 * [Pair.step_within_backward]),
    # Steps that are stopped at once, after a part, and after all.
    *(
        partial(Pair.roll_back, proceed=proceed)
        for proceed in (lambda step: None, lambda step: step.wait([0]), lambda step: step.wait())
    ),
    Pair.commit_in_vain,
    Pair.fail_a_read,
    Pair.fail_a_write,
    Pair.guess_wrongly,
    Pair.change_in_vain,
]
AT_INTERVALS: list[Callable[[Pair], None]] = [
    *(4 * [Pair.step, Pair.persist]),
    *(2 * [Pair.step_within_backward, Pair.persist_in_vain, Pair.load_in_vain]),
]
REOPENED = [Pair.reopen, Pair.reopen_within_a_step, Pair.reopen_after_a_commit_in_vain]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_any_program_gives_the_same_bits(tmp_path: Path, name: str, seed: int) -> None:
    """Only what was committed counts. It has the bits of plain steps in memory, through the cache and on storage."""
    case = CASES[name]
    is_durable, keeps_residual = case.durability in ("step", "power"), case.compression is not None
    events = DONE + ROLLED_BACK * is_durable + REOPENED * (is_durable and not keeps_residual)
    if case.durability == "interval":
        events += AT_INTERVALS + [Pair.lose] * (not keeps_residual)
    random.Random(seed).shuffle(events)
    pair = Pair(tmp_path, case, seed)
    try:
        for happen in events:
            happen(pair)
        if is_durable and not keeps_residual:  # read the files, without the cache
            pair.case = case.but(cache_bytes=0)
            pair.reopen()
        pair.compare()
        assert not keeps_residual or pair.run.state()["residual"].any()
    finally:
        pair.both(Run.close)
