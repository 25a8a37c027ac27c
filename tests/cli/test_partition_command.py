"""``perfed partition``: the table client x class on the terminal and as a picture."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from command_line import EXPERIMENT, Outcome, is_plain, perfed
from data_files import write_images
from PIL import Image

from perfed.cli.console import console
from perfed.cli.table import fit_lines
from perfed.data.federation import Federation
from perfed.datasets import dataset, load
from perfed.report.partition import ClassTable, count_tables, write_partition_page

TOML = """
name = "clothes"
rounds = 1

[data]
name = "mnist"
partition = "dominant"
clients = 5
samples = 20
test_samples = 5

[model]
head = "linear"
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with an experiment and its data file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERFED_DATA", str(tmp_path))
    write_images(tmp_path, "mnist.npz")
    (tmp_path / "clothes.toml").write_text(TOML)
    monkeypatch.setattr(console, "width", 150)  # the tables in one part
    return Path(tmp_path)


def shown(result: Outcome) -> list[list[str]]:
    """The words of each line between the summary and where the picture is."""
    assert (result.code, result.err) == (0, "") and is_plain(result.out)
    *lines, last = [line for line in result.out.splitlines()[1:] if line]
    assert Path(last.removeprefix("picture: ")).is_file()
    return [line.split() for line in lines]


def test_the_summary_is_one_line():
    result = perfed("partition", "clothes.toml")
    assert result.out == (
        "mnist: 5 clients in 5 groups; 10 classes, 5 per client; train 20 each, 100 in all; test 5 each, 25 in all\n"
    )
    dealt = perfed("partition", "clothes.toml", "uniform=0", "samples=[20,30]").out
    assert "10 classes, 3 per client; train 20 to 30 each" in dealt


def test_the_table_counts_what_a_run_would_see():
    head, *rows = shown(perfed("partition", "clothes.toml", "--show", "uniform=50", "--seed", "3"))
    assert head == ["client", "group", "train", "test", *"0123456789"]
    options = {"partition": "dominant", "clients": 5, "samples": 20, "test_samples": 5, "uniform": 50}
    for row, client in zip(rows, load("mnist", options, seed=3), strict=True):
        assert row[:4] == [client.id, str(int(client.id)), "20", "5"]
        for label, cell in enumerate(row[4:]):
            counts = [int((split.y == label).sum()) for split in (client.train, client.test)]
            assert cell == (f"{counts[0]}/{counts[1]}" if any(counts) else "·")


def test_it_works_for_every_kind_of_data_set():
    result = perfed("partition", EXPERIMENT, "--show", "clients=4", "validation_fraction=0.2")
    assert "; train 60 each, 240 in all with 48 held out for validation; test" in result.out
    head, *rows = shown(result)
    assert head == ["client", "train", "test", *"0123456789"]
    assert [row[1] for row in rows] == ["60"] * 4  # those for validation among them


def test_data_without_classes_have_sizes_only(forgotten, here):
    @dataset("lines", task="regression")
    def lines(seed: int, data_dir: Path | None) -> Federation:
        """Real targets; the second client is not tested."""
        x, y = np.ones((6, 2)), np.arange(6.0)
        tested = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
        return Federation.from_arrays([tested, {"x_train": x, "y_train": y}], task="regression")

    (here / "lines.toml").write_text(TOML.partition("[data]")[0] + '[data]\nname = "lines"\n[model]\nhead = "linear"')
    result = perfed("partition", "lines.toml", "--show", "--out", "lines.html")
    assert result.out.startswith("lines: 2 clients; train 6 each, 12 in all; test 0 to 6 each, 6 in all\n")
    assert shown(result)[:3] == [["client", "train", "test"], ["000", "6", "6"], ["001", "6", "0"]]
    page = (here / "lines.html").read_text()
    assert "client 000: 6 train" in page and "client 001: 6 train" in page and "client 001: 6 test" not in page


def test_many_classes_go_into_several_tables():
    names = [f"class {k}" for k in range(30)]
    clients = [{"x_train": np.ones((30, 1)), "y_train": np.arange(30)} for _ in range(3)]
    table = ClassTable.from_federation(Federation.from_arrays(clients, class_names=names))
    (made,) = count_tables(table)
    for width in (80, 40, 20):  # a narrow terminal still gets them all
        lines = [str(line) for line in fit_lines(made, width)]
        parts = "\n".join(lines).split("\n\n")
        assert all(len(line) <= width for line in lines) and len(parts) > 1
        assert all([line.split()[0] for line in part.splitlines()[-3:]] == table.ids for part in parts)
        heads = [line for line in lines if line.split()[:1] not in [[id_] for id_ in table.ids]]
        assert [word for line in heads for word in line.split() if word.isdigit()] == [str(k) for k in range(30)]


def test_the_colours_start_at_no_samples(here):
    """Not at the least of the counts, as if that client had none of the class."""
    clients = [{"x_train": np.ones((n, 1)), "y_train": np.zeros(n, np.int64)} for n in (50, 60)]
    table = ClassTable.from_federation(Federation.from_arrays(clients))
    page = write_partition_page(table, here / "picture.html").read_text()
    address = re.findall(r'href="data:image/png;base64,([^"]+)', page)[0]
    cover = np.asarray(Image.open(io.BytesIO(base64.b64decode(address))), dtype=float)[..., 3]
    assert np.round(60 * cover / 255).tolist() == [[50], [60]]
    assert "client 000: 0: 50" in page and "client 001: 0: 60" in page


def test_the_picture_is_one_self_contained_file(here):
    result = perfed("partition", "clothes.toml", "--out", "deep/picture.html", "--seed", "1")
    assert result.code == 0 and result.out.splitlines()[-1] == "picture: deep/picture.html"
    assert [file.name for file in (here / "deep").iterdir()] == ["picture.html"]
    page = (here / "deep" / "picture.html").read_text()
    assert "Training samples by client and class" in page and "Test samples by client and class" in page
    assert "client 000 (group 0): " in page and "5 clients in 5 groups" in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="http', page)
    assert perfed("partition", "clothes.toml", "--out", "deep/picture.html", "clients=10", "test_samples=2").code == 0
    assert "10 clients" in (here / "deep" / "picture.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("clothes.toml", "uniform=200"), "data.uniform = 200 is not allowed"),
        (("clothes.toml", "clients=7"), "clients = 7 cannot be cut into 5 equal groups"),
        (("clothes.toml", "--out", "."), "--out .: is a folder; give the name of an .html file"),
        (("clothes.toml", "lr=x"), "lr"),
        (("nothing",), "unknown experiment 'nothing'"),
    ],
)
def test_bad_input_is_one_line(here, arguments, says):
    before = sorted(file.name for file in here.iterdir())
    result = perfed("partition", *arguments)
    assert result.code == 2
    assert result.err.startswith("perfed: ") and result.err.count("\n") == 1 and says in result.err
    assert sorted(file.name for file in here.iterdir()) == before
