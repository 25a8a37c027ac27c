"""The Flower app that is submitted: the server's program, two lines long, and the study."""

from __future__ import annotations

import re

from perfed.deploy.text import filled
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment

_INIT = '''"""A deployment of perfed: the study, and the server's program that runs it."""

from pathlib import Path

STUDY = (Path(__file__).parent / "study.toml").read_text(encoding="utf-8")
"""The experiment as TOML; ``data.files`` are the names of the sites."""
'''
_SERVER = '''"""The server's program."""

from functools import partial

from perfed_app import STUDY

from perfed.deploy.program import main
from perfed.engine.flower.adapter import server_app

app = server_app(partial(main, study=STUDY))
'''
STUDY_FILE = "app/perfed_app/study.toml"
"""Where the study is in a deployment's directory."""


def app_files(study: Experiment) -> dict[str, str]:
    """The app's files by their paths in the deployment's directory; the same study gives the same bytes."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", study.name).strip("-")[:40].rstrip("-")
    return {
        "app/pyproject.toml": filled("pyproject.toml", {"app": f"perfed-{name}".rstrip("-")}),
        "app/perfed_app/__init__.py": _INIT,
        "app/perfed_app/server.py": _SERVER,
        STUDY_FILE: study.to_toml(),
    }


def app_hash(study: Experiment) -> str:
    """SHA-256 of the bundle that Flower makes of the app; empty where there is no Flower.

    The same study gives the same hash with the versions of Flower that perfed is made for.
    """
    try:
        from perfed.engine.flower.adapter import bundle_hash
    except PerfedError:
        return ""
    return bundle_hash({name.removeprefix("app/"): text for name, text in app_files(study).items()})
