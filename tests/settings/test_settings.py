"""The settings of the strategies are one object with one documentation; misspelt names get the right one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity import (
    BlockScaled,
    ConfigError,
    PlanConfig,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    SmartSSDConfig,
    StorageTrafficMonitor,
    TopK,
    TransferConfig,
)
from lightning_smartinfinity.integrations.lightning_options import checked_options
from lightning_smartinfinity.native.formats import STATE_FORMATS, optimizers_of
from lightning_smartinfinity.pipeline.layout.ring import ring_buffers
from lightning_smartinfinity.settings.strategy import StrategySettings
from lightning_smartinfinity.storage.io.mounts import num_drives
from lightning_smartinfinity.zero3.setup import update_device
from tests.helpers.assertions import assert_helpful

Strategy = type[SmartInfinityStrategy] | type[SmartInfinityFabricStrategy]
STRATEGIES: tuple[Strategy, ...] = (SmartInfinityStrategy, SmartInfinityFabricStrategy)
DEFAULTS: dict[str, Any] = {
    "storage": None,
    "update_device": "auto",
    "smartssd": None,
    "state_format": "fp32",
    "overlap": "auto",
    "compression": None,
    "activations": None,
    "transfer": None,
    "zero": None,
    "plan": None,
    "watchdog_timeout": 30.0,
    "collective_timeout": 1500.0,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_signature(strategy: Strategy) -> None:
    """The first argument may be given by position, the others by keyword only. All have these defaults."""
    parameters = list(inspect.signature(strategy).parameters.values())
    assert {one.name: one.default for one in parameters[:-1]} == DEFAULTS
    first, *others, options = (one.kind for one in parameters)
    assert first is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(others) == {inspect.Parameter.KEYWORD_ONLY}
    assert (parameters[-1].name, options) == ("options", inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_argument_is_documented(strategy: Strategy) -> None:
    """Both classes document every argument, in the constructor's order and with the same text."""
    assert strategy.__doc__ is not None and StrategySettings.__doc__ is not None
    section = strategy.__doc__.split("Args:\n")[1].split("\n\n")[0]
    assert re.findall(r"^ {8}(\*{0,2}\w+):", section, re.MULTILINE) == [*DEFAULTS, "**options"]
    shared = StrategySettings.__doc__.split("Args:\n")[1].split("\n\n")[0]
    assert section.startswith(shared)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_argument_is_kept(strategy: Strategy, tmp_path: Path) -> None:
    """Each argument is kept under its name. Arguments that are left out have the defaults above."""
    given: dict[str, Any] = {
        "storage": [str(tmp_path / "a"), tmp_path / "b"],
        "update_device": "smartssd",
        "smartssd": SmartSSDConfig(xclbin="a"),
        "state_format": "fp32",
        "overlap": "forward",
        "compression": TopK(0.5),
        "transfer": TransferConfig(num_buffers=3, keep=True),
        "zero": {"reduce_bucket_size": 7},
        "plan": PlanConfig(batch=2),
        "watchdog_timeout": 90,
        "collective_timeout": 7200,
    }
    settings = strategy(**given)._settings
    kept = {**given, "storage": (tmp_path / "a", tmp_path / "b"), "activations": None}
    assert {name: getattr(settings, name) for name in DEFAULTS} == kept
    assert strategy(state_format="int8")._settings == StrategySettings(state_format="int8")
    defaults = {field.name: getattr(StrategySettings(), field.name) for field in dataclasses.fields(StrategySettings)}
    assert defaults == {**DEFAULTS, "transfer": TransferConfig()}


def test_documented_state_formats() -> None:
    """The documentation gives each format's bytes per parameter with Adam, and names the optimizers that have it."""
    text = " ".join((StrategySettings.__doc__ or "").split("state_format: ")[1].split("overlap: ")[0].split())
    documented = re.findall(r'``"(\w+)"`` \((\d+)', text)
    assert documented[:-1] == [(name, str(sum(form.item_bytes(3)))) for name, form in STATE_FORMATS.items()]
    everyones = [name for name, form in STATE_FORMATS.items() if form.step is None]
    assert documented[-1:] == [(name, str(sum(STATE_FORMATS[name].item_bytes(1)))) for name in everyones]
    others = {optimizers_of(form) for form in STATE_FORMATS.values() if form.step is not None}
    assert others == {"Adam or AdamW"} and "Optimizers other than Adam and AdamW have only" in text


@pytest.mark.parametrize("scale", [np.float32(512), np.int64(512), Fraction(512)])
def test_numbers_become_pythons(scale: Any) -> None:
    """Python's numbers replace those of other libraries, because DeepSpeed writes its settings as JSON."""
    kept = checked_options("SmartInfinityStrategy", {"loss_scale": scale, "min_loss_scale": scale})
    assert kept == {"loss_scale": 512, "min_loss_scale": 512}
    assert {type(value) for value in kept.values()} <= {int, float}


@pytest.mark.parametrize(("name", "most"), [("watchdog_timeout", 3600), ("collective_timeout", 604800)])
def test_seconds_of_the_watch(name: str, most: int) -> None:
    """Seconds below one would lose ranks of a busy machine, and none at all switch the watch off."""
    for seconds in (None, 0, 1, most):
        assert getattr(SmartInfinityStrategy(**{name: seconds})._settings, name) == seconds
    for wrong in (0.5, -1, most + 1, "30", True):
        with pytest.raises(ConfigError, match=rf"{name}=.* Pass a number from 1 to {most}, or 0, or None"):
            SmartInfinityStrategy(**{name: wrong})


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
    told = f"{settings.__name__} has no setting {list(wrong)[-1]!r}. Did you mean '{meant}'?"
    with pytest.raises(ConfigError, match="^" + re.escape(told)):
        settings(**wrong)


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
        *(
            (partial(TopK, ratio), r"TopK\(ratio=.*is out of range.*Pass a number above 0 and at most 1\.")
            for ratio in (
                0,
                -0.1,
                1.1,
                10**400,
                Fraction(1, 10**400),
                math.nan,
                math.inf,
                True,
                "0.01",
                None,
                np.array([0.01]),
            )
        ),
        (partial(TopK, 0.01, error_feedback=1), r"TopK\(error_feedback="),
        (partial(TopK, 0.01, exact="no"), r"TopK\(exact="),
        *(
            (partial(TopK, 0.01, value_dtype=dtype), r"TopK\(value_dtype=")
            for dtype in ("fp8", 16, np.array(["bf16"] * 2))
        ),
        (partial(BlockScaled, error_feedback="yes"), r"BlockScaled\(error_feedback='yes'\)"),
        *(
            (partial(SmartInfinityStrategy, compression=value), r"is not a gradient codec.*TopK")
            for value in (0.01, "TopK", TopK, {"ratio": 0.01})
        ),
    ],
)
def test_settings_that_are_refused(make: Callable[[], Any], words: str) -> None:
    """The error names the class and the setting, and says what may be passed."""
    with pytest.raises(ConfigError, match=words):
        make()


def test_settings_are_dataclasses_as_before() -> None:
    """Signature, copies, replaced fields and pickles are those of a frozen dataclass, whose numbers are Python's."""
    assert list(inspect.signature(TransferConfig).parameters) == [
        field.name for field in dataclasses.fields(TransferConfig)
    ]
    config = TransferConfig(num_buffers=np.int64(3))  # type: ignore[arg-type]
    assert type(config.num_buffers) is int
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, num_buffers="auto") == TransferConfig()


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
        ({"transfer": {"io_engine": "io_uring_sqpoll"}}, "Use io_engine='io_uring'."),
        # A mistake within a dict gets the error of the class whose settings they are, or what may be passed.
        ({"transfer": {"num_bufers": 8}}, "TransferConfig has no setting 'num_bufers'. Did you mean 'num_buffers'?"),
        ({"smartssd": {"device": [0]}}, "SmartSSDConfig has no setting 'device'. Did you mean 'devices'?"),
        ({"transfer": {"num_buffers": 1}}, "TransferConfig(num_buffers=1) is out of range"),
        ({"transfer": 8}, "Pass a TransferConfig, or a dict of its settings"),
        ({"transfer": {8: 8}}, "Pass a TransferConfig, or a dict of its settings"),
        ({"transfer": SmartSSDConfig()}, "Pass a TransferConfig, or a dict of its settings"),
        ({"smartssd": "kernels.xclbin"}, "Pass a SmartSSDConfig, or a dict of its settings"),
    ],
)
def test_a_mistaken_option(strategy: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    """The error names the option that was meant, or the setting into which it goes."""
    with pytest.raises(ConfigError) as caught:
        strategy(**options)
    assert_helpful(caught.value, words)
    assert "zero={'offload_optimizer'" not in caught.value.remedy


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("durability", ["step", "interval"])
def test_settings_of_an_interval(
    durability: str, strategy: Callable[..., Any], recwarn: pytest.WarningsRecorder
) -> None:
    """A warning names those that are ignored, because state in memory is written in every step."""
    strategy(transfer={"persist_every": 5, "durability": durability})
    told = "TransferConfig(persist_every=5) is ignored without durability='interval'."
    assert [str(each.message) for each in recwarn] == [told] * (durability == "step")


@pytest.mark.parametrize("setting", [{"value_dtype": "bf16"}, {"exact": False}])
def test_what_is_ignored_is_said(setting: dict[str, Any]) -> None:
    """A ratio of 1 sends gradients in their own dtype and keeps no residual. A warning names the ignored settings."""
    with pytest.warns(UserWarning, match=r"TopK\(ratio=1\.0.*value_dtype and exact are ignored"):
        codec = TopK(1.0, **setting)
    assert codec.error_feedback and not codec.keeps_residual
    assert TopK(0.5).keeps_residual


def test_values_are_sent_in_the_type_asked_for() -> None:
    """A codec of the native library sends fp32, unless another type was asked for. The ratio needs no name."""
    sent = [TopK(0.01, value_dtype=dtype).native().value_dtype().name for dtype in ("auto", "bf16", "fp16")]
    assert sent == ["FLOAT32", "BFLOAT16", "FLOAT16"]
    assert TopK(0.5, False) == TopK(ratio=0.5, error_feedback=False)


@pytest.mark.parametrize(
    ("wanted", "cores", "processes", "on_gpu", "threads"),
    [
        ("auto", 2, 1, False, 1),
        ("auto", 2, 2, True, 1),
        ("auto", 16, 2, True, 4),
        ("auto", 64, 1, False, 8),
        (3, 2, 1, True, 3),
    ],
)
def test_how_many_threads_update(
    wanted: int | str, cores: int, processes: int, on_gpu: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never exceed a share of the cores, which is larger where a GPU trains."""
    monkeypatch.setattr(update_device, "available_cores", lambda: cores)
    assert update_device.compute_threads(wanted, num_processes=processes, on_gpu=on_gpu) == threads


@pytest.mark.parametrize(
    ("mib", "threads", "drives", "processes", "margin", "buffers"),
    [
        (4, 1, 1, 1, 6 << 30, 16),
        (4, 8, 8, 1, 96 << 30, 8 * 16 + 7),
        (4, 2, 8, 8, 96 << 30, 17),
        (4, 1, 4, 3, 96 << 30, 32),
        (1, 1, 1, 1, 6 << 30, 16),
        (64, 1, 1, 1, 6 << 30, 8),
        (4, 1, 8, 1, 2 << 30, 64),
        (4, 1, 8, 2, 2 << 30, 32),
        (4, 1, 1, 1, 256 << 20, 8),
    ],
)
def test_how_many_buffers_a_ring_has(
    mib: int, threads: int, drives: int, processes: int, margin: int, buffers: int
) -> None:
    """They suffice for each drive of the process's share and for each thread, if memory is not short."""
    of = {"threads": threads, "drives": drives, "processes": processes, "margin": margin}
    assert ring_buffers(tasklet_bytes=mib << 20, **of) == buffers


def test_folders_of_one_file_system_are_one_drive(tmp_path: Path) -> None:
    """Folders count by their file systems, also before they exist."""
    assert num_drives([tmp_path, tmp_path / "new" / "folder"]) == 1
    assert num_drives([tmp_path, Path("/proc")]) == 2
