"""A partition with its store and handler, driven step by step beside torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_smartinfinity.devices import HostDevice, StorageDevice
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout.partition_layout import (
    ParameterSlice,
    PartitionLayout,
    build_layout,
    with_residents,
)
from lightning_smartinfinity.pipeline.layout.tensors import flat_of
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink
from lightning_smartinfinity.pipeline.parameters.partitions import HostPartition, ParameterMemory, TensorPartition
from lightning_smartinfinity.pipeline.rules import UpdateRule, rule_for
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.settings import GradientCodec, TransferConfig
from lightning_smartinfinity.storage import StoreDescription, create_store, recover_store
from tests.helpers.assertions import assert_equal

# (numel, padding, group, sub-group): tiny ones that share a tasklet, large ones that span several.
SHAPES = (
    (1, 0, 0, 0),
    (12_000, 0, 0, 0),
    (7, 0, 1, 0),
    (6_000, 3, 1, 1),
    (1_023, 0, 0, 1),
    (40, 40, 0, 1),
    (9_001, 0, 1, 2),
)


@dataclass(frozen=True)
class Case:
    """The settings of a run."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[dict[str, Any], dict[str, Any]] = field(
        default=({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "betas": (0.8, 0.99), "weight_decay": 0.0})
    )
    # Further arguments of the optimizer beside its groups.
    defaults: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    tasklet_bytes: int = 64 * 1024
    num_buffers: int = 3
    num_devices: int = 1
    staged: bool = False
    durability: str = "step"
    state_format: str = "fp32"
    compute_threads: int = 1
    cache_bytes: int = 0
    keep: bool = False
    compression: GradientCodec | None = None
    rank: int = 0
    job_id: bytes = bytes(16)  # so that two runs write the same bytes
    all_active: bool = False  # every parameter has a gradient at every step
    shapes: tuple[tuple[int, int, int, int], ...] = SHAPES

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def rule(self) -> UpdateRule:
        return rule_for(self.optimizer([torch.nn.Parameter(torch.zeros(1))], **self.defaults))


class Run:
    """A partition in memory, its state on storage, and the same training in torch beside it."""

    link: CudaLink | None = None

    def __init__(
        self, folder: Path, case: Case, *, recover: bool = False, device: Callable[[Run], StorageDevice] | None = None
    ) -> None:
        self.case = case
        self.layout = layout_of(case)
        self.partition = first_partition(self.layout, case)
        self.parameters = [torch.nn.Parameter(self.slice(i).float().clone()) for i in range(len(case.shapes))]
        self.optimizer = case.optimizer(
            [
                {
                    "params": [p for p, shape in zip(self.parameters, case.shapes, strict=True) if shape[2] == group],
                    **options,
                }
                for group, options in enumerate(case.options)
            ],
            **case.defaults,
        )
        self.arena = GradientArena(self.layout, dtype=case.gradient_dtype, link=self.link)
        self.compressed = None
        if case.compression is not None:
            self.compressed = CompressedGradients(
                self.layout, case.compression, gradients=self.arena.buffer, num_threads=case.compute_threads
            )
        self.folders = [folder / f"disk{index}" for index in range(case.num_devices)]
        self.device = (
            HostDevice(num_buffers=case.num_buffers, compute_threads=case.compute_threads)
            if device is None
            else device(self)
        )
        rule = rule_for(self.optimizer)
        if recover:
            self.store = recover_store(self.folders, rank=case.rank)
        else:
            self.store = create_store(
                self.folders,
                config=TransferConfig(
                    tasklet_bytes=case.tasklet_bytes,
                    num_buffers=case.num_buffers,
                    durability=case.durability,
                    keep=case.keep,
                ),
                rank=case.rank,
                world_size=case.rank + 1,
                job_id=case.job_id,
                extents=self.layout.extents,
                description=StoreDescription(
                    optimizer=rule.name,
                    arrays=rule.arrays,
                    parameters=tuple(
                        {**asdict(parameter), "dtype": str(case.dtype).removeprefix("torch.")}
                        for parameter in self.layout.parameters
                    ),
                ),
            )
        self.handler = TransferHandler(self.layout, self.store, self.device, rule=rule)
        self.handler.open()
        if not recover:
            self.initialize()
        if case.durability == "interval":
            self.handler.write_back()

    def initialize(self) -> None:
        """Write the first state, or start over from the parameters in memory."""
        self.handler.initialize(self.outputs(), first_values=self.case.rule.first_values(self.optimizer.defaults))

    def slice(self, parameter: int) -> torch.Tensor:
        """Return this parameter's part of the partition, without padding."""
        where = self.layout.parameters[parameter]
        begin = where.offset - self.layout.sub_groups[where.sub_group].offset
        return self.partition[where.sub_group][begin : begin + where.real_numel]

    def set_partition(self, values: Sequence[torch.Tensor]) -> None:
        """Replace the parameters of each sub-group."""
        for tensor, value in zip(self.partition, values, strict=True):
            tensor.copy_(value)

    def send(self, parameter: int, gradient: torch.Tensor) -> None:
        """Add a gradient to the arena."""
        self.arena.arrive(parameter, gradient)

    def outputs(self) -> ParameterMemory:
        if self.case.staged:
            return TensorPartition(self.partition)
        return HostPartition([flat_of(tensor) for tensor in self.partition])

    def collect(self, step: int) -> StepPlan:
        """Run the schedules, fill the arena and torch's gradients, and return the plan of this step."""
        schedule(self.optimizer, step)
        self.arena.reset()
        for index, parameter in enumerate(self.parameters):
            gradient = gradient_of(self.case, index, step)
            parameter.grad = gradient
            if gradient is not None:
                self.send(index, gradient * SCALE)
        return self.plan()

    def plan(self) -> StepPlan:
        """Return the plan of a step with the gradients that have arrived."""
        return StepPlan(
            active=self.arena.active,
            gradients=self.arena.flats(),
            outputs=self.outputs(),
            groups=self.optimizer.param_groups,
            gradient_scale=1 / SCALE,
            compressed=self.compressed,
            loss_scale=SCALE,
            arrived=self.arena.arrived,
            link=self.link,
        )

    def update(self, plan: StepPlan) -> None:
        """Do the step of a plan and commit it."""
        self.handler.begin_step(plan)
        self.handler.commit()

    def step(self, number: int) -> None:
        """Do one step and commit it."""
        self.update(self.collect(number))

    def roll_back_to(self, before: dict[str, torch.Tensor]) -> None:
        """Roll the step back, and assert that the state is the one before it."""
        self.handler.roll_back()
        assert_equal(self.state(), before)

    def steps(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.step(number)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the partition, the arrays, the step counts and the residual if there is one."""
        arrays = self.read()
        names = self.case.rule.arrays
        state = {name: torch.cat([arrays[group][k] for group in range(len(arrays))]) for k, name in enumerate(names)}
        residual = self.compressed.residual if self.compressed is not None else None
        return {
            **state,
            **({} if residual is None else {"residual": residual.clone()}),
            "partition": torch.cat(self.partition).clone(),
            "steps": torch.from_numpy(self.handler.steps),
        }

    def read(self) -> list[list[torch.Tensor]]:
        """Read the state's arrays, by sub-group and array."""
        flat = [torch.full((self.layout.numel,), -1.0) for _ in self.case.rule.arrays]

        def keep(window: Window) -> None:
            for array, values in zip(flat, window.arrays, strict=True):
                array[window.begin : window.end] = torch.from_numpy(values)

        self.handler.state.scan(keep)
        groups = self.layout.sub_groups
        return [[array[group.offset : group.offset + group.numel] for array in flat] for group in groups]

    def close(self, *, remove: bool = True) -> None:
        self.handler.close(remove=remove)
        self.arena.close()


SCALE = 4.0


@contextmanager
def running(
    folder: Path, case: Case, *, recover: bool = False, device: Callable[[Run], StorageDevice] | None = None
) -> Iterator[Run]:
    run = Run(folder, case, recover=recover, device=device)
    try:
        yield run
    finally:
        run.close()


def stored(run: Run) -> dict[str, torch.Tensor]:
    """Return the state on storage without the partition, which dies with its process."""
    return {name: tensor for name, tensor in run.state().items() if name != "partition"}


def after_steps(folder: Path, case: Case) -> dict[str, torch.Tensor]:
    """Return the state of a run after its first three steps."""
    with running(folder, case) as run:
        run.steps(range(3))
        return run.state()


def step_of_all(run: Run, number: int) -> None:
    """Do one step that takes every parameter for active, and commit it."""
    run.update(everything(run.collect(number)))


@contextmanager
def failing_elsewhere(error: BaseException) -> Iterator[None]:
    """Fail on another rank, or where the ranks agree, after this one has committed."""
    yield
    raise error


def layout_of(case: Case) -> PartitionLayout:
    layout = build_layout(
        [
            ParameterSlice(name=f"p{i}", numel=numel, real_numel=numel - padding, group=group, sub_group=sub_group)
            for i, (numel, padding, group, sub_group) in enumerate(case.shapes)
        ],
        tasklet_bytes=case.tasklet_bytes,
        num_arrays=len(case.rule.arrays),
        num_devices=case.num_devices,
        places_per_tasklet=1 if case.durability == "none" else 2,
        state_format=case.state_format,
    )
    return with_residents(layout, nbytes=case.cache_bytes, written_through=case.durability != "none")


def first_partition(layout: PartitionLayout, case: Case) -> list[torch.Tensor]:
    """Return each sub-group's parameters before training. Padding is zero."""
    generator = np.random.default_rng(1)
    partition = []
    for group in layout.sub_groups:
        tensor = torch.from_numpy(generator.standard_normal(group.numel, np.float32)).to(case.dtype)
        for where in layout.parameters[group.first : group.last]:
            begin = where.offset - group.offset
            tensor[begin + where.real_numel : begin + where.numel] = 0
        partition.append(tensor)
    return partition


def gradient_of(case: Case, parameter: int, step: int) -> torch.Tensor | None:
    """Return a gradient, or None for every third parameter, a different third at each step, unless all are active."""
    if (parameter + step) % 3 == 0 and not case.all_active:
        return None
    numel, padding = case.shapes[parameter][:2]
    return torch.from_numpy(np.random.default_rng((step, parameter)).standard_normal(numel - padding, np.float32))


def everything(plan: StepPlan) -> StepPlan:
    """Return what is known of a step before its last gradients have come."""
    return replace(plan, active=np.ones_like(plan.active))


def complete_tasklets(run: Run, plan: StepPlan) -> list[int]:
    """Return the tasklets whose parameters are all active."""
    inactive = [run.layout.tasklets_of(slice(index, index + 1)) for index in np.flatnonzero(~plan.active)]
    return sorted(set(range(len(run.layout.tasklets))).difference(*inactive))


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Change lr at every step and betas from the third step on, as schedulers do."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - 0.07 * (step % 5))
    first = optimizer.param_groups[0]
    if "betas" not in first:
        return
    first["betas"] = (0.85, 0.995) if step >= 2 else first.setdefault("initial_betas", first["betas"])
