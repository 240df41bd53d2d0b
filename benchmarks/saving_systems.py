"""Systems that keep what forward saves for backward, as ``activations.py`` compares them."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comparison import Figures
from gpt2 import GPT2
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import WARMUP, tokens

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD, OffloadedActivations

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHUNK = 256  # tokens
LEAST_NUMEL = 1000  # of a tensor that torch's tutorial writes to a file


class Trained(GPT2):
    """GPT-2 with any of the two losses, and with or without checkpoints around its blocks."""

    def __init__(self, size: str, loss: str) -> None:
        super().__init__(size)
        self.is_chunked, self.is_checkpointed = loss == "chunked", False
        for block in self.h:
            block.forward = partial(self._run, block.forward)

    def _run(self, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(forward, x, use_reentrant=False) if self.is_checkpointed else forward(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self.is_chunked:
            return super().forward(tokens)
        features, wanted = self.features(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        parts = zip(features.split(CHUNK), wanted.split(CHUNK), strict=True)
        return sum(checkpoint(self._loss, *part, use_reentrant=False) for part in parts) / len(wanted)

    def _loss(self, features: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(features).float(), wanted, reduction="sum")


class Meter:
    """Adds up what autograd saves, apart from some tensors: every saved tensor, and every storage once."""

    def __init__(self, apart: Sequence[torch.Tensor]) -> None:
        self._apart = {tensor.untyped_storage()._cdata for tensor in apart}
        self._seen: dict[int, torch.UntypedStorage] = {}
        self.saved_bytes = 0

    def held_bytes(self, *, below: float = math.inf) -> int:
        """Return the bytes of the storages with fewer bytes."""
        return sum(storage.nbytes() for storage in self._seen.values() if storage.nbytes() < below)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._apart:
            self.saved_bytes += tensor.nbytes
            self._seen[storage._cdata] = storage
        return tensor.detach()

    def forward(self) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)


class Hooks:
    """Writes every saved tensor to a file of its own by torch.save, as torch's tutorial of hooks does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written_bytes = self.passed_bytes = self.most_loaded_bytes = 0

    class File:
        """File that goes with what autograd keeps."""

        def __init__(self, path: Path) -> None:
            self.path = path

        def __del__(self) -> None:
            self.path.unlink()

    def pack(self, tensor: torch.Tensor) -> object:
        if tensor.numel() < LEAST_NUMEL:
            self.passed_bytes += tensor.nbytes
            return tensor.detach()
        file = self.File(self.folder / str(uuid.uuid4()))
        torch.save(tensor, file.path)
        self.written_bytes += file.path.stat().st_size
        return file

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        tensor: torch.Tensor = torch.load(packed.path)
        self.most_loaded_bytes = max(self.most_loaded_bytes, tensor.nbytes)
        return tensor

    def forward(self) -> AbstractContextManager[Any]:
        self.passed_bytes = 0
        return saved_tensors_hooks(self.pack, self.unpack)


class Ours:
    """OffloadedActivations, whose memory is looked at whenever it may grow."""

    def __init__(self, folder: Path, model: nn.Module, *, throttle: float = 0.0, **settings: Any) -> None:
        self.activations = OffloadedActivations([folder], module=model, settings=ActivationOffload(**settings))
        self.activations.open()
        self.peak = 0
        store = self.activations._store
        for name in ("admit", "fetch"):
            setattr(store, name, partial(self._watched, getattr(store, name)))
        if throttle:
            sys.path.insert(0, str(Path(__file__).parents[1]))
            from tests.helpers.native_testing import Throttle

            files = store.files.tensors
            self.throttle = Throttle(files.core, files._files.files)
            self.throttle.bytes_per_second = throttle

    def _watched(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        self.peak = max(self.peak, self.activations.held_bytes)
        return result

    def restart_peak(self) -> None:
        self.peak = 0


class Clock:
    """Takes the seconds, and the CPU seconds of all threads, of steps of systems."""

    def __init__(self, systems: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in systems}
        self.cpu: dict[str, list[float]] = {name: [] for name in systems}

    @contextmanager
    def step(self, system: str) -> Iterator[None]:
        """Take the times of what runs in this context."""
        began, cpu_began = time.perf_counter(), time.process_time()
        yield
        self.seconds[system].append(time.perf_counter() - began)
        self.cpu[system].append(time.process_time() - cpu_began)

    def medians(self, system: str) -> Figures:
        """Return the median of each after the warm-up."""
        seconds, cpu = self.seconds[system][WARMUP:], self.cpu[system][WARMUP:]
        return {"seconds": median(seconds), "cpu": median(cpu)}


class Runner:
    """Runs steps of systems in turns.

    Args:
        options: The command line.
        systems: Systems to run.
        folder: Folder for their files.
    """

    def __init__(self, options: argparse.Namespace, systems: Sequence[str], folder: Path) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with self.device:
            model = Trained(options.size, options.loss)
        self.model = model.to(PRECISIONS[options.precision])
        if self.device.type == "cuda":
            # As in training, where each gradient leaves as soon as it is there: all of them would take more memory.
            for param in self.model.parameters():
                param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        self.batches = partial(tokens, size=options.size, shape=tuple(options.shape))
        self.hooks = Hooks(folder)
        self.ours = {
            name: Ours(
                folder / name, self.model, throttle=options.rate, keep=options.keep, host_bytes=options.host_bytes
            )
            for name in systems
            if name in ("ours", "both")
        }
        self.clock = Clock(systems)

    def forward(self, system: str, batch: torch.Tensor) -> AbstractContextManager[Any]:
        if system in self.ours:
            return self.ours[system].activations.forward(batch)
        if system == "hooks":
            return self.hooks.forward()
        return save_on_cpu(pin_memory=True) if system == "save_on_cpu" else nullcontext()

    def step(self, system: str, number: int, around: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
        """Run a step of a system.

        Args:
            system: The system.
            number: Number of the step.
            around: Function that returns what forward runs in, if not what the system needs.
        """
        batch = self.batches(number).to(self.device)
        self.model.is_checkpointed = system in ("checkpoint", "both")
        with self.clock.step(system):
            with self.forward(system, batch) if around is None else around():
                loss = self.model(batch)
            loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        self.model.zero_grad(set_to_none=True)

    def settle(self) -> None:
        """Run steps, which do not count, until it is settled what is offloaded."""
        for system in self.ours:
            for number in range(FIRST_SETTLED_FORWARD):
                self.step(system, number)
        self.clock = Clock(list(self.clock.seconds))

    def held(self, system: str) -> Figures:
        """Return what the system held after a step, and what a hook of each saved tensor would have saved."""
        meter = Meter([*self.model.parameters(), *self.model.buffers(), self.batches(0)])
        self.step(system, 0, meter.forward)
        if system in self.ours and self.ours[system].peak:  # otherwise hooks do not pay
            held = self.ours[system].peak + meter.held_bytes(below=ActivationOffload().min_bytes)
        elif system == "hooks":
            held = self.hooks.passed_bytes + self.hooks.most_loaded_bytes
        else:
            held = meter.held_bytes() if system != "save_on_cpu" else 0
        return {"held_gb": held / 1e9, "saved_gb": meter.saved_bytes / 1e9}

    def restart_device_peak(self) -> int:
        """Watch the device's memory from now on, and return how many bytes of it are in use; 0 without a device.

        That includes what torch was given back, and cannot lend again before copies from it have run.
        """
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        used: int = torch.cuda.memory_stats()["active_bytes.all.current"]
        return used

    def device_peak(self) -> int:
        """Return the most bytes of the device that were in use since then; 0 without a device."""
        if self.device.type != "cuda":
            return 0
        most: int = torch.cuda.memory_stats()["active_bytes.all.peak"]
        return most

    def written_bytes(self, system: str) -> int:
        if system in self.ours:
            return self.ours[system].activations.traffic().written_bytes
        return self.hooks.written_bytes if system == "hooks" else 0

    def close(self) -> None:
        for each in self.ours.values():
            each.activations.close()


@contextmanager
def running(options: argparse.Namespace, systems: Sequence[str]) -> Iterator[Runner]:
    """Yield a runner of systems, and close what they opened."""
    with tempfile.TemporaryDirectory(dir=options.storage) as folder:
        runner = Runner(options, systems, Path(folder))
        try:
            yield runner
        finally:
            runner.close()
