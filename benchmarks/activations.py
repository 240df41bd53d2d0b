"""Measures offloading what forward saves for backward: memory, time and bytes, beside recomputation and other hooks.

    python benchmarks/activations.py --size 124m 355m --shape 4 1024 --loss whole chunked --storage /mnt/nvme0
    python benchmarks/activations.py --throttle 0.1 0.3 1 --size 124m --storage /mnt/nvme0
    python benchmarks/activations.py --tiny
    python benchmarks/activations.py --ratios

GPT-2 runs forward and backward, without an optimizer, in bf16. On processors without instructions for bf16 that takes
more than ten times as long as in fp32; `--precision fp32` measures the times there. `chunked` computes logits and loss
of 256 tokens at a time under torch.utils.checkpoint, so that no more logits live at once. The systems:

- `plain` is autograd alone, and `ours` is OffloadedActivations;
- `checkpoint` is torch.utils.checkpoint around every block, and `both` is `ours` around that;
- `hooks` is torch's tutorial: a file of torch.save for every saved tensor;
- `save_on_cpu` is torch.autograd.graph.save_on_cpu(pin_memory=True), only on a CUDA device.

Each system runs in a process of its own for its memory. Another process runs all of them in turns for the times,
because the speed of a shared machine drifts. "Held" is the most that autograd keeps at once, apart from parameters and
the batch: what is saved, the pool, and what is read back. Hooks do not see what a checkpoint recomputes in backward.
"VmHWM above" is beside the same system's run on 32 tokens. CPU seconds are those of all threads; where other work runs
beside the benchmark, they say more than the clock about what a system adds.

With `--throttle`, requests to storage take turns at these rates, reads and writes together, and `keep="auto"` has to
find out what pays. Only a core that was built with SMART_INFINITY_TESTING can do that.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comparison import Figures, in_child, parse_options, report, several, table, write_figures
from gpt2 import CONTEXT, GPT2, SIZES
from machine import describe
from peak_memory import resident, restart_peak
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import WARMUP, tokens

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.packing import tensors_in

SYSTEMS = ("plain", "ours", "checkpoint", "both", "hooks", "save_on_cpu")
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHUNK = 256  # tokens
LEAST_NUMEL = 1000  # of a tensor that torch's tutorial writes to a file
MEMORY_STEPS = WARMUP + 1
NUM_TINY, LARGE_NUMEL = 10_000, 1 << 20
TINY_FACTOR = 10  # short steps vary more, so there are more of them
COLUMNS = {  # key of a system's figures, digits
    "held GB": ("held_gb", 3),
    "x plain": ("held_ratio", 2),
    "VmHWM GB": ("peak_gb", 2),
    "VmHWM above GB": ("above_gb", 2),
    "x plain ": ("above_ratio", 2),
    "step s": ("seconds", 2),
    "x plain  ": ("seconds_ratio", 3),
    "overhead s": ("overhead", 2),
    "CPU s": ("cpu", 2),
    "x plain   ": ("cpu_ratio", 3),
    "written GB": ("written_gb", 2),
    "of saved": ("written_ratio", 2),
}
THROTTLED_COLUMNS = {
    "plain s": ("plain", 3),
    "ours s": ("seconds", 3),
    "x plain": ("ratio", 3),
    "predicted s": ("predicted", 3),
    "measured / predicted": ("of_predicted", 3),
    "held GB": ("held_gb", 3),
    "predicted GB": ("predicted_gb", 3),
    "held / predicted": ("held_of_predicted", 3),
    "held x plain": ("held_ratio", 2),
    "offloaded GB": ("offloaded_gb", 3),
}
TINY_COLUMNS = {"plain ms": ("plain", 1), "ours ms": ("ours", 1), "x plain": ("ratio", 3), "CPU x plain": ("cpu", 3)}
RATIO_COLUMNS = {"saved MB": ("saved", 2), "written MB": ("written", 2), "written / saved": ("ratio", 3)}


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

            files = store.files
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
        self.model = Trained(options.size, options.loss).to(self.device, PRECISIONS[options.precision])
        self.batches = partial(tokens, size=options.size, shape=tuple(options.shape))
        self.hooks = Hooks(folder)
        self.ours = {
            name: Ours(folder / name, self.model, throttle=options.rate) for name in systems if name in ("ours", "both")
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

    def held(self, system: str) -> Figures:
        """Return what the system held after a step, and what a hook of each saved tensor would have saved."""
        meter = Meter([*self.model.parameters(), *self.model.buffers(), self.batches(0)])
        self.step(system, 0, meter.forward)
        if system in self.ours:
            held = self.ours[system].peak + meter.held_bytes(below=ActivationOffload().min_bytes)
        elif system == "hooks":
            held = self.hooks.passed_bytes + self.hooks.most_loaded_bytes
        else:
            held = meter.held_bytes() if system != "save_on_cpu" else 0
        return {"held_gb": held / 1e9, "saved_gb": meter.saved_bytes / 1e9}

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


def run(options: argparse.Namespace) -> Figures:
    """Run a child: the memory of one system, or the times of several in turns."""
    systems = options.child.split(",")
    with running(options, systems) as runner:
        if options.rate:
            return throttled(runner, options.steps)
        if len(systems) > 1:
            take_turns(runner, options.steps)
            return {name: runner.clock.medians(name) for name in systems}
        return memory(runner, systems[0])


def take_turns(runner: Runner, steps: int) -> None:
    systems = list(runner.clock.seconds)
    for number in range(steps):
        for name in systems[number % len(systems) :] + systems[: number % len(systems)]:
            runner.step(name, number)


def memory(runner: Runner, system: str) -> Figures:
    """Return the memory of a system, and what it wrote in a step, after the warm-up."""
    for number in range(MEMORY_STEPS):
        if number == WARMUP:
            restart_peak()
            for each in runner.ours.values():
                each.restart_peak()
        written = runner.written_bytes(system)
        runner.step(system, number)
    peak, written = resident("VmHWM"), runner.written_bytes(system) - written
    return {"peak_gb": peak / 1e9, "written_gb": written / 1e9, **runner.held(system)}


def throttled(runner: Runner, steps: int) -> Figures:
    """Compare what the choice predicts with what came true, on slow storage."""
    take_turns(runner, steps)
    ours = runner.ours["ours"]
    choice = ours.activations.choice
    assert choice is not None, "the third step chooses"
    ours.restart_peak()
    before = ours.activations.traffic().offloaded_bytes
    runner.step("ours", steps)
    offloaded = ours.activations.traffic().offloaded_bytes - before
    plain, seconds = (runner.clock.medians(name)["seconds"] for name in ("plain", "ours"))
    held = ours.peak / 1e9
    return {
        "plain": plain,
        "seconds": seconds,
        "ratio": seconds / plain,
        "predicted": choice.seconds,
        "of_predicted": seconds / choice.seconds,
        "held_gb": held,
        "predicted_gb": choice.peak_bytes / 1e9,
        "held_of_predicted": held / (choice.peak_bytes / 1e9),
        "held_ratio": held / runner.held("plain")["held_gb"],
        "offloaded_gb": offloaded / 1e9,
    }


def child_options(options: argparse.Namespace, *, size: str, loss: str, rate: float) -> argparse.Namespace:
    """Return the options of a child that runs one size and loss, with storage at a rate; 0: as fast as it is."""
    shared = {name: getattr(options, name) for name in ("storage", "shape", "steps", "precision")}
    return argparse.Namespace(**shared, size=size, loss=loss, rate=rate)


def compare_systems(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of all systems, sizes and losses; a system that fails is left out."""
    rows = {}
    for size, loss in ((size, loss) for size in options.size for loss in options.loss):
        common = child_options(options, size=size, loss=loss, rate=0.0)
        found = {name: in_child(__file__, common, name) for name in options.systems}
        small = {name: in_child(__file__, common, name, shape=[1, 32]) for name in options.systems}
        seconds = in_child(__file__, common, ",".join(options.systems)) if len(found) > 1 else None
        for name, figures in found.items():
            if figures is not None:
                figures |= {"above_gb": figures["peak_gb"] - small[name]["peak_gb"]} if small[name] else {}
                figures |= seconds[name] if seconds else {}
                rows[f"{size}, {loss}, {name}"] = beside(figures, found.get("plain"))
    return rows


def beside(figures: Figures, plain: Figures | None) -> Figures:
    """Return figures with their ratios to those of autograd alone."""
    if plain is None:
        return figures
    names = {"held_ratio": "held_gb", "above_ratio": "above_gb", "seconds_ratio": "seconds", "cpu_ratio": "cpu"}
    ratios = {ratio: figures[name] / plain[name] for ratio, name in names.items() if plain.get(name)}
    if "seconds" in figures:
        ratios["overhead"] = figures["seconds"] - plain["seconds"]
    return {**figures, **ratios, "written_ratio": figures["written_gb"] / plain["saved_gb"]}


def compare_rates(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures on slow storage, for every size, loss and rate."""
    rows = {}
    for size in options.size:
        for loss in options.loss:
            for rate in options.throttle:
                common = child_options(options, size=size, loss=loss, rate=rate * 1e9)
                figures = in_child(__file__, common, "plain,ours")
                if figures is not None:
                    rows[f"{size}, {loss}, {rate:g} GB/s"] = figures
    return rows


class Tiny(nn.Module):
    """Saves thousands of tiny tensors, and before them one large one if its batch is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (2 * x).sin()[:8]
        for _ in range(NUM_TINY):
            y = y.sin()
        return y.sum()


def compare_tiny(options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of thousands of tiny tensors, alone and behind a large one."""
    model, rows = Tiny(), {}
    for name, numel in {"nothing large": 8, "one large tensor": LARGE_NUMEL}.items():
        x = torch.randn(numel, requires_grad=True)
        clock = Clock(["plain", "ours"])
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.storage))
            activations = OffloadedActivations([folder], module=model)
            stack.callback(activations.close)
            for number in range(WARMUP + TINY_FACTOR * (options.steps - WARMUP)):
                for system in sorted(clock.seconds, reverse=bool(number % 2)):
                    with clock.step(system):
                        with activations.forward(x) if system == "ours" else nullcontext():
                            loss = model(x)
                        loss.backward()
        plain, ours = (clock.medians(system) for system in ("plain", "ours"))
        rows[name] = {
            "plain": 1e3 * plain["seconds"],
            "ours": 1e3 * ours["seconds"],
            "ratio": ours["seconds"] / plain["seconds"],
            "cpu": ours["cpu"] / plain["cpu"],
        }
    return rows


def small_models() -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build models of transformers with random weights and without dropout."""
    import transformers as hf

    common = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"vocab_size": 1000, "n_embd": 256, "n_layer": 3, "n_head": 4}
    t5 = {"vocab_size": 1000, "d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 3, "num_heads": 4}
    return {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_hidden_layers=3, intermediate_size=688)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, dropout_rate=0.0, decoder_start_token_id=0)),
        "BERT": lambda: hf.BertForMaskedLM(
            hf.BertConfig(**common, **dropout, num_hidden_layers=3, intermediate_size=1024)
        ),
        "GPT-2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(**gpt2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
        ),
    }


def compare_bytes(options: argparse.Namespace) -> dict[str, Figures]:
    """Return what is written of each model beside what it saves, tensor by tensor."""
    rows = {}
    for name, build in small_models().items():
        torch.manual_seed(0)
        model = build().train()
        batch = torch.randint(0, 1000, (4, 128))
        meter = Meter([*model.parameters(), *model.buffers(), *tensors_in(batch)])
        with meter.forward():
            model(input_ids=batch, labels=batch).loss.backward()
        with tempfile.TemporaryDirectory(dir=options.storage) as folder:
            settings = ActivationOffload(keep=0, min_bytes=1, host_bytes="1GiB")
            activations = OffloadedActivations([folder], module=model, settings=settings)
            with activations.forward(batch):
                loss = model(input_ids=batch, labels=batch).loss
            while activations.traffic().written_bytes < activations.traffic().offloaded_bytes:
                time.sleep(0.01)
            written = activations.traffic().written_bytes
            loss.backward()
            activations.close()
        rows[name] = {"saved": meter.saved_bytes / 1e6, "written": written / 1e6, "ratio": written / meter.saved_bytes}
    return rows


def main() -> int:
    """Measure what was asked for, and print a table below the machine.

    Returns:
        Exit status: 1 if something failed.
    """
    options = parse_options(
        __doc__,
        tokens=None,
        size={"nargs": "+", "choices": SIZES, "default": ["124m"]},
        shape={"nargs": 2, "type": int, "default": [4, CONTEXT], "metavar": ("BATCH", "LENGTH")},
        loss={"nargs": "+", "choices": ("whole", "chunked"), "default": ["whole"]},
        systems=several(SYSTEMS, default=SYSTEMS if torch.cuda.is_available() else SYSTEMS[:-1]),
        precision={"choices": PRECISIONS, "default": "bf16"},
        throttle={"nargs": "+", "type": float, "metavar": "GBPS", "help": "measure keep='auto' on slow storage"},
        tiny={"action": "store_true", "help": "measure ten thousand tiny tensors"},
        ratios={"action": "store_true", "help": "measure what is written of models of transformers"},
        rate={"type": float, "default": 0.0, "help": argparse.SUPPRESS},
    )
    if options.child:
        options.size, options.loss = options.size[0], options.loss[0]
        report(run(options))
        return 0
    machine = describe("torch")
    print(machine, flush=True)
    steps = options.steps - WARMUP
    if options.tiny:
        heading, columns, compared = f"{NUM_TINY} tiny tensors", TINY_COLUMNS, compare_tiny
    elif options.ratios:
        heading, columns, compared = "bytes of models of transformers, without dropout", RATIO_COLUMNS, compare_bytes
    elif options.throttle:
        heading, columns, compared = "GPT-2 on slow storage, keep='auto'", THROTTLED_COLUMNS, compare_rates
    else:
        heading, columns, compared = "GPT-2", COLUMNS, compare_systems
    rows = compared(options)
    if not (options.tiny or options.ratios):
        heading += ", {}, {} x {} tokens, medians of {} steps".format(options.precision, *options.shape, steps)
    print(f"\n{heading}\n")
    print(table(rows, columns))
    write_figures(options.json, machine=machine, rows=rows)
    return int(not rows)


if __name__ == "__main__":
    sys.exit(main())
