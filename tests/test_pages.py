"""What pages show below a command is what it prints, but for numbers and line breaks."""

import re
import shlex
from pathlib import Path

import pytest
from command_line import perfed

DOCS = Path(__file__).parent.parent / "docs"
MY_METHODS = re.findall(r"```python\n(.*?)```", (DOCS / "tutorials" / "own-method.md").read_text(), flags=re.DOTALL)[0]
SHOWN = re.compile(r"```\n(perfed [^\n]+)\n(?:perfed [^\n]+\n)*```\n(?:(?!```).)*?```text\n(.*?)```", flags=re.DOTALL)
CASES = [
    pytest.param(command, text, id=f"{page.relative_to(DOCS)}: {command.split()[1]}")
    for page in sorted(DOCS.glob("*/*.md"))
    for command, text in SHOWN.findall(page.read_text())
]


def plain(text: str) -> str:
    """Return the text without numbers, their signs, which depend on the processor, and the space they take."""
    return re.sub(r"[-+]?[\d.]+", "#", " ".join(text.split()))


def test_pages_show_what_commands_print():
    assert len(CASES) >= 5


@pytest.mark.long
@pytest.mark.parametrize(("command", "text"), CASES)
def test_a_command_prints_what_its_page_shows(command, text, tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_methods.py").write_text(MY_METHODS)
    done = perfed(*shlex.split(command)[1:])
    assert done.code == (2 if text.startswith("perfed: ") else 0), done.err  # a page on messages shows one
    printed = plain(done.out + done.err)
    assert [part for part in text.split("\n\n") if plain(part) not in printed] == []
