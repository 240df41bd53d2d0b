"""What users write, checked by mypy --strict; nothing here runs.

An ``ignore`` marks what must be refused: mypy reports one that it does not need.
"""

from pathlib import Path

import lightning as L
from typing_extensions import assert_type

import lightning_smartinfinity
from lightning_smartinfinity import (
    ConfigError,
    SmartInfinityError,
    SmartInfinityFabricStrategy,
    SmartInfinityPrecision,
    SmartInfinityStrategy,
    SmartSSDConfig,
    StorageError,
    StorageFullError,
    StorageTrafficMonitor,
    TransferConfig,
)
from lightning_smartinfinity.huggingface import SmartInfinityTraining
from lightning_smartinfinity.metrics import StorageBytes


def with_settings(folder: Path) -> L.Trainer:
    strategy = SmartInfinityStrategy(
        storage=["/mnt/nvme0", folder],
        update_device="host",
        state_format="int8",
        overlap="none",
        transfer=TransferConfig(tasklet_bytes=1 << 20, num_buffers=8, durability="power", direct_io="on"),
        zero={"reduce_bucket_size": 1_000_000},
        initial_scale_power=12,
    )
    return L.Trainer(strategy=strategy, callbacks=[StorageTrafficMonitor()])


def on_cards() -> SmartInfinityStrategy:
    cards = SmartSSDConfig(xclbin="kernels.xclbin", devices=["0000:3d:00.1", 1], gradient_route="storage", timeout=10)
    return SmartInfinityStrategy(["/mnt/a", "/mnt/b"], update_device="smartssd", smartssd=cards)


def with_dicts_and_text() -> SmartInfinityStrategy:
    transfer = TransferConfig(tasklet_bytes="4MB", dram_cache_bytes="8GB")
    assert_type(transfer.buffer_bytes, int | None)
    SmartInfinityFabricStrategy(transfer={"num_buffers": 8, "dram_cache_bytes": "8GB"})
    return SmartInfinityStrategy(transfer={"num_buffers": 8}, smartssd={"xclbin": "kernels.xclbin"})


def with_transformers() -> SmartInfinityTraining:
    return SmartInfinityTraining(storage="/mnt/nvme")


def with_a_metric() -> StorageBytes:
    return StorageBytes()


def fabric_with_settings(folder: Path) -> L.Fabric:
    strategy = SmartInfinityFabricStrategy([folder], transfer=TransferConfig(num_buffers=8), initial_scale_power=12)
    fabric = L.Fabric(strategy=strategy)
    assert_type(strategy.traffic().shared_read_bytes, int)
    assert_type(strategy.close(), None)
    return fabric


def after_fit(trainer: L.Trainer) -> None:
    strategy = trainer.strategy
    assert isinstance(strategy, SmartInfinityStrategy)
    assert_type(strategy.traffic().shared_read_bytes, int)
    assert_type(strategy.state_bytes, int)
    assert_type(strategy.close(), None)
    assert isinstance(trainer.precision_plugin, SmartInfinityPrecision)


def errors(trainer: L.Trainer, module: L.LightningModule) -> str:
    try:
        trainer.fit(module)
    except StorageFullError as error:
        assert_type(error.remedy, str)
        return error.problem
    except StorageError as error:
        raise RuntimeError(error.remedy) from error
    except (ConfigError, SmartInfinityError) as error:
        return str(error)
    assert_type(lightning_smartinfinity.__version__, str)
    return ""


def refused(folder: Path) -> None:
    SmartInfinityStrategy(storage=[1])  # type: ignore[list-item]
    SmartInfinityStrategy(folder, "host")  # type: ignore[call-arg]
    SmartInfinityStrategy(storages=[folder])  # type: ignore[call-arg]
    SmartInfinityFabricStrategy(storages=[folder])  # type: ignore[call-arg]
    SmartInfinityStrategy(transfer=8)  # type: ignore[arg-type]
    TransferConfig(num_bufers=8)  # type: ignore[call-arg]
    SmartSSDConfig("kernels.xclbin")  # type: ignore[call-arg]
    SmartInfinityStrategy(smartssd="kernels.xclbin")  # type: ignore[arg-type]
    TransferConfig(1 << 20)  # type: ignore[call-arg]
    TransferConfig(num_buffers=8.0)  # type: ignore[arg-type]
    TransferConfig().num_buffers = 8  # type: ignore[misc]
    lightning_smartinfinity.SmartInfinity  # type: ignore[attr-defined]  # noqa: B018
