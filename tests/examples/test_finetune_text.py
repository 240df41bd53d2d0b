"""The example as a user starts it, at its smallest size."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.conftest import EXAMPLES

Run = Callable[..., str]
SMALL = (
    "--model-size",
    "nano",
    "--block-size",
    "32",
    "--batch-size",
    "4",
    "--sample-bytes",
    "8",
    "--accelerator",
    "cpu",
)


def test_trains_saves_and_goes_on(run_example: Run, tmp_path: Path) -> None:
    """The output has all reports, and the checkpoint resumes and starts new runs."""
    # The default depends on the CPU, and with it the bytes of a step.
    options = (*SMALL, "--precision", "bf16-mixed")
    output = run_example("finetune_text.py", *options, "--max-steps", "4", "--storage", "disk0", "disk1")
    assert [int(step) for step in re.findall(r"^ +(\d+) +\d\.\d{3} {6,}", output, re.MULTILINE)] == [1, 2, 3, 4]
    losses = [float(loss) for loss in re.findall(r"(\d\.\d{3}) at step", output)]
    assert losses[1] < losses[0] < 5.7
    for part in (r"24\.\d\d bytes per parameter", r"peak memory of the process: \d+ MiB", r"ring \d+ MiB", r"sample\n"):
        assert re.search(part, output), part
    checkpoint = "runs/finetune_text/smart_infinity-step4.ckpt"
    assert checkpoint in output
    assert (tmp_path / "disk1").is_dir()
    resumed = run_example("finetune_text.py", *options, "--max-steps", "6", "--resume", checkpoint)
    assert "2 steps in" in resumed
    weights = run_example("finetune_text.py", *options, "--max-steps", "1", "--init-from", checkpoint)
    assert losses[1] == pytest.approx(float(re.findall(r"(\d\.\d{3}) at step 0", weights)[0]), abs=0.02)
    over = run_example("finetune_text.py", *options, "--max-steps", "4", "--resume", checkpoint, status=1)
    assert "is at step 4 already: raise --max-steps" in over


@pytest.mark.long
def test_two_processes(start_example: Run, tmp_path: Path) -> None:
    """Both processes take part to the end, and only the first prints."""
    options = ("--max-steps", "2", "--devices", "2", "--accumulate", "2", "--precision", "bf16-true")
    output = start_example("finetune_text.py", *SMALL, *options)
    assert output.count("held-out loss") == 1
    assert "512 bytes of text per step" in output
    assert (tmp_path / "runs/finetune_text/smart_infinity-step2.ckpt").is_dir()


def test_plain_torch_for_comparison(run_example: Run) -> None:
    """Another strategy prints no traffic."""
    output = run_example("finetune_text.py", *SMALL, "--max-steps", "2", "--strategy", "auto")
    assert "SingleDeviceStrategy" in output
    assert "bytes per parameter" not in output


def test_lightning_cli(run_example: Run, tmp_path: Path) -> None:
    """The configuration file trains, finds the strategy by name, and logs the traffic."""
    options = {
        "trainer.max_steps": "4",
        "trainer.val_check_interval": "2",
        "trainer.log_every_n_steps": "2",
        "trainer.accelerator": "cpu",
        # A row has all bytes of its steps.
        "trainer.strategy": "lightning_smartinfinity.SmartInfinityStrategy",
        "trainer.strategy.overlap": "none",
        "model.model_size": "nano",
        "model.block_size": "32",
        "data.block_size": "32",
        "data.batch_size": "4",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run_example("cli.py", "fit", "--config", str(EXAMPLES / "finetune_text.yaml"), *arguments)
    (metrics,) = tmp_path.rglob("metrics.csv")
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row["io/bytes_per_parameter"]]
    assert [int(row["step"]) for row in rows] == [1, 3]
    assert all(24 <= float(row["io/bytes_per_parameter"]) < 25 for row in rows)


def test_precision_follows_the_hardware(example: Callable[[str], ModuleType]) -> None:
    """On a CPU the example chooses bfloat16 if there are instructions for it, else float32."""
    has_instructions = re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", Path("/proc/cpuinfo").read_text()) is not None
    assert example("finetune_text").choose_precision("cpu") == ("bf16-mixed" if has_instructions else "32-true")


def test_cli_imports_no_strategy() -> None:
    """The CLI and its model do not mention the package."""
    for name in ("cli.py", "byte_lm.py", "text_folder.py"):
        assert "lightning_smartinfinity" not in (EXAMPLES / name).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-size", "huge"], "invalid choice: 'huge'"),
        (["--max-steps", "0"], "0 is below 1"),
        (["--resume", "nowhere.ckpt"], "--resume nowhere.ckpt: no such checkpoint"),
        (["--resume", ".", "--init-from", "."], "not allowed with argument"),
        (["--prompt", ""], "--prompt needs at least one character"),
        (["--data", "nowhere"], "nowhere is not a folder"),
        (["--data", "empty"], "0 files like"),
        (["--strategy", "auto", "--storage", "disk"], "--storage means nothing to --strategy auto"),
        (["--strategy", "fast"], "fast"),
        (["--precision", "bf8"], "bf8"),
    ],
)
def test_bad_arguments(
    example: Callable[[str], ModuleType],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program ends with a message before it trains or writes anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        example("finetune_text").main([*SMALL, *arguments])
    assert ended.value.code not in (0, None)
    assert message in f"{ended.value.code}{capsys.readouterr().err}"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
