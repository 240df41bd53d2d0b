"""Writes a plan's settings as Python and as a configuration of LightningCLI, ready to paste."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_smartinfinity.planning.training import Training

__all__ = ["python_recipe", "yaml_recipe"]


def python_recipe(training: Training, *, storage: Path, on_gpu: bool, sets_cache: bool = True) -> str:
    """Return Python code that creates the Trainer, with the remaining settings in comments.

    Args:
        training: The training.
        storage: The storage folder.
        on_gpu: Whether a GPU computes.
        sets_cache: Whether to set the size of state in memory, which the training otherwise chooses by itself.
    """
    settings = _strategy_settings(training, storage, sets_cache=sets_cache)
    codec, arguments = _codec(training)
    names = ", ".join(sorted(filter(None, ("SmartInfinityStrategy", codec))))
    lines = ["import lightning as L", "", f"from lightning_smartinfinity import {names}", ""]
    lines += [f"# {words}" for words in _advice(training)]
    lines += ["strategy = SmartInfinityStrategy("]
    lines += [f"    {name}={value!r}," for name, value in settings.items()]
    if codec:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        lines += [f"    compression={codec}({given}),"]
    lines += [")", "trainer = L.Trainer(", "    strategy=strategy,"]
    lines += [f"    {name}={value!r}," for name, value in _trainer_settings(training, on_gpu=on_gpu).items()]
    return "\n".join([*lines, ")"])


def yaml_recipe(training: Training, *, storage: Path, on_gpu: bool, sets_cache: bool = True) -> str:
    """Return the same settings as the ``trainer`` section of a configuration file of LightningCLI."""
    lines = [f"# {words}" for words in _advice(training)]
    lines += [
        "trainer:",
        "  strategy:",
        "    class_path: lightning_smartinfinity.SmartInfinityStrategy",
        "    init_args:",
    ]
    # JSON is YAML, too.
    settings = _strategy_settings(training, storage, sets_cache=sets_cache)
    codec, arguments = _codec(training)
    if codec:
        settings["compression"] = {"class_path": f"lightning_smartinfinity.{codec}", "init_args": arguments}
    lines += [f"      {name}: {json.dumps(value)}" for name, value in settings.items()]
    lines += [f"  {name}: {json.dumps(value)}" for name, value in _trainer_settings(training, on_gpu=on_gpu).items()]
    return "\n".join(lines)


def _codec(training: Training) -> tuple[str, dict[str, Any]]:
    """Return the class name of the gradient codec and its arguments; an empty name without compression."""
    if training.compression is None:
        return "", {}
    if isinstance(training.compression, str):
        return training.compression, {}
    return "TopK", {"ratio": training.compression}


def _strategy_settings(training: Training, storage: Path, *, sets_cache: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"storage": str(storage), "state_format": training.state_format}
    transfer: dict[str, Any] = {}
    if not training.asynchronous:
        transfer["asynchronous"] = False
    if training.accumulate > 1 and training.accumulate_in != "fp32":
        transfer["accumulate_in"] = training.accumulate_in
    if training.gradient_budget is not None:
        transfer["gradient_bytes"] = training.gradient_budget
    if training.parameter_budget is not None:
        transfer["parameter_bytes"] = training.parameter_budget
    if sets_cache:
        transfer["dram_cache_bytes"] = training.cache_bytes
    if training.cache_bytes and training.interval is None:
        transfer["durability"] = "step"
    if transfer:
        settings["transfer"] = transfer
    if training.offload_param != "none":
        pinning = {"pin_memory": training.pin_memory} if training.offload_param == "cpu" else {}
        settings["zero"] = {"offload_param": {"device": training.offload_param, **pinning}}
    return settings


def _trainer_settings(training: Training, *, on_gpu: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "accelerator": "gpu" if on_gpu else "cpu",
        "devices": training.processes,
        "precision": training.precision,
    }
    if training.nodes > 1:
        settings["num_nodes"] = training.nodes
    if training.accumulate > 1:
        settings["accumulate_grad_batches"] = training.accumulate
    return settings


def _advice(training: Training) -> list[str]:
    """List settings that Trainer has no argument for."""
    words = [f"Micro-batches of {training.batch} x {training.seq} tokens; torch.optim.{training.optimizer}."]
    if training.checkpointing:
        words.append("Call model.gradient_checkpointing_enable() where the model is built.")
    if training.build == "configure_model":
        words.append("Build the model in configure_model, not in __init__.")
    return words
