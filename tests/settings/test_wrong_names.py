"""People type settings as dicts, and misspell names: a misspelt one is answered with the right one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lightning_smartinfinity import (
    BlockScaled,
    ConfigError,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    SmartSSDConfig,
    StorageTrafficMonitor,
    TopK,
    TransferConfig,
)
from lightning_smartinfinity.settings.wrong_names import did_you_mean

STRATEGIES = (SmartInfinityStrategy, SmartInfinityFabricStrategy)


@pytest.mark.parametrize(
    ("settings", "wrong", "meant"),
    [
        (TransferConfig, {"num_bufers": 8}, "num_buffers"),
        (TransferConfig, {"dram_cache": "8GB"}, "dram_cache_bytes"),
        (SmartSSDConfig, {"xcl_bin": "a"}, "xclbin"),
        (TopK, {"ratio": 0.5, "exakt": True}, "exact"),
        (BlockScaled, {"errorfeedback": True}, "error_feedback"),
        (TopK, {"ratios": 0.1}, "ratio"),
        (StorageTrafficMonitor, {"every_n_step": 1}, "every_n_steps"),
        (StorageTrafficMonitor, {"endurance": 600}, "endurance_tbw"),
        (TransferConfig, {"buffer_count": 4}, "tasklet_bytes' or 'num_buffers"),
        (TransferConfig, {"ring_bytes": 4}, "tasklet_bytes' or 'num_buffers"),
        (TransferConfig, {"max_memory": 4}, "dram_cache_bytes"),
    ],
)
def test_a_misspelt_setting(settings: type, wrong: dict[str, Any], meant: str) -> None:
    """The error names the setting that was meant, and is no TypeError."""
    with pytest.raises(ConfigError) as caught:
        settings(**wrong)
    owner = settings.__name__
    assert str(caught.value).startswith(f"{owner} has no setting {list(wrong)[-1]!r}. Did you mean '{meant}'?")


def test_a_setting_like_no_other() -> None:
    """The error lists the settings that exist, and guesses nothing."""
    with pytest.raises(ConfigError) as caught:
        TransferConfig(pizza=1)  # type: ignore[call-arg]
    assert "Did you mean" not in str(caught.value)
    for field in dataclasses.fields(TransferConfig):
        assert field.name in caught.value.remedy


def test_a_setting_that_is_left_out() -> None:
    """The error names the class and the setting that it needs."""
    for incomplete in (TopK, lambda: TopK(exact=False)):  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match=r"^TopK needs the setting 'ratio'\. Pass ratio="):
            incomplete()  # type: ignore[operator]


def test_a_setting_that_is_given_twice() -> None:
    """The error names it."""
    with pytest.raises(ConfigError, match=r"^TopK was given the setting 'ratio' twice\."):
        TopK(0.1, ratio=0.2)  # type: ignore[misc]


def test_a_setting_without_its_name() -> None:
    """A value that has to be named raises ConfigError. The ratio of TopK needs no name."""
    with pytest.raises(ConfigError, match=r"TransferConfig\(8\) has values without names"):
        TransferConfig(8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"StorageTrafficMonitor\(True, 4\) has values without names"):
        StorageTrafficMonitor(True, 4)  # type: ignore[misc]
    assert TopK(0.5, False) == TopK(ratio=0.5, error_feedback=False)


def test_settings_are_dataclasses_as_before() -> None:
    """Signature, copies, replaced fields and pickles are those of a frozen dataclass."""
    assert list(inspect.signature(TransferConfig).parameters) == [
        field.name for field in dataclasses.fields(TransferConfig)
    ]
    config = TransferConfig(num_buffers=3)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, num_buffers=16) == TransferConfig()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_settings_as_dicts(strategy: Callable[..., Any]) -> None:
    """A dict means the settings in it, and the defaults of the others."""
    settings = strategy(
        transfer={"num_buffers": 8, "dram_cache_bytes": "1GiB"}, smartssd={"xclbin": "kernels.xclbin"}
    )._settings
    assert settings.transfer == TransferConfig(num_buffers=8, dram_cache_bytes=2**30)
    assert settings.smartssd == SmartSSDConfig(xclbin="kernels.xclbin")
    assert strategy(transfer={})._settings.transfer == TransferConfig()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transfer": {"num_bufers": 8}}, "TransferConfig has no setting 'num_bufers'. Did you mean 'num_buffers'?"),
        ({"smartssd": {"device": [0]}}, "SmartSSDConfig has no setting 'device'. Did you mean 'devices'?"),
        ({"transfer": {"num_buffers": 1}}, "TransferConfig(num_buffers=1) is out of range"),
        ({"transfer": 8}, "Pass a TransferConfig, or a dict of its settings"),
        ({"transfer": {8: 8}}, "Pass a TransferConfig, or a dict of its settings"),
        ({"transfer": SmartSSDConfig()}, "Pass a TransferConfig, or a dict of its settings"),
        ({"smartssd": "kernels.xclbin"}, "Pass a SmartSSDConfig, or a dict of its settings"),
    ],
)
def test_a_mistake_in_a_dict_of_settings(strategy: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    """The error is that of the class whose settings they are, or says what may be passed."""
    with pytest.raises(ConfigError) as caught:
        strategy(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlapp": "none"}, "Did you mean 'overlap'?"),
        ({"storages": "/mnt"}, "Did you mean 'storage'?"),
        ({"exclude_frozen_params": True}, "Did you mean 'exclude_frozen_parameters'?"),
        ({"num_buffers": 8}, "Pass transfer={'num_buffers': 8}."),
        ({"dram_cache_bytes": "8GB"}, "Pass transfer={'dram_cache_bytes': '8GB'}."),
        ({"xclbin": "a"}, "Pass smartssd={'xclbin': 'a'}."),
        ({"num_bufers": 8}, "Did you mean transfer={'num_buffers': ...}?"),
        ({"reduce_bucketsize": 8}, "Did you mean zero={'reduce_bucket_size': ...}?"),
        ({"ring_bytes": 8}, "Did you mean transfer={'tasklet_bytes': ...} or transfer={'num_buffers': ...}?"),
        ({"buffer_size": "8 gigs"}, "Did you mean transfer={'tasklet_bytes': ...} or transfer={'num_buffers': ...}?"),
        ({"host_memory": "8GB"}, "Did you mean transfer={'dram_cache_bytes': ...}?"),
        ({"cache_bytes": "8GB"}, "Did you mean transfer={'dram_cache_bytes': ...}?"),
        ({"offload_optim": True}, "Did you mean 'offload_optimizer'? Leave it out: optimizer state is always in"),
        ({"stages": 3}, "Did you mean 'stage'? Leave it out: training is always in ZeRO stage 3."),
        ({"zero_stage": 3}, "Did you mean 'stage'? Leave it out"),
        ({"nvme": "/nvme"}, "Did you mean 'nvme_path'? Pass storage='/nvme'"),
        ({"pinned_memory": True}, "Pass zero={'offload_param': {'device': 'cpu', 'pin_memory': True}}."),
        ({"offload_param": {"device": "cpu"}}, "Pass zero={'offload_param': {'device': 'cpu'}}."),
        ({"stage3_max_reuse_distance": 7}, "Pass zero={'stage3_max_reuse_distance': 7}."),
        ({"bf16": True}, "(precision=...) by name."),
        ({"devices": 2}, "(devices=...), or the cards"),  # smartssd={'devices': 2} would be refused
        ({"pizza": 1}, "Settings of ZeRO-3 go into zero={...}"),
        ({"pizza": 1, "num_buffers": 8}, "has no setting 'num_buffers', 'pizza'."),
    ],
)
def test_a_misspelt_option(strategy: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    """The error names the option that was meant, or the setting into which it goes."""
    with pytest.raises(ConfigError) as caught:
        strategy(**options)
    assert words in str(caught.value)
    assert caught.value.remedy.endswith(".")


def test_a_question_about_nothing() -> None:
    """No word is like an empty name, and there may be no words at all."""
    assert did_you_mean("", ["storage"]) == did_you_mean("storage", []) == ""
