"""A server cannot choose a module that a site imports: those that the site's own study names are all there are."""

from __future__ import annotations

import sys
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from stations import Stations, study, submit

from perfed.errors import PerfedError
from perfed.sites.deploy.site_agent import SiteAgent
from perfed.sites.flower.message import pack, unpack
from perfed.sites.flower.refusal import RefusalReason

MODULE = """
from pathlib import Path
from sklearn.preprocessing import StandardScaler

Path({witness!r}).touch()

class Scaled(StandardScaler):
    pass
"""
PLACES: list[dict[str, Any]] = [
    {"method": "elsewhere:Scaled"},
    {"model": {"body": {"kind": "elsewhere:Scaled"}, "head": "linear"}},
    {"evaluation": {"metrics": ["elsewhere:Scaled"]}},
    {"callbacks": ["elsewhere:Scaled"]},
    {"method": "sklearn:elsewhere.Scaled"},
    {"method": "fedavg+elsewhere:scaled"},
    {"participation": {"policy": "elsewhere:scaled"}},
    {"participation": {"elsewhere:scaled": {}}},
    {
        "data": {
            "name": "tables",
            "files": ["north", "south", "west"],
            "target": "ill",
            "preprocess": "elsewhere:Scaled",
        }
    },
]


@pytest.fixture
def witness(tmp_path, monkeypatch) -> Path:
    """A file that is there once the module was imported, which any process here could do."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "elsewhere.py").write_text(MODULE.format(witness=str(tmp_path / "witness")))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    return tmp_path / "witness"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: next(iter(place)))
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "any study"])
def test_a_module_that_the_server_names_is_not_imported(place, pinned, tables, witness):
    text, notes = study(tables), list[str]()
    theirs = tomli_w.dumps({**tomllib.loads(text), **place})
    fields = {"run": "r", "study": theirs, "place": "/srv/run", "opening": "o"}
    with closing(
        SiteAgent(tables / "at", "north", tables / "north.csv", text if pinned else None, notes.append)
    ) as site:
        unpack(site.answer(pack({"kind": "study", **fields}, {})))
        told = unpack(site.answer(pack({"kind": "study", **fields, "study": text}, {})))[0]["told"]
        agreement = {"agreement": agreement_of(told), "kind": "agreement", **fields}
        said = unpack(site.answer(pack(agreement, {})))[0]
    assert said["error"] in (RefusalReason.STUDY, RefusalReason.DATA) and not witness.exists()
    assert "elsewhere" not in sys.modules and (pinned or "elsewhere" in notes[-1])


def agreement_of(told: dict[str, Any]) -> dict[str, Any]:
    """What would hold if there were no other site."""
    from perfed.data.federation_schema import SiteMetadata
    from perfed.experiment.config import validate
    from perfed.sites.deploy.part import read_table_options
    from perfed.tables.agreement import agree_on_schema

    data = {"name": "tables", "files": ["x"], "target": "ill"}
    options = read_table_options(validate({"method": "fedavg", "rounds": 1, "data": data, "model": {"head": "linear"}}))
    return agree_on_schema({"north": SiteMetadata.of_plain(told, "north")}, options).plain()


@pytest.mark.long
def test_a_module_that_the_site_s_own_study_names_is_imported(tables, witness):
    text = study(tables, data=PLACES[-1]["data"])
    submit(tables, text, Stations(tables, text))
    assert witness.exists()
    with pytest.raises(PerfedError):
        submit(tables, text, Stations(tables, study(tables)))
