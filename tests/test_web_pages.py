"""The site: pages made from the code say what the code says, and the whole is built without a warning."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import build_site
import glossary_links
import method_pages
import pytest
import reference_pages
import typer
from command_line import perfed as perfed_command
from documents import ROOT
from site_text import from_docstring

import perfed
from perfed.cli import entry as _program  # noqa: F401 - it adds all commands
from perfed.cli.app import app
from perfed.cli.index import index
from perfed.experiment.config import Experiment
from perfed.method.registry import entry, known_names

METHODS = {item["name"]: item for item in index()["methods"]}
REFERENCE = reference_pages.pages()


def rows(page: str) -> dict[str, list[str]]:
    """Cells of the rows of all tables by the first, without marks of code; of equal ones those of the upper table."""
    lines = [re.split(r"(?<!\\)\|", line[1:]) for line in page.splitlines() if line.startswith("|")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:-1]] for cells in reversed(lines)}


def test_the_index_leads_to_every_method_s_page():
    assert {*METHODS} <= {*known_names()}
    assert sorted(re.findall(r"\]\(([\w-]+)\.md\)", method_pages.index_page())) == sorted(METHODS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["fedpac", "fedavg", "fedrep-srpfl", "fedadam", "mixed", "flic-hl", "local"])
def test_a_method_s_page_has_its_settings_with_their_defaults(name):
    found, page = entry(name), rows(method_pages.page(METHODS[name]))
    fields = {k: f for part in (found.method, *found.extensions) for k, f in part.model_fields.items()}
    own = {k: f for k, f in fields.items() if k not in perfed.Method.model_fields}
    assert own.keys() <= page.keys()
    for key, field in own.items():
        default, shown = (found.defaults or {}).get(key, field.default), page[key][0]
        plain = [*default] if isinstance(default, tuple) else default
        assert (None if shown == "not given" else json.loads(shown.strip("`"))) == plain, key


@pytest.mark.long
def test_a_method_s_page_says_what_is_sent_and_what_is_kept():
    scaffold, fedpac, local = (rows(method_pages.page(METHODS[name])) for name in ("scaffold", "fedpac", "local"))
    assert scaffold["a client sends"] == ["`shared`, `change`"]
    assert "`own_control` at each client" in scaffold["kept beside the model"][0]
    assert {"`statistics`", "`head`", "`shared`"} <= {*fedpac["a client sends"][0].split(", ")}
    assert local["a client sends"] == ["nothing"]


def test_a_method_s_page_names_the_tables_that_it_is_in():
    flic, fedpac, unused = (
        "\n".join(method_pages.tables_with(METHODS[n])) for n in ("flic-hl", "fedpac", "fedprox-ft")
    )
    assert "(../results.md#bci-common)" in flic and "(../when.md#features-differ-flic)" in flic
    assert "`perfed leaderboard pfllib-fashion-pathological`" in fedpac
    assert unused == ""


@pytest.mark.long
def test_the_command_line_s_page_has_every_command_and_option():
    page = REFERENCE["reference/command-line.md"]
    for command in re.findall(r"^## perfed (.+)$", page, re.MULTILINE):
        said = perfed_command(*command.split(), "--help").out
        section = page.split(f"## perfed {command}\n")[1].partition("\n## ")[0]
        options = {
            option
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", said.partition("Options:")[2])
            if option != "--help"
        }
        assert options <= {*re.findall(r"--[a-z][\w-]*", section)}, command
    named = {
        line.split()[0]
        for line in perfed_command("--help").out.partition("Commands:")[2].splitlines()
        if line[:3].strip()
    }
    assert named <= {*re.findall(r"^## perfed ([\w-]+)", page, re.MULTILINE)} and len(named) > 15


def test_the_settings_page_has_every_key_of_an_experiment():
    page = rows(REFERENCE["reference/settings.md"])
    text = REFERENCE["reference/settings.md"]
    for name in Experiment.model_fields:
        assert name in page or f"## {name}\n" in text or name == "methods", name
    assert page["rounds"][:2] == ["needed", "integer >= 1"] and page["rate"][:2] == ["`1.0`", "number > 0 and <= 1"]
    assert page["local_epochs"][0] == f"`{perfed.Method.model_fields['local_epochs'].default}`"


def test_the_page_on_python_has_the_public_interface():
    listed = [name for names in reference_pages.GROUPS.values() for name in names]
    modules = {"aggregate", "datasets", "extensions", "method", "placement", "registry"}
    assert sorted(listed) == sorted({*perfed.__all__, *modules})


def test_the_examples_of_the_settings_run():
    """The first block is an experiment; each further one shows other settings of it."""
    first, *others = re.findall(r"^```toml\n(.*?)^```$", REFERENCE["reference/settings.md"], re.DOTALL | re.MULTILINE)
    table = tomllib.loads(first)
    for more in ({}, *map(tomllib.loads, others)):
        whole = {key: {**table[key], **more[key]} if key in more else table[key] for key in table}
        assert more.keys() <= table.keys()
        assert perfed.start(perfed.validate({**whole, "rounds": 1})).execute()["rounds"] == 1
    assert others


SHOWN_COMMANDS = {
    command
    for page in (*REFERENCE.values(), *method_pages.pages().values())
    for command in re.findall(r"(?:`|^ *)(perfed [a-z][^`\n]*)", page.replace("\\\n", " "), re.MULTILINE)
    if "..." not in command and not re.search(r"\b[A-Z]{2,}", command)
}


@pytest.mark.long
def test_the_commands_of_the_reference_can_be_given():
    assert len(SHOWN_COMMANDS) > 60
    for shown in sorted(SHOWN_COMMANDS):
        command, words = typer.main.get_command(app), shlex.split(shown, comments=True)[1:]
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        command.make_parser(typer.Context(command)).parse_args(words)


def test_docstrings_become_markdown():
    text = "See :class:`~perfed.method.Method` and :func:`start <perfed.start>`, ``a_i <- b``."
    assert from_docstring(text) == "See `Method` and `start`, `a_i <- b`."


def test_links_lead_to_where_pages_are():
    def moved(text: str, file: str, to: str) -> str:
        return build_site.moved(text, ROOT / file, Path(to))

    assert moved("[a](docs/results.md#x)", "CHANGELOG.md", "changelog.md") == "[a](results.md#x)"
    assert moved("[a](../../CHANGELOG.md)", "docs/howto/x.md", "howto/x.md") == "[a](../changelog.md)"
    assert moved("[a](../README.md#install)", "docs/x.md", "x.md") == "[a](install.md)"
    assert moved("[`code`](../perfed/rng.py), [b](#c), [d](https://e.org/f)", "docs/x.md", "x.md") == (
        "`code`, [b](#c), [d](https://e.org/f)"
    )


class Page(HTMLParser):
    """Where links of a page lead, and the marks that others can lead to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.marks: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.marks |= {str(given["id"])} if given.get("id") else set()
        self.links += [str(given[key]) for key in ("href", "src") if given.get(key)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.sources(folder / "source")
    assert build_site.build(folder / "source", folder / "html") == 0, "warnings: see above"
    return folder / "html"


@pytest.mark.long
def test_every_link_of_the_built_site_leads_somewhere(site):
    pages = {file.resolve(): Page(file) for file in site.rglob("*.html")}
    assert len(pages) > 80
    lost = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme in ("https", "http", "data", "mailto"), link
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            known = target not in pages or not parts.fragment or unquote(parts.fragment) in pages[target].marks
            lost += [] if target.exists() and known else [f"{file.relative_to(site.resolve())}: {link}"]
    assert not lost, lost[:20]


@pytest.mark.long
def test_options_keep_their_dashes(site):
    """Outside of code too, where typography makes one dash of two."""
    text = (site / "reference" / "command-line.html").read_text()
    plain = re.sub(r"<(code|pre)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert "--event" in plain and not re.search("[\N{EN DASH}\N{EM DASH}](?=[a-z])", plain)


@pytest.mark.long
def test_a_word_s_meaning_is_a_click_away(site, tmp_path):
    """A word's first place on a page leads to what docs/glossary.md says of it."""
    from report.chromium import chromium

    words = {
        "tutorials/own-method": ["client", "head", "seed"],
        "howto/flic": ["anchor"],
        "concepts/verdict": ["client-run"],
        "concepts/participation": ["clock", "virtual time"],
    }
    text = re.sub("[*`]", "", (ROOT / "docs" / "glossary.md").read_text())
    every = "[...document.querySelectorAll('article a.term')]"
    with chromium(tmp_path) as tab:
        for page, sought in words.items():
            tab.open(site / f"{page}.html")
            links = dict(tab.run(f"{every}.map(a => [a.hash, a.href])"))
            assert len(links) == tab.run(f"{every}.length"), page  # each word once
            assert tab.run("document.querySelectorAll('article :is(a, h1, h2, h3, pre, code) a.term').length") == 0
            for word in sought:
                tab.call("Page.navigate", url=links[f"#term-{word.replace(' ', '-')}"])
                while not tab.run("document.readyState == 'complete' && !!document.querySelector('dt:target')"):
                    time.sleep(0.02)
                there = "document.querySelector('dt:target')"
                term, said = tab.run(f"[{there}.innerText, {there}.nextElementSibling.innerText]")
                said = said.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
                assert f"\n{term}\n: {said}\n" in text and term.startswith(word), (term, said)


@pytest.mark.long
def test_the_glossary_has_words_of_the_pages_and_every_menu_leads_to_it(site):
    pages = {file.stem: Page(file) for file in site.rglob("*.html")}
    menus = {name: any(link.endswith("glossary.html") for link in page.links) for name, page in pages.items()}
    assert [name for name, leads in menus.items() if not leads] in ([], ["glossary"])
    used = {link.rpartition("#")[2] for page in pages.values() for link in page.links}
    known = {mark for mark in pages["glossary"].marks if mark.startswith("term-")}
    assert len(known) == len(re.findall("^: ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE))
    everyday = {glossary_links.mark(word) for word in glossary_links.EVERYDAY}
    assert everyday < known and not everyday & used and len(known & used) > 35
    tutorial = pages["own-method"].links
    assert [link for link in tutorial if link.endswith("#term-client")] == ["../glossary.html#term-client"]


@pytest.mark.long
def test_the_site_asks_no_server_for_anything(site):
    asked = [
        link
        for file in site.rglob("*.html")
        for link in re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="(https?:[^"]+)"', file.read_text())
    ]
    assert not asked, asked


@pytest.mark.long
def test_search_works_from_a_file(site, tmp_path):
    from report.chromium import program

    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path}"]
    command = [
        program(),
        *quiet,
        "--virtual-time-budget=8000",
        "--dump-dom",
        f"{(site / 'search.html').as_uri()}?q=barycentre",
    ]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    results = re.search(r'<ul[^>]*class="search"[^>]*>(.*?)</ul>', page, re.DOTALL)
    assert results is not None and "methods/" in results[1], page[-3000:]
