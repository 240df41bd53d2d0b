"""Several machines share parameters, gradients and state, and pay for it on the network."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lightning_smartinfinity.planning.choice import Plan, Resources, alternatives, make_plan
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import Place, needs
from lightning_smartinfinity.planning.pace import Range, assumed_rates, pace
from lightning_smartinfinity.planning.training import Training
from tests.planning.test_choice import llama

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
NODES = (1, 2, 4, 8, 16, 32, 64)
# Eight GPUs of 80 GB and eight drives of 4 TB, each of which reads 6 GB and writes 4 GB a second, on 400 Gbit/s.
MACHINE = Resources(
    host_memory=2 * 10**12, disk=32 * 10**12, cores=128, gpu_memory=80 * 10**9, num_gpus=8, drive_bytes=4 * 10**12
)
RATES = replace(
    assumed_rates(on_gpu=True, cores=128),
    drive_read=Range.exactly(8 * 6e9),
    drive_write=Range.exactly(8 * 4e9),
    network=Range.exactly(50e9),
)
TRAINING = Training(seq=2048, checkpointing=True, build="configure_model", precision="bf16-true", processes=8)


MODELS = [llama(8, seq=2048), llama(70, seq=2048), llama(405, seq=2048)]


def plan_of(model: ModelFigures, nodes: int) -> Plan:
    return make_plan(model, replace(TRAINING, nodes=nodes), MACHINE, RATES)


def most(plan: Plan, place: Place) -> int:
    return max(need.total for need in plan.needs if need.place is place)


def owner(plan: Plan, place: Place, name: str) -> int:
    return max(need.owners.get(name, 0) for need in plan.needs if need.place is place)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_machines_share_state_and_parameters(model: ModelFigures) -> None:
    """State, gradients and parameters of all machines stay the same, and no machine needs more than with fewer."""
    plans = [plan_of(model, nodes) for nodes in NODES]
    for nodes, plan in zip(NODES, plans, strict=True):
        for place, name in (
            (Place.DISK, "optimizer state"),
            (Place.DISK, "checkpoints"),
            (Place.HOST, "gradient_arena"),
            (Place.GPU, "parameters"),
        ):
            one = owner(plans[0], place, name)
            assert nodes * owner(plan, place, name) == pytest.approx(one, rel=0.02), (nodes, name)
    for place in Place:
        used = [most(plan, place) for plan in plans]
        assert used == sorted(used, reverse=True), place


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_network_carries_gathers_and_gradients(model: ModelFigures) -> None:
    """Two gathers and one reduction of all that other machines have, in 16 bit; each machine updates its part."""
    paces = [(nodes, plan_of(model, nodes).pace) for nodes in NODES]
    one = paces[0][1]
    for nodes, found in paces:
        assert found is not None and one is not None
        assert found.network.low == pytest.approx(6 * model.numel * (nodes - 1) / nodes / 50e9)
        assert found.step.low >= found.network.low + found.backward.low
        assert nodes * found.update.low == pytest.approx(one.update.low, rel=0.1)
        assert found.tokens_per_step == nodes * one.tokens_per_step
        assert nodes * found.written_bytes == pytest.approx(one.written_bytes, rel=0.1)
    twice, once = (pace(model, replace(TRAINING, nodes=4, accumulate=n), RATES, on_gpu=True) for n in (2, 1))
    assert twice is not None and once is not None and twice.network.low == pytest.approx(2 * once.network.low)


def test_processes_on_other_machines_count_as_those_of_this_one() -> None:
    """What each GPU holds depends on the number of processes, wherever they are; a machine's memory on its own."""
    far, near = (
        {(need.place, need.phase): need for need in needs(MODELS[0], replace(TRAINING, **how), on_gpu=True)}
        for how in ({"processes": 1, "nodes": 8}, {"processes": 8})
    )
    assert far[Place.GPU, "training"].owners == near[Place.GPU, "training"].owners
    assert 8 * far[Place.HOST, "training"].total == near[Place.HOST, "training"].total
    # FSDP counts the GPUs of all machines, too.
    names = [each.name for each in alternatives(MODELS[1], replace(TRAINING, nodes=4), MACHINE)]
    assert "FSDP over 32 GPUs" in names


def test_the_page_has_these_figures() -> None:
    """docs/planning.md shows what the planner says."""
    heads = ("model", "machines", "GPU GB", "host GB", "disk TB", "network s", "update s", "step s")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model, nodes in product(MODELS, NODES):
        plan = plan_of(model, nodes)
        assert plan.pace is not None
        sizes = [f"{most(plan, place) / 1e9:.1f}" for place in (Place.GPU, Place.HOST)]
        times = [f"{part.low:.2f} to {part.high:.2f}" for part in (plan.pace.update, plan.pace.step)]
        cells = [*sizes, f"{most(plan, Place.DISK) / 1e12:.2f}", f"{plan.pace.network.low:.2f}", *times]
        lines.append(f"| {model.name} | {nodes} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert f"\n{table}\n" in PAGE, table
