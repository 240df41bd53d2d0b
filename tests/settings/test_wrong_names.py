"""Settings as people type them: dicts, misspelt names, answered with the right one, and what codecs take."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(), r"^TopK needs the setting 'ratio'\. Pass ratio="),
        (lambda: TopK(exact=False), r"^TopK needs the setting 'ratio'\. Pass ratio="),
        (lambda: TopK(0.1, ratio=0.2), r"^TopK was given the setting 'ratio' twice\."),
        (lambda: TransferConfig(8), r"TransferConfig\(8\) has values without names"),
        (lambda: StorageTrafficMonitor(True, 4), r"StorageTrafficMonitor\(True, 4\) has values without names"),
    ],
)
def test_a_setting_that_is_left_out_or_without_its_name(make: Callable[[], Any], words: str) -> None:
    """The error names the class and the setting. The ratio of TopK needs no name."""
    with pytest.raises(ConfigError, match=words):
        make()
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
        # A dict is not Lightning's flag of that name, but what goes into zero; several options are answered one by one.
        ({"zero_optimization": {"overlap_comm": True}}, "Pass what is inside of it as zero={...}"),
        ({"stage": 3, "offload_optimizer": True}, "always in ZeRO stage 3"),
        ({"stage": 3, "offload_optimizer": True}, "optimizer state is always in the folders of storage="),
        ({"stage": 3, "nvme_path": "/nvme"}, "Pass storage='/nvme'"),
    ],
)
def test_a_misspelt_option(strategy: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    """The error names the option that was meant, or the setting into which it goes."""
    with pytest.raises(ConfigError) as caught:
        strategy(**options)
    assert words in str(caught.value)
    assert caught.value.remedy.endswith(".") and "zero={'offload_optimizer'" not in caught.value.remedy


def test_a_question_about_nothing() -> None:
    """No word is like an empty name, and there may be no words at all."""
    assert did_you_mean("", ["storage"]) == did_you_mean("storage", []) == ""


NO_NUMBERS = (True, "0.01", None, np.array([0.01]))


@pytest.mark.parametrize("ratio", [0, -0.1, 1.1, 10**400, Fraction(1, 10**400), math.nan, math.inf, *NO_NUMBERS])
def test_ratio_is_a_share(ratio: Any) -> None:
    """The ratio is a number above 0 and at most 1. Text is refused."""
    with pytest.raises(ConfigError, match=r"TopK\(ratio=.*is out of range.*Pass a number above 0 and at most 1\."):
        TopK(ratio)


@pytest.mark.parametrize("setting", [{"value_dtype": "bf16"}, {"exact": False}])
def test_what_is_ignored_is_said(setting: dict[str, Any]) -> None:
    """A ratio of 1 sends gradients in their own dtype and keeps no residual. A warning names the ignored settings."""
    with pytest.warns(UserWarning, match=r"TopK\(ratio=1\.0.*value_dtype and exact are ignored"):
        codec = TopK(1.0, **setting)
    assert codec.error_feedback and not codec.keeps_residual
    assert TopK(0.5).keeps_residual


@pytest.mark.parametrize("ratio", [np.float64(0.5), np.float32(0.5), np.float16(0.5), Fraction(1, 2)])
def test_ratio_of_any_kind_of_number(ratio: Any) -> None:
    """The ratio may be a NumPy scalar or a Fraction. It is shown and passed on as a Python float."""
    assert repr(TopK(ratio)) == repr(TopK(0.5))
    assert repr(TopK(ratio).native()) and type(TopK(ratio).ratio) is float


@pytest.mark.parametrize(
    "setting",
    [
        {"error_feedback": 1},
        {"exact": "no"},
        {"value_dtype": "fp8"},
        {"value_dtype": 16},
        {"value_dtype": np.array(["bf16"] * 2)},
    ],
)
def test_other_settings_are_checked(setting: dict[str, Any]) -> None:
    """Flags must be bools, and the type of the values must be a known name; values are sent in the type asked for."""
    with pytest.raises(ConfigError, match=rf"TopK\({next(iter(setting))}="):
        TopK(0.01, **setting)
    with pytest.raises(ConfigError, match=r"BlockScaled\(error_feedback='yes'\)"):
        BlockScaled(error_feedback="yes")  # type: ignore[arg-type]
    sent = [TopK(0.01, value_dtype=dtype).native().value_dtype().name for dtype in ("auto", "bf16", "fp16")]
    assert sent == ["FLOAT32", "BFLOAT16", "FLOAT16"]


@pytest.mark.parametrize("compression", [0.01, "TopK", TopK, {"ratio": 0.01}])
def test_strategy_takes_codecs_only(compression: Any) -> None:
    """The strategy refuses a compression that is not a gradient codec, and the error says what to pass."""
    with pytest.raises(ConfigError, match=r"is not a gradient codec.*TopK"):
        SmartInfinityStrategy(compression=compression)
