"""``plan="auto"``: what the user left open is chosen before the model is built, and no result depends on it."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_smartinfinity import (
    BlockScaled,
    ConfigError,
    PlanConfig,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    TopK,
    TransferConfig,
    UnsupportedError,
)
from lightning_smartinfinity.planning import automatic, automatic_strategy, choice
from lightning_smartinfinity.planning import needs as plan_needs
from lightning_smartinfinity.planning.automatic_strategy import Surroundings, plan_training
from lightning_smartinfinity.planning.needs import PROCESS_BYTES, Place, held_by_update, needs
from lightning_smartinfinity.planning.survey import resources
from lightning_smartinfinity.planning.survey.modules import survey_module
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.settings import GradientCodec
from lightning_smartinfinity.settings.strategy import StrategySettings
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.training.test_overlap import SMALL_RING
from tests.training.test_parameter_budget import Configured

RECIPE = Recipe(precision="bf16-true", width=64, depth=6, max_steps=2)
AROUND = Surroundings(precision=RECIPE.precision, accumulate=1, processes=1, nodes=1, on_gpu=False)
NVME = {"offload_param": {"device": "nvme"}}


@pytest.fixture(autouse=True)
def _small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BUDGETS", (128 << 10, 64 << 10))
    monkeypatch.setattr(plan_needs, "_TRANSFER_BYTES", 16 << 10)  # else as much as all parameters of a tiny model


def fit(
    root: Path,
    module: LitTiny,
    *,
    plan: PlanConfig | Mapping[str, Any] | str | None,
    transfer: Mapping[str, Any] | None = None,
    **options: Any,
) -> SmartInfinityStrategy:
    strategy = SmartInfinityStrategy(
        root / "storage", plan=plan, transfer=TransferConfig(**SMALL_RING, **(transfer or {})), **options
    )
    quiet_trainer(root, strategy, max_steps=RECIPE.max_steps, precision=module.recipe.precision).fit(module)
    return strategy


def just_enough_for(build: str, **settings: Any) -> dict[str, Any]:
    """Return a plan for a machine that has as much host memory as a training with these settings needs."""
    training = Training(
        precision=RECIPE.precision,
        build=build,
        save_top_k=0,
        num_buffers=SMALL_RING["num_buffers"],
        tasklet_bytes=SMALL_RING["tasklet_bytes"],
        **settings,
    )
    figures = survey_module(LitTiny(RECIPE), batch=1, seq=512, in_16_bit=True)
    found = needs(figures, training, on_gpu=False)
    return {"host_memory": max(need.total for need in found if need.place is Place.HOST)}


SMALL = {"host_memory": PROCESS_BYTES + 900_000}
SMALLEST = {"offload_param": "nvme", "parameter_budget": 128 << 10, "gradient_budget": 64 << 10}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[type[LitTiny], list[float]]:
    """The losses of trainings without a plan: whoever builds in configure_model draws other weights."""
    found = {}
    for module_class in (Configured, LitTiny):
        module = module_class(RECIPE)
        fit(tmp_path_factory.mktemp("plain"), module, plan=None, overlap="none").close()
        found[module_class] = module.losses
    return found


@pytest.fixture
def losses(expected: dict[type[LitTiny], list[float]]) -> list[float]:
    """Those of a model that configure_model builds."""
    return expected[Configured]


def test_a_machine_that_is_large_enough_changes_nothing(
    tmp_path: Path, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults stay, the bits are the same, and the table says so."""
    module, told = Configured(RECIPE), []
    monkeypatch.setattr("lightning_smartinfinity.integrations.trainer.strategy.rank_zero_info", told.append)
    strategy = fit(tmp_path, module, plan="auto")
    assert module.losses == losses
    assert (strategy._settings.zero, strategy._settings.transfer) == (None, TransferConfig(**SMALL_RING))
    (table,) = [message for message in told if "Plan for Configured" in message]
    assert "the defaults fit" in table and "host memory  training" in table
    strategy.close()


def test_gradients_get_a_budget(tmp_path: Path, losses: list[float]) -> None:
    """Of what fits the fastest is taken: as many gradients in memory as possible, and parameters, too."""
    module = Configured(RECIPE)
    plan = just_enough_for("configure_model", gradient_budget=128 << 10)
    strategy = fit(tmp_path, module, plan=plan, overlap="none")
    assert (strategy._settings.zero, strategy._settings.transfer.gradient_bytes) == (None, 128 << 10)
    assert module.losses == losses
    strategy.close()


@pytest.mark.parametrize("module_class", [Configured, LitTiny])
def test_parameters_go_to_storage(
    module_class: type[LitTiny], tmp_path: Path, expected: dict[type[LitTiny], list[float]]
) -> None:
    """They are built there by configure_model, or go there if the model exists; the bits are the same."""
    module = module_class(RECIPE)
    plan = just_enough_for("init" if module_class is LitTiny else "configure_model", **SMALLEST)
    strategy = fit(tmp_path, module, plan=plan, overlap="none")
    transfer = strategy._settings.transfer
    assert strategy._settings.zero == NVME
    assert (transfer.parameter_bytes, transfer.gradient_bytes) == (128 << 10, 64 << 10)
    section = strategy._engine_config["zero_optimization"]
    assert section["offload_param"]["device"] == "nvme" and section["stage3_param_persistence_threshold"] == 0
    assert strategy.parameter_bytes > 0
    assert module.losses == expected[module_class]
    strategy.close()


def test_explicit_settings_win(tmp_path: Path, losses: list[float]) -> None:
    """A plan changes nothing that the user has set, and says what then does not fit."""
    module = Configured(RECIPE)
    given = {"gradient_bytes": 200_000, "parameter_bytes": 180_000}
    strategy = fit(tmp_path, module, plan="auto", transfer=given, zero=NVME, overlap="none")
    settings = strategy._settings
    assert settings.zero == NVME
    assert (settings.transfer.gradient_bytes, settings.transfer.parameter_bytes) == (200_000, 180_000)
    assert module.losses == losses
    strategy.close()
    in_memory, plan = {"offload_param": {"device": "none"}}, just_enough_for("configure_model", **SMALLEST)
    with pytest.raises(ConfigError, match="does not fit: host memory"):
        fit(tmp_path, Configured(RECIPE), plan=plan, zero=in_memory)


def test_nothing_fits(tmp_path: Path) -> None:
    """The error says what breaks and what is nearest, and nothing was written."""
    with pytest.raises(ConfigError, match="does not fit: host memory") as caught:
        fit(tmp_path, Configured(RECIPE), plan={"host_memory": PROCESS_BYTES})
    assert "TOO BIG" in str(caught.value) and "state_formats" in caught.value.remedy
    with pytest.raises(ConfigError, match="does not fit: disk"):
        fit(tmp_path, Configured(RECIPE), plan={"disk": "1MB"})
    assert not (tmp_path / "storage").exists()


def test_a_smaller_state_that_the_user_allows(tmp_path: Path) -> None:
    """It is taken where the other does not fit, and not beside an explicit format."""
    plan = {"disk": "8MB", "state_formats": ["int8"]}
    strategy = fit(tmp_path, Configured(RECIPE), plan=plan)
    assert strategy._settings.state_format == "int8"
    strategy.close()
    with pytest.raises(ConfigError, match="both choose a state format"):
        fit(tmp_path, Configured(RECIPE), plan=plan, state_format="bf16")


def rmsprop(recipe: Recipe = RECIPE) -> Recipe:
    return dataclasses.replace(recipe, optimizer="RMSprop")


def test_the_optimizer_that_is_named_is_planned(tmp_path: Path) -> None:
    """State of RMSprop takes four arrays: it needs a larger disk than that of AdamW, and has no smaller format."""
    plan = {"disk": "9MB", "optimizer": "RMSprop", "state_formats": ["int8"]}
    with pytest.raises(ConfigError, match="does not fit: disk") as caught:
        fit(tmp_path, Configured(rmsprop()), plan=plan)
    assert "passed over for RMSprop in bf16-true: int8" in str(caught.value)
    fit(tmp_path, Configured(rmsprop()), plan={**plan, "disk": "13MB"}).close()
    with pytest.raises(ConfigError, match="optimizer='Lion'"):
        PlanConfig(optimizer="Lion")


@pytest.mark.parametrize("module_class", long_but([Configured], [Configured, LitTiny]))
def test_an_optimizer_that_was_taken_for_another(module_class: type[LitTiny], tmp_path: Path) -> None:
    """Once it is known, a training that does not fit with its state ends, and one that fits goes on."""
    with pytest.raises(ConfigError, match=r"taken the optimizer for AdamW, but it is RMSprop: disk") as caught:
        fit(tmp_path, module_class(rmsprop()), plan={"disk": "9MB"})
    assert "plan={'optimizer': 'RMSprop'}" in caught.value.remedy
    assert not (tmp_path / "storage").exists()
    fit(tmp_path, module_class(rmsprop()), plan={"disk": "13MB"}).close()
    sgd = dataclasses.replace(RECIPE, optimizer="SGD", eps=None)
    with pytest.raises(ConfigError, match="it is SGD: state_format='int8' does not exist for it"):
        fit(tmp_path, module_class(sgd), plan={"disk": "7MB", "state_formats": ["int8"]})


def test_state_in_memory_is_left_out_only_where_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a size the plan keeps state in what is left of the memory; it leaves an explicit 0 as it is."""
    monkeypatch.setattr(automatic, "_LEAST_CACHE", 10**6)
    seen = []
    for given in ({}, {"dram_cache_bytes": 0}):
        strategy = fit(tmp_path, Configured(RECIPE), plan={"host_memory": "4GB"}, transfer=given)
        seen.append((strategy._settings.transfer.dram_cache_bytes, strategy.host_bytes.get("dram_cache", 0)))
        strategy.close()
    assert seen[0][0] >= seen[0][1] > 10**6
    assert seen[1] == (0, 0)


def test_a_budget_of_parameters_decides_where_they_lie(tmp_path: Path, losses: list[float]) -> None:
    """They are on storage, also where all of them would fit into memory; an explicit place contradicts the budget."""
    module = Configured(RECIPE)
    given = {"parameter_bytes": 180_000}
    strategy = fit(tmp_path, module, plan="auto", transfer=given, overlap="none")
    assert (strategy._settings.zero, strategy._settings.transfer.parameter_bytes) == (NVME, 180_000)
    assert strategy.parameter_bytes > 0
    assert module.losses == losses
    strategy.close()
    for options in ({"plan": None}, {"plan": "auto", "zero": {"offload_param": {"device": "cpu"}}}):
        with pytest.raises(ConfigError, match="needs parameters on storage"):
            fit(tmp_path, Configured(RECIPE), transfer=given, **options)


def test_a_model_that_is_built_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the training would fit with the model built in configure_model, the error says to build it there."""
    monkeypatch.setattr(plan_needs, "ENGINE_BYTES", 0)  # it comes after the model, and is larger than a tiny one
    plan = just_enough_for("configure_model", **SMALLEST)
    with pytest.raises(ConfigError, match=r"does not fit: host memory \(building\)") as caught:
        fit(tmp_path, LitTiny(RECIPE), plan=plan)
    assert "Build it in configure_model" in caught.value.remedy and "state_formats" not in caught.value.remedy


@pytest.mark.parametrize(
    "codec",
    long_but(
        [BlockScaled(error_feedback=False), TopK(0.1)],
        [BlockScaled(), BlockScaled(error_feedback=False), TopK(0.1), TopK(1.0)],
    ),
)
@pytest.mark.usefixtures("activations_as_asked")
def test_compressed_gradients_are_counted(codec: GradientCodec, tmp_path: Path) -> None:
    """Payloads of every codec, and its residual if it keeps one, are those of the run, to the byte."""
    strategy = fit(tmp_path, Configured(RECIPE), plan="auto", compression=codec, overlap="none")
    planned, held = strategy._planned, strategy.host_bytes
    assert planned is not None
    assert held_by_update(planned.figures, planned.training) == held
    assert held["payloads"] > 0 and ("residual" in held) == codec.keeps_residual
    strategy.close()


class Stubborn(Configured):
    """A module that needs values while it is built."""

    def configure_model(self) -> None:
        assert float(torch.ones(3).sum().item()) == 3.0
        super().configure_model()


def test_a_model_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """The error says to name the model; with its name the plan is made."""
    with pytest.raises(UnsupportedError, match="cannot look at Stubborn before it is built") as caught:
        fit(tmp_path, Stubborn(RECIPE), plan="auto")
    assert "plan={'model'" in caught.value.remedy
    fit(tmp_path, Stubborn(RECIPE), plan={"model": "1M"}).close()


def test_another_module_is_planned_anew(tmp_path: Path) -> None:
    """A strategy that trains again chooses again, from what the user gave."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", plan=SMALL, transfer=TransferConfig(**SMALL_RING))
    trainer = quiet_trainer(tmp_path, strategy, max_steps=2, precision=RECIPE.precision)
    trainer.fit(Configured(RECIPE))
    assert strategy._settings.zero == NVME
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Configured(dataclasses.replace(RECIPE, depth=1)))
    assert strategy._settings.zero is None
    strategy.close()


def test_an_evaluation_plans_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only a fit has state and gradients."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", plan="auto")
    with caplog.at_level(logging.INFO):
        quiet_trainer(tmp_path, strategy, precision=RECIPE.precision).validate(LitTiny(RECIPE), verbose=False)
    assert not any("Plan for" in record.getMessage() for record in caplog.records)
    strategy.close()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("fast", "plan='fast'"),
        ({"batchsize": 2}, "batchsize"),
        ({"batch": 0}, r"batch=0"),
        ({"state_formats": ["fp8"]}, "state_formats"),
        ({"host_memory": "much"}, "host_memory"),
        ({"model": ""}, "model=''"),
    ],
)
def test_bad_input(plan: Any, message: str) -> None:
    """A plan that says nothing sensible is refused when the strategy is made."""
    with pytest.raises(ConfigError, match=message):
        SmartInfinityStrategy(plan=plan)


def test_two_processes_choose_alike(tmp_path: Path) -> None:
    """The least that any rank sees counts, and both train with the same settings to the same bits."""
    done = run_module("tests.training.plan_worker", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["settings"] == ranks[1]["settings"]
    assert "nvme" in ranks[0]["settings"][0]
    assert ranks[0]["losses"] == ranks[0]["expected"]
    assert (done.stdout + done.stderr).count("Plan for Configured") == 1


def test_parameters_offloaded_to_the_memory_in_which_they_are(tmp_path: Path) -> None:
    """An explicit device is kept, also one that a plan would not choose."""
    strategy = fit(tmp_path, LitTiny(RECIPE), plan="auto", zero={"offload_param": {"device": "cpu"}})
    assert strategy._settings.zero == {"offload_param": {"device": "cpu"}}
    strategy.close()


@pytest.mark.parametrize("module_class", [Configured, LitTiny])
def test_a_fit_after_an_evaluation(module_class: type[LitTiny], tmp_path: Path) -> None:
    """Parameters stay where the evaluation has put them: gradients alone get a budget."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", plan=SMALL, transfer=TransferConfig(**SMALL_RING))
    trainer = quiet_trainer(tmp_path, strategy, max_steps=1, precision=RECIPE.precision)
    module = module_class(RECIPE)
    trainer.validate(module, verbose=False)
    with pytest.raises(ConfigError, match="does not fit: host memory"):
        trainer.fit(module)
    strategy.close()
    roomy = {"host_memory": PROCESS_BYTES + 2_500_000}
    strategy = SmartInfinityStrategy(tmp_path / "storage", plan=roomy, transfer=TransferConfig(**SMALL_RING))
    trainer = quiet_trainer(tmp_path, strategy, max_steps=1, precision=RECIPE.precision)
    module = module_class(RECIPE)
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    assert strategy._settings.zero is None
    strategy.close()


def disk_with(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: usage(free, 0, free))


def test_the_state_of_the_job_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training is resumed on a disk that its own state has filled."""
    strategy = fit(tmp_path, Configured(RECIPE), plan="auto", transfer={"keep": True})
    strategy.close()
    disk_with(2_000_000, monkeypatch)  # the rest of what the plan needs, an export among it
    strategy = SmartInfinityStrategy(
        tmp_path / "storage", plan="auto", transfer=TransferConfig(**SMALL_RING, keep=True)
    )
    trainer = quiet_trainer(tmp_path, strategy, max_steps=4, precision=RECIPE.precision)
    trainer.fit(Configured(RECIPE), ckpt_path="storage")
    assert trainer.global_step == 4
    strategy.close()
    with pytest.raises(ConfigError, match="does not fit: disk"):
        fit(tmp_path / "elsewhere", Configured(RECIPE), plan="auto")


def test_data_in_memory_are_not_given_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of what a process holds, only its libraries and the model are a part of what the training needs."""
    seen = []
    for resident in (PROCESS_BYTES, 100 * PROCESS_BYTES):
        monkeypatch.setattr(automatic_strategy, "_resident_bytes", lambda resident=resident: resident)
        settings = StrategySettings(storage=(tmp_path,))
        seen.append(automatic_strategy._resources(settings, PlanConfig(), LitTiny(RECIPE), AROUND).host_memory)
    assert seen[1] == pytest.approx(seen[0], rel=0.1)


def test_a_model_that_exists_counts_as_it_is(tmp_path: Path) -> None:
    """It was built in fp32 before the Trainer's precision was known."""
    told: list[str] = []
    settings = StrategySettings(storage=(tmp_path,), plan=PlanConfig(), transfer=TransferConfig(**SMALL_RING))
    training, _ = automatic_strategy._asked(settings, PlanConfig(), {}, LitTiny(RECIPE), AROUND)
    assert (training.build, training.precision, training.built_bytes) == ("init", "bf16-true", 4)
    plan_training(settings, LitTiny(RECIPE), dataclasses.replace(AROUND, tell=told.append))
    assert "taken for AdamW" in told[0]


def test_gradients_of_schedules_take_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan knows that several micro-batches may come, as in manual optimization and by a scheduler."""
    seen: list[int] = []
    monkeypatch.setattr(SmartInfinityStrategy, "_plan", lambda strategy, module, around: seen.append(around.accumulate))
    for callbacks in ([], [GradientAccumulationScheduler({1: 4})]):
        strategy = SmartInfinityStrategy(tmp_path / str(len(callbacks)), plan="auto")
        trainer = quiet_trainer(tmp_path, strategy, callbacks=callbacks, max_steps=1, precision=RECIPE.precision)
        trainer.fit(LitTiny(RECIPE))
        strategy.close()
    assert set(seen[: len(seen) // 2]) == {1} and set(seen[len(seen) // 2 :]) == {2}


def test_folders_that_do_not_exist_yet(tmp_path: Path) -> None:
    """The disk of a folder is that of the nearest folder above it, and two folders on one disk have it once."""
    told: list[str] = []
    around = Surroundings(precision="32-true", accumulate=1, processes=1, nodes=1, on_gpu=False, tell=told.append)
    tables = []
    for folders in (("a/b",), ("a/b", "c")):
        storage = tuple(tmp_path / folder for folder in folders)
        settings = StrategySettings(storage=storage, plan=PlanConfig(host_memory="2GB"))
        assert plan_training(settings, LitTiny(RECIPE), around).settings == settings
        tables.append(told.pop())
    one, two = (table.splitlines()[-1].split()[:5] for table in tables)
    assert one[:4] == two[:4] and float(one[4]) == pytest.approx(float(two[4]), rel=0.01)


def test_cards_take_all_gradients_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SmartSSDs may update, gradients get no budget, and no state is kept in memory."""
    around = Surroundings(precision=RECIPE.precision, accumulate=1, processes=1, nodes=1, on_gpu=False, tell=print)
    plan = PlanConfig(**just_enough_for("init", gradient_budget=128 << 10))
    ring = TransferConfig(**SMALL_RING)
    settings = StrategySettings(storage=(tmp_path,), plan=plan, transfer=ring)
    assert plan_training(settings, LitTiny(RECIPE), around).settings.transfer.gradient_bytes == 128 << 10
    monkeypatch.setenv("SMART_INFINITY_XCLBIN", str(tmp_path / "kernels.xclbin"))
    with pytest.raises(ConfigError, match="does not fit"):
        plan_training(settings, LitTiny(RECIPE), around)


def test_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists is planned in setup; one that init_module is to build has to be named before."""
    from lightning.fabric import Fabric

    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    strategy = SmartInfinityFabricStrategy(plan={"host_memory": PROCESS_BYTES + 1_700_000}, transfer=SMALL_RING)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true")
    fabric.launch()
    fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert strategy._settings.transfer.gradient_bytes != "auto"
    strategy.close()
    # The optimizer is known here. Its state takes a third more than that of AdamW.
    strategy = SmartInfinityFabricStrategy(plan={"disk": "12MB"}, transfer=SMALL_RING)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true")
    fabric.launch()
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    with pytest.raises(ConfigError, match=r"plan='auto': Sequential does not fit: disk"):
        fabric.setup(model, torch.optim.RMSprop(model.parameters()))
    unnamed = SmartInfinityFabricStrategy(plan="auto")
    fabric = Fabric(accelerator="cpu", devices=1, strategy=unnamed, precision="bf16-true")
    fabric.launch()
    with pytest.raises(ConfigError, match="does not know the model yet"), fabric.init_module():
        pass
