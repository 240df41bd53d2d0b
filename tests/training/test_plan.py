"""``plan="auto"``: what the user left open is chosen before the model is built, and no result depends on it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
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
from lightning_smartinfinity.planning import choice
from lightning_smartinfinity.planning import needs as plan_needs
from lightning_smartinfinity.planning.automatic_strategy import Surroundings, plan_training
from lightning_smartinfinity.planning.needs import PROCESS_BYTES, MemoryKind, held_by_update, needs
from lightning_smartinfinity.planning.survey import resources
from lightning_smartinfinity.planning.survey.modules import survey_module
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.settings import GradientCodec
from lightning_smartinfinity.settings.strategy import StrategySettings
from tests.helpers.assertions import refused
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.test_offloaded_parameters import Configured
from tests.training.test_overlap import SMALL_RING
from tests.training.worker import each_rank

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
    return {"host_memory": max(need.total for need in found if need.place is MemoryKind.HOST)}


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


@dataclass(frozen=True)
class Asked:
    """What a user gives. A plan that is a tuple is just enough memory for how the model is built, and settings."""

    plan: Any = "auto"
    module_class: type[LitTiny] = Configured
    recipe: Recipe = RECIPE
    transfer: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def fit(self, root: Path) -> tuple[LitTiny, SmartInfinityStrategy]:
        plan = just_enough_for(self.plan[0], **self.plan[1]) if isinstance(self.plan, tuple) else self.plan
        module = self.module_class(self.recipe)
        return module, fit(root, module, plan=plan, transfer=self.transfer, **{"overlap": "none", **self.options})


BUDGETS = {"parameter_bytes": 128 << 10, "gradient_bytes": 64 << 10}
GIVEN = {"gradient_bytes": 200_000, "parameter_bytes": 180_000}
CPU = {"offload_param": {"device": "cpu"}}
CHOSEN: dict[str, tuple[Asked, dict[str, Any] | None, dict[str, Any]]] = {
    "the defaults, where they fit": (Asked(), None, {}),
    # Of what fits the fastest is taken: as many gradients in memory as possible, and parameters, too.
    "a budget of gradients": (
        Asked(("configure_model", {"gradient_budget": 128 << 10})),
        None,
        {"gradient_bytes": 128 << 10},
    ),
    "parameters that are built on storage": (Asked(("configure_model", SMALLEST)), NVME, BUDGETS),
    "parameters that go to storage": (Asked(("init", SMALLEST), LitTiny), NVME, BUDGETS),
    "what the user has set": (Asked(transfer=GIVEN, options={"zero": NVME}), NVME, GIVEN),
    # A budget puts them there, also where all of them would fit into memory.
    "the place of a budget": (Asked(transfer={"parameter_bytes": 180_000}), NVME, {"parameter_bytes": 180_000}),
    "an explicit place": (Asked(module_class=LitTiny, options={"zero": CPU}), CPU, {}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(
    name: str, tmp_path: Path, expected: dict[type[LitTiny], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan changes what the user has left open, if it must; the bits are the same, and a table says so."""
    told: list[str] = []
    monkeypatch.setattr("lightning_smartinfinity.integrations.trainer.strategy.rank_zero_info", told.append)
    asked, zero, chosen = CHOSEN[name]
    module, strategy = asked.fit(tmp_path)
    assert (strategy._settings.zero, strategy._settings.transfer) == (
        zero,
        TransferConfig(**SMALL_RING, **chosen),
    ) and (strategy.parameter_bytes > 0) == (zero == NVME)
    if zero == NVME:
        section = strategy._engine_config["zero_optimization"]
        assert section["offload_param"]["device"] == "nvme" and section["stage3_param_persistence_threshold"] == 0
    assert module.losses == expected[asked.module_class]
    (table,) = [message for message in told if f"Plan for {asked.module_class.__name__}" in message]
    assert "host memory  training" in table and (zero is not None or chosen or "the defaults fit" in table)


class Stubborn(Configured):
    """A module that needs values while it is built."""

    def configure_model(self) -> None:
        assert float(torch.ones(3).sum().item()) == 3.0
        super().configure_model()


RMSPROP = dataclasses.replace(RECIPE, optimizer="RMSprop")
SGD = dataclasses.replace(RECIPE, optimizer="SGD", eps=None)
INT8 = {"disk": "8MB", "state_formats": ["int8"]}
# The state of RMSprop takes four arrays, and has no smaller format.
NAMED = {"disk": "9MB", "optimizer": "RMSprop", "state_formats": ["int8"]}
REFUSED: dict[str, tuple[Asked, str, str]] = {
    "explicit settings": (
        Asked(("configure_model", SMALLEST), options={"zero": {"offload_param": {"device": "none"}}}),
        "does not fit: host memory",
        "",
    ),
    "all memory": (Asked({"host_memory": PROCESS_BYTES}), "does not fit: host memory(?s:.)*TOO BIG", "state_formats"),
    "all of the disk": (Asked({"disk": "1MB"}), "does not fit: disk", "state_formats"),
    "two formats": (Asked(INT8, options={"state_format": "bf16"}), "both choose a state format", ""),
    "an optimizer": (
        Asked(NAMED, recipe=RMSPROP),
        "does not fit: disk(?s:.)*passed over for RMSprop in bf16-true: int8",
        "",
    ),
    "another optimizer": (
        Asked({"disk": "9MB"}, recipe=RMSPROP),
        "taken the optimizer for AdamW, but it is RMSprop: disk",
        "plan={'optimizer': 'RMSprop'}",
    ),
    "another optimizer of a model that exists": (
        Asked({"disk": "7MB", "state_formats": ["int8"]}, LitTiny, SGD),
        "it is SGD: state_format='int8' does not exist for it",
        "",
    ),
    "a budget without a plan": (Asked(None, transfer=GIVEN), "needs parameters on storage", ""),
    "a budget, and another place": (
        Asked(transfer=GIVEN, options={"zero": CPU}),
        "needs parameters on storage",
        "",
    ),
    "a model that is built too early": (
        Asked(("configure_model", SMALLEST), LitTiny),
        r"does not fit: host memory \(building\)",
        "Build it in configure_model",
    ),
    "a model that cannot be looked at": (
        Asked(module_class=Stubborn),
        "cannot look at Stubborn before it is built",
        "plan={'model'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what breaks and what to do, and nothing was written."""
    if name == "a model that is built too early":
        monkeypatch.setattr(plan_needs, "ENGINE_BYTES", 0)  # it comes after the model, and is larger than a tiny one
    asked, match, remedy = REFUSED[name]
    with refused((ConfigError, UnsupportedError), match=match, remedy=remedy):
        asked.fit(tmp_path)
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    "asked",
    [
        Asked(INT8),
        Asked({**NAMED, "disk": "13MB"}, recipe=RMSPROP),
        Asked({"disk": "13MB"}, recipe=RMSPROP),
        Asked({"model": "1M"}, Stubborn),
    ],
    ids=["a smaller state", "an optimizer that is named", "another optimizer", "a model that is named"],
)
def test_what_fits(asked: Asked, tmp_path: Path) -> None:
    """A smaller state is taken where the user allows it; what was refused above trains with a little more."""
    _, strategy = asked.fit(tmp_path)
    assert strategy._settings.state_format == ("int8" if asked.plan == INT8 else "fp32")


def test_state_in_memory_is_left_out_only_where_the_user_says_so(tmp_path: Path) -> None:
    """Without a size the plan keeps state in what is left of the memory; it leaves an explicit 0 as it is."""
    seen = []
    for given in ({"dram_cache_bytes": None}, {"dram_cache_bytes": 0}):
        strategy = fit(tmp_path, Configured(RECIPE), plan={"host_memory": "4GB"}, transfer=given)
        seen.append((strategy._settings.transfer.dram_cache_bytes, strategy.host_bytes.get("dram_cache", 0)))
        strategy.close()
    assert seen[0][0] >= seen[0][1] > 10**6 and seen[1] == (0, 0)


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
    assert held.get("residual", 0) == 4 * strategy.state_numel * codec.keeps_residual
    assert held["payloads"] > 0


def test_each_fit_is_planned_anew(tmp_path: Path) -> None:
    """A strategy chooses again from what the user gave."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", plan=SMALL, transfer=TransferConfig(**SMALL_RING))
    trainer = quiet_trainer(tmp_path, strategy, max_steps=2, precision=RECIPE.precision)
    trainer.fit(Configured(RECIPE))
    assert strategy._settings.zero == NVME
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Configured(dataclasses.replace(RECIPE, depth=1)))
    assert strategy._settings.zero is None


def test_two_processes_choose_alike(tmp_path: Path) -> None:
    """The least that any rank sees counts, and both train with the same settings to the same bits."""
    ranks = each_rank("planned", tmp_path)
    assert ranks[0]["settings"] == ranks[1]["settings"]
    assert "nvme" in ranks[0]["settings"][0]
    assert (ranks[0]["losses"], [len(rank["told"]) for rank in ranks]) == (ranks[0]["expected"], [1, 0])


def test_a_fit_after_an_evaluation(tmp_path: Path) -> None:
    """An evaluation plans nothing, as it has no state, and parameters stay where it has put them, in memory."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", plan=SMALL, transfer=TransferConfig(**SMALL_RING))
    trainer = quiet_trainer(tmp_path, strategy, max_steps=1, precision=RECIPE.precision)
    module = Configured(RECIPE)
    trainer.validate(module, verbose=False)
    with pytest.raises(ConfigError, match="does not fit: host memory"):
        trainer.fit(module)
    strategy.close()


def test_the_state_of_the_job_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training is resumed on a disk that its own state has filled."""
    kept = Asked(transfer={"keep": True})
    kept.fit(tmp_path)[1].close()
    usage = type(shutil.disk_usage("/"))
    free = 2_000_000  # the rest of what the plan needs, an export among it
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: usage(free, 0, free))
    strategy = SmartInfinityStrategy(
        tmp_path / "storage", plan="auto", transfer=TransferConfig(**SMALL_RING, keep=True)
    )
    trainer = quiet_trainer(tmp_path, strategy, max_steps=4, precision=RECIPE.precision)
    trainer.fit(Configured(RECIPE), ckpt_path="storage")
    assert trainer.global_step == 4
    strategy.close()
    with pytest.raises(ConfigError, match="does not fit: disk"):
        kept.fit(tmp_path / "elsewhere")


def test_what_surrounds_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that is not known is taken for AdamW, folders on one disk have it once, and cards need gradients."""
    told: list[str] = []
    around = dataclasses.replace(AROUND, tell=told.append)
    roomy = StrategySettings(storage=(tmp_path,), plan=PlanConfig(), transfer=TransferConfig(**SMALL_RING))
    plan_training(roomy, LitTiny(RECIPE), around)
    assert "taken for AdamW" in told[-1]
    seven = PlanConfig(model="7B", gpu_memory="10GB", host_memory="64GB", disk="2TB")
    planned = plan_training(dataclasses.replace(roomy, plan=seven), None, dataclasses.replace(around, on_gpu=True))
    assert planned.settings.zero == {"offload_param": {"device": "cpu", "pin_memory": False}}
    tables = []
    for folders in (("a/b",), ("a/b", "c")):  # none of which exists yet
        storage = tuple(tmp_path / folder for folder in folders)
        settings = StrategySettings(storage=storage, plan=PlanConfig(host_memory="2GB"))
        planned = plan_training(settings, LitTiny(RECIPE), around)
        assert planned.settings == settings
        assert planned.training.num_buffers == 2 * 10**9 // 4 // 8 // (4 << 20)  # an eighth of the quarter
        tables.append(told.pop().splitlines()[-1].split()[:5])
    assert tables[0][:4] == tables[1][:4] and float(tables[0][4]) == pytest.approx(float(tables[1][4]), rel=0.01)
    tight = dataclasses.replace(roomy, plan=PlanConfig(**just_enough_for("init", gradient_budget=128 << 10)))
    assert plan_training(tight, LitTiny(RECIPE), around).settings.transfer.gradient_bytes == 128 << 10
    monkeypatch.setenv("SMART_INFINITY_XCLBIN", str(tmp_path / "kernels.xclbin"))
    with pytest.raises(ConfigError, match="does not fit"):
        plan_training(tight, LitTiny(RECIPE), around)


def test_gradients_of_schedules_take_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan knows that several micro-batches may come, as in manual optimization and by a scheduler."""
    seen: list[int] = []
    monkeypatch.setattr(SmartInfinityStrategy, "_plan", lambda strategy, module, around: seen.append(around.accumulate))
    for callbacks, accumulate in (([], 1), ([GradientAccumulationScheduler({1: 4})], 2)):
        strategy = SmartInfinityStrategy(tmp_path / str(accumulate), plan="auto")
        trainer = quiet_trainer(tmp_path, strategy, callbacks=callbacks, max_steps=1, precision=RECIPE.precision)
        trainer.fit(LitTiny(RECIPE))
        strategy.close()
        assert set(seen) == {accumulate}
        seen.clear()


def test_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists is planned in setup; one that init_module is to build has to be named before."""
    monkeypatch.chdir(tmp_path)

    def launched(plan: Any) -> Fabric:
        strategy = SmartInfinityFabricStrategy(plan=plan, transfer=SMALL_RING)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-true")
        fabric.launch()
        return fabric

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))

    fabric, module = launched({"host_memory": PROCESS_BYTES + 1_700_000}), model()
    fabric.setup(module, torch.optim.AdamW(module.parameters()))
    assert fabric.strategy._settings.transfer.gradient_bytes != "auto"
    fabric.strategy.close()
    module = model()
    # The optimizer is known here. Its state takes a third more than that of AdamW.
    with pytest.raises(ConfigError, match=r"plan='auto': Sequential does not fit: disk"):
        launched({"disk": "12MB"}).setup(module, torch.optim.RMSprop(module.parameters()))
    with pytest.raises(ConfigError, match="does not know the model yet"), launched("auto").init_module():
        pass
