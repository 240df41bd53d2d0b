"""Memory and time of saving, loading and evaluating a checkpoint of GPT-2, beside stock DeepSpeed on the same machine.

    python benchmarks/checkpoint_memory.py --size 355m --systems smart_infinity stock

Each system trains one step in bf16 and saves in one process, resumes in another, and loads only the weights, as for an
evaluation, in a third. ``stock`` is Lightning's DeepSpeedStrategy(stage=3) with CPU offload and torch's AdamW: it
holds the whole state in memory, so its growth shows what a checkpoint adds to that.

The benchmark measures anonymous memory (RssAnon, every 5 ms) and the resident set's high-water mark (VmHWM, reset
before), each as growth over the moment before. File pages that a process maps count in the second only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comparison import measure, report, table
from gpt2 import SIZES
from machine import describe
from peak_memory import resident, restart_peak
from training import BUCKET, SUB_GROUP, Probe, lightning_module, quiet_trainer, tokens

SYSTEMS = ("smart_infinity", "stock")
SAMPLING_SECONDS = 0.005


class Watch:
    """Measures the growth of this process's memory within a context, and the time it took."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self._done = threading.Event()
        self._peak = 0

    def __enter__(self) -> Watch:
        self._before = {key: resident(key) for key in ("RssAnon", "VmRSS")}
        restart_peak()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begin
        self._done.set()
        self._thread.join()
        self.figures = {
            "seconds": seconds,
            "before_mb": self._before["VmRSS"] / 1e6,
            "anonymous_mb": (self._peak - self._before["RssAnon"]) / 1e6,
            "resident_mb": (resident("VmHWM") - self._before["VmRSS"]) / 1e6,
        }

    def _sample(self) -> None:
        while not self._done.wait(SAMPLING_SECONDS):
            self._peak = max(self._peak, resident("RssAnon"))


def strategy_of(system: str, folder: str) -> Any:
    """Create the strategy under test."""
    if system == "smart_infinity":
        from lightning_smartinfinity import SmartInfinityStrategy

        zero = {"sub_group_size": SUB_GROUP, "reduce_bucket_size": BUCKET}
        return SmartInfinityStrategy(folder, zero=zero, transfer={"dram_cache_bytes": 0})
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_smartinfinity.zero3.setup.environment import forbid_jit_builds

    class StockOnCpu(DeepSpeedStrategy):
        """Lightning's strategy, changed only so that it starts on a CPU."""

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", self.local_rank)

        def setup_environment(self) -> None:
            forbid_jit_builds()
            super(DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    strategy = StockOnCpu(
        stage=3,
        offload_optimizer=True,
        sub_group_size=SUB_GROUP,
        reduce_bucket_size=BUCKET,
        zero_allow_untested_optimizer=True,
    )
    assert isinstance(strategy.config, dict)
    strategy.config |= {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    strategy.config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    return strategy


def run(system: str, phase: str, size: str, folder: str) -> dict[str, float]:
    """Save, load or evaluate in this process."""
    strategy, watch, path = strategy_of(system, folder), Watch(), Path(folder) / "a.ckpt"
    load = strategy.load_checkpoint

    def watched(*args: Any, **kwargs: Any) -> Any:
        with watch:
            return load(*args, **kwargs)

    strategy.load_checkpoint = watched
    trainer = quiet_trainer(folder, strategy, max_steps=1 if phase == "save" else 2, limit_predict_batches=0)
    batches = partial(tokens, size=size, shape=(1, 32))
    module = lightning_module(size, 2, Probe(), batches)
    if phase == "evaluate":
        trainer.predict(module, module.train_dataloader(), ckpt_path=path)
    else:
        trainer.fit(module, ckpt_path=path if phase == "load" else None)
    if phase == "save":
        with watch:
            trainer.save_checkpoint(path)
    return {**watch.figures, "file_mb": sum(file.stat().st_size for file in path.rglob("*.pt")) / 1e6}


COLUMNS = {  # key of the figures and number of digits
    "seconds": ("seconds", 1),
    "resident before, MB": ("before_mb", 0),
    "anonymous memory added, MB": ("anonymous_mb", 0),
    "resident memory added, MB": ("resident_mb", 0),
    "files, MB": ("file_mb", 0),
}


def main() -> int:
    """Measure each system and print a table below the machine.

    Returns:
        Exit status: 1 if a system failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["smart_infinity"])
    parser.add_argument("--storage", help="folder on the disk to measure; default: a temporary one here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        report(run(*options.child, options.size, options.storage))
        return 0
    rows: dict[str, dict[str, float] | None] = {}
    for system in options.systems:
        with tempfile.TemporaryDirectory(dir=options.storage or ".") as folder:
            for phase in ("save", "load", "evaluate"):
                name, size = f"{system}, {phase}", ["--size", options.size]
                rows[name] = measure(name, __file__, "--child", system, phase, *size, "--storage", folder)
    print(describe("torch", "deepspeed", "lightning"))
    print(f"GPT-2 {options.size}, bf16\n")
    print(table({name: row for name, row in rows.items() if row is not None}, COLUMNS, head=""))
    return int(None in rows.values())


if __name__ == "__main__":
    sys.exit(main())
