"""The settings that a gradient codec accepts."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity import BlockScaled, ConfigError, SmartInfinityStrategy, TopK

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
    """Flags must be bools, and the type of the values must be a known name."""
    with pytest.raises(ConfigError, match=rf"TopK\({next(iter(setting))}="):
        TopK(0.01, **setting)


def test_flag_of_block_scaled_is_checked() -> None:
    """BlockScaled refuses a flag that is not a bool."""
    with pytest.raises(ConfigError, match=r"BlockScaled\(error_feedback='yes'\)"):
        BlockScaled(error_feedback="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", [0.01, "TopK", TopK, {"ratio": 0.01}])
def test_strategy_takes_codecs_only(compression: Any) -> None:
    """The strategy refuses a compression that is not a gradient codec, and the error says what to pass."""
    with pytest.raises(ConfigError, match=r"is not a gradient codec.*TopK"):
        SmartInfinityStrategy(compression=compression)


@pytest.mark.parametrize(("dtype", "name"), [("auto", None), ("bf16", "BFLOAT16"), ("fp16", "FLOAT16")])
def test_values_have_the_type_asked_for(dtype: str, name: str | None) -> None:
    """Values are sent in the type that the user asked for, by default in that of the gradients."""
    sent = TopK(0.01, value_dtype=dtype).native().value_dtype()
    assert sent.name == (name or "FLOAT32")
