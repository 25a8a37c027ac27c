"""``perfed deploy`` says in one line what is wrong, and writes nothing then."""

from __future__ import annotations

import sys

import pytest
from command_line import perfed
from deployments import SITES, deploy, deployed, study

FLIC = "[methods.flic-hl]\npretrain_epochs = 1\n"
TARGET = 'target = "disease"'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sites", "north,North"), "'North' is there already ('north')"),
        (("--sites", "north,south/west"), "'south/west' cannot be a site's name"),
        (("--sites", "-north"), "'-north' cannot be a site's name"),
        (("--sites", ""), "--sites: at least one name is needed"),
        (("--host", "https://fed.example.org"), "is no host"),
        (("--tls", "--host", "fed.example.org:8443"), "is no host"),
        (("--tls", "--host", "300.1.1.1"), "is no host"),
        (("--tls", "--server-name", "two words"), "is no host"),
        (("--superlink-port", "70000"), "--superlink-port 70000: must be from 1 to 65535"),
        (("--tls", "--port", "0"), "--port 0: must be from 1 to 65535"),
        (("--tls", "--port", "8000"), "--port 8000: the SuperLink's own"),
        (("--host", "fed.example.org"), "without --tls nothing is encrypted"),
        (("--server-name", "fed"), "--server-name: names of the server's certificate"),
        (("--dir-on-server", "srv/heart"), "--dir-on-server 'srv/heart': must be absolute"),
        (("--dir-on-server", "/srv/my heart"), "must be absolute, of letters"),
        (("--days", "0"), "--days"),
        (("method=sklearn:logistic",), "'sklearn:logistic' is not a method"),
        (("rouns=3",), "unknown key 'rouns'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options(tmp_path, options, said):
    out = tmp_path / "deployment"
    given = options if "--sites" in options else ("--sites", ",".join(SITES), *options)
    done = perfed("deploy", study(tmp_path), "--out", out, *given)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((TARGET, TARGET + '\nsite_column = "site"'), "data.site_column: in a deployment each site has a file"),
        ((TARGET, TARGET + '\ntest_files = ["t.csv"]'), "data.test_files: in a deployment each site tests"),
        ((FLIC, FLIC + '[clock]\nspeeds = "fixed"\n'), "clock.speeds = 'fixed' applies to virtual time"),
        ((FLIC, FLIC + "[clock]\ncommunication = 1.0\n"), "clock.communication = 1.0 applies to virtual time"),
        (
            (FLIC, FLIC + '[participation]\npolicy = "deadline"\ndeadline = { seconds = 2.5 }\n'),
            "participation.deadline.seconds = 2.5: these are real seconds",
        ),
        ((FLIC, FLIC + '[participation]\npolicy = "deadline"\n'), "participation.deadline.seconds = None"),
        ((FLIC, FLIC + "[snapshots]\nrounds = [5]\n"), "snapshots.rounds: embeddings of single rows would leave"),
        ((FLIC, FLIC + "[snapshots]\nlosses = true\n"), "snapshots.losses: the losses of single sites would leave"),
        ((FLIC, FLIC + '[evaluation]\nmetrics = ["generalisation-gap"]\n'), "local models, which stay at the sites"),
        (('"flic-hl"', '"fedrep-tsne"'), "fedrep-tsne cannot be deployed"),
        (
            (FLIC, FLIC + '[aggregation]\nkind = "median"\n'),
            "aggregation.kind = 'median' cannot replace the mean here: in the extension 'anchors', anchors are means",
        ),
        ((FLIC, FLIC + '[aggregation]\nkind = "krum"\n'), "there is no such kind; allowed: mean, median"),
        (('"flic-hl"', '"fedbn"'), "a rehearsal on synthetic tables failed: fedbn keeps batch-norm personal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_studies(tmp_path, change, said):
    other_method = change[0] == '"flic-hl"'
    file = study(tmp_path, change, *([(FLIC, "")] if other_method else []))
    done = deploy(file, tmp_path / "deployment")
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


def test_data_of_the_library_are_no_sites(tmp_path):
    done = deploy("heart-disease", tmp_path / "deployment")
    assert done.code == 2 and "data.name = 'heart-disease': the sites of a deployment use their own tables" in done.err
    done = deploy("hart-disease", tmp_path / "deployment")
    assert done.code == 2 and "unknown experiment 'hart-disease' (did you mean 'heart-disease'?)" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_nothing_is_written_over(tmp_path):
    folder = deployed(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = deploy(tmp_path / "study.toml", folder)
    assert done.code == 2 and f"{folder} is there already" in done.err
    (folder / "sites/east").mkdir()
    done = perfed("deploy", "--extend", folder, "--sites", "east")
    assert done.code == 2 and "sites/east is there already" in done.err
    assert {path: path.stat().st_mtime_ns for path in before if path.is_file()} == {
        path: time for path, time in before.items() if path.is_file()
    }


@pytest.mark.long
def test_what_belongs_together(tmp_path):
    folder = deployed(tmp_path)
    for arguments, said in (
        ((), "one of EXPERIMENT, --extend, --renew, --rotate is needed (given: none)"),
        (("--extend", folder, "--renew", folder), "(given: --extend, --renew)"),
        ((tmp_path / "study.toml",), "--out: a directory for the files is needed"),
        (("--extend", folder), "--extend: the new sites are given with --sites"),
        (("--extend", tmp_path, "--sites", "east"), f"{tmp_path}: no deployment is there"),
        (("--renew", folder), "this deployment has no TLS"),
    ):
        done = perfed("deploy", *arguments)
        assert done.code == 2 and said in done.err, done.err


def test_without_cryptography_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    done = deploy(study(tmp_path), tmp_path / "deployment", "--tls")
    assert done.code == 2 and "[flower]" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


@pytest.mark.long
def test_a_site_that_cannot_start_says_why(tmp_path):
    """And leaves no folder behind."""
    table = tmp_path / "north.csv"
    table.write_text("age,ill\n61,yes\n48,no\n70,yes\n55,no\n")
    folder = ("--dir", tmp_path / "at-north")
    given = ("--server", "127.0.0.1:9", "--name", "north", *folder)
    connected = (*given, "--any-study")
    policy = tmp_path / "policy.toml"
    policy.write_text("programmes = []")
    for arguments, said in (
        ((), "--data is needed"),
        (("--data", table), "--server is needed"),
        (("--data", table, "--server", "127.0.0.1:9"), "--name is needed"),
        (("--data", tmp_path / "absent.csv", *connected), "absent.csv: no such file"),
        (("--data", table, *connected, "--key", tmp_path / "absent.key"), "absent.key: no such file"),
        (("--data", table, *given), "--study FILE or --any-study is needed, and not both"),
        (("--data", table, *connected, "--study", study(tmp_path)), "--study FILE or --any-study is needed"),
        (("--data", table, *given, "--study", tmp_path / "absent.toml"), "absent.toml: cannot be read"),
        (("--data", table, *given, "--study", study(tmp_path)), "no column"),
        (("--data", table, *connected, "--policy", tmp_path / "absent.toml"), "absent.toml: cannot be read"),
        (("--data", table, *connected, "--policy", policy), "unknown key 'programmes' (did you mean 'programs'?)"),
    ):
        done = perfed("site", *arguments)
        assert done.code == 2 and said in done.err, done.err
    assert not (tmp_path / "at-north").exists()
    for command in ("log", "export"):
        done = perfed("site", command, "--dir", tmp_path)
        assert done.code == 2 and f"--dir {tmp_path}: not the folder of a site" in done.err, done.err


def test_what_is_no_deployment_cannot_be_submitted(tmp_path):
    done = perfed("submit", tmp_path)
    assert done.code == 2 and f"{tmp_path}: no deployment is there" in done.err


def test_who_stops_following_is_told_that_the_run_goes_on(tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perfed.sites.deploy.submit.submit", interrupted)
    done = perfed("submit", tmp_path, "--out", tmp_path / "run")
    assert done.code == 130
    assert f"interrupted; the run goes on, and 'perfed submit {tmp_path} --out {tmp_path}/run' follows it" in done.err
