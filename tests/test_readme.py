"""The README's examples run as they stand."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from command_line import perfed as perfed_command

import perfed
from perfed.method import registry
from perfed.method.method import Method

README = Path(__file__).parent.parent / "README.md"
SMALL = ("local_epochs=1", "clients=4", "plan.threads=1", "plan.engine=stacked")
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.long
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


@pytest.mark.long
def test_the_commands_on_data_that_come_with_perfed_run(tmp_path, monkeypatch):
    """Each is copied from the README; what trains does so for one round, with few samples."""
    monkeypatch.chdir(tmp_path)
    text = README.read_text()
    block = re.search(r"All of these run as they stand.*?```\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.partition("#")[0].strip() for line in block[1].splitlines()]
    assert len(lines) > 10
    for line in lines:
        program, command, *words = shlex.split(line)
        fresh = command in ("run", "compare", "tune", "sweep") and "--extend" not in words
        small = [*SMALL, "rounds=1"] if fresh and "rounds=20" not in words else SMALL if fresh else []
        done = perfed_command(command, *words, *small)
        assert (program, done.code) == ("perfed", 0), (line, done.err)
    assert (tmp_path / "runs/three/report.html").is_file() and (tmp_path / "t.tex").is_file()


def test_the_readme_has_both_examples():
    assert len(BLOCKS) == 2
