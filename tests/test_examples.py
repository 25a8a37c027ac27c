"""The examples in docstrings, and the docstrings themselves."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import perfed

FACES = (
    "perfed",
    *(f"perfed.{n}" for n in ("aggregate", "datasets", "method", "placement", "registry", "extensions", "testing")),
)
# Modules that are a program, or cannot be imported without what an extra brings.
ALONE = ("__main__", *(() if find_spec("flwr") else ("flower.adapter",)))
# Exports that can have no docstring; the example is in that of what takes them.
WITHOUT = {
    **dict.fromkeys(("FROZEN", "PERSONAL", "PER_DOMAIN", "SENT", "SHARED"), "constants, for place and Method"),
    **dict.fromkeys(("Average", "Fold", "Home", "Placement"), "types: for client_mean, Clients, ParameterSet, place"),
}


def lacking(face: ModuleType) -> Iterator[str]:
    """Exports of ``face`` without an example; a module has one in each of its own."""
    for name in face.__all__:
        found = getattr(face, name)
        if name not in WITHOUT and not isinstance(found, ModuleType) and ">>> " not in (found.__doc__ or ""):
            yield f"{face.__name__}.{name}"


@pytest.mark.long
def test_examples_in_docstrings_are_true(forgotten):
    for info in pkgutil.walk_packages(perfed.__path__, "perfed."):
        if not info.name.endswith(ALONE):
            found = doctest.testmod(importlib.import_module(info.name), optionflags=doctest.ELLIPSIS)
            assert found.failed == 0, info.name


def test_every_export_has_an_example():
    faces = [importlib.import_module(name) for name in FACES]
    assert not (found := [name for face in faces for name in lacking(face)]), found
    assert WITHOUT.keys() <= {name for face in faces for name in face.__all__}


@pytest.mark.long
def test_docstrings_are_sentences():
    """A name says as much as three words do."""
    short = []
    for path in Path(perfed.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text.split()) <= 3:
                    short.append(f"{path.name}: {text}")
    assert not short, short
