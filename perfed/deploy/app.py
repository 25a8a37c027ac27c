"""The Flower app that is submitted: two programs of two lines, and the study."""

from __future__ import annotations

import re

from perfed.deploy.text import filled
from perfed.experiment.config import Experiment

_INIT = '''"""A deployment of perfed: the study, and the two programs that run it."""

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
_CLIENT = '''"""A site's program: it hands messages to the worker of 'perfed site'."""

from perfed.engine.flower.adapter import client_app

app = client_app()
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
        "app/perfed_app/client.py": _CLIENT,
        STUDY_FILE: study.to_toml(),
    }
