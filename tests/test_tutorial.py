"""The tutorial's commands, copied as they stand, do what it says."""

import csv
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from command_line import perfed

TEXT = (Path(__file__).parent.parent / "docs" / "tutorials" / "tables.md").read_text()
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```\n(?:```text\n(.*?)```)?", TEXT, flags=re.DOTALL)
RUN = Path("runs/heart/mixed/seed-0")
WITHOUT_PERFED = "import sys; sys.modules['perfed'] = sys.modules['torch'] = None\n"
POINTS = 3.0  # accuracies, over 123 to 303 patients of a hospital, move by this with another processor's rounding


def plain(text: str) -> str:
    """Without what may differ from one processor to another: numbers, and the space that they take."""
    return re.sub(r"[\d.]+(e-\d+)?", "#", " ".join(text.split()))


def command(line: str, shown: str) -> None:
    """One line of a shell block: it ends as the text shows, with these lines of output among others."""
    words = shlex.split(line)
    assert words[0] == "perfed", line
    done = perfed(*words[1:])
    refused = shown.splitlines()[-1:] and shown.splitlines()[-1].startswith("perfed: ")
    assert done.code == (2 if refused else 0), f"{line}: {done.err}"
    said = [plain(part) for part in (done.out + done.err).splitlines()]
    assert not (absent := [part for part in shown.splitlines() if plain(part) not in said]), (line, absent)


def program(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a Python block prints; one that does not import perfed is run where there is none, and no torch."""
    if "perfed" in re.findall(r"^(?:import|from) (\w+)", code, flags=re.MULTILINE):
        capsys.readouterr()
        exec(code, {})  # the text is our own
        return capsys.readouterr().out
    alone = subprocess.run([sys.executable, "-c", WITHOUT_PERFED + code], capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    return alone.stdout


def matrix(printed: str) -> np.ndarray:
    """The last array that was printed: patients x classes."""
    return np.array(re.findall(r"-?\d\.\d+(?:e-\d+)?", printed)[-10:], float).reshape(5, 2)


def measured() -> dict[str, dict[str, float]]:
    """Method -> hospital -> accuracy in %, mean over the seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in Path("runs/heart").glob("*/seed-*/clients.csv"):
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                name = file.parent.parent.name.replace("sklearn.", "sklearn:")
                found[name][row["id"]].append(100 * float(row["accuracy_before"]))
    return {name: {site: float(np.mean(values)) for site, values in of.items()} for name, of in found.items()}


@pytest.mark.long
def test_the_tutorial_is_true(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed = []
    for language, code, shown in BLOCKS:
        if language == "python":
            printed.append(program(code, capsys))
        else:
            for line in code.splitlines():
                command(line, shown)
    # three ways to the same probabilities
    with Path("proba.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    said = np.array([[float(row[f"probability of {label}"]) for label in ("no", "yes")] for row in rows])
    np.testing.assert_allclose(matrix(printed[1]), said, atol=1e-6)
    np.testing.assert_allclose(matrix(printed[2]), said, atol=1e-5)
    assert (RUN / "models" / "cleveland.md").is_file() and (RUN / "joined" / "va" / "card.md").is_file()
    # the table of accuracies
    table = re.findall(r"^\| `([\w:-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, flags=re.MULTILINE)
    found = measured()
    assert sorted(name for name, *_ in table) == sorted(found)
    for name, *numbers in table:
        by_site = [found[name][site] for site in ("cleveland", "hungarian", "switzerland")]
        expected = [float(np.mean(by_site)), *by_site]
        assert [float(number) for number in numbers] == pytest.approx(expected, abs=POINTS), name


def test_the_tutorial_goes_all_the_way():
    """Nothing is left out by a block that the test does not see."""
    commands = [line.split()[1] for language, code, _ in BLOCKS if language == "sh" for line in code.splitlines()]
    assert set(commands) == {"init", "check", "compare", "report", "predict", "export", "run", "join"}
    assert len(re.findall(r"^```(?:python|sh)$", TEXT, flags=re.MULTILINE)) == len(BLOCKS)
    assert sum(language == "python" for language, *_ in BLOCKS) == 3
