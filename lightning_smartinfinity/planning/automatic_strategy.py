"""``plan="auto"``: chooses open settings to suit the model, the available memory and the available storage."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_smartinfinity.common.machine import available_cores
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS, serves
from lightning_smartinfinity.planning.automatic import Open, choose, plan_in_words, with_ring
from lightning_smartinfinity.planning.choice import Resources
from lightning_smartinfinity.planning.cost import CompressionResources, gain_of
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.needs import needs
from lightning_smartinfinity.planning.needs_table import what_breaks
from lightning_smartinfinity.planning.pace import assumed_rates
from lightning_smartinfinity.planning.simulator.gradients import Dense
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.planning.survey.models import find_source, survey_model
from lightning_smartinfinity.planning.survey.modules import is_built, survey_module
from lightning_smartinfinity.planning.survey.resources import survey_resources
from lightning_smartinfinity.planning.training import BLOCK_SCALED, OPTIMIZERS, Training
from lightning_smartinfinity.settings import PlanConfig, TopK
from lightning_smartinfinity.settings.smartssd import is_xclbin_named
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.storage.io.mounts import num_drives
from lightning_smartinfinity.zero3 import OffloadSettings
from lightning_smartinfinity.zero3.ranks.collectives import gather, raising_together
from lightning_smartinfinity.zero3.setup.deepspeed_config import FOLLOWS_FROM_BUDGET

__all__ = [
    "Planned",
    "Surroundings",
    "plan_training",
    "warn_of_no_gain",
]


_USED = 0.9  # share of the available resources that a plan uses
_PAGE = os.sysconf("SC_PAGE_SIZE")
_BLOCK = 512  # bytes per unit of st_blocks
_OFFLOADS = "offload_param"
_BUILT_TOO_EARLY = (
    "Build it in configure_model (with Fabric in fabric.init_module()), where it is never whole in memory, as it is in "
    "__init__."
)
_ALLOW_MORE = (
    "Allow smaller state (plan={'state_formats': ['int8']}), train with smaller micro-batches, or see what "
    "`smart-infinity plan` says."
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Facts that a strategy knows about a training.

    Args:
        precision: Precision of the Trainer or Fabric.
        accumulate: Micro-batches per step.
        processes: Processes of this machine.
        nodes: Number of machines.
        on_gpu: Whether each process computes on a GPU of its own.
        optimizer: Class name of the optimizer; None if it is not known yet.
        tell: Prints a text for the user, on the first rank only.
    """

    precision: str
    accumulate: int
    processes: int
    nodes: int
    on_gpu: bool
    optimizer: str | None = None
    tell: Callable[[str], None] = _log.warning


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The chosen settings, and the facts on which the choice is based.

    Args:
        settings: The settings, with values for those that the user left open.
        figures: The model.
        training: The training with these settings.
        resources: The resources that could be used.
    """

    settings: StrategySettings
    figures: ModelFigures
    training: Training
    resources: Resources

    def require_optimizer(self, name: str) -> None:
        """Raise unless the plan also fits with the training's actual optimizer.

        Args:
            name: Class name of the optimizer. If it has no update rule, another check raises.

        Raises:
            ConfigError: The training does not fit with this optimizer's state, or the chosen state format does not
                exist for it.
        """
        taken_for = self.training.optimizer
        if name not in OPTIMIZERS or OPTIMIZERS[name] == OPTIMIZERS[taken_for]:
            return
        state_format = self.training.state_format
        if not serves(STATE_FORMATS[state_format], name):
            why = f"state_format={state_format!r} does not exist for it"
        else:
            real, resources = replace(self.training, optimizer=name), self.resources
            found = needs(self.figures, real, on_gpu=resources.on_gpu, process_bytes=resources.process_bytes)
            why = "; ".join(what_breaks(need, resources) for need in found if need.total > resources.has(need.place))
        if why:
            raise ConfigError(
                f"plan='auto' has taken the optimizer for {taken_for}, but it is {name}: {why}.",
                f"Pass plan={{'optimizer': {name!r}}}.",
            )


def plan_training(settings: StrategySettings, module: nn.Module | None, around: Surroundings) -> Planned:
    """Choose values for the settings that the user left open, and print them. Collective.

    Args:
        settings: The user's settings, with ``plan`` and the storage folders.
        module: The module that will be trained; it may be unknown if ``plan`` names a model.
        around: Other facts about the training.

    Raises:
        ConfigError: No combination of the open settings fits.
        UnsupportedError: The model cannot be inspected.
    """
    config, zero = settings.plan, dict(settings.zero or {})
    assert config is not None and settings.storage is not None
    training, open_ = _asked(settings, config, zero, module, around)
    with raising_together() if dist.is_initialized() else nullcontext():
        figures = _figures(config, module, training)
        own = _resources(settings, config, module, around)
    resources = _least(own)
    training = replace(training, checkpointing=figures.checkpointing)
    if settings.transfer.num_buffers == "auto" and not _may_use_cards(settings):
        training = with_ring(training, resources)
    rates = assumed_rates(on_gpu=around.on_gpu, cores=resources.cores, in_16_bit=training.item_bytes == 2)
    plan = choose(figures, training, resources, rates, open_)
    assumed = [] if config.optimizer or around.optimizer else [f"the optimizer is taken for {training.optimizer}"]
    words = plan_in_words(figures, training, plan, resources, open_=open_, assumed=assumed)
    if not plan.fits:
        unbuilt = replace(training, build="configure_model")
        is_built_too_early = choose(figures, unbuilt, resources, rates, open_).fits
        raise ConfigError(
            f"plan='auto': {figures.name} does not fit: {'; '.join(what_breaks(n, resources) for n in plan.broken)}.\n"
            f"The nearest is this.\n{words}\n",
            _BUILT_TOO_EARLY if is_built_too_early else _ALLOW_MORE,
        )
    around.tell(words)
    chosen = _with(settings, zero, training, plan.training, open_)
    return Planned(settings=chosen, figures=figures, training=plan.training, resources=resources)


def _asked(
    settings: StrategySettings,
    config: PlanConfig,
    zero: Mapping[str, Any],
    module: nn.Module | None,
    around: Surroundings,
) -> tuple[Training, Open]:
    """Return the training as it is without a plan, and its open settings."""
    transfer, offload = settings.transfer, zero.get(_OFFLOADS)
    if config.state_formats and settings.state_format != "fp32":
        raise ConfigError(
            f"state_format={settings.state_format!r} and plan={{'state_formats': {list(config.state_formats)}}} both "
            "choose a state format.",
            "Leave one of them out.",
        )
    device = offload.get("device", "none") if isinstance(offload, Mapping) else "none"
    is_partitioned = module is not None and any(hasattr(param, "ds_id") for param in module.parameters())
    keys = (*zero, *(offload if isinstance(offload, Mapping) else ()))
    own_buffers = any(key.removeprefix("stage3_") in FOLLOWS_FROM_BUDGET for key in keys)
    on_cards = _may_use_cards(settings)
    codec = settings.compression
    share = codec.ratio if isinstance(codec, TopK) else None if codec is None else BLOCK_SCALED
    optimizer = around.optimizer if around.optimizer in OPTIMIZERS else config.optimizer
    # A budget of parameters implies that they are on storage, unless their place is already set.
    budget, may_move = _given(transfer.parameter_bytes), offload is None and not is_partitioned
    bucket = zero.get("reduce_bucket_size")
    training = Training(
        batch=config.batch,
        seq=config.seq,
        accumulate=around.accumulate,
        precision=around.precision,
        optimizer=optimizer or Training.optimizer,
        state_format=settings.state_format,
        offload_param="nvme" if may_move and budget is not None else device,
        pin_memory=isinstance(offload, Mapping) and offload.get("pin_memory") is not False,
        build="init" if module is not None and is_built(module) else "configure_model",
        built_itemsize=_itemsize(module),
        processes=around.processes,
        nodes=around.nodes,
        save_top_k=0,  # the folder of checkpoints is unknown here
        asynchronous=transfer.asynchronous,
        gradient_budget=None if codec is not None else _given(transfer.gradient_bytes),
        parameter_budget=budget,
        cache_bytes=_given(transfer.dram_cache_bytes) or 0,
        interval=transfer.interval,
        accumulate_in=transfer.accumulate_in,
        num_buffers=_given(transfer.num_buffers) or Training.num_buffers,
        tasklet_bytes=transfer.buffer_bytes or Training.tasklet_bytes,
        places=transfer.places_per_tasklet,
        compression=share,
        error_feedback=codec is None or codec.error_feedback,
        bucket_numel=bucket if isinstance(bucket, int) else Training.bucket_numel,
    )
    open_ = Open(
        # After an evaluation before the fit, parameters are partitioned, so their place is fixed.
        offload_param=may_move,
        parameter_budget=budget is None and not own_buffers and not is_partitioned,
        gradient_budget=isinstance(transfer.gradient_bytes, str) and codec is None and not on_cards,
        cache_bytes=_given(transfer.dram_cache_bytes) is None and not on_cards,
        bucket_numel=bucket is None,
        state_formats=config.state_formats,
    )
    return training, open_


def _may_use_cards(settings: StrategySettings) -> bool:
    chosen_later = settings.update_device == "auto" and is_xclbin_named(settings.smartssd)
    return settings.update_device == "smartssd" or chosen_later


def _given(size: int | str | None) -> int | None:
    return size if isinstance(size, int) else None


def _figures(config: PlanConfig, module: nn.Module | None, training: Training) -> ModelFigures:
    how = {"batch": training.batch, "seq": training.seq}
    if config.model is not None:
        return survey_model(find_source(config.model), in_16_bit=training.item_bytes == 2, **how)
    if module is None:
        raise ConfigError(
            "plan='auto' does not know the model yet.", "Name it: plan={'model': 'folder, package.module:Class or 7B'}."
        )
    return survey_module(module, in_16_bit=training.item_bytes == 2, **how)


def _itemsize(module: nn.Module | None) -> int | None:
    """Return the largest bytes per element of the module's existing parameters; None if there are none."""
    return max((param.element_size() for param in module.parameters()), default=None) if module is not None else None


def _resources(
    settings: StrategySettings, config: PlanConfig, module: nn.Module | None, around: Surroundings
) -> Resources:
    """Return the user's limits, or else nine tenths of the resources that this rank sees."""
    storage = settings.storage
    assert storage is not None
    found = [survey_resources(folder) for folder in storage]
    first = found[0]
    # Memory that this process already uses counts as free, as far as the plan includes it: libraries and the model, but
    # not the process's data.
    whole = 0 if module is None else sum(param.nbytes for param in module.parameters())
    held = min(_resident_bytes(), first.process_bytes + whole)
    host = int(_USED * (first.host_memory + around.processes * held))
    # A new fit replaces or resumes the job's state, so its space counts as free.
    own = sum(_file_bytes(folder / settings.transfer.job) for folder in storage)
    disk = int(_USED * min(each.disk for each in found)) * len(_devices_of(storage)) + own
    gpu = None if not around.on_gpu else int(_USED * (first.gpu_memory or 0))
    return replace(
        first,
        host_memory=_given(config.host_memory) or host,
        kept_free=None if _given(config.host_memory) else first.kept_free,
        storage_is_memory=any(each.storage_is_memory for each in found),
        disk=_given(config.disk) or disk,
        gpu_memory=gpu if gpu is None else _given(config.gpu_memory) or gpu,
        num_gpus=around.processes if around.on_gpu else 0,
        num_drives=num_drives(storage),
    )


def _devices_of(storage: tuple[Path, ...]) -> set[int]:
    """Return the device numbers of these folders' file systems. The folders need not exist."""
    existing = (
        next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()) for folder in storage
    )
    return {os.stat(path).st_dev for path in existing}


def _file_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder occupy on the disk."""
    found = (Path(parent) / name for parent, _, names in os.walk(folder) for name in names)
    total = 0
    for file in found:
        with suppress(OSError):  # another process may remove it
            total += _BLOCK * file.stat().st_blocks
    return total


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _least(own: Resources) -> Resources:
    """Return the minimum over all ranks, so that all ranks make the same choice."""
    seen = gather(own, None) if dist.is_initialized() else [own]
    gpus = [each.gpu_memory for each in seen if each.gpu_memory is not None]
    return replace(
        own,
        host_memory=min(each.host_memory for each in seen),
        kept_free=max((each.kept_free for each in seen if each.kept_free is not None), default=None),
        storage_is_memory=any(each.storage_is_memory for each in seen),
        disk=min(each.disk for each in seen),
        cores=min(each.cores for each in seen),
        gpu_memory=min(gpus, default=None),
        drive_bytes=min(each.drive_bytes for each in seen),
        num_drives=max(each.num_drives for each in seen),
    )


def _with(
    settings: StrategySettings, zero: dict[str, Any], asked: Training, chosen: Training, open_: Open
) -> StrategySettings:
    """Return the settings with the chosen values where they differ from the original ones."""
    transfer: dict[str, Any] = {}
    if open_.offload_param and chosen.offload_param != "none":
        pinning = {"pin_memory": chosen.pin_memory} if chosen.offload_param == "cpu" else {}
        zero[_OFFLOADS] = {"device": chosen.offload_param, **pinning}
    if chosen.bucket_numel != asked.bucket_numel:
        zero["reduce_bucket_size"] = chosen.bucket_numel
    if chosen.parameter_budget != asked.parameter_budget:
        transfer["parameter_bytes"] = chosen.parameter_budget
    if chosen.gradient_budget != asked.gradient_budget:
        transfer["gradient_bytes"] = chosen.gradient_budget
    if open_.cache_bytes:
        transfer["dram_cache_bytes"] = chosen.cache_bytes
    if chosen.interval != asked.interval:
        transfer["durability"] = "step"
    return replace(
        settings,
        state_format=chosen.state_format,
        zero=zero or None,
        transfer=replace(settings.transfer, **transfer),
    )


def warn_of_no_gain(offload: OffloadSettings, *, num_arrays: int, num_processes: int, on_gpu: bool) -> None:
    """Warn on rank 0 if compression, which costs accuracy or at least memory, is predicted to gain nothing.

    Args:
        offload: Settings, with the cards of this process.
        num_arrays: Number of arrays of the optimizer's state.
        num_processes: Number of processes on this machine.
        on_gpu: Whether gradients come from a GPU.
    """
    if offload.compression is None or torch.distributed.get_rank() != 0:
        return
    dense = Workload(
        numel=1,
        gradients=Dense(offload.gradient_itemsize),
        num_arrays=num_arrays,
        parameter_bytes=offload.parameter_itemsize,
    )
    through_storage = offload.smartssd is not None and offload.smartssd.gradient_route == "storage"
    plan = offload.cards
    resources = CompressionResources(
        num_cards=0 if plan is None else max(1, num_processes * len(plan.cards) // plan.sharers),
        num_cores=available_cores(),
        num_threads=num_processes * offload.feed_back_threads,
        num_gpus=num_processes if on_gpu else 0,
        route=Route.STORAGE if through_storage else Route.HOST,
    )
    gain = gain_of(offload.compression, dense, resources)
    if not gain.gains:
        warnings.warn(f"compression={offload.compression} is predicted to bring no gain. {gain.reason}", stacklevel=2)
