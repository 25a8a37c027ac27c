"""Server and sites install perfed from a wheel and a list with hashes that the administrator hands over."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from deployments import SITES, deploy, study

WHEEL = "perfed-0.2.0-py3-none-any.whl"
PINS = [f"{name} \\\n    --hash=sha256:{digit * 64}" for name, digit in (("torch==2.13.0", "0"), ("flwr==1.42.0", "1"))]
LOCK = "\n".join(["# made by pip-compile", *PINS, ""])


def write_release(folder: Path, lock: str = LOCK, wheels: tuple[str, ...] = (WHEEL,)) -> Path:
    folder.mkdir()
    (folder / "requirements.lock").write_text(lock)
    for name in wheels:
        (folder / name).write_bytes(b"a wheel")
    return folder


@pytest.mark.parametrize("options", [(), ("--tls", "--host", "192.0.2.7")], ids=["trial", "tls"])
def test_every_site_gets_the_files_and_their_hashes_on_its_page(tmp_path, options):
    pytest.importorskip("cryptography", reason="needs the extra flower")
    release = write_release(tmp_path / "release")
    out = tmp_path / "deployment"
    done = deploy(study(tmp_path), out, "--release", release, *options)
    assert done.code == 0, done.err
    for folder in (out / "release", *(out / "sites" / site for site in SITES)):
        assert (folder / WHEEL).read_bytes() == b"a wheel" and (folder / "requirements.lock").read_text() == LOCK
    for site in SITES:
        page = (out / "sites" / site / "README.md").read_text()
        assert all(hashlib.sha256(content).hexdigest() in page for content in (b"a wheel", LOCK.encode()))
        assert "--require-hashes --requirement requirements.lock" in page and f"--no-index ./{WHEEL}" in page
    if options:
        image = yaml.safe_load((out / "server/compose.yaml").read_text())["services"]["address"]["build"]
        assert image["context"].endswith("/release") and WHEEL in image["dockerfile_inline"]
        assert "--require-hashes" in image["dockerfile_inline"] and "perfed[" not in image["dockerfile_inline"]


def test_without_the_files_the_pages_ask_for_them(tmp_path):
    out = tmp_path / "deployment"
    done = deploy(study(tmp_path), out)
    assert done.code == 0 and "without --release" in done.out.replace("\n", " ")
    assert "| `requirements.lock` | ask the server's administrator |" in (out / "sites/north/README.md").read_text()
    assert not (out / "release").exists()


@pytest.mark.parametrize(
    ("lock", "wheels", "said"),
    [
        (LOCK, (), "one perfed-*.whl and requirements.lock are needed"),
        (LOCK, (WHEEL, "perfed-0.1.0-py3-none-any.whl"), "one perfed-*.whl and requirements.lock are needed"),
        ("torch==2.13.0\n", (WHEEL,), "every package needs a version and hashes"),
        (f"torch>=2 --hash=sha256:{'0' * 64}\n", (WHEEL,), "every package needs a version and hashes"),
        (LOCK + "git+https://example.org/x\n", (WHEEL,), "every package needs a version and hashes"),
        ("", (WHEEL,), "every package needs a version and hashes"),
    ],
)
def test_a_release_that_does_not_pin_everything_is_refused_before_anything_is_written(tmp_path, lock, wheels, said):
    release = write_release(tmp_path / "release", lock, wheels)
    done = deploy(study(tmp_path), tmp_path / "deployment", "--release", release)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "deployment").exists()
