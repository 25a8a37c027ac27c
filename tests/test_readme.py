"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

from perfed import registry
from perfed.method import Method

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_of_the_readme_runs(number, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    names: dict[str, object] = {}
    exec(BLOCKS[number], names)  # the text is our own
    made = [value for value in names.values() if isinstance(value, type) and issubclass(value, Method)]
    if len(made) > 1:  # Method itself is imported: the example is a method
        assert "fedper" in registry.method_names()
    else:
        assert "mean" in capsys.readouterr().out


def test_the_readme_has_both_examples():
    assert len(BLOCKS) == 2
