"""What the report's buttons copy: names of others are no formula, no LaTeX and no Markdown (run by Node.js)."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shlex
import shutil
import subprocess
from importlib import resources

import pytest
from markdown_it import MarkdownIt
from test_report import write_run

from perfed.data.csv_text import escape_cell as escaped_cell
from perfed.report import load_runs, write_report
from perfed.report.papers import escape_latex as escaped_latex

NAMES = [
    "\\input{/etc/passwd}",
    "~^{}&%$#_",
    "=1+1",
    "+1+cmd|' /C calc'!A0",
    "a;=1+1",
    " =1+1",
    "a\n@x",
    "<img src=x onerror=alert(1)>",
]
NAMES += ["a|b", "[a](javascript:alert)", "*a* _b_ `c`", "a_b", "-2+3", 'a"b,c', "\u2003=1", "＝1+1", "north–south"]
VALUES = ["81.00 ± 1.41", "+4.00 (+1.20 to +6.80)", "-0.5", "–", "+1.00 [-0.10, +2.10]", "1e-3"]
WITHOUT_A_PAGE = """
const none = () => null;
const document = { querySelectorAll: () => [], querySelector: none, getElementById: none, addEventListener: none };
const addEventListener = () => {};
"""


@pytest.fixture(scope="module")
def copied() -> dict[str, str]:
    """The table of all names and values in each format."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js on the PATH")
    script = (
        (resources.files("perfed.report.page") / "page.js").read_text(encoding="utf-8").replace('"use strict";', "")
    )
    rows = json.dumps([["Method", "Value"], *([name, value] for name in NAMES for value in VALUES)])
    kinds = "Object.fromEntries(Object.entries(texts).map(([kind, of]) => [kind, of(rows, 'A_b: \\\\c')]))"
    program = f"{WITHOUT_A_PAGE}{script}\nconst rows = {rows};\nconsole.log(JSON.stringify({kinds}));"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=True)
    return {kind: "\n".join(lines) for kind, lines in json.loads(done.stdout).items()}


def test_csv_is_that_of_the_command(copied):
    _, *rows = csv.reader(io.StringIO(copied["csv"], newline=""))
    assert rows == [[escaped_cell(name), value] for name in NAMES for value in VALUES]


def test_latex_is_that_of_the_command(copied):
    lines = copied["latex"].split("\n")
    body = lines[lines.index("\\midrule") + 1 : lines.index("\\bottomrule")]
    expected = [
        [escaped_latex(" ".join(f" {text} ".split())) for text in (name, value)] for name in NAMES for value in VALUES
    ]
    assert [line.removesuffix(" \\\\").strip().split(" & ") for line in body] == expected
    assert "\\caption{A\\_b: \\textbackslash{}c.}" in lines


def test_markdown_shows_the_names(copied):
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(copied["markdown"])
    cells = [token.children or [] for token in tokens if token.type == "inline"][2:]
    assert {child.type for cell in cells for child in cell} <= {"text", "text_special"}
    shown = ["".join(child.content for child in cell) for cell in cells]
    assert shown == [" ".join(text.split()) for name in NAMES for value in VALUES for text in (name, value)]


def test_the_commands_that_make_a_run_again_are_two_lines_of_a_shell(tmp_path):
    run = write_run(tmp_path / "a; touch b $(c)", "fedavg", 0)
    for name in ("config.toml", "summary.json"):
        text = (run / name).read_text()
        (run / name).write_text(text.replace('"fedavg"', r'"x\ntouch b"'))
    page = write_report(load_runs([run]), tmp_path / "report.html", title="a").read_text()
    shown, *_ = re.findall("<pre>(.*?)</pre>", page, re.DOTALL)
    comment, command = html.unescape(shown).split("\n")
    assert comment.startswith("# ") and shlex.split(command) == ["perfed", "run", str(run / "config.toml")]
