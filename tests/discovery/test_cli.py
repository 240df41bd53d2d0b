"""LightningCLI takes the strategy by name, by class path and from a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_smartinfinity import ActivationOffload, SmartInfinityStrategy, TopK

CLASS_PATH = "lightning_smartinfinity.SmartInfinityStrategy"
COMMON = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
YAML = f"""
trainer:
  strategy:
    class_path: {CLASS_PATH}
    init_args:
      storage: [{{folder}}/nvme0, {{folder}}/nvme1]
      transfer:
        tasklet_bytes: 1048576
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
    """``class_path`` and ``init_args`` reach the constructor with their types."""
    config = tmp_path / "config.yaml"
    config.write_text(YAML.format(folder=tmp_path))
    strategy = strategy_from(f"--config={config}")
    assert strategy._settings.storage == (tmp_path / "nvme0", tmp_path / "nvme1")
    assert (strategy._settings.transfer.num_buffers, strategy._settings.transfer.durability) == (8, "power")
    assert strategy._settings.compression == TopK(0.02, error_feedback=False)
    assert strategy._settings.activations == ActivationOffload(budget_bytes=8_000_000_000)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 1_000_000  # type: ignore[index]


def test_sizes_with_their_units(tmp_path: Path) -> None:
    """Sizes may be text, on the command line and in a file."""
    config = tmp_path / "config.yaml"
    config.write_text(YAML.format(folder=tmp_path).replace("1048576", "4MB\n        dram_cache_bytes: 8GiB"))
    strategy = strategy_from(f"--config={config}", "--trainer.strategy.init_args.transfer.dram_cache_bytes=1GB")
    transfer = strategy._settings.transfer
    assert (transfer.tasklet_bytes, transfer.dram_cache_bytes, transfer.num_buffers) == (4_000_000, 10**9, 8)


def test_a_misspelt_setting_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with a message that names the setting that was meant."""
    config = tmp_path / "config.yaml"
    config.write_text(YAML.format(folder=tmp_path).replace("num_buffers", "num_bufers"))
    with pytest.raises((ValueError, SystemExit)) as ended:  # jsonargparse quotes our error in its own
        strategy_from(f"--config={config}")
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
