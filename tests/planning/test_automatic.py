"""What a user has left open is chosen: the fastest combination that fits, the roomiest of equally fast ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from lightning_smartinfinity.planning.automatic import Open, choose, plan_in_words
from lightning_smartinfinity.planning.choice import BUDGETS, Resources, make_plan
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import Place, needs, state_bytes
from lightning_smartinfinity.planning.needs_table import needs_table
from lightning_smartinfinity.planning.pace import assumed_rates, pace, seconds_beside_update
from lightning_smartinfinity.planning.training import OFFLOADS, Training
from tests.planning.test_choice import GB, RATES, SEVEN, llama

ASKED = Training(precision="bf16-true", build="configure_model", save_top_k=0, seq=2048)
DESKTOP = Resources(host_memory=58 * GB, disk=2_000 * GB, cores=16, gpu_memory=21 * GB, num_gpus=1)


# A model whose embedding no usual budget would hold.
EMBEDDING = 128256 * 8192
LAYER = [8192**2] * 2 + [8192 * 1024] * 2 + [8192 * 28672] * 3
WIDE = ModelFigures(name="m", trained=(EMBEDDING, *LAYER * 80, EMBEDDING), num_layers=80, largest_module=EMBEDDING)


@pytest.mark.parametrize(
    ("model", "machine", "offload"),
    [
        pytest.param(SEVEN, {"host_memory": 500 * GB, "gpu_memory": 80 * GB}, "none", id="a large machine"),
        pytest.param(llama(13), {}, "cpu", id="13B with 24 GB on the GPU and 64 GB of memory"),
        pytest.param(llama(13), {"host_memory": 25 * GB}, None, id="13B with 32 GB of memory"),
        pytest.param(llama(70), {"disk": 4_000 * GB}, "nvme", id="70B"),
        pytest.param(WIDE, {"host_memory": 16 * GB, "disk": 6_000 * GB, "gpu_memory": 24 * GB}, "nvme", id="embedding"),
    ],
)
def test_what_trains_on_a_desktop(model: ModelFigures, machine: dict[str, int], offload: str | None) -> None:
    """Neither parameters nor gradients have to fit into memory; the table has each setting as a user writes it."""
    resources = replace(DESKTOP, **machine)
    plan = choose(model, ASKED, resources, RATES, Open())
    assert plan.fits
    assert offload is None or plan.training.offload_param == offload
    if offload == "none":  # nothing but the state in memory changes
        assert replace(plan.training, cache_bytes=0) == ASKED
    elif offload != "cpu":
        assert plan.training.offload_param == "nvme" or plan.training.gradient_budget is not None
    words = plan_in_words(model, ASKED, plan, resources, open_=Open())
    assert words.splitlines()[-len(plan.needs) - 1 :] == [*needs_table(plan, resources)]
    assert "B parameters, 1 x 2048 tokens" in words and "GPU memory   training" in words
    assert ("offload_param device             nvme" in words) == (plan.training.offload_param == "nvme")
    assert ("transfer gradient_bytes" in words) == (plan.training.gradient_budget is not None)


@pytest.mark.parametrize("host", [12, 30])
def test_no_other_combination_is_faster(host: int) -> None:
    """Every combination was tried: none that fits is faster, and if none fits, none does."""
    resources = replace(DESKTOP, host_memory=host * GB, gpu_memory=12 * GB)
    plan = choose(SEVEN, ASKED, resources, RATES, Open(cache_bytes=False))
    fitting = []
    for offload, held, gradients, bucket in product(OFFLOADS, (None, *BUDGETS), (None, *BUDGETS), (1 << 24, 1 << 20)):
        if held is None or offload == "nvme":
            one = replace(
                ASKED, offload_param=offload, parameter_budget=held, gradient_budget=gradients, bucket_numel=bucket
            )
            if make_plan(SEVEN, one, resources, RATES).fits:
                fitting.append(seconds_beside_update(SEVEN, one, RATES, on_gpu=True))
    assert plan.fits == bool(fitting)
    if fitting:
        assert seconds_beside_update(SEVEN, plan.training, RATES, on_gpu=True) == min(fitting)


def test_explicit_settings_win() -> None:
    """What is not open is never changed, though something else would fit; a smaller state only if it is allowed."""
    small = replace(DESKTOP, host_memory=12 * GB, gpu_memory=12 * GB)
    assert choose(SEVEN, ASKED, small, RATES, Open()).fits
    closed = choose(SEVEN, ASKED, small, RATES, Open(offload_param=False))
    assert not closed.fits and closed.training.offload_param == "none"
    given = replace(ASKED, offload_param="nvme", gradient_budget=3 * GB, parameter_budget=2 * GB)
    nothing = Open(
        offload_param=False, parameter_budget=False, gradient_budget=False, cache_bytes=False, bucket_numel=False
    )
    plan = choose(SEVEN, given, small, RATES, nothing)
    assert plan.fits and plan.training == given
    narrow = replace(DESKTOP, disk=150 * GB)
    assert not choose(SEVEN, ASKED, narrow, RATES, Open()).fits
    plan = choose(SEVEN, ASKED, narrow, RATES, Open(state_formats=("bf16", "int8")))
    assert plan.fits and plan.training.state_format == "bf16"
    assert choose(SEVEN, ASKED, DESKTOP, RATES, Open(state_formats=("int8",))).training.state_format == "fp32"


def test_formats_that_do_not_exist_for_the_training_are_passed_over() -> None:
    """RMSprop has its state in fp32 alone, and masters with a remainder need parameters in bf16; the table says so."""
    small, open_ = replace(DESKTOP, disk=150 * GB), Open(state_formats=("int8_remainder", "bf16"))
    asked = replace(ASKED, optimizer="RMSprop")
    plan = choose(SEVEN, asked, small, RATES, open_)
    assert not plan.fits and plan.training.state_format == "fp32"
    words = plan_in_words(SEVEN, asked, plan, small, open_=open_)
    assert "passed over for RMSprop in bf16-true: int8_remainder, bf16" in words
    plan = choose(SEVEN, replace(ASKED, precision="16-true"), small, RATES, open_)
    assert plan.fits and plan.training.state_format == "bf16"
    assert "passed over" not in plan_in_words(SEVEN, ASKED, plan, small, open_=Open(state_formats=("bf16",)))


def test_a_budget_of_parameters_puts_them_on_storage() -> None:
    """Nothing else is tried where the budget is given and the place is open, and the table names the place."""
    asked = replace(ASKED, offload_param="nvme", parameter_budget=2 * GB)
    plan = choose(SEVEN, asked, DESKTOP, RATES, Open(parameter_budget=False))
    assert plan.fits
    assert (plan.training.offload_param, plan.training.parameter_budget) == ("nvme", 2 * GB)
    words = plan_in_words(SEVEN, asked, plan, DESKTOP, open_=Open(parameter_budget=False))
    assert "offload_param device             nvme" in words and "parameter_bytes" not in words


def test_memory_that_is_left_keeps_state() -> None:
    """A quarter of it stays free; the need says how much state is there, and the step reads less."""
    plan = choose(SEVEN, ASKED, replace(DESKTOP, host_memory=90 * GB, gpu_memory=80 * GB), RATES, Open())
    host = {need.phase: need for need in plan.needs if need.place is Place.HOST}
    assert 0 < plan.training.cache_bytes < state_bytes(SEVEN, plan.training)
    assert host["training"].owners["state in memory"] == plan.training.cache_bytes
    assert 60 * GB < host["saving"].total <= 90 * GB * 3 // 4
    without = replace(plan.training, cache_bytes=0)
    fast, slow = (pace(SEVEN, one, RATES, on_gpu=True) for one in (plan.training, without))
    assert fast is not None and slow is not None
    assert fast.update.high < slow.update.high and fast.written_bytes == slow.written_bytes


def test_without_passes_the_roomiest_that_fits_is_taken() -> None:
    """The time of a step is unknown, and so are activations: parameters stay in memory as long as they fit."""
    unknown = replace(SEVEN, passes=None)
    rates = assumed_rates(on_gpu=False, cores=8)
    on_cpu = replace(DESKTOP, gpu_memory=None, num_gpus=0)
    asked = replace(ASKED, gradient_budget=None)
    roomy = choose(unknown, asked, on_cpu, rates, Open(cache_bytes=False))
    assert roomy.training == asked
    tight = choose(unknown, asked, replace(on_cpu, host_memory=20 * GB), rates, Open(cache_bytes=False))
    assert tight.training == replace(asked, gradient_budget=BUDGETS[0])


def test_a_budget_of_parameters_bounds_what_is_in_memory() -> None:
    """On a GPU it bounds what is gathered, and in host memory the partitions that are read."""
    one = replace(ASKED, offload_param="nvme", parameter_budget=GB)
    found = {(need.place, need.phase): need.owners for need in needs(SEVEN, one, on_gpu=True)}
    assert found[Place.GPU, "training"]["gathered layers"] <= GB
    in_flight = found[Place.HOST, "training"]["parameter buffers"] - GB
    assert 8 << 20 < in_flight < 16 << 20  # by transfers of the update
    on_cpu = {need.phase: need.owners for need in needs(SEVEN, replace(one, processes=2), on_gpu=False)}
    assert on_cpu["training"]["parameter buffers"] == 2 * (GB + in_flight)
    assert "gathered layers" not in on_cpu["training"]
