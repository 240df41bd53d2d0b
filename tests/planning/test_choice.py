"""A plan says what fits, which settings make it fit, and what needs no storage; what is left open is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import transformers

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.planning.automatic import Open, choose, plan_in_words
from lightning_smartinfinity.planning.choice import (
    BUDGETS,
    Plan,
    Resources,
    _divided,
    alternatives,
    cheapest,
    make_plan,
    nearest,
)
from lightning_smartinfinity.planning.model import LlamaShape, ModelFigures, Passes, llama_shape
from lightning_smartinfinity.planning.needs import MemoryKind, Need, held_by_update, needs, state_bytes
from lightning_smartinfinity.planning.needs_table import needs_table
from lightning_smartinfinity.planning.pace import Range, assumed_rates, pace, seconds_beside_update, written_bytes
from lightning_smartinfinity.planning.training import OFFLOADS, Training

GB = 10**9
RATES = assumed_rates(on_gpu=True, cores=8)
TRAINING = Training()


def llama(billions: float, seq: int = 512) -> ModelFigures:
    shape = llama_shape(round(billions * GB))
    sizes = shape.sizes()
    return ModelFigures(
        name=f"{billions}B",
        trained=sizes,
        num_layers=shape.layers,
        largest_module=max(sizes),
        passes=shape.passes(batch=1, seq=seq),
    )


SEVEN = llama(7)
LARGE = Resources(host_memory=512 * GB, disk=10_000 * GB, cores=8, gpu_memory=80 * GB, num_gpus=1)


def need(plan: Plan, place: MemoryKind, phase: str) -> Need:
    return next(each for each in plan.needs if (each.place, each.phase) == (place, phase))


def owners(place: MemoryKind = MemoryKind.DISK, phase: str = "in all", **changed: Any) -> Mapping[str, int]:
    return need(make_plan(SEVEN, replace(TRAINING, **changed), LARGE, RATES), place, phase).owners


@pytest.mark.parametrize(
    ("machine", "changed", "broken"),
    [
        pytest.param({}, {}, [], id="all that a large machine has is enough"),
        pytest.param(
            {"host_memory": 24 * GB},
            {"build": "configure_model"},
            [(MemoryKind.HOST, "building", "whole model")],
            id="7B in fp32 are 28 GB: it is built in configure_model",
        ),
        pytest.param({"gpu_memory": 12 * GB}, {"offload_param": "cpu"}, None, id="13 GB of parameters"),
        pytest.param(
            {"gpu_memory": 12 * GB, "host_memory": 14 * GB}, {"offload_param": "nvme"}, None, id="in no memory"
        ),
        pytest.param(
            {"host_memory": 12 * GB},
            {"build": "configure_model", "gradient_budget": 4 * GB},
            None,
            id="gradients go to storage where they do not fit",
        ),
        pytest.param({"disk": 300 * GB}, {"state_format": "bf16"}, None, id="a small disk makes the state smaller"),
        pytest.param(
            {"disk": sum(owners(asynchronous=False).values())},
            {"asynchronous": False},
            [(MemoryKind.DISK, "in all", "optimizer state")],
            id="the third place is given up before anything else",
        ),
    ],
)
def test_what_does_not_fit_is_changed(
    machine: dict[str, int], changed: dict[str, Any], broken: list[Any] | None
) -> None:
    """The plan names what breaks; the cheapest that fits changes as little as it can."""
    small = replace(LARGE, **machine)
    asked, chosen = make_plan(SEVEN, TRAINING, small, RATES), cheapest(SEVEN, TRAINING, small, RATES)
    assert asked.fits == (not changed)
    if broken is not None:
        assert [(each.place, each.phase, each.largest) for each in asked.broken] == broken
        assert chosen is not None and chosen.training == replace(TRAINING, **changed)
    assert chosen is not None and chosen.fits and {name: getattr(chosen.training, name) for name in changed} == changed


@pytest.mark.parametrize(
    ("optimizer", "state_format"), [("AdamW", "int8"), ("SGD", "fp32")], ids=["int8 is smallest", "fp32 alone exists"]
)
def test_what_lacks_the_least_is_found(optimizer: str, state_format: str) -> None:
    """On a disk that is too small for every state no plan is made up, and the smallest that exists is nearest."""
    asked, small = replace(TRAINING, optimizer=optimizer), replace(LARGE, disk=GB)
    assert cheapest(SEVEN, asked, small, RATES) is None
    assert nearest(SEVEN, asked, small, RATES).training.state_format == state_format
    assert asked.suits("fp32") and asked.suits("int8") == asked.suits("int8_remainder") == (optimizer == "AdamW")
    assert not replace(asked, precision="32-true").suits("int8_remainder")


def test_what_lies_on_the_disk() -> None:
    """Checkpoints and the one being saved, a third place of the state to save it from, and gradients with a budget."""
    three, default = owners(save_top_k=3), owners()
    assert three["checkpoints"] == 3 * three["checkpoint being saved"] > 3 * 12 * SEVEN.numel
    assert "checkpoints" not in owners(save_top_k=0) and default["state being saved"] == default["optimizer state"] // 2
    without = [owners(**changed) for changed in ({"asynchronous": False}, {"save_top_k": 0}, {"places": 1})]
    assert not any("state being saved" in each for each in without)
    assert owners(gradient_budget=GB)["gradients"] == pytest.approx(14 * GB, rel=0.05) and "gradients" not in default
    # All of it is known to the byte, so that a full disk is not tight.
    plan = make_plan(SEVEN, TRAINING, replace(LARGE, disk=sum(default.values())), RATES)
    assert plan.fits and not plan.tight


def test_what_lies_in_memory() -> None:
    """Gradients of several micro-batches are in fp32; activations are doubled unless they were counted in fp32."""
    one, two = (owners(MemoryKind.HOST, "training", accumulate=n)["gradient_arena"] for n in (1, 2))
    assert two == 2 * one == 4 * SEVEN.numel
    assert owners(MemoryKind.HOST, "training", gradient_budget=4 * GB)["gradient_arena"] == 4 * GB
    assert owners(MemoryKind.HOST, "training")["gradient_ring"] == 64 << 20
    half, full = (owners(MemoryKind.GPU, "training", precision=of)["activations"] for of in ("bf16-mixed", "32-true"))
    assert full == 2 * half
    counted = replace(SEVEN, passes=replace(SEVEN.passes, item_bytes=4))
    plan = make_plan(counted, replace(TRAINING, precision="32-true"), LARGE, RATES)
    assert need(plan, MemoryKind.GPU, "training").owners["activations"] == half
    with pytest.raises(ConfigError, match="Compressed gradients are all in memory"):
        Training(gradient_budget=GB, compression=0.1)


def test_a_drive_lives_as_long_as_it_may_write() -> None:
    """A step writes 12 bytes per parameter; parameters on storage add 2, and gradients what is beyond their budget."""
    assert written_bytes(SEVEN, TRAINING) == pytest.approx(12 * SEVEN.numel, rel=0.01)
    assert written_bytes(SEVEN, replace(TRAINING, offload_param="nvme")) == pytest.approx(14 * SEVEN.numel, rel=0.01)
    spilled = written_bytes(SEVEN, replace(TRAINING, gradient_budget=4 * GB)) - written_bytes(SEVEN, TRAINING)
    assert spilled == pytest.approx(10 * GB, rel=0.05)
    found = pace(SEVEN, TRAINING, RATES, on_gpu=True)
    assert found is not None and found.life_in_steps(600) == pytest.approx(600e12 / written_bytes(SEVEN, TRAINING))


def test_too_little_gpu_memory_for_activations_divides_the_batch() -> None:
    """The tokens of a step stay the same."""
    asked = Training(batch=32, seq=2048)
    model = replace(SEVEN, passes=llama_shape(7 * GB).passes(batch=32, seq=2048))
    chosen = cheapest(model, asked, replace(LARGE, gpu_memory=24 * GB), RATES)
    assert chosen is not None and chosen.training.batch < 32
    assert chosen.training.tokens_per_step == asked.tokens_per_step


def test_a_tenth_of_the_memory_is_left_where_that_is_possible() -> None:
    """What takes more is chosen only if nothing else is there, and the plan names the tight place."""
    asked = make_plan(SEVEN, replace(TRAINING, build="configure_model"), LARGE, RATES)
    most = max(each.total for each in asked.needs if each.place is MemoryKind.HOST)
    for host_memory, is_tight in ((most * 100 // 95, True), (most * 100 // 89, False)):
        small = replace(LARGE, host_memory=host_memory)
        plan = make_plan(SEVEN, asked.training, small, RATES)
        assert plan.fits and {each.place for each in plan.tight} == ({MemoryKind.HOST} if is_tight else set())
        chosen = cheapest(SEVEN, asked.training, small, RATES)
        assert chosen is not None and not chosen.tight and (chosen.training == asked.training) is not is_tight
    # Of a small model nearly all is what the libraries take, with any settings.
    narrow = cheapest(llama(0.02), TRAINING, replace(LARGE, host_memory=23 * GB // 10), RATES)
    assert narrow is not None and narrow.fits and {each.place for each in narrow.tight} == {MemoryKind.HOST}
    assert narrow.training.state_format == TRAINING.state_format


def test_a_small_model_needs_no_storage() -> None:
    """AdamW takes 16 bytes per parameter: 1B fits into 24 GB with it, 7B only as LoRA."""
    resources = replace(LARGE, gpu_memory=24 * GB)
    fits = {one.name: one.fits for one in alternatives(llama(1.0), TRAINING, resources)}
    assert fits["AdamW in memory"] and fits["8-bit AdamW, weights in bf16"]
    seven = {one.name: one for one in alternatives(SEVEN, TRAINING, resources)}
    assert not seven["AdamW in memory"].fits and seven["LoRA with 1 % of the parameters"].fits
    assert seven["AdamW in memory"].total > 16 * SEVEN.numel
    many = {one.name: one for one in alternatives(SEVEN, TRAINING, replace(resources, num_gpus=8))}
    assert many["AdamW in memory (DDP)"].total > many["FSDP over 8 GPUs"].total > 2 * SEVEN.numel
    # Of a model of which little is trained parameters take 2 bytes, not 16.
    trained = SEVEN.trained[-2:-1]
    model = replace(SEVEN, trained=trained, frozen=(SEVEN.numel - sum(trained),), passes=None)
    assert alternatives(model, TRAINING, LARGE)[0].total == pytest.approx(2 * model.numel, rel=0.1)
    # SGD without momentum keeps one array less than AdamW's two, at least.
    adam, sgd = (alternatives(SEVEN, replace(TRAINING, optimizer=name), LARGE)[0] for name in ("AdamW", "SGD"))
    assert sgd.name == "SGD in memory"
    assert adam.owners["optimizer state"] == 8 * SEVEN.numel > sgd.owners["optimizer state"]


@pytest.mark.parametrize(("batch", "parts"), [(16, [16, 8, 4, 2, 1]), (15, [15, 5, 1]), (7, [7, 1]), (1, [1])])
def test_batches_are_divided_down_to_single_sequences(batch: int, parts: list[int]) -> None:
    """The tokens of a step stay the same, whatever the batch is."""
    divided = [*_divided(replace(TRAINING, batch=batch))]
    assert ([each.batch for each in divided], {each.batch * each.accumulate for each in divided}) == (parts, {batch})


def test_processes_on_a_cpu_share_its_cores() -> None:
    """Four processes compute four times as much on the same cores; each on a GPU of its own takes no longer."""
    for on_gpu, factor in ((False, 4), (True, 1)):
        one, four = (pace(SEVEN, replace(TRAINING, processes=n), RATES, on_gpu=on_gpu) for n in (1, 4))
        assert one is not None and four is not None and four.forward.low == pytest.approx(factor * one.forward.low)


def test_measured_rates_make_figures() -> None:
    """A step is at least as long as its update and its passes; measured rates make no range."""
    rates = replace(
        RATES,
        **{name: Range.exactly(getattr(RATES, name).low) for name in vars(RATES)},
    )
    found = pace(SEVEN, TRAINING, rates, on_gpu=True)
    assert found is not None and found.step.measured and found.step.low == pytest.approx(found.step.high)
    # Reads and writes of 12 bytes per parameter at 1 GB/s.
    assert found.update.low == pytest.approx(24 * SEVEN.numel / 1e9, rel=0.05)
    assert found.step.low >= max(found.update.low, found.forward.low + found.backward.low)
    unmeasured = pace(SEVEN, TRAINING, RATES, on_gpu=True)
    assert unmeasured is not None and not unmeasured.step.measured
    assert unmeasured.step.low < found.step.low <= unmeasured.step.high * 1.001


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"batch": 0}, "at least|from 1"),
        ({"precision": "fp8"}, "bf16-mixed"),
        ({"state_format": "int8_remainder", "precision": "32-true"}, "bf16"),
        ({"state_format": "int8", "optimizer": "SGD"}, "fp32"),
    ],
)
def test_impossible_trainings_are_refused(wrong: dict[str, object], remedy: str) -> None:
    """The error names the value and a remedy."""
    with pytest.raises(ConfigError, match=remedy):
        replace(TRAINING, **wrong)


PASSES = Passes(
    batch=2,
    seq=8,
    saved_bytes=1000,
    kept_bytes=200,
    peak_bytes=1500,
    logits_bytes=300,
    forward_flops=10.0,
    backward_flops=20.0,
)


@pytest.mark.parametrize("numel", [20e6, 124e6, 1.1e9, 7e9, 13e9, 70e9])
def test_a_number_becomes_a_shape_of_about_that_size(numel: float) -> None:
    """The shape has as many parameters as asked, within 8 %, and whole heads."""
    shape = llama_shape(round(numel))
    assert (sum(shape.sizes()), shape.width % shape.heads) == (pytest.approx(numel, rel=0.08), 0)


def test_sizes_are_those_of_transformers() -> None:
    """The formula lists the parameters of transformers' LlamaForCausalLM, in its order."""
    shape = LlamaShape(layers=2, width=64, inner=128, heads=1, vocab=100)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=1, vocab_size=100
    )
    assert shape.sizes() == tuple(param.numel() for param in transformers.LlamaForCausalLM(config).parameters())


def test_figures_of_a_model() -> None:
    """Passes are proportional to the batch; activation checkpoints keep inputs and one layer; frozen parameters count.

    With four layers, a layer's share of what is not kept is 200 bytes; the peak above what is saved is 500.
    """
    figures = ("saved_bytes", "peak_bytes", "logits_bytes", "forward_flops")
    six, one = ([getattr(PASSES.of_batch(batch), name) for name in figures] for batch in (6, 1))
    assert (six, one) == ([3000, 4500, 900, 30.0], [500, 750, 150, 5.0])
    taken = [PASSES.activation_bytes(checkpointing=on, num_layers=n) for on, n in ((False, 4), (True, 4), (True, 1))]
    assert (taken, PASSES.recomputed_flops(checkpointing=True)) == ([1200, 200 + 500 - 300, 200 + 800 - 300], 30.0)
    model = ModelFigures(name="m", trained=(3, 4), frozen=(5,))
    assert (model.numel, model.trained_numel, model.largest) == (12, 7, 5)
    shape = llama_shape(6_738_415_616)  # Meta published 32 layers and a width of 4096 for Llama 7B
    assert (shape.layers, shape.width) == (pytest.approx(32, abs=1), pytest.approx(4096, abs=128))


ASKED = Training(precision="bf16-true", build="configure_model", save_top_k=0, seq=2048)
DESKTOP = Resources(host_memory=58 * GB, disk=2_000 * GB, cores=16, gpu_memory=21 * GB, num_gpus=1)
SMALL, NARROW = replace(DESKTOP, host_memory=12 * GB, gpu_memory=12 * GB), replace(DESKTOP, disk=150 * GB)


# A model whose embedding no usual budget would hold.
EMBEDDING = 128256 * 8192
LAYER = [8192**2] * 2 + [8192 * 1024] * 2 + [8192 * 28672] * 3
WIDE = ModelFigures(name="m", trained=(EMBEDDING, *LAYER * 80, EMBEDDING), num_layers=80, largest_module=EMBEDDING)


@pytest.mark.parametrize(
    ("model", "machine", "offload"),
    [
        pytest.param(SEVEN, {"host_memory": 500 * GB, "gpu_memory": 80 * GB}, "none", id="a large machine"),
        pytest.param(llama(13), {"host_memory": 70 * GB}, "cpu", id="13B with 24 GB on the GPU and 80 GB of memory"),
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


ADAPTED = replace(SEVEN, trained=(3 << 20,), frozen=(3 << 26,) * 32, largest_module=3 << 26)


@pytest.mark.parametrize(
    ("model", "host_memory", "pinned", "words"),
    [
        pytest.param(SEVEN, 60 * GB, False, "False (trained parameters are pinned in any case)", id="all are trained"),
        pytest.param(ADAPTED, 60 * GB, True, "True (17.19 GB, of at most 30.00 GB)", id="within the budget"),
        pytest.param(ADAPTED, 30 * GB, False, "False (frozen parameters would pin 17.19 GB", id="beyond the budget"),
    ],
)
def test_frozen_parameters_are_pinned_within_a_budget(
    model: ModelFigures, host_memory: int, pinned: bool, words: str
) -> None:
    """Torch takes a power of two for each; trained ones are in one buffer, which DeepSpeed pins by itself."""
    resources = replace(DESKTOP, gpu_memory=8 * GB, host_memory=host_memory)
    plan = choose(model, ASKED, resources, RATES, Open())
    assert (plan.training.offload_param, plan.training.pin_memory) == ("cpu", pinned)
    assert f"pin_memory         {words}" in plan_in_words(model, ASKED, plan, resources, open_=Open())
    held = need(plan, MemoryKind.HOST, "training").owners
    assert held["parameters"] == (1 << 34 if model is SEVEN else (1 << 23) + (0 if pinned else 32 * (3 << 27)))


def test_no_other_combination_is_faster() -> None:
    """Every combination was tried, and none that fits is faster."""
    plan = choose(SEVEN, ASKED, SMALL, RATES, Open(cache_bytes=False))
    fitting = []
    for offload, held, gradients, bucket in product(OFFLOADS, (None, *BUDGETS), (None, *BUDGETS), (1 << 24, 1 << 20)):
        if held is None or offload == "nvme":
            one = replace(
                ASKED, offload_param=offload, parameter_budget=held, gradient_budget=gradients, bucket_numel=bucket
            )
            if make_plan(SEVEN, one, SMALL, RATES).fits:
                fitting.append(seconds_beside_update(SEVEN, one, RATES, on_gpu=True))
    assert plan.fits and seconds_beside_update(SEVEN, plan.training, RATES, on_gpu=True) == min(fitting)


GIVEN = replace(ASKED, offload_param="nvme", gradient_budget=3 * GB, parameter_budget=2 * GB)
NOTHING = Open(
    offload_param=False, parameter_budget=False, gradient_budget=False, cache_bytes=False, bucket_numel=False
)


@pytest.mark.parametrize(
    ("asked", "machine", "open_", "fits", "expected"),
    [
        pytest.param(ASKED, SMALL, Open(), True, {}, id="all is open"),
        pytest.param(ASKED, SMALL, Open(offload_param=False), False, {"offload_param": "none"}, id="the place is not"),
        pytest.param(GIVEN, SMALL, NOTHING, True, vars(GIVEN), id="nothing is open"),
        pytest.param(
            replace(ASKED, offload_param="nvme", parameter_budget=2 * GB),
            *(DESKTOP, Open(parameter_budget=False), True, {"offload_param": "nvme", "parameter_budget": 2 * GB}),
            id="a budget of parameters puts them on storage",
        ),
        pytest.param(
            replace(ASKED, offload_param="nvme", parameter_budget=60 * GB),
            *(SMALL, Open(parameter_budget=False), False, {"parameter_budget": 60 * GB}),
            id="a budget that does not fit is not another one",
        ),
        pytest.param(ASKED, NARROW, Open(), False, {}, id="no smaller state is allowed"),
        pytest.param(
            *(ASKED, NARROW, Open(state_formats=("bf16", "int8")), True, {"state_format": "bf16"}), id="one is allowed"
        ),
        pytest.param(
            *(ASKED, DESKTOP, Open(state_formats=("int8",)), True, {"state_format": "fp32"}), id="it is not needed"
        ),
        pytest.param(
            replace(ASKED, precision="16-true"),
            *(NARROW, Open(state_formats=("int8_remainder", "bf16")), True, {"state_format": "bf16"}),
            id="masters with a remainder need parameters in bf16",
        ),
    ],
)
def test_explicit_settings_win(
    asked: Training, machine: Resources, open_: Open, fits: bool, expected: dict[str, Any]
) -> None:
    """What is not open is never changed, though something else would fit; a smaller state only if it is allowed.

    The table names what is open.
    """
    plan = choose(SEVEN, asked, machine, RATES, open_)
    words = plan_in_words(SEVEN, asked, plan, machine, open_=open_)
    on_storage = plan.training.offload_param == "nvme"
    assert ("offload_param device             nvme" in words) == (on_storage and open_.offload_param)
    assert open_.parameter_budget or "parameter_bytes" not in words
    assert (plan.fits, {name: getattr(plan.training, name) for name in expected}) == (fits, expected)


def test_formats_that_do_not_exist_for_the_training_are_passed_over() -> None:
    """RMSprop has its state in fp32 alone, and the table says so."""
    asked, open_ = replace(ASKED, optimizer="RMSprop"), Open(state_formats=("int8_remainder", "bf16"))
    plan = choose(SEVEN, asked, NARROW, RATES, open_)
    assert not plan.fits and plan.training.state_format == "fp32"
    words = plan_in_words(SEVEN, asked, plan, NARROW, open_=open_)
    assert "passed over for RMSprop in bf16-true: int8_remainder, bf16" in words
    assert "passed over" not in plan_in_words(SEVEN, ASKED, plan, NARROW, open_=Open(state_formats=("bf16",)))


def test_memory_that_is_left_keeps_state() -> None:
    """A quarter of all memory stays free; the need says how much state is there, and the step reads less."""
    resources = replace(DESKTOP, host_memory=90 * GB, kept_free=30 * GB, gpu_memory=80 * GB)
    plan = choose(SEVEN, ASKED, resources, RATES, Open())
    host = {need.phase: need for need in plan.needs if need.place is MemoryKind.HOST}
    assert 0 < plan.training.cache_bytes < state_bytes(SEVEN, plan.training)
    assert host["training"].owners["state in memory"] == plan.training.cache_bytes
    assert 59 * GB < host["saving"].total <= 60 * GB
    without = replace(plan.training, cache_bytes=0)
    # Resident tasklets have slots of their own, for parameters of 2 bytes beside 12 of state.
    more, fewer = (held_by_update(SEVEN, one, on_gpu=True)["ring"] for one in (plan.training, without))
    assert more - fewer == pytest.approx(16 * (4 << 20) * 2 / 12, rel=0.01)
    fast, slow = (pace(SEVEN, one, RATES, on_gpu=True) for one in (plan.training, without))
    assert fast.update.high < slow.update.high
    # State in memory is written once per interval: here every tenth step, in every step, or never.
    often = replace(without, cache_bytes=state_bytes(SEVEN, without) // 2)
    shares = [({"interval": 10}, 0.55), ({"interval": None}, 1.0), ({"places": 1}, 0.5), ({"interval": 60.0}, 0.6)]
    for changed, share in shares:
        found = written_bytes(SEVEN, replace(often, **changed), step_seconds=12.0)
        assert found == pytest.approx(share * slow.written_bytes, rel=0.01)
    # Without room for a third place of the other state, it is written in every step.
    asked = replace(ASKED, interval=600.0)
    places = owners(cache_bytes=20 * GB, save_top_k=0, interval=600.0)
    small = replace(DESKTOP, host_memory=90 * GB, gpu_memory=80 * GB, disk=sum(places.values()) - 40 * GB)
    large = replace(small, disk=2 * small.disk)
    found = [choose(SEVEN, asked, one, RATES, Open()).training.interval for one in (small, large)]
    assert found == [None, 600.0]


def test_without_passes_the_roomiest_that_fits_is_taken() -> None:
    """The time of a step is unknown, and so are activations: parameters stay in memory as long as they fit."""
    unknown = replace(SEVEN, passes=None)
    rates = assumed_rates(on_gpu=False, cores=8)
    on_cpu = replace(DESKTOP, gpu_memory=None, num_gpus=0)
    asked = replace(ASKED, gradient_budget=None)
    assert choose(unknown, asked, on_cpu, rates, Open(cache_bytes=False)).training == asked
    tight = choose(unknown, asked, replace(on_cpu, host_memory=20 * GB), rates, Open(cache_bytes=False))
    assert tight.training == replace(asked, gradient_budget=BUDGETS[0])


def test_a_budget_of_parameters_bounds_what_is_in_memory() -> None:
    """On a GPU it bounds what is gathered, and in host memory the partitions that are read."""
    one = replace(ASKED, offload_param="nvme", parameter_budget=GB)
    found = {(need.place, need.phase): need.owners for need in needs(SEVEN, one, on_gpu=True)}
    assert found[MemoryKind.GPU, "training"]["gathered layers"] <= GB
    in_flight = found[MemoryKind.HOST, "training"]["parameter buffers"] - GB
    assert 8 << 20 < in_flight < 16 << 20  # by transfers of the update
    on_cpu = {need.phase: need.owners for need in needs(SEVEN, replace(one, processes=2), on_gpu=False)}
    assert on_cpu["training"]["parameter buffers"] == 2 * (GB + in_flight)
    assert "gathered layers" not in on_cpu["training"]


# ---- several machines share parameters, gradients and state, and pay for it on the network


PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
NODES = (1, 2, 4, 8, 16, 32, 64)
# Eight GPUs of 80 GB and eight drives of 4 TB, each of which reads 6 GB and writes 4 GB a second, on 400 Gbit/s.
MACHINE = Resources(
    host_memory=2 * 10**12, disk=32 * 10**12, cores=128, gpu_memory=80 * 10**9, num_gpus=8, drive_bytes=4 * 10**12
)
RATES_OF_A_NODE = replace(
    assumed_rates(on_gpu=True, cores=128),
    drive_read=Range.exactly(8 * 6e9),
    drive_write=Range.exactly(8 * 4e9),
    network=Range.exactly(50e9),
)
OF_A_NODE = Training(seq=2048, checkpointing=True, build="configure_model", precision="bf16-true", processes=8)


MODELS = [llama(8, seq=2048), llama(70, seq=2048), llama(405, seq=2048)]


def plan_of(model: ModelFigures, nodes: int) -> Plan:
    return make_plan(model, replace(OF_A_NODE, nodes=nodes), MACHINE, RATES_OF_A_NODE)


def most(plan: Plan, place: MemoryKind) -> int:
    return max(need.total for need in plan.needs if need.place is place)


def owner(plan: Plan, place: MemoryKind, name: str) -> int:
    return max(need.owners.get(name, 0) for need in plan.needs if need.place is place)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_machines_share_state_and_parameters(model: ModelFigures) -> None:
    """State, gradients and parameters of all machines stay the same, and no machine needs more than with fewer."""
    plans = [plan_of(model, nodes) for nodes in NODES]
    for nodes, plan in zip(NODES, plans, strict=True):
        for place, name in (
            (MemoryKind.DISK, "optimizer state"),
            (MemoryKind.DISK, "checkpoints"),
            (MemoryKind.HOST, "gradient_arena"),
            (MemoryKind.GPU, "parameters"),
        ):
            one = owner(plans[0], place, name)
            assert nodes * owner(plan, place, name) == pytest.approx(one, rel=0.02), (nodes, name)
    for place in MemoryKind:
        used = [most(plan, place) for plan in plans]
        assert used == sorted(used, reverse=True), place


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_network_carries_gathers_and_gradients(model: ModelFigures) -> None:
    """Two gathers and one reduction of all that other machines have, in 16 bit; each machine updates its part."""
    paces = [(nodes, plan_of(model, nodes).pace) for nodes in NODES]
    one = paces[0][1]
    for nodes, found in paces:
        assert found.network.low == pytest.approx(6 * model.numel * (nodes - 1) / nodes / 50e9)
        assert found.step.low >= found.network.low + found.backward.low
        assert nodes * found.update.low == pytest.approx(one.update.low, rel=0.1)
        assert found.tokens_per_step == nodes * one.tokens_per_step
        assert nodes * found.written_bytes == pytest.approx(one.written_bytes, rel=0.1)
    twice, once = (pace(model, replace(OF_A_NODE, nodes=4, accumulate=n), RATES_OF_A_NODE, on_gpu=True) for n in (2, 1))
    assert twice is not None and once is not None and twice.network.low == pytest.approx(2 * once.network.low)


def test_processes_on_other_machines_count_as_those_of_this_one() -> None:
    """What each GPU holds depends on the number of processes, wherever they are; a machine's memory on its own."""
    far, near = (
        {(need.place, need.phase): need for need in needs(MODELS[0], replace(OF_A_NODE, **how), on_gpu=True)}
        for how in ({"processes": 1, "nodes": 8}, {"processes": 8})
    )
    assert far[MemoryKind.GPU, "training"].owners == near[MemoryKind.GPU, "training"].owners
    assert 8 * far[MemoryKind.HOST, "training"].total == near[MemoryKind.HOST, "training"].total
    # FSDP counts the GPUs of all machines, too.
    assert "FSDP over 32 GPUs" in [each.name for each in alternatives(MODELS[1], replace(OF_A_NODE, nodes=4), MACHINE)]


def test_the_page_has_these_figures() -> None:
    """docs/planning.md shows what the planner says."""
    heads = ("model", "machines", "GPU GB", "host GB", "disk TB", "network s", "update s", "step s")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model, nodes in product(MODELS, NODES):
        plan = plan_of(model, nodes)
        sizes = [f"{most(plan, place) / 1e9:.1f}" for place in (MemoryKind.GPU, MemoryKind.HOST)]
        times = [f"{part.low:.2f} to {part.high:.2f}" for part in (plan.pace.update, plan.pace.step)]
        cells = [*sizes, f"{most(plan, MemoryKind.DISK) / 1e12:.2f}", f"{plan.pace.network.low:.2f}", *times]
        lines.append(f"| {model.name} | {nodes} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert f"\n{table}\n" in PAGE, table
