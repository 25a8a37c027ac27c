"""Which Flower is taken, and what is said of another one or none."""

from __future__ import annotations

import sys
from importlib import import_module, metadata

import pytest

from perfed.errors import PerfedError
from perfed.sites.flower.processes import build_command, check_flower
from perfed.system import extra_command


@pytest.mark.parametrize("version", ["1.41.0", "1.42.3", "1.41.0.dev20261101"])
def test_versions_that_perfed_is_made_for(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    check_flower()


@pytest.mark.parametrize("version", ["1.40.9", "1.43.0", "2.0.0"])
def test_another_version_is_refused_in_one_line(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(PerfedError) as error:
        build_command("flower-superlink")
    assert str(error.value) == (
        f"flwr {version} is installed, but perfed needs flwr >=1.41,<1.43: {extra_command('flower')}"
    )


@pytest.mark.parametrize(
    "use",
    [
        check_flower,
        lambda: import_module("perfed.sites.flower.adapter"),
        lambda: import_module("perfed.sites.flower.node"),
    ],
)
def test_without_flower_the_extra_is_named(use, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    for name in ("adapter", "letters", "node"):
        monkeypatch.delitem(sys.modules, f"perfed.sites.flower.{name}", raising=False)
    with pytest.raises(PerfedError) as error:
        use()
    assert str(error.value) == f"a federation of sites needs flwr >=1.41,<1.43: {extra_command('flower')}"


def test_a_flower_without_what_a_site_needs_of_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.supernode.fleet_http_client", None)
    monkeypatch.delitem(sys.modules, "perfed.sites.flower.node", raising=False)
    with pytest.raises(PerfedError) as error:
        import_module("perfed.sites.flower.node")
    line = "the installed flwr lacks a part that a site needs: import of flwr.supernode.fleet_http_client halted; "
    assert str(error.value) == f"{line}None in sys.modules"
