"""A plan says what fits, which settings make it fit, and what needs no storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.planning.choice import (
    Plan,
    Resources,
    _divided,
    alternatives,
    cheapest,
    make_plan,
    nearest,
)
from lightning_smartinfinity.planning.model import ModelFigures, llama_shape
from lightning_smartinfinity.planning.needs import Need, Place
from lightning_smartinfinity.planning.pace import Range, assumed_rates, pace, written_bytes
from lightning_smartinfinity.planning.training import Training

GB = 10**9
RATES = assumed_rates(on_gpu=True, cores=8)
TRAINING = Training()


def llama(billions: float) -> ModelFigures:
    shape = llama_shape(round(billions * GB))
    sizes = shape.sizes()
    return ModelFigures(
        name=f"{billions}B",
        trained=sizes,
        num_layers=shape.layers,
        largest_module=max(sizes),
        passes=shape.passes(batch=1, seq=512),
    )


SEVEN = llama(7)
LARGE = Resources(host_memory=512 * GB, disk=10_000 * GB, cores=8, gpu_memory=80 * GB, num_gpus=1)


def need(plan: Plan, place: Place, phase: str) -> Need:
    return next(each for each in plan.needs if (each.place, each.phase) == (place, phase))


def test_all_that_a_large_machine_has_is_enough() -> None:
    """A plan that fits is chosen as it was asked."""
    plan = make_plan(SEVEN, TRAINING, LARGE, RATES)
    assert plan.fits
    chosen = cheapest(SEVEN, TRAINING, LARGE, RATES)
    assert chosen is not None and chosen.training == TRAINING


def test_too_little_host_memory_moves_the_build() -> None:
    """A model of 7B is 28 GB in fp32: with less, it is built in configure_model, and the plan names what broke."""
    small = replace(LARGE, host_memory=24 * GB)
    asked = make_plan(SEVEN, TRAINING, small, RATES)
    assert [(each.place, each.phase, each.largest) for each in asked.broken] == [
        (Place.HOST, "building", "whole model")
    ]
    chosen = cheapest(SEVEN, TRAINING, small, RATES)
    assert chosen is not None and chosen.fits
    assert chosen.training == replace(TRAINING, build="configure_model")


def test_too_little_gpu_memory_moves_the_parameters() -> None:
    """13 GB of parameters do not fit on a GPU of 12 GB: they lie in host memory, or on storage if that is small."""
    small = replace(LARGE, gpu_memory=12 * GB)
    chosen = cheapest(SEVEN, TRAINING, small, RATES)
    assert chosen is not None and chosen.training.offload_param == "cpu"
    chosen = cheapest(SEVEN, TRAINING, replace(small, host_memory=14 * GB), RATES)
    assert chosen is not None and chosen.training.offload_param == "nvme"


def test_too_little_gpu_memory_for_activations_divides_the_batch() -> None:
    """The tokens of a step stay the same."""
    asked = Training(batch=32, seq=2048)
    model = replace(SEVEN, passes=llama_shape(7 * GB).passes(batch=32, seq=2048))
    chosen = cheapest(model, asked, replace(LARGE, gpu_memory=24 * GB), RATES)
    assert chosen is not None and chosen.training.batch < 32
    assert chosen.training.tokens_per_step == asked.tokens_per_step


def test_a_small_disk_makes_the_state_smaller() -> None:
    """Both places of fp32 state and two checkpoints take 48 bytes per parameter; int8 state takes 12 instead of 24."""
    small = replace(LARGE, disk=300 * GB)
    chosen = cheapest(SEVEN, TRAINING, small, RATES)
    assert chosen is not None and chosen.training.state_format != "fp32"


def test_a_tenth_of_the_memory_is_left_where_that_is_possible() -> None:
    """What takes more is chosen only if nothing else is there, and the plan names the tight place."""
    asked = make_plan(SEVEN, replace(TRAINING, build="configure_model"), LARGE, RATES)
    most = max(each.total for each in asked.needs if each.place is Place.HOST)
    for host_memory, is_tight in ((most * 100 // 95, True), (most * 100 // 89, False)):
        small = replace(LARGE, host_memory=host_memory)
        plan = make_plan(SEVEN, asked.training, small, RATES)
        assert plan.fits and {each.place for each in plan.tight} == ({Place.HOST} if is_tight else set())
        chosen = cheapest(SEVEN, asked.training, small, RATES)
        assert chosen is not None and not chosen.tight
        assert (chosen.training == asked.training) is not is_tight
    # Of a small model nearly all is what the libraries take, with any settings.
    narrow = cheapest(llama(0.02), TRAINING, replace(LARGE, host_memory=23 * GB // 10), RATES)
    assert narrow is not None and narrow.fits and {each.place for each in narrow.tight} == {Place.HOST}
    assert narrow.training.state_format == TRAINING.state_format


def test_a_full_disk_is_not_tight() -> None:
    """What lies there is known to the byte."""
    disk = sum(owners_on_disk().values())
    plan = make_plan(SEVEN, TRAINING, replace(LARGE, disk=disk), RATES)
    assert plan.fits and not plan.tight


def test_formats_that_the_optimizer_lacks_are_not_tried() -> None:
    """State of SGD exists in fp32 alone, as int8_remainder does with parameters in bf16 alone."""
    sgd = replace(TRAINING, optimizer="SGD")
    assert nearest(SEVEN, sgd, replace(LARGE, disk=GB), RATES).training.state_format == "fp32"
    assert sgd.suits("fp32") and not sgd.suits("int8") and TRAINING.suits("int8_remainder")
    assert not replace(TRAINING, precision="32-true").suits("int8_remainder")


def test_nothing_fits_on_a_tiny_machine() -> None:
    """No plan is made up."""
    assert cheapest(SEVEN, TRAINING, replace(LARGE, disk=GB), RATES) is None


def test_gradients_of_several_micro_batches_take_twice_the_memory() -> None:
    """They are added in fp32."""
    one = need(make_plan(SEVEN, TRAINING, LARGE, RATES), Place.HOST, "training")
    two = need(make_plan(SEVEN, replace(TRAINING, accumulate=2), LARGE, RATES), Place.HOST, "training")
    assert two.owners["gradient_arena"] == 2 * one.owners["gradient_arena"] == 4 * SEVEN.numel


def test_activations_in_fp32_take_twice_the_memory() -> None:
    """A plan doubles activations that were counted in 16 bit for a training in fp32, but not for one in 16 bit."""
    plans = [make_plan(SEVEN, replace(TRAINING, precision=of), LARGE, RATES) for of in ("bf16-mixed", "32-true")]
    half, full = (need(plan, Place.GPU, "training").owners["activations"] for plan in plans)
    assert full == 2 * half
    counted = replace(SEVEN, passes=replace(SEVEN.passes, item_bytes=4))
    plan = make_plan(counted, replace(TRAINING, precision="32-true"), LARGE, RATES)
    assert need(plan, Place.GPU, "training").owners["activations"] == half


def test_processes_share_parameters_and_state() -> None:
    """Each of four processes holds a fourth on its GPU; disk and host memory are those of all."""
    one, four = (make_plan(SEVEN, replace(TRAINING, processes=n), LARGE, RATES) for n in (1, 4))
    held = [need(plan, Place.GPU, "training").owners["parameters"] for plan in (one, four)]
    assert held[1] == pytest.approx(held[0] / 4, rel=1e-6)
    states = [need(plan, Place.DISK, "in all").owners["optimizer state"] for plan in (one, four)]
    assert states[1] == pytest.approx(states[0], rel=0.001)


def test_checkpoints_count_with_the_one_being_saved() -> None:
    """While three are kept, a fourth exists while it is saved; with none, there are no checkpoints."""
    three = need(make_plan(SEVEN, replace(TRAINING, save_top_k=3), LARGE, RATES), Place.DISK, "in all").owners
    assert three["checkpoints"] == 3 * three["checkpoint being saved"] > 3 * 12 * SEVEN.numel
    none = need(make_plan(SEVEN, replace(TRAINING, save_top_k=0), LARGE, RATES), Place.DISK, "in all").owners
    assert "checkpoints" not in none


def owners_on_disk(**changed: Any) -> Mapping[str, int]:
    return need(make_plan(SEVEN, replace(TRAINING, **changed), LARGE, RATES), Place.DISK, "in all").owners


def test_state_has_a_third_place_to_be_saved_from() -> None:
    """It takes half as much as the other two, unless nothing is saved or training waits for its checkpoints."""
    owners = owners_on_disk()
    assert owners["state being saved"] == owners["optimizer state"] // 2
    for changed in ({"asynchronous": False}, {"save_top_k": 0}, {"places": 1}):
        assert "state being saved" not in owners_on_disk(**changed)


def test_too_little_disk_lets_training_wait_for_its_checkpoints() -> None:
    """The third place is given up before anything else is changed."""
    small = replace(LARGE, disk=sum(owners_on_disk(asynchronous=False).values()))
    asked = make_plan(SEVEN, TRAINING, small, RATES)
    assert [each.place for each in asked.broken] == [Place.DISK]
    chosen = cheapest(SEVEN, TRAINING, small, RATES)
    assert chosen is not None and chosen.training == replace(TRAINING, asynchronous=False)


def test_gradients_go_to_storage_where_they_do_not_fit() -> None:
    """A budget is what they take in host memory; all of them take space on the disk, and a step writes the others."""
    small = replace(LARGE, host_memory=12 * GB)
    chosen = cheapest(SEVEN, TRAINING, small, RATES)
    assert chosen is not None and chosen.fits
    assert chosen.training == replace(TRAINING, build="configure_model", gradient_budget=4 * GB)
    assert need(chosen, Place.HOST, "training").owners["gradient_arena"] == 4 * GB
    assert owners_on_disk(gradient_budget=GB)["gradients"] == pytest.approx(14 * GB, rel=0.05)
    assert "gradients" not in owners_on_disk()
    asked, spilled = (written_bytes(SEVEN, one) for one in (TRAINING, chosen.training))
    assert spilled - asked == pytest.approx(10 * GB, rel=0.05)
    with pytest.raises(ConfigError, match="Compressed gradients are all in memory"):
        Training(gradient_budget=GB, compression=0.1)


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


def test_frozen_parameters_have_no_state_in_memory_either() -> None:
    """A model of which little is trained needs 2 bytes per parameter without storage, not 16."""
    trained = SEVEN.trained[-2:-1]
    model = replace(SEVEN, trained=trained, frozen=(SEVEN.numel - sum(trained),), passes=None)
    (plain, *_) = alternatives(model, TRAINING, LARGE)
    assert plain.total == pytest.approx(2 * model.numel, rel=0.1)


def test_an_optimizer_in_memory_has_its_own_state() -> None:
    """SGD without momentum keeps one array less than AdamW's two, at least."""
    adam, sgd = (alternatives(SEVEN, replace(TRAINING, optimizer=name), LARGE)[0] for name in ("AdamW", "SGD"))
    assert sgd.name == "SGD in memory"
    assert adam.owners["optimizer state"] == 8 * SEVEN.numel > sgd.owners["optimizer state"]


@pytest.mark.parametrize(("batch", "parts"), [(16, [16, 8, 4, 2, 1]), (15, [15, 5, 1]), (7, [7, 1]), (1, [1])])
def test_batches_are_divided_down_to_single_sequences(batch: int, parts: list[int]) -> None:
    """The tokens of a step stay the same, whatever the batch is."""
    divided = [*_divided(replace(TRAINING, batch=batch))]
    assert [each.batch for each in divided] == parts
    assert {each.batch * each.accumulate for each in divided} == {batch}


def test_what_lacks_the_least_is_found() -> None:
    """On a disk that is too small for every state, the smallest state is nearest."""
    small = replace(LARGE, disk=GB)
    assert cheapest(SEVEN, TRAINING, small, RATES) is None
    assert nearest(SEVEN, TRAINING, small, RATES).training.state_format == "int8"


def test_processes_on_a_cpu_share_its_cores() -> None:
    """Four processes compute four times as much on the same cores; each on a GPU of its own takes no longer."""
    for on_gpu, factor in ((False, 4), (True, 1)):
        one, four = (pace(SEVEN, replace(TRAINING, processes=n), RATES, on_gpu=on_gpu) for n in (1, 4))
        assert one is not None and four is not None
        assert four.forward.low == pytest.approx(factor * one.forward.low)


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


def test_a_drive_lives_as_long_as_it_may_write() -> None:
    """A step writes 12 bytes per parameter; parameters on storage add 2."""
    assert written_bytes(SEVEN, TRAINING) == pytest.approx(12 * SEVEN.numel, rel=0.01)
    stored = written_bytes(SEVEN, replace(TRAINING, offload_param="nvme"))
    assert stored == pytest.approx(14 * SEVEN.numel, rel=0.01)
    found = pace(SEVEN, TRAINING, RATES, on_gpu=True)
    assert found is not None
    assert found.life_in_steps(600) == pytest.approx(600e12 / written_bytes(SEVEN, TRAINING))


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
