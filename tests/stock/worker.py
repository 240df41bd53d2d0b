"""Runs the scenarios of the comparison with stock: ``python -m tests.stock.worker SYSTEM FOLDER``.

It prints one JSON line for each. SYSTEM is ``smart_infinity`` or ``stock``: Lightning's DeepSpeedStrategy with
optimizer state on NVMe, DeepSpeed's own swappers and DeepSpeed's own I/O code.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import torch

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.waiting import PROCESS_LIMIT
from tests.stock.systems import Hook, StockOnCpu
from tests.training.worker import REPOSITORY

# The width makes DeepSpeed swap at all: it keeps tensors below 1 MiB in memory.
RECIPE = Recipe(precision="bf16-true", lr=1e-3, width=256, depth=1, max_steps=6)
UNUSED = dataclasses.replace(RECIPE, precision="32-true", skip_side_at=(2, 3))
ACCUMULATED = dataclasses.replace(RECIPE, precision="32-true", accumulate=2, clip=0.5)
SAVE_AT = 3
THREADS = 4
TASKLET_BYTES = 256 * 1024


def stock_strategy(folder: Path, **config: Any) -> Any:
    """Return ZeRO-Infinity as Lightning configures it, with torch's AdamW instead of an op that must be compiled."""
    from tests.stock.async_io import install

    install()
    strategy = StockOnCpu(
        stage=3,
        offload_optimizer=True,
        offload_optimizer_device="nvme",
        nvme_path=str(folder),
        thread_count=THREADS,
        zero_allow_untested_optimizer=True,
        reduce_bucket_size=1_000_000,
    )
    assert isinstance(strategy.config, dict)
    strategy.config |= {"zero_force_ds_cpu_optimizer": False, **config}
    return strategy


def our_strategy(folder: Path, **settings: Any) -> Any:
    from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig

    return SmartInfinityStrategy(
        folder,
        transfer=TransferConfig(num_buffers=THREADS, tasklet_bytes=TASKLET_BYTES, keep=False),
        zero={"reduce_bucket_size": 1_000_000},
        **{"overlap": "none", **settings},
    )


class Scenarios:
    """Scenarios for a user of either system. The tests judge the result of each method."""

    def __init__(self, system: str, folder: Path) -> None:
        self.system, self.folder = system, folder
        self.checkpoint = folder / f"step-{SAVE_AT}.ckpt"
        self.losses: list[float] = []
        self.masters: dict[str, torch.Tensor] = {}

    def strategy(self, name: str, **settings: Any) -> Any:
        factory = our_strategy if self.system == "smart_infinity" else stock_strategy
        return factory(self.folder / "storage" / name, **settings)

    def trainer(self, name: str, *hooks: Hook, recipe: Recipe = RECIPE, **settings: Any) -> pl.Trainer:
        return pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=self.strategy(name, **settings),
            precision=recipe.precision,  # type: ignore[arg-type]
            max_steps=recipe.max_steps,
            accumulate_grad_batches=recipe.accumulate,
            gradient_clip_val=recipe.clip,
            callbacks=list(hooks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=self.folder,
        )

    def fit(self, name: str, *hooks: Hook, recipe: Recipe = RECIPE, resume: Path | None = None) -> list[float]:
        module = LitTiny(recipe)
        self.trainer(name, *hooks, recipe=recipe).fit(module, ckpt_path=resume)
        return module.losses

    def straight(self) -> dict[str, Any]:
        """Train, save on the way, and count the bytes that later steps move."""

        def save(trainer: pl.Trainer) -> None:
            trainer.save_checkpoint(self.checkpoint)
            for name, param in trainer.lightning_module.model.named_parameters():  # type: ignore[union-attr]
                self.masters[name] = param._z3_optimizer.get_full_hp_param(param).clone()
            # Between two steps only the steps move bytes.
            moved["before"] = self._moved(trainer)

        def count(trainer: pl.Trainer) -> None:
            moved["after"] = self._moved(trainer)

        moved: dict[str, int] = {}
        self.losses = self.fit("straight", Hook(SAVE_AT, save), Hook(RECIPE.max_steps, count))
        numel = sum(master.numel() for master in self.masters.values())
        steps = RECIPE.max_steps - SAVE_AT
        return {"losses": self.losses, "bytes_per_parameter": (moved["after"] - moved["before"]) / numel / steps}

    def _moved(self, trainer: pl.Trainer) -> int:
        if self.system == "stock":
            from tests.stock.async_io import AioHandle

            return AioHandle.bytes_moved
        traffic = trainer.strategy.traffic()  # type: ignore[attr-defined]
        return int(traffic.shared_read_bytes + traffic.shared_write_bytes)

    def resume(self) -> dict[str, Any]:
        return {"losses": self.fit("resume", resume=self.checkpoint), "expected": self.losses[SAVE_AT:]}

    def save_twice(self) -> dict[str, Any]:
        path = self.folder / "last.ckpt"
        self.fit("twice", *(Hook(step, lambda trainer: trainer.save_checkpoint(path)) for step in (1, 2)))
        return {}

    def zero_to_fp32(self) -> dict[str, Any]:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(self.checkpoint))
        equal = [torch.equal(weights[f"model.{name}"], master) for name, master in self.masters.items()]
        return {"equal": equal}

    def ds_to_universal(self) -> dict[str, Any]:
        output = self.folder / "universal"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
                *("--num_extract_workers", "1", "--num_merge_workers", "1"),
                *("--input_folder", str(self.checkpoint / "checkpoint")),
                *("--output_folder", str(output / "checkpoint")),
            ],
            capture_output=True,
            text=True,
            timeout=PROCESS_LIMIT,
        )
        assert done.returncode == 0, done.stderr[-800:]
        names = list(self.masters)
        saved = [output / "checkpoint" / "zero" / f"model.{name}" / "exp_avg.pt" for name in names]
        return {"moments": [path.exists() for path in saved]}

    def validate(self) -> dict[str, Any]:
        torch.manual_seed(1)
        module = LitTiny(RECIPE)
        module.val_dataloader = RECIPE.validation_loader  # type: ignore[method-assign]
        (metrics,) = self.trainer("validate").validate(module, ckpt_path=self.checkpoint, verbose=False)
        return {"loss": metrics["val_loss"]}

    def full_disk(self) -> dict[str, Any]:
        """Limit every file to 1 MiB, as on a full disk."""

        def limit(trainer: pl.Trainer) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            self.fit("full", Hook(1, limit))
        except RuntimeError as error:
            return {"noticed": type(error).__name__, "message": str(error)}
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, before)
        return {"noticed": None}

    def two_jobs(self) -> dict[str, Any]:
        """Start a second training with the same settings in the middle of the first."""
        other: list[str] = []

        def start_another(trainer: pl.Trainer) -> None:
            done = subprocess.run(
                [sys.executable, "-m", "tests.stock.worker", self.system, str(self.folder), "intrude"],
                cwd=REPOSITORY,
                env=fresh_environment(),
                capture_output=True,
                text=True,
                timeout=PROCESS_LIMIT,
            )
            other.append(done.stdout + done.stderr)

        losses = self.fit("shared", Hook(2, start_another))
        return {"losses": losses, "locked": "StorageLockedError" in other[0]}

    def intrude(self) -> dict[str, Any]:
        return {"losses": self.fit("shared")}

    def unused_parameter(self) -> dict[str, Any]:
        return {"losses": self.fit("unused", recipe=UNUSED)}

    def accumulation(self) -> dict[str, Any]:
        return {"losses": self.fit("accumulation", recipe=ACCUMULATED)}

    def state_in_16_bit(self) -> dict[str, Any]:
        module = LitTiny(RECIPE)
        sixteen: dict[str, Any] = {"state_format": "bf16"}
        if self.system == "stock":
            sixteen = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
            module.configure_optimizers = lambda: _cpu_adam(module)  # type: ignore[method-assign]
        trainer = self.trainer("sixteen", **sixteen)
        trainer.fit(module)
        strategy: Any = trainer.strategy
        return {"losses": module.losses, "bytes_per_parameter": strategy.state_bytes / strategy.state_numel}

    def preset(self) -> dict[str, Any]:
        """Return the memory that the update holds by default, and a setting in effect."""
        module = LitTiny(RECIPE)
        trainer = self.trainer("preset")
        seen: dict[str, Any] = {}

        def look(trainer: pl.Trainer) -> None:
            optimizer = trainer.strategy.model.optimizer  # type: ignore[union-attr]
            if self.system == "stock":
                swapper: Any = optimizer.optimizer_swapper
                seen["buffers"] = sum(b.numel() * 4 for b in swapper.swap_buffer_manager.all_buffers)
                seen["setting"] = swapper.aio_config["intra_op_parallelism"]
            else:
                seen["buffers"] = trainer.strategy.host_bytes["ring"]  # type: ignore[attr-defined]
                seen["setting"] = round(seen["buffers"] / TASKLET_BYTES)  # tasklets are rounded down to blocks

        trainer.callbacks.append(Hook(1, look))  # type: ignore[attr-defined]
        trainer.fit(module)
        return {**seen, "numel": sum(p.ds_numel for p in module.parameters())}


# Two jobs come first. Stock names its files by counting parameters, so that only processes of the same age collide.
ORDER = (
    "two_jobs",
    "straight",
    "resume",
    "save_twice",
    "zero_to_fp32",
    "ds_to_universal",
    "validate",
    "preset",
    "unused_parameter",
    "accumulation",
    "state_in_16_bit",
    "full_disk",
)


def _cpu_adam(module: torch.nn.Module) -> Any:
    """Return the optimizer that DeepSpeed asks for. Its op is a mock, since the set-up never reaches a step."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder.load = lambda self: MagicMock()
    return DeepSpeedCPUAdam(module.parameters(), fp32_optimizer_states=False)


def main() -> None:
    system, folder, *only = sys.argv[1:]
    scenarios = Scenarios(system, Path(folder))
    for name in only or ORDER:
        try:
            outcome = getattr(scenarios, name)()
        except Exception as error:
            traceback.print_exc()
            outcome = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"\nOUTCOME {name} {json.dumps(outcome)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
