"""Error messages for options that a class does not have, above all options of the stock DeepSpeedStrategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.settings import SmartSSDConfig, TransferConfig
from lightning_smartinfinity.settings.rules import shown
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.settings.wrong_names import closest, did_you_mean
from lightning_smartinfinity.settings.zero_keys import ZERO_KEYS

__all__ = ["OF_FABRIC", "OF_TRAINER", "refuse_unknown", "what_to_write"]

_OURS = tuple(field.name for field in fields(StrategySettings))
_SECTIONS = {"transfer": TransferConfig, "smartssd": SmartSSDConfig}
_PLACES = {field.name: section for section, kind in _SECTIONS.items() for field in fields(kind)}

# Options of stock that DeepSpeed keeps in offload_param: the key, and the device that it applies to.
_OF_OFFLOAD_PARAM = {
    "max_in_cpu": ("max_in_cpu", "nvme"),
    "params_buffer_count": ("buffer_count", "nvme"),
    "params_buffer_size": ("buffer_size", "nvme"),
    "pin_memory": ("pin_memory", "cpu"),
}
_STAGE = "training is always in ZeRO stage 3"
_STATE = "optimizer state always lies in the folders of storage=..., and transfer={'dram_cache_bytes': 'auto'} keeps in"
_REQUESTS = "the I/O engine keeps a request for each ring buffer in progress; transfer={'num_buffers': 32} makes more"
_CHECKPOINTING = "Call deepspeed.checkpointing.configure(None, {}=True) before you use deepspeed.checkpointing."
_SENTENCES = {
    "block_size": "Pass transfer={'tasklet_bytes': '4MiB'}: the most that is read or written at once.",
    "contiguous_memory_optimization": _CHECKPOINTING.format("contiguous_checkpointing"),
    "cpu_offload": f"Leave it out: {_STATE} host memory what fits.",
    "cpu_checkpointing": _CHECKPOINTING.format("checkpoint_in_cpu"),
    "logging_batch_size_per_gpu": "Leave it out: DeepSpeed only prints it.",
    "logging_level": "Call logging.getLogger('DeepSpeed').setLevel(...).",
    "offload_optimizer": f"Leave it out: {_STATE} host memory what fits.",
    "offload_optimizer_device": f"Leave it out: {_STATE} host memory what fits.",
    "offload_parameters": "Pass zero={'offload_param': {'device': 'cpu'}} for host memory, or 'nvme' for storage.",
    "optimizer_buffer_count": "Pass transfer={'num_buffers': 16}: the buffers of the ring, for models of any size.",
    "overlap_events": f"Leave it out: {_REQUESTS}.",
    "partition_activations": _CHECKPOINTING.format("partition_activations"),
    "queue_depth": f"Leave it out: {_REQUESTS}.",
    "single_submit": f"Leave it out: {_REQUESTS}.",
    "stage": f"Leave it out: {_STAGE}.",
    "synchronize_checkpoint_boundary": _CHECKPOINTING.format("synchronize"),
    "thread_count": f"Leave it out: {_REQUESTS}.",
    "zero_allow_untested_optimizer": "Leave it out: optimizers are updated by rules of our own, and one without a rule "
    "is refused by name.",
    "zero_optimization": f"Leave it out: {_STAGE}.",
}
_CONFIG = "Pass its section zero_optimization, without stage and offload_optimizer, as zero={...}."
_PARTITIONED = (
    "is partitioned at once, and zero={'offload_param': {'device': 'cpu'}}, or 'nvme', says where the partitions lie."
)
OF_TRAINER = {
    "config": f"{_CONFIG} The Trainer sets the rest: precision, gradient clipping and accumulation.",
    "devices": "Pass Trainer(devices=...), or the cards of storage folders as smartssd={'devices': [...]}.",
    **dict.fromkeys(("bf16", "fp16", "precision"), "Pass Trainer(precision=...) by name."),
    "remote_device": f"Leave it out: what configure_model builds {_PARTITIONED}",
}
"""Messages for the Trainer's strategy only."""

OF_FABRIC = {
    "config": f"{_CONFIG} Pass Fabric(precision=...); gradient clipping and accumulation are your loop's.",
    "devices": "Pass Fabric(devices=...), or the cards of storage folders as smartssd={'devices': [...]}.",
    **dict.fromkeys(("bf16", "fp16", "precision_plugin"), "Pass Fabric(precision=...) by name."),
    "remote_device": f"Leave it out: what is built in fabric.init_module() {_PARTITIONED}",
}
"""Messages for Fabric's strategy only."""

_OTHERWISE = "Settings of ZeRO-3 go into zero={...}, settings of the transfer into transfer={...}."


def refuse_unknown(
    owner: str, options: Mapping[str, object], *, known: Iterable[str] = (), answers: Mapping[str, str]
) -> None:
    """Raise an error for options that a class does not have.

    Args:
        owner: Class name, for the message.
        options: Options that the user passed in addition to our own settings.
        known: Options that the class has in addition to our own settings.
        answers: Messages for options whose remedy depends on the class.

    Raises:
        ConfigError: An option is unknown; the message names all unknown ones and their remedies.
    """
    known = tuple(known)
    unknown = sorted(set(options) - set(known))
    if unknown:
        remedies = (what_to_write(name, options[name], known=known, answers=answers) for name in unknown)
        raise ConfigError(f"{owner} has no setting {', '.join(map(repr, unknown))}.", " ".join(dict.fromkeys(remedies)))


def what_to_write(name: str, value: object, *, known: Iterable[str], answers: Mapping[str, str]) -> str:
    """Return a sentence that tells the user what to write instead of an unknown option.

    Args:
        name: Name of the option.
        value: Value that the user passed for it.
        known: Options that the class has in addition to our own settings.
        answers: Messages for options whose remedy depends on the class.
    """
    written = _answer(name, value, answers)
    return written or _guess(name, value, known=known, answers=answers)


def _answer(name: str, value: object, answers: Mapping[str, str]) -> str | None:
    """Return the option's own sentence, or None if it has none."""
    if name in answers:
        return answers[name]
    if name == "zero_optimization" and isinstance(value, Mapping):
        return "Pass what is inside of it as zero={...}, without stage and offload_optimizer."
    if name in ZERO_KEYS:
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
    return _SENTENCES.get(name)


def _guess(name: str, value: object, *, known: Iterable[str], answers: Mapping[str, str]) -> str:
    """Return a "Did you mean" sentence with the closest option's own answer or section."""
    inside = {each: f"{section}={{{each!r}: ...}}" for each, section in _PLACES.items()}
    inside |= {each: f"zero={{{each!r}: ...}}" for each in ZERO_KEYS}
    taken = dict.fromkeys([*_OURS, *known, *inside])
    refused = {*answers, *_SENTENCES, *_OF_OFFLOAD_PARAM, "nvme_path", "offload_params_device"} - {*_OURS, *known}
    close = closest(name, [*taken, *sorted(refused)])
    if close and close[0] in refused:
        return f"Did you mean {close[0]!r}? {_answer(close[0], value, answers)}"
    return f"{did_you_mean(name, taken, written=inside)}{_OTHERWISE}"
