"""Flower's own programs read what ``perfed deploy`` has written."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import deployed

from perfed.sites.flower.processes import FLOWER_SETTINGS

pytest.importorskip("flwr", reason="needs the extra flower")


def flwr(folder: Path, *arguments: object) -> str:
    program = shutil.which("flwr", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run(
        [program, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **FLOWER_SETTINGS, "FLWR_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_app_becomes_a_bundle_with_every_file(tmp_path):
    app = deployed(tmp_path) / "app"
    written = [path for path in app.rglob("*") if path.is_file() and path.name != "pyproject.toml"]
    flwr(tmp_path, "build", "--app", app)
    (bundle,) = tmp_path.glob("*.fab")
    page = (app.parent / "sites/north/README.md").read_text()
    assert f"That of this study is `{hashlib.sha256(bundle.read_bytes()).hexdigest()}`" in page
    assert bundle.stat().st_size < 10_000_000
    shutil.unpack_archive(bundle, tmp_path / "unpacked", "zip")
    for file in written:
        assert (tmp_path / "unpacked" / file.relative_to(app)).read_bytes() == file.read_bytes()


def test_keys_are_what_flower_registers(tmp_path):
    from flwr.cli.supernode.register import try_load_public_key

    folder = deployed(tmp_path, "--tls")
    assert try_load_public_key(folder / "server/keys/north.pub")
