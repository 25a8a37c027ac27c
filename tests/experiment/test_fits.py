"""Where a method does not fit an experiment, the refusal names settings to add; with them it runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import Outcome, perfed
from data_files import write_images

SHORT = ("rounds=1", "local_epochs=1", "plan.engine=stacked", "plan.threads=1", "snapshots.rounds=[]")
VIEWS = ("flic-digits-views", "clients=4", "samples_per_client=20")
SKEW = ("digits-label-skew", "clients=4")
LINEAR = ("feddar-synthetic", "data.clients=4", "model.body.out=2")
IMAGES = ("fedpac-fashion-20", "clients=5", "samples=30", "test_samples=10", "overlap=all")
OWN = ("own.toml",)
NAMED = ("named.toml",)
EMBEDDING = "placement.embedding=personal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Tables of sites with other columns: so many of each (own), as many of other names (named); images."""
    made = tmp_path_factory.mktemp("fits")
    rng = np.random.default_rng(0)
    for name, columns in (
        ("own", (["age", "bp", "chol"], ["age", "pulse"])),
        ("named", (["age", "bp"], ["age", "ecg"])),
    ):
        (made / name).mkdir()
        for site, own in zip(("north", "south"), columns, strict=True):
            frame = pd.DataFrame({column: rng.normal(size=40) for column in own})
            frame = frame.assign(ill=(frame["age"] > 0).astype(int), sex=rng.choice(["f", "m"], 40))
            frame.to_csv(made / name / f"{site}.csv", index=False)
        (made / f"{name}.toml").write_text(
            f'rounds = 1\n[data]\nname = "tables"\nfiles = ["{name}"]\ntarget = "ill"\ntest_fraction = 0.25\n'
            'columns = "own"\n[model]\nembedding = { kind = "linear", out = 8 }\nhead = "linear"\n'
        )
    write_images(made, "fashion_mnist.npz")
    return made


def run(folder: Path, out: Path, experiment: tuple[str, ...], method: str, *settings: str) -> Outcome:
    """``perfed run`` in the folder of the tables."""
    command = ("run", *experiment, *SHORT, "--method", method, *settings, "--out", out, "--data-dir", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return perfed(*command)


@pytest.mark.long
@pytest.mark.parametrize(
    ("experiment", "method", "settings"),
    [
        (SKEW, "flic-hl", ("model.embedding=mlp", EMBEDDING)),
        (SKEW, "flic-class", ("model.embedding=mlp", EMBEDDING)),
        (SKEW, "fedbn", ("model.body.batch_norm=true",)),
        (IMAGES, "flic-hl", ("model.embedding=cnn", "model.body=hidden-layer", EMBEDDING)),
        (
            (*SKEW, "training.optimizer=adam"),
            "scaffold",
            ("methods.scaffold.optimizer=sgd", "methods.scaffold.lr=0.01"),
        ),
        (LINEAR, "fedbn", ("model.body.kind=mlp", "model.body.batch_norm=true")),
        (LINEAR, "flic-class", ("model.embedding=mlp", EMBEDDING)),
        (VIEWS, "fedpac", (EMBEDDING,)),
        (VIEWS, "ditto", (EMBEDDING,)),
        (VIEWS, "fedrep-srpfl", (EMBEDDING,)),
        ((*VIEWS, "model.embedding=none"), "fedpac", ("model.embedding=mlp", EMBEDDING)),
        ((*VIEWS, "methods.fedavg-ft.extensions=[anchors]"), "fedavg-ft", (EMBEDDING,)),
        ((*SKEW, "methods.fedavg-ft.extensions=[anchors]"), "fedavg-ft", ("model.embedding=mlp", EMBEDDING)),
        (OWN, "fedpac", ("columns=common",)),
        (OWN, "fedpac", ("columns=union",)),
        (OWN, "fedpac", (EMBEDDING,)),
        (NAMED, "fedpac", ("columns=common",)),
        (NAMED, "fedpac", ("columns=union",)),
        (NAMED, "fedpac", (EMBEDDING,)),
        ((*OWN, "model.embedding=none", "model.body=mlp"), "fedpac", ("columns=union",)),
        ((*OWN, "columns=common"), "feddar-wa", ("domain=sex",)),
    ],
)
def test_with_the_settings_that_the_refusal_names_it_runs(folder, tmp_path, experiment, method, settings):
    refused = run(folder, tmp_path / "out", experiment, method)
    assert refused.code == 2 and refused.err.count("\n") == 1 and not (tmp_path / "out").exists()
    for setting in settings:
        assert setting.replace("domain=sex", "domain=COLUMN") in refused.err, refused.err
    assert refused.out == ""  # before anything runs
    done = run(folder, tmp_path / "out", experiment, method, *settings)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rounds"] == 1


@pytest.mark.long
def test_columns_are_named_for_tables_of_sites_alone(folder, tmp_path):
    assert "columns=" not in run(folder, tmp_path / "out", VIEWS, "fedpac").err
    assert "domain=COLUMN" not in run(folder, tmp_path / "out", SKEW, "feddar-wa").err


@pytest.mark.long
def test_a_comparison_is_refused_before_its_first_run(tmp_path):
    methods = ("--methods", "local,flic-hl")
    refused = perfed("compare", *SKEW, *SHORT, *methods, "--out", tmp_path / "out")
    assert refused.code == 2 and refused.err.startswith(
        "perfed: flic-hl: the anchors extension aligns personal embeddings"
    )
    assert refused.out == "" and not (tmp_path / "out").exists()
    added = ("model.embedding=mlp", EMBEDDING)
    done = perfed("compare", *SKEW, *SHORT, *methods, *added, "--out", tmp_path / "out")
    assert done.code == 0, done.err
