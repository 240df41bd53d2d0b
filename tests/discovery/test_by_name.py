"""The strategy is found by its name, in new interpreters, by LightningCLI, and whatever the order of imports."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_smartinfinity import ActivationOffload, ConfigError, SmartInfinityStrategy, TopK, _autoload
from tests.helpers.fresh_python import fresh_python

IS_REGISTERED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from lightning.pytorch.strategies import StrategyRegistry
loaded = ["deepspeed" in sys.modules, "lightning_smartinfinity.integrations.trainer.strategy" in sys.modules]
print("smart_infinity" in StrategyRegistry, *loaded)
"""
REGISTERED_LAZILY = "True False False"


@pytest.mark.seam("discovery by name", "StrategyRegistry, STRATEGY_REGISTRY; the entry point torch.backends.")
def test_without_autoload_the_import_of_the_package_registers_the_name(tmp_path: Path) -> None:
    """Where torch may not load plugins, the name is unknown until the package is imported, even after Lightning."""
    code = "import lightning" + IS_REGISTERED + "import lightning_smartinfinity" + IS_REGISTERED
    assert fresh_python(code, cwd=tmp_path, autoload=False).splitlines() == ["False False False", REGISTERED_LAZILY]


def test_training_by_name(tmp_path: Path) -> None:
    """A script that names the strategy alone trains with Fabric and twice with a Trainer, and leaves no state behind.

    Both registries know the name, without the strategy or DeepSpeed being loaded, also when Lightning is reloaded. A
    wrong key is refused before DeepSpeed is imported, which would choose an accelerator for good.
    """
    code = """
    import importlib, sys
    import torch
    import lightning.pytorch.strategies as strategies
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    before = strategies.StrategyRegistry
    print("known", "smart_infinity" in before, "smart_infinity" in STRATEGY_REGISTRY)
    importlib.reload(strategies)
    print("reloaded", strategies.StrategyRegistry is not before, "smart_infinity" in strategies.StrategyRegistry)
    doors = [f"lightning_smartinfinity.integrations.{door}.strategy" for door in ("trainer", "fabric")]
    names = ["deepspeed", *doors]
    print("loaded", *(name in sys.modules for name in names))

    from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
    try:
        SmartInfinityStrategy(zero={"offload_param": {"devise": "cpu"}})
    except ConfigError as error:
        print("refused", "deepspeed" in sys.modules, "SmartInfinityStrategy(zero=" in str(error))

    class Model(BoringModel):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    for _ in range(2):
        model = Model()
        before = model.layer.weight.detach().clone()
        trainer = Trainer(
            strategy="smart_infinity", accelerator="cpu", devices=1, max_steps=2, limit_val_batches=0,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(model)
        after = trainer.strategy.lightning_module_state_dict()["layer.weight"]
        print("steps", trainer.global_step, "moved", not torch.equal(before, after.float().cpu()))

    fabric = Fabric(strategy="smart_infinity", accelerator="cpu", devices=1, precision="bf16-mixed")
    print("chosen", type(fabric.strategy).__name__, type(fabric.strategy.precision).__name__)
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 4)).square().mean()
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print("fabric moved", losses[0] != losses[1])
    """
    words = ("known", "reloaded", "loaded", "refused", "steps", "chosen", "fabric")
    assert [line for line in fresh_python(code, cwd=tmp_path).splitlines() if line.split(" ")[0] in words] == [
        "known True True",
        "reloaded True True",
        "loaded False False False",
        "refused False True",
        *["steps 2 moved True"] * 2,
        "chosen SmartInfinityFabricStrategy SmartInfinityFabricPrecision",
        "fabric moved True",
    ]
    assert not list((tmp_path / "smart_infinity").glob("*/*"))


# ---- LightningCLI takes the strategy by name, by class path and from a configuration file


CLASS_PATH = "lightning_smartinfinity.SmartInfinityStrategy"
COMMON = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
YAML = f"""
trainer:
  strategy:
    class_path: {CLASS_PATH}
    init_args:
      storage: [{{folder}}/nvme0, {{folder}}/nvme1]
      transfer:
        tasklet_bytes: 4MB
        dram_cache_bytes: 8GiB
        num_buffers: 8
        durability: power
      compression:
        class_path: lightning_smartinfinity.TopK
        init_args:
          ratio: 0.02
          error_feedback: false
      activations:
        budget_bytes: 8GB
      zero:
        reduce_bucket_size: 1000000
"""


pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning.pytorch.cli")


def written(config: str, folder: Path) -> str:
    """Write a configuration that uses this folder there, and return the argument that names it."""
    (folder / "config.yaml").write_text(config.format(folder=folder))
    return f"--config={folder / 'config.yaml'}"


def strategy_from(*arguments: str) -> SmartInfinityStrategy:
    cli = LightningCLI(
        BoringModel, BoringDataModule, args=[*COMMON, *arguments], run=False, seed_everything_default=False
    )
    strategy = cli.trainer.strategy
    assert type(strategy) is SmartInfinityStrategy
    return strategy


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.strategy=smart_infinity"],
        ["--trainer.strategy", "smart_infinity"],
        [f"--trainer.strategy.class_path={CLASS_PATH}"],
        ["--trainer.strategy.class_path", "lightning_smartinfinity.strategy.SmartInfinityStrategy"],
    ],
    ids=" ".join,
)
def test_strategy_on_the_command_line(arguments: list[str]) -> None:
    """The name and the class path both give our strategy, with default settings."""
    assert strategy_from(*arguments)._settings.storage is None


def test_settings_in_a_file(tmp_path: Path) -> None:
    """``class_path`` and ``init_args`` reach the constructor with their types.

    Sizes may be text, on the command line, which comes after the file, too.
    """
    config = written(YAML, tmp_path)
    strategy = strategy_from(config, "--trainer.strategy.init_args.transfer.dram_cache_bytes=1GB")
    settings = strategy._settings
    assert settings.storage == (tmp_path / "nvme0", tmp_path / "nvme1")
    transfer = settings.transfer
    assert (transfer.tasklet_bytes, transfer.dram_cache_bytes) == (4_000_000, 10**9)
    assert (transfer.num_buffers, transfer.durability) == (8, "power")
    expected = (TopK(0.02, error_feedback=False), ActivationOffload(budget_bytes=8_000_000_000))
    assert (settings.compression, settings.activations) == expected
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 1_000_000  # type: ignore[index]


def test_a_misspelt_setting_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with a message that names the setting that was meant."""
    config = written(YAML.replace("num_buffers", "num_bufers"), tmp_path)
    with pytest.raises((ValueError, SystemExit)) as ended:  # jsonargparse quotes our error in its own
        strategy_from(config)
    assert "Did you mean 'num_buffers'?" in f"{ended.value} {capsys.readouterr().err}"


def test_a_fit_that_resumes_if_it_can(tmp_path: Path) -> None:
    """``--ckpt_path storage-or-new`` begins where there is nothing, and resumes from the newest checkpoint."""
    steps = []
    for most in ("1", "2"):
        options = {"default_root_dir": str(tmp_path), "max_steps": most, "limit_val_batches": "0"}
        options |= {"strategy": "smart_infinity", "enable_model_summary": "false", "enable_progress_bar": "false"}
        arguments = [f"--trainer.{name}={value}" for name, value in options.items()]
        cli = LightningCLI(
            BoringModel,
            BoringDataModule,
            args=["fit", *COMMON, *arguments, "--ckpt_path", "storage-or-new"],
            seed_everything_default=False,
            save_config_callback=None,
        )
        steps.append((cli.trainer.ckpt_path, cli.trainer.global_step))
    assert steps[0] == (None, 1) and steps[1][1] == 2 and str(steps[1][0]).endswith("step=1.ckpt")


# ---- the post-import hook leaves the hooked module as it was and is silent when it fails


TARGET = "lightning_smartinfinity_hook_target"
SOURCE = "LOADS = globals().get('LOADS', 0) + 1\nStrategyRegistry = None\n"


@pytest.fixture
def registrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of registered modules. A module to be imported and hooked is on the path."""
    (tmp_path / f"{TARGET}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    monkeypatch.setitem(_autoload._REGISTRARS, TARGET, lambda module: seen.append(module.__name__))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield seen
    sys.modules.pop(TARGET, None)


def hooks() -> list[object]:
    return [finder for finder in sys.meta_path if type(finder).__module__ == _autoload.__name__]


def test_module_is_registered_with_after_its_import(registrations: list[str]) -> None:
    """A module imported after the installation is registered once and keeps its own loader."""
    _autoload.install()
    module = importlib.import_module(TARGET)
    assert registrations == [TARGET] and isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == SOURCE


def test_module_loaded_before_is_registered_with_at_once(registrations: list[str]) -> None:
    """A module imported before the installation is registered at once."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in hooks()]
    importlib.import_module(TARGET)
    assert registrations == []
    _autoload.install()
    assert registrations == [TARGET]


def test_a_failing_import_fails_as_it_would_alone(registrations: list[str], tmp_path: Path) -> None:
    """The user sees the module's own error, and the next import works."""
    (tmp_path / f"{TARGET}.py").write_text("raise ZeroDivisionError")
    _autoload.install()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(TARGET)
    assert registrations == []
    (tmp_path / f"{TARGET}.py").write_text(SOURCE + "# of another size than before\n")
    importlib.invalidate_caches()
    importlib.import_module(TARGET)
    assert registrations == [TARGET]


def test_failed_registration_is_swallowed(
    registrations: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failed registration never breaks an import. A debug variable shows its traceback."""
    monkeypatch.setitem(_autoload._REGISTRARS, TARGET, lambda module: 1 // 0)
    _autoload.install()
    importlib.import_module(TARGET)
    _autoload.install()
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("SMART_INFINITY_AUTOLOAD_DEBUG", "1")
    _autoload.install()
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_what_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing installation does not make install raise.

    A Lightning module without the registry is left alone, such as one still being executed.
    """
    _autoload._register_with_trainer(ModuleType("lightning.pytorch.strategies"))
    monkeypatch.setattr(_autoload, "_install_finder", lambda: 1 // 0)
    _autoload.install()


@pytest.mark.parametrize("name", ["smart_infinity", "smart-infinity"])
def test_name_that_the_user_registered_stays_theirs(name: str) -> None:
    """A preset that the user registered under the name, or under one like it, is kept."""
    module = ModuleType("lightning.pytorch.strategies")
    module.StrategyRegistry = registry = _StrategyRegistry()  # type: ignore[attr-defined]
    registry.register(name, dict, storage="mine")
    _autoload._register_with_trainer(module)
    assert registry.get(name) == {"storage": "mine"}


@pytest.mark.parametrize("name", ["Smart-Infinity", "smart infinity", "smart_infinty", "SmartInfinityFabricStrategy"])
@pytest.mark.parametrize("user", [Trainer, Fabric])
def test_another_spelling_of_the_name(name: str, user: Callable[..., object]) -> None:
    """Trainer and Fabric answer it with the name of the strategy."""
    _autoload.install()
    with pytest.raises(ConfigError, match=rf"strategy={name.lower()!r} is no name.*Write strategy='smart_infinity'\."):
        user(strategy=name, accelerator="cpu", devices=1)


def test_reload_leaves_one_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload of the package removes the old finder."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    _autoload.install()
    importlib.reload(_autoload).install()
    assert len(hooks()) == 1


def test_other_finders_that_ask_everybody_else(registrations: list[str]) -> None:
    """A finder that delegates to all others, as ours does, causes no endless recursion."""

    class Delegating:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            others = [finder for finder in sys.meta_path if finder is not self]
            return next((spec for o in others if (spec := o.find_spec(name, path, target))), None)  # type: ignore

    _autoload.install()
    sys.meta_path.append(Delegating())  # type: ignore[arg-type]
    importlib.import_module(TARGET)
    assert registrations == [TARGET]
