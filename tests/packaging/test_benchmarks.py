"""Benchmarks run at their smallest size."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import lightning_smartinfinity.native._core as core
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT
from tests.native.builds import run
from tests.training.worker import REPOSITORY

pytestmark = pytest.mark.timeout(BUILD_TEST_LIMIT)

BENCHMARKS = REPOSITORY / "benchmarks"
# Arguments of a run that takes seconds, and how the lines of its table begin.
RUNS = {
    "activations.py": (
        [*("--size", "tiny", "--shape", "2", "64", "--loss", "chunked", "--systems", "plain", "ours", "--steps", "3")],
        ["GPT-2, bf16, 2 x 64 tokens", "| system |", "| tiny, chunked, plain |", "| tiny, chunked, ours |"],
    ),
    "backward.py": (
        ["--size", "tiny", "--runs", "1"],
        ["| backward |", "| plain autograd |", "| smart_infinity |"],
    ),
    "checkpoint_memory.py": (
        ["--size", "tiny"],
        ["|  |", "| smart_infinity, save |", "| smart_infinity, load |", "| smart_infinity, evaluate |"],
    ),
    "memory.py": (
        # Stock DeepSpeed's op would have to be built.
        [
            *("--sizes", "1M", "--systems", "in_memory", "gradients", "--clip", "on", "--tokens", "16", "--steps", "1"),
            *("--gradient-bytes", "6000000", "--from-pretrained", "--json", "figures.json"),
        ],
        ["| model, system |", "| 1M, in_memory |", "| 1M, gradients |"],
    ),
    "checkpoint_stall.py": (
        ["--size", "tiny", "--steps", "3", "--tokens", "32"],
        ["| system | saves | step s |", "| beside |", "| waits |", "| stock |"],
    ),
    "checksums.py": (
        ["--size", "tiny", "--steps", "4", "--rounds", "1"],
        ["| system | step s |", "| state on storage |", "| state and parameters on storage |"],
    ),
    "partitioned_parameters.py": (
        ["classes", "--layers", "4", "--rounds", "2"],
        ["| parameters |", "| 8 | none |", "| 8 | all |"],
    ),
    "tiny_tensors.py": (
        ["--tensors", "10", "--steps", "3"],
        ["10 tiny tensors", "| system | plain ms |", "| nothing large |", "| one large tensor |"],
    ),
    "written_activations.py": (
        [],
        ["| system | saved MB |", "| Llama |", "| T5 |", "| BERT |", "| GPT-2 |"],
    ),
    "shared_disk.py": (
        ["--size", "tiny", "--shape", "2", "64", "--steps", "6"],
        ["| system | disk GB/s |", "| unlimited |", "| state |", "| state and activations |"],
    ),
    "compression.py": (["--tiny"], ["top 1 %  ", "8 bits  "]),
    "compression_accuracy.py": (
        [*("--tasks", "from-scratch", "--size", "nano", "--scratch-steps", "2", "--seeds", "1")],
        ["| gradients |", "| dense |", "| 1.0%, with error feedback |", "| 0.5%, without error feedback |"],
    ),
    "csim.py": (
        ["--numel", "4096", "--steps", "2", "--verify"],
        ["step  ", "adamw  ", "rmsprop  "],
    ),
    "engines.py": (
        ["--tiny", "--folder", "."],
        ["| engine |", "| io_uring | huge | yes |", "| threads | 4 KiB | no |", "| plain |"],
    ),
    "export.py": (
        ["--numel", "2e5"],
        ["|  |", "| live, bf16 |", "| live, fp32 |", "| export, lightning |", "| raw write |", "Tensors that differ"],
    ),
    "leaks.py": (
        ["--actions", "save", "--rounds-each", "6"],
        ["88 tensors, 6 rounds", "| system |", "| save, this package |", "| save, Lightning |"],
    ),
    "formats.py": (
        ["--tiny"],
        [
            "| format | read + written",
            "| state in memory | 1 threads",
            "| format | seed 0 |",
            "| fp32 |",
            "| bf16 |",
            "| int8 |",
            "| int8_remainder |",
        ],
    ),
    "import_time.py": (["--runs", "1"], ["import torch, autoload on", "  this package's entry point"]),
    "native_kernels.py": (["--tiny", "--folder", "."], ["sum of squares", "CRC-32C", "step compute", "whole step"]),
    "paper_tables.py": ([], ["| parameter |", "| shared | SU+O |", "| duplex | ours |"]),
    "peak_memory.py": (
        ["--size", "tiny", "--systems", "smart_infinity", "adamw", "--steps", "4"],
        ["| system |", "| smart_infinity |", "| adamw |"],
    ),
    "plan.py": (
        ["--sizes", "1M", "--seq", "16", "--no-measure"],
        ["| size |", "| 1M | building, GB |", "| 1M | state, GB |", "| 1M | seconds, s |"],
    ),
    "scaling.py": (
        ["--tiny", "--json", "figures.json"],
        ["| tensors 20 |", "| folders 2 |", "| processes 1 |", "| processes 2 |"],
    ),
    "step.py": (
        # One system of each kind, except those whose Adam would have to be built.
        [
            *("--size", "tiny", "--steps", "4", "--clip", "on", "--stock-io", "glue", "--json", "figures.json"),
            *("--systems", "zero_infinity_tuned", "int8/backward"),
        ],
        ["GPT-2 tiny, bf16, 1 x 32 tokens, clipping on", "| zero_infinity_tuned |", "| int8/backward |"],
    ),
    "tensor_store.py": (
        ["--size", "tiny", "--rounds", "1", "--stock-io", "glue"],
        ["| memory in progress | system |", "| 64 MiB | ours |", "| 64 MiB | aio |", "| all | raw |"],
    ),
    "tiers.py": (
        # DeepSpeed's own Adam would have to be built.
        [
            *("--size", "tiny", "--tokens", "32", "--steps", "6", "--persist-every", "2", "--stock-adam", "torch"),
            *("--systems", "zero_offload", "default", "half", "nothing", "--clip", "on"),
        ],
        ["GPT-2 tiny, bf16, 32 tokens, clipping on", "| zero_offload |", "| default |", "| half |", "| nothing |"],
    ),
    "training_record.py": (
        ["--size", "tiny", "--steps", "5", "--systems", "overlap none"],
        ["| system | step s | record ms |", "| overlap none |"],
    ),
    "update.py": (
        ["--tiny", "--formats", "fp32", "int8_remainder", "--json", "figures.json"],
        ["| state format, engine |", "| fp32, io_uring |", "| fp32, plain |", "| int8_remainder, threads |"],
    ),
}
# Scripts that run only where XRT is installed.
ON_CARDS = {
    "calibration.py": (["--tiny", "--folder", "."], ["| update by |", "| host | 2 | 4 |", "| cards | 1 | 4 |"]),
    "xrt_bindings.py": (["--tiny", "--folder", "."], ["| binding |", "| native |", "| pyxrt |"]),
}
# Scripts that take longer than five seconds of both cores even so, except update.py, whose figures are plotted.
SLOW = {
    *("activations.py", "backward.py", "calibration.py", "checkpoint_memory.py", "checkpoint_stall.py", "checksums.py"),
    *("compression_accuracy.py", "csim.py", "engines.py", "export.py", "formats.py", "import_time.py"),
    *("leaks.py", "memory.py"),
    *("paper_tables.py", "partitioned_parameters.py", "peak_memory.py", "plan.py", "scaling.py", "shared_disk.py"),
    *("step.py", "tensor_store.py", "tiers.py"),
    *("tiny_tensors.py", "training_record.py", "written_activations.py", "xrt_bindings.py"),
}
# The plots that plots.py makes of these figures, and texts in them.
PLOTTED = {
    "memory.py": {"figures-clip-on.svg": ["in_memory", "gradients, limit", "GB"]},
    "scaling.py": {"figures.svg": ["tensors", "folders", "processes", "seconds per step"]},
    "step.py": {
        "figures-32-tokens-clip-on.svg": ["forward", "backward", "update", "zero_infinity_tuned", "int8/backward"],
        "figures-32-tokens-clip-on-memory.svg": ["GB", "zero_infinity_tuned", "int8/backward"],
    },
    "update.py": {"figures.svg": ["raw disk", "fp32, io_uring", "int8_remainder, plain"]},
}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[RunIf(xrt=True)] * (script in ON_CARDS) + [pytest.mark.long] * (script in SLOW))
        for script in (*RUNS, *ON_CARDS)
    ],
)
def test_benchmark_prints_its_table_with_the_machine(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script exits with 0, prints the machine above the rows of its table and leaves no file behind."""
    begin_in(tmp_path, monkeypatch)
    arguments, rows = (RUNS | ON_CARDS)[script]
    lines = run(sys.executable, BENCHMARKS / script, *arguments).stdout.splitlines()
    assert (
        re.search(r"\d+ cores, .* GiB of memory, Linux \d", lines[0])
        and [row for row in rows if not any(line.startswith(row) for line in lines)] == []
    )
    if script in PLOTTED:
        assert_plotted(tmp_path / "figures.json", PLOTTED[script])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "action",
    [
        *("save", "validate", "evaluate", "fit", "resume", "checkpointing", "transformers", "strategy"),
        *("export", "export_file", "callback", "live_export"),
    ],
)
def test_memory_does_not_grow(action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 rounds in one process, each of the last 200 leaves at most 1 KiB, or as much as without this package.

    It leaves no object: half of the rounds may leave one.
    """
    begin_in(tmp_path, monkeypatch)
    run(sys.executable, BENCHMARKS / "leaks.py", "--actions", action, "--json", "figures.json")
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"].values()
    memory = "allocated" if action == "callback" else "anonymous"  # its threads cut up the heap
    for figure, least in ((memory, 1024), ("objects", 0.5)):
        ours, *plain = (row[figure] for row in rows)
        assert ours <= max([least, *plain]), figure


def begin_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder and restore the environment from before any training in this process."""
    for name in set(os.environ) - set(fresh_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(core.__file__).parents[2]), str(REPOSITORY)]))
    monkeypatch.chdir(folder)


def assert_plotted(figures: Path, plots: dict[str, list[str]]) -> None:
    """Assert that plots.py makes these plots of the figures, and remove them all."""
    output = figures.with_name("plots")
    printed = run(sys.executable, BENCHMARKS / "plots.py", figures, "--output", output).stdout.splitlines()
    assert " cores, " in printed[0] and printed[1:] == [str(output / name) for name in plots]
    for name, texts in plots.items():
        drawn = {text.text for text in ElementTree.parse(output / name).iter("{http://www.w3.org/2000/svg}text")}
        assert set(texts) <= drawn
    shutil.rmtree(output)
    figures.unlink()


def test_every_benchmark_is_run_here_and_named_in_the_readme() -> None:
    """A new script must be added to both."""
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == set(RUNS) | set(ON_CARDS) | {"gpu_step.py"} | {"plots.py"}
    readme = (BENCHMARKS / "README.md").read_text()
    assert [path.name for path in BENCHMARKS.glob("*.py") if f"`{path.name}`" not in readme] == []
