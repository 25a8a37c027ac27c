"""A model card shows names of others as they are: they hold no HTML, link or cell of a table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from site_models import finished, table_site

from perfed import Federation, start, validate
from perfed.client_model.card import card
from perfed.client_model.export import export

NAMES = [
    "<img src=x onerror=alert(1)>",
    "a|b",
    "[a](javascript:b)",
    "*a* _b_",
    "`c` ``",
    "Age\n(years)",
    "&lt;",
    "\\|",
    "# a",
]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_names_are_text_in_every_part_of_a_card(name):
    draw = np.random.default_rng(0)
    rows = {name: draw.normal(size=40), "b": draw.normal(size=40), f"{name}?": np.tile([name, f"{name}!"], 20)}
    rows[f"{name}:"] = np.tile(["m", name], 20)
    frames = {name: pd.DataFrame(rows), "south": pd.DataFrame(rows)}
    federation = Federation.from_frames(frames, target=f"{name}:", domain=f"{name}?", columns="named")
    data = {"name": "tables", "files": ["a.csv"], "target": f"{name}:"}
    run = start(validate({"rounds": 1, "data": data, "model": {"head": "linear"}}), federation=federation)
    run.execute()
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(card(run.site(name).facts))
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in [*tokens, *inline]}
    assert not {"html_block", "html_inline", "link_open", "em_open"} & kinds
    texts = ["".join(child.content for child in token.children or ()) for token in tokens if token.type == "inline"]
    shown = " ".join(name.split())
    assert texts[0] == f"Model of site {shown}"
    assert shown in texts and f"training samples of class {shown}" in texts
    assert f"training samples of domain {shown}!" in texts
    assert any(f"probabilities of the classes of {shown}:: " in text for text in texts)


@pytest.mark.long
def test_the_card_of_a_table_names_its_target():
    text = card(table_site("local", "own").facts)
    assert "predicts the probabilities of the classes of `sick`: " in text


@pytest.mark.long
def test_the_card_says_what_is_known_and_has_no_row(tmp_path):
    site = finished("knnper")[1]
    export(site, tmp_path / "c0.safetensors", "safetensors")
    text = (tmp_path / "c0.md").read_text()
    found = site.facts["metrics"]["of"]["accuracy"]
    assert found["low"] <= found["value"] <= found["high"]
    assert f"| accuracy | {100 * found['value']:.4g} % |" in text
    for line in ("| train samples | 12 |", "| training samples of class 2 | 4 |", "| batch_size | `4` |"):
        assert line in text
    assert "features and labels of the site's training samples" in text
