"""Says what to write instead of an option that a strategy does not have, above all those of stock DeepSpeedStrategy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from lightning_smartinfinity.checks import shown
from lightning_smartinfinity.config import SmartSSDConfig, TransferConfig
from lightning_smartinfinity.settings import StrategySettings
from lightning_smartinfinity.wrong_names import did_you_mean

__all__ = ["what_to_write"]

_OURS = tuple(field.name for field in fields(StrategySettings))
_SECTIONS = {"transfer": TransferConfig, "smartssd": SmartSSDConfig}
_PLACES = {field.name: section for section, kind in _SECTIONS.items() for field in fields(kind)}

# Options of Lightning's DeepSpeedStrategy that have one name there and in DeepSpeed's zero_optimization section.
_OF_ZERO = (
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "sub_group_size",
)
# Those that DeepSpeed keeps in offload_param: the key, and the device that it belongs to.
_OF_OFFLOAD_PARAM = {
    "max_in_cpu": ("max_in_cpu", "nvme"),
    "params_buffer_count": ("buffer_count", "nvme"),
    "params_buffer_size": ("buffer_size", "nvme"),
    "pin_memory": ("pin_memory", "cpu"),
}
_STAGE = "the strategy is always ZeRO stage 3"
_STATE = "optimizer state always lies in the folders of storage=..., and transfer={'dram_cache_bytes': 'auto'} keeps in"
_REQUESTS = "the I/O engine keeps a request for each ring buffer in progress; transfer={'num_buffers': 32} makes more"
_CHECKPOINTING = "Call deepspeed.checkpointing.configure(None, {}=True) before you use deepspeed.checkpointing."
_SENTENCES = {
    "block_size": "Pass transfer={'tasklet_bytes': '4MiB'}: the most that is read or written at once.",
    "config": "Pass its section zero_optimization, without stage and offload_optimizer, as zero={...}. Lightning sets "
    "the rest: precision, gradient clipping and accumulation.",
    "contiguous_memory_optimization": _CHECKPOINTING.format("contiguous_checkpointing"),
    "cpu_checkpointing": _CHECKPOINTING.format("checkpoint_in_cpu"),
    "logging_batch_size_per_gpu": "Leave it out: DeepSpeed only prints it.",
    "logging_level": "Call logging.getLogger('DeepSpeed').setLevel(...).",
    "offload_optimizer": f"Leave it out: {_STATE} host memory what fits.",
    "offload_optimizer_device": f"Leave it out: {_STATE} host memory what fits.",
    "offload_parameters": "Pass zero={'offload_param': {'device': 'cpu'}} for host memory, or 'nvme' for storage.",
    "optimizer_buffer_count": "Pass transfer={'num_buffers': 16}: the buffers of the ring, for models of any size.",
    "overlap_events": f"Leave it out: {_REQUESTS}.",
    "partition_activations": _CHECKPOINTING.format("partition_activations"),
    "precision": "Pass Trainer(precision=...) by name.",
    "precision_plugin": "Pass Fabric(precision=...) by name.",
    "queue_depth": f"Leave it out: {_REQUESTS}.",
    "remote_device": "Leave it out: what configure_model builds is partitioned at once, and "
    "zero={'offload_param': {'device': 'cpu'}}, or 'nvme', says where the partitions lie.",
    "single_submit": f"Leave it out: {_REQUESTS}.",
    "stage": f"Leave it out: {_STAGE}.",
    "synchronize_checkpoint_boundary": _CHECKPOINTING.format("synchronize"),
    "thread_count": f"Leave it out: {_REQUESTS}.",
    "zero_allow_untested_optimizer": "Leave it out: the strategy has update rules of its own, and names them if it "
    "lacks that of an optimizer.",
    "zero_optimization": f"Leave it out: {_STAGE}.",
}
_OTHERWISE = "Settings of ZeRO-3 go into zero={...}, settings of the transfer into transfer={...}."


def what_to_write(name: str, value: object, *, known: Iterable[str]) -> str:
    """Return a sentence that says what to write instead of an option that a strategy does not have.

    Args:
        name: Name of the option.
        value: Value that the user gave it.
        known: Options that the strategy has beside our own settings.
    """
    if name in _OF_ZERO:
        return f"Pass zero={{{name!r}: {shown(value)}}}."
    if name in _OF_OFFLOAD_PARAM:
        key, device = _OF_OFFLOAD_PARAM[name]
        return f"Pass zero={{'offload_param': {{'device': {device!r}, {key!r}: {shown(value)}}}}}."
    if name == "offload_params_device":
        return f"Pass zero={{'offload_param': {{'device': {shown(value)}}}}}."
    if name == "nvme_path":
        return f"Pass storage={shown(value)}; parameters go there with zero={{'offload_param': {{'device': 'nvme'}}}}."
    if name in _PLACES:
        return f"Pass {_PLACES[name]}={{{name!r}: {shown(value)}}}."
    return _SENTENCES.get(name) or f"{_guess(name, known)}{_OTHERWISE}"


def _guess(name: str, known: Iterable[str]) -> str:
    """Return a question that names what was meant, with the setting in which it belongs, or nothing."""
    inside = {each: f"{section}={{{each!r}: ...}}" for each, section in _PLACES.items()}
    inside |= {each: f"zero={{{each!r}: ...}}" for each in _OF_ZERO}
    return did_you_mean(name, [*_OURS, *known, *inside], written=inside)
