"""What users of either system meet with optimizer state on NVMe: stock has DeepSpeed's own swappers and I/O code.

Each situation takes the system and an empty folder, and returns whether all is right.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import torch

from tests.helpers import reference
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import REPOSITORY
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import convert
from tests.helpers.waiting import PROCESS_LIMIT
from tests.stock.systems import OURS, Hook, StockOnCpu

# The width makes DeepSpeed swap at all: it keeps tensors below 1 MiB in memory.
RECIPE = Recipe(precision="bf16-true", lr=1e-3, width=256, depth=1, max_steps=6)
SAVE_AT = 3
THREADS = 4
TASKLET_BYTES = 256 * 1024


def strategy_of(system: str, storage: Path, **settings: Any) -> Any:
    """Return ours, or ZeRO-Infinity as Lightning configures it, with torch's AdamW in place of an op to compile."""
    if system == OURS:
        from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

        transfer = TransferConfig(num_buffers=THREADS, tasklet_bytes=TASKLET_BYTES, keep=False)
        zero = {"reduce_bucket_size": 1_000_000}
        return SmartInfinityStrategy(storage, transfer=transfer, zero=zero, **{"overlap": "none", **settings})
    from tests.stock.async_io import install

    install()
    strategy = StockOnCpu(
        stage=3,
        offload_optimizer=True,
        offload_optimizer_device="nvme",
        nvme_path=str(storage),
        thread_count=THREADS,
        zero_allow_untested_optimizer=True,
        reduce_bucket_size=1_000_000,
    )
    assert isinstance(strategy.config, dict)
    strategy.config |= {"zero_force_ds_cpu_optimizer": False, **settings}
    return strategy


def trainer_of(system: str, root: Path, *hooks: Hook, recipe: Recipe = RECIPE, **settings: Any) -> pl.Trainer:
    return quiet_trainer(
        root,
        strategy_of(system, root / "storage", **settings),
        precision=recipe.precision,
        max_steps=recipe.max_steps,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
        callbacks=list(hooks),
    )


def fit(system: str, root: Path, *hooks: Hook, recipe: Recipe = RECIPE, resume: Path | None = None) -> list[float]:
    module = LitTiny(recipe)
    trainer_of(system, root, *hooks, recipe=recipe).fit(module, ckpt_path=resume)
    return module.losses


@dataclass
class Straight:
    """A training to which nothing happens: its losses, its checkpoint and masters, and the bytes that steps move."""

    losses: list[float]
    checkpoint: Path
    masters: dict[str, torch.Tensor]
    bytes_per_parameter: float


def straight(system: str, root: Path) -> Straight:
    """Train, save on the way, and count the bytes that later steps move: between two steps only steps move bytes."""
    masters, moved, checkpoint = dict[str, torch.Tensor](), list[int](), root / "saved.ckpt"

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(checkpoint)
        for name, param in trainer.lightning_module.model.named_parameters():
            masters[name] = param._z3_optimizer.get_full_hp_param(param).clone()
        moved.append(bytes_moved(trainer))

    losses = fit(system, root, Hook(SAVE_AT, save), Hook(RECIPE.max_steps, lambda it: moved.append(bytes_moved(it))))
    numel = sum(master.numel() for master in masters.values())
    return Straight(losses, checkpoint, masters, (moved[1] - moved[0]) / numel / (RECIPE.max_steps - SAVE_AT))


def bytes_moved(trainer: Any) -> int:
    if isinstance(trainer.strategy, StockOnCpu):
        from tests.stock.async_io import AioHandle

        return AioHandle.bytes_moved
    traffic = trainer.strategy.traffic()
    return int(traffic.shared_read_bytes + traffic.shared_write_bytes)


def training(system: str, root: Path) -> bool:
    """Without disturbance both systems learn, so that the other situations compare two working systems."""
    losses = fit(system, root)
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0] / 2


def resume(system: str, root: Path) -> bool:
    known = straight(system, root)
    return fit(system, root, resume=known.checkpoint) == known.losses[SAVE_AT:]


def save_twice(system: str, root: Path) -> bool:
    path = root / "last.ckpt"
    fit(system, root, *(Hook(step, lambda trainer: trainer.save_checkpoint(path)) for step in (1, 2)))
    return True


def zero_to_fp32(system: str, root: Path) -> bool:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    known = straight(system, root)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(known.checkpoint))
    return all(torch.equal(weights[f"model.{name}"], master) for name, master in known.masters.items())


def ds_to_universal(system: str, root: Path) -> bool:
    known = straight(system, root)
    folder = convert(known.checkpoint) / "zero"
    return all((folder / f"model.{name}" / "exp_avg.pt").exists() for name in known.masters)


def validate(system: str, root: Path) -> bool:
    known = straight(system, root)
    torch.manual_seed(1)
    module = LitTiny(dataclasses.replace(RECIPE, validate=True))
    (metrics,) = trainer_of(system, root).validate(module, ckpt_path=known.checkpoint, verbose=False)
    return bool(metrics["val_loss"] < known.losses[SAVE_AT - 1] + 0.5)


def full_disk(system: str, root: Path) -> bool:
    """Limit every file to 1 MiB, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = Hook(1, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY)))
    try:
        fit(system, root, limit)
    except RuntimeError as error:
        return type(error).__name__ in ("StorageError", "StorageFullError") and "state.bin" in str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return False


def two_jobs(system: str, root: Path) -> bool:
    """Start a second training with the same settings in the middle of the first.

    Stock names its files by counting parameters: only processes of the same age collide.
    """
    other: list[str] = []

    def start_another(_: pl.Trainer) -> None:
        command = [sys.executable, "-m", "tests.stock.situations", str(root), system, "training", "1"]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PROCESS_LIMIT}
        done = subprocess.run(command, cwd=REPOSITORY, env=fresh_environment(), **options)
        other.append(done.stdout + done.stderr)

    losses = fit(system, root, Hook(2, start_another))
    return "StorageLockedError" in other[0] and losses == fit(system, root / "alone")


def state_in_16_bit(system: str, root: Path) -> bool:
    """Moments in bf16 take 8 bytes per parameter instead of 12 in each place, and losses stay near those with fp32."""
    module = LitTiny(RECIPE)
    sixteen: dict[str, Any] = {"state_format": "bf16"}
    if system != OURS:
        sixteen = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        module.configure_optimizers = lambda: cpu_adam(module)  # type: ignore[method-assign]
    trainer: Any = trainer_of(system, root, **sixteen)
    trainer.fit(module)
    nbytes = trainer.strategy.state_bytes / trainer.strategy.state_numel
    return 16 <= nbytes < 17 and near(module.losses, fit(system, root / "fp32"), 2e-2)


def cpu_adam(module: torch.nn.Module) -> Any:
    """Return the optimizer that DeepSpeed asks for. Its op is a mock, since the set-up never reaches a step."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder.load = lambda self: MagicMock()
    return DeepSpeedCPUAdam(module.parameters(), fp32_optimizer_states=False)


def near(losses: list[float], expected: list[float], tolerance: float) -> bool:
    return torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=tolerance)


def buffers_and_threads(system: str, root: Path) -> tuple[int, int]:
    """Return the bytes of the update's buffers per parameter, and a setting in effect."""
    seen: list[int] = []

    def look(trainer: Any) -> None:
        numel = sum(param.ds_numel for param in trainer.lightning_module.parameters())
        if system == OURS:
            ring = trainer.strategy.host_bytes["ring"]
            seen.extend((ring // numel, round(ring / TASKLET_BYTES)))  # tasklets are rounded down to blocks
        else:
            swapper = trainer.strategy.model.optimizer.optimizer_swapper
            buffers = sum(buffer.numel() * 4 for buffer in swapper.swap_buffer_manager.all_buffers)
            seen.extend((buffers // numel, swapper.aio_config["intra_op_parallelism"]))

    fit(system, root, Hook(1, look))
    nbytes, threads = seen
    return nbytes, threads


def memory(system: str, root: Path) -> bool:
    return buffers_and_threads(system, root)[0] < 4


def setting(system: str, root: Path) -> bool:
    return buffers_and_threads(system, root)[1] == THREADS


def unused_parameter(system: str, root: Path) -> bool:
    return trains_like_torch(system, root, skip_side_at=(2, 3))


def accumulation(system: str, root: Path) -> bool:
    return trains_like_torch(system, root, accumulate=2, clip=0.5)


def trains_like_torch(system: str, root: Path, **changes: Any) -> bool:
    recipe = dataclasses.replace(RECIPE, precision="32-true", **changes)
    return near(fit(system, root, recipe=recipe), reference.train(recipe).losses, 1e-3)


def traffic(system: str, root: Path) -> bool:
    """A step reads and writes 12 bytes per parameter each, plus up to 2 % for trailers and alignment."""
    return 24 <= straight(system, root).bytes_per_parameter < 24.5


EMPTY = "fails on the empty partitions in its own checkpoint"
REASONS: dict[Callable[[str, Path], bool], str] = {
    training: "",
    accumulation: "",
    resume: "moments and step are not in the checkpoint, and resume goes on from zeros without a word",
    save_twice: "FileExistsError, as Lightning's last.ckpt finds out",
    zero_to_fp32: EMPTY,
    ds_to_universal: EMPTY,
    validate: EMPTY,
    full_disk: "writes that fail are not noticed, training goes on with what was never stored",
    state_in_16_bit: "a bare AssertionError in the middle of the set-up",
    two_jobs: "the second job writes into the first one's files, and its losses change",
    memory: "with its preset every swap buffer is as large as the model's partition: 16 bytes per parameter",
    setting: "Lightning passes thread_count under a name that DeepSpeed does not read",
    unused_parameter: "a parameter without gradient is stepped again with its last one",
    traffic: "gradients travel to the disk and back with the state",
}
"""What is wrong with stock in each situation; nothing if it is right."""
ON_NVME = {situation.__name__: situation for situation in REASONS}
