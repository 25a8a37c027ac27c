"""What README, quickstart and the commands at a glance show runs as it stands."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from command_line import perfed as perfed_command
from documents import ROOT, alike, blocks

import perfed

SMALL = ("local_epochs=1", "clients=4", "plan.threads=1", "plan.engine=stacked")
GLANCE = "docs/reference/at-a-glance.md"
POINTS = 0.11  # what is shown is rounded to a tenth of a point, in float64


def printed(code: str, capsys: pytest.CaptureFixture[str], names: dict[str, object]) -> str:
    capsys.readouterr()
    exec(code, names)  # the text is our own
    return capsys.readouterr().out


@pytest.mark.long
def test_the_readme_shows_what_its_example_prints(capsys):
    (code,), (shown,) = blocks("README.md", "python"), blocks("README.md", "text")
    assert shown.strip() and alike(shown, printed(code, capsys, {}), POINTS)


@pytest.mark.long
def test_the_quickstart_shows_what_its_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    compare, report, export = (code.strip() for code in blocks("docs/quickstart.md"))
    done = perfed_command(*shlex.split(compare)[1:], "--engine", "stacked", "plan.threads=1")
    (shown,) = blocks("docs/quickstart.md", "text")
    assert done.code == 0 and shown.strip() and alike(shown, done.out, POINTS), done.out
    for line in (report, export):
        done = perfed_command(*shlex.split(line)[1:])
        assert done.code == 0, done.err
    assert Path("table.csv").is_file() and [*Path("runs/first").rglob("*.safetensors")]


@pytest.mark.long
def test_what_the_quickstart_says_is_true_of_methods_that_have_converged(forgotten, capsys):
    arrays, comparison = blocks("docs/quickstart.md", "python")
    names: dict[str, object] = {}
    lines = [line.split(" ", 1) for line in printed(arrays, capsys, names).splitlines()]
    shown = {name: ast.literal_eval(values) for name, values in lines}
    assert shown["fedpac"]["mean"] > shown["local"]["mean"] + 0.02
    federation, model = names["federation"], names["model"]

    def local(rounds, lr):
        method = perfed.build_method("local", {"lr": lr})
        return perfed.Run(federation, method, model, rounds=rounds).execute()["accuracy"]["mean"]

    longer = [local(rounds, lr) for rounds in (10, 90) for lr in (1e-3, 3e-3, 1e-2)]
    assert shown["fedpac"]["mean"] > max(longer) + 0.02
    assert names["own"](federation.clients[3].test.x[:5].float()).shape == (5, 10)
    assert "FedPAC" in printed(comparison, capsys, names)


@pytest.mark.long
def test_the_commands_on_data_that_come_with_perfed_run(tmp_path, monkeypatch):
    """Each is copied from the page; what trains does so for one round, with few samples."""
    monkeypatch.chdir(tmp_path)
    lines = [line.partition("#")[0].strip() for line in blocks(GLANCE)[0].splitlines()]
    assert len(lines) > 10
    for line in lines:
        program, command, *words = shlex.split(line)
        fresh = command in ("run", "compare", "tune", "sweep") and "--extend" not in words
        small = [*SMALL, "rounds=1"] if fresh and "rounds=20" not in words else SMALL if fresh else []
        done = perfed_command(command, *words, *small)
        assert (program, done.code) == ("perfed", 0), (line, done.err)
    assert (tmp_path / "runs/three/report.html").is_file() and (tmp_path / "t.tex").is_file()


def test_the_messages_page_shows_what_is_printed():
    (command,), (shown,) = blocks("docs/reference/errors.md"), blocks("docs/reference/errors.md", "text")
    done = perfed_command(*shlex.split(command)[1:])
    assert (done.code, done.err) == (2, shown)


def test_the_readme_fits_a_screen_or_two_and_says_how_to_begin():
    text = (ROOT / "README.md").read_text()
    assert len(re.sub(r"## How to cite.*", "", text, flags=re.DOTALL).splitlines()) < 100
    assert {"make run", "make test", "make site"} <= {*re.findall(r"make \w+", text)}
    assert len(blocks("README.md", "python")) == 1


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", (ROOT / "README.md").read_text())
    paths = [one or other for one, other in targets]
    assert len(paths) > 10 and not [path for path in paths if ":" not in path and not (ROOT / path).exists()]
