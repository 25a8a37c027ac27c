"""The README's examples run as they stand."""

import ast
import re
from pathlib import Path

import perfed
from perfed.method import registry
from perfed.method.method import Method

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_what_the_first_example_shows_is_true_of_methods_that_have_converged(forgotten, capsys):
    names: dict[str, object] = {}
    exec(BLOCKS[0], names)  # the text is our own
    lines = [line.split(" ", 1) for line in capsys.readouterr().out.splitlines()]
    shown = {name: ast.literal_eval(values) for name, values in lines}
    assert shown["fedpac"]["mean"] > shown["local"]["mean"] + 0.02
    federation, model = names["federation"], names["model"]

    def local(rounds, lr):
        method = perfed.build_method("local", {"lr": lr})
        return perfed.Run(federation, method, model, rounds=rounds).execute()["accuracy"]["mean"]

    longer = [local(rounds, lr) for rounds in (10, 90) for lr in (1e-3, 3e-3, 1e-2)]
    assert shown["fedpac"]["mean"] > max(longer) + 0.02
    assert names["own"](federation.clients[3].test.x[:5].float()).shape == (5, 10)


def test_the_second_example_is_a_method(forgotten):
    names: dict[str, object] = {}
    exec(BLOCKS[1], names)
    assert any(isinstance(value, type) and issubclass(value, Method) for value in names.values())
    assert "my-fedper" in registry.method_names()


def test_the_readme_has_both_examples():
    assert len(BLOCKS) == 2
