"""Attributes of other packages are replaced for a while, and are then as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smartinfinity.common.patches import Shared, replaced, wrapped


class Base:
    """A class with a method."""

    def greet(self, name: str) -> str:
        return f"Hello {name}"


class Derived(Base):
    """A class that inherits it."""


def louder(original: Any, *args: Any) -> Any:
    return original(*args) + "!"


def test_an_attribute_has_another_value_for_a_while() -> None:
    """An error ends the context, too."""
    module = SimpleNamespace(value=1)
    seen = []

    def fail() -> None:
        seen.append(module.value)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replaced(module, "value", 2):
        fail()
    assert seen == [2] and module.value == 1


@pytest.mark.parametrize("owner", [Base, Derived])
def test_a_method_of_a_class_is_wrapped(owner: type[Base]) -> None:
    """The wrapper gets the original and its arguments. An inherited method is afterwards inherited again."""
    before = dict(vars(owner))
    with wrapped(owner, "greet", louder):
        assert owner().greet("you") == "Hello you!"
    assert dict(vars(owner)) == before and owner().greet("you") == "Hello you"


@pytest.mark.parametrize("kept", [{"value": 1}, {}], ids=["own", "inherited"])
def test_an_interrupt_when_an_attribute_is_replaced(kept: dict[str, int]) -> None:
    """Nothing is left behind an interrupt that comes when the attribute has its other value."""

    class Interrupted:
        value = 0

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if value == 2:
                raise KeyboardInterrupt

    owner = Interrupted()
    vars(owner).update(kept)
    with pytest.raises(KeyboardInterrupt), replaced(owner, "value", 2):
        pass
    assert vars(owner) == kept


def test_a_replacement_stays_for_its_last_user() -> None:
    """Users may end in any order, and others may begin afterwards."""
    module = SimpleNamespace(value=1)
    shared = Shared(lambda: replaced(module, "value", 2))
    seen = []
    for call in (shared.begin, shared.begin, shared.end, shared.end, shared.begin, shared.end):
        call()
        seen.append(module.value)
    assert seen == [2, 2, 2, 1, 2, 1]
