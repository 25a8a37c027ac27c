"""The systemd units of a deployment: what they let its programs do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from deployments import deployed

EXPOSURE = 1.6
"""Of 10, by ``systemd-analyze security``; with a user of its own, NoNewPrivileges and PrivateTmp alone: 8.8."""
UNITS = ("server/perfed-superlink.service", "server/perfed-superexec.service", "sites/north/perfed-site.service")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """For a server that has an address; tests only read it."""
    pytest.importorskip("cryptography", reason="needs the extra flower")
    folder = tmp_path_factory.mktemp("made")
    return deployed(folder, "--tls", "--host", "10.0.0.7", "--dir-on-server", "/srv/study")


def settings(unit: Path) -> dict[str, list[str]]:
    """Values of the unit's service, by key."""
    service = unit.read_text().partition("[Service]\n")[2].partition("\n[")[0]
    found: dict[str, list[str]] = {}
    for line in service.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS)
def test_units_are_hardened(made, unit):
    found = settings(made / unit)
    yes = "NoNewPrivileges PrivateTmp PrivateDevices ProtectHome LockPersonality RestrictNamespaces RestrictSUIDSGID"
    assert all(found[key] == ["yes"] for key in yes.split())
    assert found["ProtectSystem"] == ["strict"] and found["CapabilityBoundingSet"] == [""]
    assert found["UMask"] == ["0077"]
    assert found["RestrictAddressFamilies"] == ["AF_UNIX AF_INET AF_INET6"]
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    assert found["ReadWritePaths"] == ["/opt/perfed" if "site" in unit else "/srv/study/server"]
    assert found["IPAddressDeny"] == ["any"]
    assert found["IPAddressAllow"] == ["localhost 10.0.0.7" if "site" in unit else "localhost"]


def test_programs_that_train_may_make_machine_code(made):
    """As PyTorch does when it multiplies matrices; the SuperLink hands on messages, and may not."""
    denied = {unit: settings(made / unit).get("MemoryDenyWriteExecute") for unit in UNITS}
    assert denied == dict(zip(UNITS, (["yes"], None, None), strict=True))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("host", ["address", "name"])
def test_the_exposure_that_systemd_computes(made, tmp_path, unit, host):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze on the PATH (Debian: apt install systemd)")
    folder = made if host == "address" else deployed(tmp_path, "--tls", "--host", "fed.example.org")
    done = subprocess.run(
        [program, "security", "--offline=true", "--no-pager", folder / unit], capture_output=True, text=True
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("needs a systemd-analyze that looks at files (systemd 250 or newer)")
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stderr
    assert float(exposure[1]) <= EXPOSURE, done.stdout


def test_a_server_with_a_name_has_no_address_that_a_unit_could_know(tmp_path):
    pytest.importorskip("cryptography", reason="needs the extra flower")
    unit = deployed(tmp_path, "--tls", "--host", "fed.example.org") / "sites/north/perfed-site.service"
    assert "IPAddressAllow" not in settings(unit)
    assert "# fed.example.org is a name" in unit.read_text()


@pytest.mark.parametrize(("directory", "seen"), [("/srv/study", "yes"), ("/home/ann/study", "read-only")])
def test_a_deployment_in_a_home_directory_can_be_read_there(tmp_path, directory, seen):
    server = deployed(tmp_path, "--dir-on-server", directory) / "server"
    for unit in server.glob("*.service"):
        assert settings(unit)["ProtectHome"] == [seen]
