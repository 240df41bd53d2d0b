"""What Python is told about the native core is what it finds."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from nanobind.stubgen import StubGen  # type: ignore[import-untyped]

import lightning_smartinfinity.native as native
import lightning_smartinfinity.native._core as core
import lightning_smartinfinity.native.testing as testing

# Beside the Python files: in an editable install the compiled module lies elsewhere.
STUB = Path(native.__file__).parent / "_core.pyi"


def statements(source: str) -> list[str]:
    """What a stub says, in any layout and order; a method called memoryview makes the type need its full name."""
    tree = ast.parse(source.replace("builtins.memoryview", "memoryview"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = inspect.cleandoc(node.value.value).strip()
    kinds = (ast.ClassDef, ast.FunctionDef)
    return sorted(ast.dump(statement) for statement in tree.body if isinstance(statement, kinds))


def test_stub_is_that_of_the_module() -> None:
    """Signatures, defaults and docstrings of the committed stub are what nanobind generates from the built module."""
    generator = StubGen(core)
    generator.put(core)
    assert statements(STUB.read_text()) == statements(generator.get())


def test_everything_public_is_exported() -> None:
    """The package re-exports the module; faults have a module of their own."""
    public = {name for name in vars(core) if not name.startswith("_")}
    assert set(native.__all__) | set(testing.__all__) == public
    assert native.__all__ == sorted(native.__all__)
    assert not set(native.__all__) & set(testing.__all__)
