"""What ``perfed deploy`` writes: the app and its study, the server's files, a page for every site."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from command_line import contents, perfed
from deployments import SITES, deploy, deployed, study

from perfed.experiment.config import Experiment, find_experiment, read, validate
from perfed.sites.deploy.trial import list_sent_entries
from perfed.sites.flower.processes import FLOWER_SETTINGS


@pytest.mark.long
def test_the_app_carries_the_whole_study_and_no_path(tmp_path):
    app = deployed(tmp_path) / "app"
    files = contents(app)
    assert {Path(name).suffix for name in files} == {".py", ".toml"}
    assert sum(map(len, files.values())) < 100_000
    assert b"somebody" not in b"".join(files.values())
    found = read((app / "perfed_app/study.toml").read_text(), "study.toml").model_dump(mode="json")
    given = validate(find_experiment(str(tmp_path / "study.toml"))).model_dump(mode="json")
    assert found.pop("data") == {**given.pop("data"), "files": list(SITES)}
    assert found == given


def test_the_app_installs_nothing_and_imports_neither_torch_nor_data(tmp_path):
    app = deployed(tmp_path) / "app"
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", project["project"]["name"])
    assert project["tool"]["flwr"]["app"]["publisher"]
    assert set(project["tool"]["flwr"]["app"]["components"].values()) == {"perfed_app.server:app"}
    imported = re.findall(r"^from (\S+) import", (app / "perfed_app/server.py").read_text(), flags=re.MULTILINE)
    assert imported and all(name.startswith(("perfed.", "perfed_app")) or name == "functools" for name in imported)


def test_the_same_experiment_gives_the_same_app(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert contents(deployed(first) / "app") == contents(deployed(second, "--superlink-port", 8001) / "app")


@pytest.mark.long
def test_a_further_site_changes_what_nobody_else_has(tmp_path):
    folder = deployed(tmp_path)
    before = contents(folder)
    done = perfed("deploy", "--extend", folder, "--sites", "east")
    assert done.code == 0, done.err
    after = contents(folder)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"app/perfed_app/study.toml", "deployment.toml"}
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {"east"}
    assert read(after["app/perfed_app/study.toml"].decode(), "").data.options["files"] == ["east", *SITES]
    again = perfed("deploy", "--extend", folder, "--sites", "East")
    assert again.code == 2 and "is there already ('east')" in again.err
    assert contents(folder) == after


def test_scripts_are_shell_and_set_what_keeps_flower_at_home(tmp_path):
    server = deployed(tmp_path) / "server"
    for script in server.glob("*.sh"):
        subprocess.run(["sh", "-n", script], check=True)
    program = f'here={shlex.quote(str(server))}; . "$here/environment.sh"; env'
    environment = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {f"{key}={value}" for key, value in FLOWER_SETTINGS.items()} <= set(environment)
    assert f"FLWR_HOME={server}/flwr" in environment
    connection = tomllib.loads((server / "flwr/config.toml").read_text())["superlink"]
    assert connection[connection["default"]] == {"address": "127.0.0.1:8000", "insecure": True}


def test_scripts_start_flower_on_the_loopback_address(tmp_path):
    """With programs of Flower's names that say how they were called."""
    server = deployed(tmp_path, "--superlink-port", 8123) / "server"
    programs = server.parent / "venv/bin"
    programs.mkdir(parents=True)
    for name in ("flower-superlink", "flower-superexec", "flwr"):
        (programs / name).write_text('#!/bin/sh\necho "$0" "$@"\n')
        (programs / name).chmod(0o755)

    def said(script: str, *arguments: str) -> str:
        done = subprocess.run(["sh", server / script, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    superlink = said("superlink.sh")
    assert "--host 127.0.0.1 --port 8123 " in superlink and "--isolation process" in superlink
    assert f"--database {server}/state/superlink.db" in superlink and (server / "state").is_dir()
    assert "--runtime-api-address 127.0.0.1:8123 --insecure" in said("superexec.sh")
    registered = said("register.sh", "north", "west").splitlines()
    assert registered == [f"{name}: its key is known now" for name in ("north", "west")]


def test_keys_that_are_known_already_do_not_stop_the_others(tmp_path):
    """With a ``flwr`` that refuses north's key as Flower does one that it has, and west's for another reason."""
    server = deployed(tmp_path) / "server"
    program = server.parent / "venv/bin/flwr"
    program.parent.mkdir(parents=True)
    program.write_text(
        "#!/bin/sh\ncase $3 in\n"
        "*/north.pub) echo '| [code: 23] Public key already in use. |'; exit 1 ;;\n"
        "*/west.pub) echo '| Connection refused |'; exit 1 ;;\nesac\n"
    )
    program.chmod(0o755)
    done = subprocess.run(["sh", server / "register.sh", *SITES], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "north: its key was known already; one that was barred stays so",
        "south: its key is known now",
    ]
    assert done.returncode == 1 and done.stderr == "west: | Connection refused |\n"


def test_units_come_back_for_good(tmp_path):
    folder = deployed(tmp_path)
    units = [*folder.glob("server/*.service"), *folder.glob("sites/*/*.service")]
    assert len(units) == 2 + len(SITES)
    for unit in units:
        text = unit.read_text()
        assert "\nRestart=always\n" in text and re.search(r"\nRestartSec=\d+\n", text)
        assert "\nUser=perfed\n" in text and "\nStartLimitIntervalSec=0\n" in text
    site = (folder / "sites/north/perfed-site.service").read_text()
    assert re.search("\nExecStart=.*perfed site .* --consent HASH\n", site)
    assert all(f"\nEnvironment={key}={value}\n" in site for key, value in FLOWER_SETTINGS.items())


def test_pages_say_what_to_do_and_what_leaves(tmp_path):
    folder = deployed(tmp_path)
    readme = (folder / "README.md").read_text()
    assert "Whoever may submit to the SuperLink runs code on this machine" in readme
    for site in SITES:
        page = (folder / "sites" / site / "README.md").read_text()
        assert f"perfed site --data {site}.csv --server 127.0.0.1:8000 --name {site} --study study.toml\n" in page
        assert "`target = 'disease'`" in page and "the names of the classes" in page
        assert "which of these columns they have: patient." in page and "a checksum of your rows" in page
        for entry in ("shared/body.0.weight", "num_samples", "extensions/anchors/mean"):
            assert f"* `{entry}`" in page
        assert "embedding" not in page
        assert f"perfed site preview --data {site}.csv --study study.toml --name {site}\n" in page
        for command in ("perfed site log", "perfed site export", "systemctl disable --now perfed-site"):
            assert command in page
    assert "@{" not in "".join(text.decode() for text in contents(folder).values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "sent"),
    [
        ("local", set()),
        ("fedavg", {"embedding", "body", "head"}),
        ("fedrep", {"embedding", "body"}),
        ("hetfedrep", {"body"}),
        ("flic-class", set()),
        ("lg-fedavg", {"head"}),
    ],
)
def test_what_is_said_to_be_sent_is_sent(tmp_path, method, sent):
    table = find_experiment(
        str(study(tmp_path, ('"flic-hl"', f'"{method}"'), ("[methods.flic-hl]\npretrain_epochs = 1\n", "")))
    )
    names = list_sent_entries(validate(table))
    assert {name.split("/")[1].split(".")[0] for name in names if name.startswith("shared/")} == sent


@pytest.mark.parametrize("more", ['event = "died"', 'task = "regression"', 'domain = "sex"'])
def test_all_kinds_of_targets_and_domains_can_be_tried(tmp_path, more):
    target = 'target = "disease"'
    assert "num_samples" in list_sent_entries(
        experiment(tmp_path, ('"flic-hl"', '"hetfedrep"'), (target, f"{target}\n{more}"))
    )


def experiment(folder: Path, *replaced: tuple[str, str]) -> Experiment:
    """The study without what only its own method has."""
    file = study(folder, ("[methods.flic-hl]\npretrain_epochs = 1\n", ""), *replaced)
    return validate(find_experiment(str(file)))


def test_modules_of_the_users_are_named(tmp_path, monkeypatch):
    (tmp_path / "ours.py").write_text(
        "from perfed import Method, register\nfrom perfed.methods.fedavg import FedAvg\n\n\n"
        '@register("shrunk")\nclass Shrunk(FedAvg):\n    """Ours."""\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = deploy(
        study(tmp_path, ('"flic-hl"', '"ours:shrunk"'), ("[methods.flic-hl]\npretrain_epochs = 1\n", "")),
        tmp_path / "deployment",
    )
    assert done.code == 0, done.err
    for page in ("README.md", "sites/north/README.md"):
        assert "modules of its own: `ours`." in (tmp_path / "deployment" / page).read_text()


def test_without_tls_nothing_is_for_other_machines(tmp_path):
    files = contents(deployed(tmp_path))
    assert not [name for name in files if name.endswith((".key", ".crt", ".pub", "nginx.conf", "compose.yaml"))]
    assert perfed("deploy", study(tmp_path), "--sites", "a", "--out", tmp_path / "b", "--host", "10.0.0.7").code == 2


def test_what_mixed_sends_of_named_columns_is_found_where_a_linear_head_is_all_of_the_model():
    data = {"name": "tables", "files": ["a", "b"], "target": "ill", "columns": "named"}
    table = {"method": "mixed", "rounds": 1, "data": data, "model": {"head": "linear"}}
    assert list_sent_entries(validate(table)) == ["hessian", "target", "constant", "freedom", "outputs"]
