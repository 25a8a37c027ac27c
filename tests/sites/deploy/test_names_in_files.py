"""What the files of a deployment make of names that hold what means something to systemd, Markdown, nginx or TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from command_line import perfed
from deployments import SITES, deploy, study
from markdown_it import MarkdownIt

from perfed.data.names import quote_name
from perfed.sites.deploy.policy import Policy

UNITS = ("server/perfed-superlink.service", "server/perfed-superexec.service", "sites/north/perfed-site.service")
ODD = [
    "100 % of %n",
    "heart\\",
    'heart "a"',
    "heart'; rm -rf ~",
    "<b>heart</b>",
    "@{site} ${x}",
    "# heart",
    "Größe",
    "*a* [b](c)",
]
PRIVACY = """
[data.public]
disease = ["no", "yes"]
age = [0, 100]

[privacy]
unit = "sample"
epsilon = 6.5
delta = 1e-3
"""


def deployed(folder: Path, *replaced: tuple[str, str], options: tuple[object, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    done = deploy(study(folder, *replaced), folder / "deployment", *options)
    assert done.code == 0, done.err
    return folder / "deployment"


def called(name: str) -> tuple[str, str]:
    return 'name = "Heart study"', f"name = {quote_name(name)}"


@pytest.mark.parametrize(
    "name", ["a\nExecStartPre=/bin/false", "a\rb", "a\x00b", "a\x1b[2K", "a\u2028b", "a\x85b", "\u202ea"]
)
def test_a_study_name_that_would_be_another_line_is_refused(tmp_path, name):
    done = deploy(study(tmp_path, called(name)), tmp_path / "deployment")
    assert done.code == 2 and "control characters" in done.err and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "deployment").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", ODD)
def test_a_study_name_is_in_the_description_of_units_and_nowhere_else(tmp_path, name):
    plain, odd = deployed(tmp_path / "plain"), deployed(tmp_path / "odd", called(name))
    for unit in UNITS:
        pairs = zip((plain / unit).read_text().splitlines(), (odd / unit).read_text().splitlines(), strict=True)
        differing = [pair for pair in pairs if pair[0].replace(str(plain), str(odd)) != pair[1]]
        assert len(differing) == 1
        for text, called_so in zip(differing[0], ("Heart study", name), strict=True):
            assert text.startswith("Description=") and called_so in text.replace("%%", "%") and text[-1] != "\\"
            assert "%" not in text.replace("%%", "")


@pytest.mark.long
@pytest.mark.parametrize("name", ODD)
def test_pages_show_names_and_no_markup_of_them(tmp_path, name):
    columns = f"drop = [{quote_name(name)}, {quote_name('`<i>`')}]"
    folder = deployed(
        tmp_path, called(name), ('drop = ["patient"]', columns), ('"Who has', f'"{quote_name(name)[1:-1]}')
    )
    parser = MarkdownIt("gfm-like", {"html": True, "linkify": False})
    for page in ("README.md", "sites/north/README.md"):
        tokens = parser.parse((folder / page).read_text())
        inline = [child for token in tokens for child in token.children or ()]
        assert not {"html_block", "html_inline", "link_open"} & {token.type for token in [*tokens, *inline]}
        shown = "".join(token.content for token in tokens[1].children or ())
        assert shown.startswith(f"{name}: for the ")
    codes = [token.content for token in inline if token.type == "code_inline"]
    assert f"drop = {[name, '`<i>`']!r}" in codes


@pytest.mark.parametrize(("length", "code"), [(25, 0), (26, 2), (300, 2)])
def test_names_longer_than_flower_takes_are_refused(tmp_path, length, code):
    pytest.importorskip("flwr", reason="needs the extra flower")
    done = deploy(study(tmp_path, called("x" * length)), tmp_path / "deployment")
    assert done.code == code and "Traceback" not in done.err, done.err
    assert code == 0 or (done.err.count("\n") == 1 and "at most 32 characters" in done.err)


@pytest.mark.parametrize("host", ["fe80::1%eth0", "::1%\nallow all;", "10.0.0.7%", "::1\n"])
def test_a_zone_is_no_part_of_an_address(tmp_path, host):
    done = deploy(study(tmp_path), tmp_path / "deployment", "--tls", "--host", host)
    assert done.code == 2 and "is no host" in done.err


@pytest.mark.parametrize(
    ("options", "both"),
    [
        (("--host", "::1"), True),
        (("--host", "2001:db8::7", "--port", "9443"), True),
        (("--host", "fed.example.org", "--server-name", "2001:db8::7"), True),
        (("--host", "10.0.0.7"), False),
    ],
)
def test_the_proxy_listens_where_sites_call(tmp_path, options, both):
    pytest.importorskip("cryptography", reason="needs the extra flower")
    folder = deployed(tmp_path, options=("--tls", *options))
    port = "9443" if "9443" in options else "8443"
    lines = [line.strip() for line in (folder / "server/nginx.conf").read_text().splitlines()]
    assert [line for line in lines if line.startswith("listen")] == [
        f"listen {port} ssl;",
        *([f"listen [::]:{port} ssl;"] if both else []),
    ]


@pytest.mark.long
def test_a_private_study_is_limited_at_each_site_unless_the_site_decides_otherwise(tmp_path):
    more = ('method = "flic-hl"', 'method = "fedavg"'), ("[methods.flic-hl]\npretrain_epochs = 1\n", PRIVACY)
    folder = deployed(tmp_path / "private", *more, ('target = "disease"', 'target = "disease"\ncolumns = "common"'))
    for site in SITES:
        policy = folder / "sites" / site / "policy.toml"
        assert tomllib.loads(policy.read_text()) == {"epsilon": 6.5} and Policy.read(policy).epsilon == 6.5
        for file in ("README.md", "perfed-site.service"):
            text = (policy.parent / file).read_text()
            (command,) = {line for line in text.splitlines() if "perfed site --data" in line}
            assert " --study study.toml --policy policy.toml" in command
    plain = deployed(tmp_path / "plain") / "sites/north"
    assert tomllib.loads((plain / "policy.toml").read_text()) == {}
    assert "--policy policy.toml --" not in (plain / "perfed-site.service").read_text()


def test_a_host_with_a_line_break_in_a_deployment_file_is_refused(tmp_path):
    folder = deployed(tmp_path)
    file = folder / "deployment.toml"
    file.write_text(file.read_text().replace('host = "127.0.0.1"', 'host = "::1%\\nx"'))
    done = perfed("deploy", "--extend", folder, "--sites", "east")
    assert done.code == 2 and "is no host" in done.err and done.err.count("\n") == 1
