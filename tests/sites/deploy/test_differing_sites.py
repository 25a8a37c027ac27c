"""Sites of a deployment that have other codes or units: whoever submits the study reads which, and the run keeps it."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from stations import study, submit

from perfed.sites.deploy import submit as submission
from perfed.sites.deploy.opening import AGREED


@pytest.mark.long
def test_the_submitter_is_told_which_site_differs_and_the_mapping_of_the_study_reaches_the_sites(tables, capsys):
    south = pd.read_csv(tables / "south.csv")
    south["ill"] = south["ill"].map({"ill": "ILL", "well": "Well"})
    south.to_csv(tables / "south.csv", index=False)
    submit(tables, study(tables))
    said = [json.loads(line.removeprefix(submission.LINE)) for line in capsys.readouterr().out.splitlines()]
    (line,) = [entry["stage"] for entry in said if "seem to mean the same" in entry.get("stage", "")]
    assert "'ILL', 'Well' at south" in line and 'values = { ill = { ILL = "ill", Well = "well" } }' in line
    agreed = json.loads((tables / "run" / AGREED).read_text())
    assert agreed["agreement"]["classes"] == ["ILL", "Well", "ill", "well"] and agreed["doubts"] == [line]

    data = {"name": "tables", "files": [str(tables / "north.csv")], "target": "ill"}
    mapped = study(tables, data={**data, "values": {"ill": {"ILL": "ill", "Well": "well"}}})
    (tables / "run").rename(tables / "before")
    submit(tables, mapped)
    agreed = json.loads((tables / "run" / AGREED).read_text())
    assert agreed["agreement"]["classes"] == ["ill", "well"] and agreed["doubts"] == []
    assert "seem to mean the same" not in capsys.readouterr().out
