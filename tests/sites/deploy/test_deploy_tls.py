"""Keys and certificates of ``perfed deploy --tls``: what openssl and TLS itself say of them, and the proxy."""

from __future__ import annotations

import datetime
import re
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from command_line import contents, perfed
from deployments import SITES, deploy, deployed

pytest.importorskip("cryptography", reason="needs the extra flower")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

OPTIONS = ("--tls", "--host", "fed.example.org", "--server-name", "10.0.0.7")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A deployment that tests only read."""
    return deployed(tmp_path_factory.mktemp("made"), *OPTIONS)


def connect(folder: Path, name: str, authority: Path) -> str:
    """Shake hands with a server that has the deployment's certificate; its name in the certificate."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "server/tls/server.crt", folder / "server/tls/server.key")
    calling = ssl.create_default_context(cafile=authority)
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            serving.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with calling.wrap_socket(here, server_hostname=name) as secure:
            return str(dict(part[0] for part in secure.getpeercert()["subject"])["commonName"])
    finally:
        here.close()
        thread.join()


@pytest.mark.parametrize("name", ["fed.example.org", "10.0.0.7", "localhost", "127.0.0.1"])
def test_sites_reach_the_server_by_each_of_its_names(made, name):
    assert connect(made, name, made / "sites/north/ca.crt") == "fed.example.org"


def test_another_name_or_authority_is_refused(made, tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        connect(made, "other.example.org", made / "sites/north/ca.crt")
    other = deployed(tmp_path, *OPTIONS)
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        connect(made, "fed.example.org", other / "tls/ca.crt")


def test_openssl_agrees(made):
    def said(*arguments: object) -> str:
        return subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=True).stdout

    ca, server = made / "tls/ca.crt", made / "server/tls/server.crt"
    assert "OK" in said("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", ca, server)
    fingerprint = said("x509", "-noout", "-fingerprint", "-sha256", "-in", ca).partition("=")[2].strip()
    for site in SITES:
        assert f"| `{fingerprint}` |" in (made / "sites" / site / "README.md").read_text()
        assert (made / "sites" / site / "ca.crt").read_bytes() == ca.read_bytes()


def test_every_site_has_a_key_of_its_own_in_the_format_of_openssh(made):
    seen = set()
    for site in SITES:
        private = load_ssh_private_key((made / f"sites/{site}/{site}.key").read_bytes(), None)
        public = load_ssh_public_key((made / f"server/keys/{site}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        seen.add(private.private_numbers().private_value)
        said = subprocess.run(
            ["ssh-keygen", "-l", "-f", made / f"server/keys/{site}.pub"], capture_output=True, text=True
        )
        fingerprint = said.stdout.split()[1]
        assert f"| `{fingerprint}` |" in (made / "sites" / site / "README.md").read_text()
    assert len(seen) == len(SITES)


def test_private_keys_are_for_their_owner_alone(made):
    modes = {path.relative_to(made).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in made.rglob("*.key")}
    assert modes.keys() == {"tls/ca.key", "server/tls/server.key", *(f"sites/{site}/{site}.key" for site in SITES)}
    assert set(modes.values()) == {0o600}
    secrets = [path.read_bytes() for path in made.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert len(secrets) == len(modes)


def test_the_certificate_is_valid_as_long_as_was_said(tmp_path):
    folder = deployed(tmp_path, "--tls", "--days", 10)
    found = x509.load_pem_x509_certificate((folder / "server/tls/server.crt").read_bytes())
    left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=9) < left <= datetime.timedelta(days=10)
    refused = deploy(tmp_path / "study.toml", tmp_path / "other", "--tls", "--days", 5000)
    assert refused.code == 2 and "--days 5000: the authority itself ends on" in refused.err
    assert {path.name for path in tmp_path.iterdir()} == {"study.toml", "deployment"}


def test_a_new_certificate_of_the_same_authority(tmp_path):
    folder = deployed(tmp_path, "--tls", "--days", 10)
    before = contents(folder)
    done = perfed("deploy", "--renew", folder, "--days", 100, "--server-name", "fed.example.org")
    assert done.code == 0 and "valid until" in done.out, done.err
    after = contents(folder)
    assert {name for name in after if before.get(name) != after[name]} == {"server/tls/server.crt", "deployment.toml"}
    assert connect(folder, "fed.example.org", folder / "sites/north/ca.crt") == "127.0.0.1"
    (folder / "tls/ca.key").rename(tmp_path / "ca.key")
    done = perfed("deploy", "--renew", folder)
    assert done.code == 2 and "tls/ca.key is not there" in done.err
    assert contents(folder) == {name: text for name, text in after.items() if name != "tls/ca.key"}


@pytest.mark.long
def test_a_further_site_needs_no_new_authority(tmp_path):
    folder = deployed(tmp_path, *OPTIONS)
    (folder / "tls/ca.key").unlink()  # kept elsewhere
    before = contents(folder)
    done = perfed("deploy", "--extend", folder, "--sites", "east")
    assert done.code == 0 and "register.sh east" in done.said, done.err
    after = contents(folder)
    assert {name for name in after.keys() - before.keys() if "README" not in name and "service" not in name} == {
        "server/keys/east.pub",
        "sites/east/ca.crt",
        "sites/east/east.key",
        "sites/east/policy.toml",
        "sites/east/study.toml",
    }
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"app/perfed_app/study.toml", "deployment.toml"}


def test_the_server_speaks_tls_and_asks_who_a_site_is(made):
    superlink = (made / "server/superlink.sh").read_text()
    assert "--enable-supernode-auth" in superlink and "--insecure" not in superlink
    for option, name in (("ca-certfile", "ca.crt"), ("certfile", "server.crt"), ("keyfile", "server.key")):
        assert f'--ssl-{option} "$here/tls/{name}"' in superlink and (made / "server/tls" / name).exists()
    page = (made / "sites/west/README.md").read_text()
    assert "--server fed.example.org:8443 --name west --study study.toml --key west.key --ca ca.crt\n" in page


def test_the_proxy_passes_on_the_fleet_path_alone(made):
    proxy = (made / "server/nginx.conf").read_text()
    places = re.findall(r"location (\S+) \{(.*?)\}", proxy, flags=re.DOTALL)
    assert [place for place, _ in places] == ["/v1/fleet/", "/"]
    assert "proxy_pass https://127.0.0.1:8000/v1/fleet/;" in places[0][1] and "proxy_ssl_verify on;" in places[0][1]
    assert places[1][1].split() == ["return", "404;"]


def test_containers_publish_the_proxy_alone(made):
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((made / "server/compose.yaml").read_text())["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"address"}
    assert services["address"]["ports"] == ["8443:8443"]
    for name in ("superlink", "superexec", "proxy"):
        assert services[name]["network_mode"] == "service:address" and services[name]["restart"] == "always"


def test_a_run_is_submitted_from_the_container_that_alone_reaches_the_superlink(made):
    """So all that ``perfed submit`` reads is in it, and nothing that is secret beside the server's own key."""
    yaml = pytest.importorskip("yaml")
    superlink = yaml.safe_load((made / "server/compose.yaml").read_text())["services"]["superlink"]
    there = "/srv/study" if "/srv/study" in (made / "README.md").read_text() else str(made)
    held = {volume.split(":")[1].removeprefix(there + "/") for volume in superlink["volumes"]}
    assert held == {"server", "app", "deployment.toml"}
    assert f"compose.yaml exec superlink perfed submit {there}\n" in (made / "README.md").read_text()


def test_what_is_done_later_is_done_by_the_user_who_owns_the_files(made):
    """A certificate that root has written could not be read by the SuperLink's user."""
    page = (made / "README.md").read_text()
    later = [line.strip() for line in page.partition("## Later")[2].splitlines()]
    called = [line for line in later if re.search(r"perfed deploy --|(bar|register)\.sh NAME", line)]
    assert len(called) == 6
    assert all(re.search(r"sudo -u perfed (/\S+/venv/bin/perfed|sh /\S+/server/\w+\.sh) ", line) for line in called)
