"""Each concept page opens with a drawing that its script makes: small, of words that are text, and true."""

import re
from xml.etree import ElementTree

import concept_pictures
import pytest
from documents import ROOT

import perfed.methods.presets  # noqa: F401 - registers methods
from perfed.method.registry import entry

CONCEPTS = ROOT / "docs" / "concepts"


def test_every_page_has_its_drawing():
    pages = {file.stem for file in CONCEPTS.glob("*.md")} - {"index", "run-directory"}  # the latter shows a directory
    assert pages == set(concept_pictures.PICTURES) == {file.stem for file in CONCEPTS.glob("*.svg")}


@pytest.mark.parametrize("name", concept_pictures.PICTURES)
def test_a_page_opens_with_its_drawing(name):
    file = (CONCEPTS / f"{name}.svg").read_text()
    assert file == concept_pictures.PICTURES[name]() + "\n", "python docs/concept_pictures.py"
    assert len(file) < 8000
    root, space = ElementTree.fromstring(file), "{http://www.w3.org/2000/svg}"
    left, top, width, height = (float(number) for number in root.get("viewBox").split())
    for text in root.iter(f"{space}text"):
        assert left < float(text.get("x")) < width and top < float(text.get("y")) < height, text.text
    opening = (CONCEPTS / f"{name}.md").read_text().partition("\n## ")[0]
    assert f"![{root.find(f'{space}desc').text}]({name}.svg)" in opening
    colours = set(re.findall(r"var\(--(\w+)\)", file))
    for theme in ("light", "dark"):
        style = root.find(f"{space}style").text.partition("@media")[0 if theme == "light" else 2]
        assert colours == set(re.findall(r"--(\w+):#", style))


def test_the_drawing_of_placements_is_that_of_the_methods():
    letters = {"shared": "s", "personal": "p", "per-domain": "d"}
    for title, drawn in concept_pictures.PLACED.items():
        places = entry({"FLIC": "flic-hl", "FedDAR": "feddar-wa"}.get(title, title.lower())).method.default_placement
        assert "".join(letters[places[stage]] for stage in ("embedding", "body", "head")) == drawn
