"""`make test` and `make test-long` together run all tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from short_part import SHORT_METHODS, is_sampled

from perfed.method.registry import method_names

ROOT = Path(__file__).parents[1]
SHORT, LONG = '\t$(PYTEST) --dist loadfile -m "not long"', "\t$(PYTEST) --dist loadgroup -m long"


def test_what_one_part_leaves_out_the_other_runs():
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^\t.*\$\(PYTEST\).*$", makefile, re.M) == [LONG, SHORT]
    assert re.search(r"^PYTEST := .* -m pytest tests (?!.*( -[mk] |--deselect|--ignore))", makefile, re.M)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1].endswith("make test-all")
    for name, commands in {"test": "short", "test-all": "test|test-long"}.items():
        recipe = re.search(rf"^{name}:.*\n((?:\t.*\n)+)", makefile, re.M)
        assert recipe is not None
        for command in commands.split("|"):
            assert re.search(rf"\$\(MAKE\).* {command}$", recipe[1], re.M), (name, command)


@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", method_names())
def test_the_short_part_has_one_method_of_each_shape(request, name):
    assert (request.node.get_closest_marker("long") is None) == (name in SHORT_METHODS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(9))
def test_the_short_part_has_a_sample_of_the_cases(request, case):
    assert (request.node.get_closest_marker("long") is None) == is_sampled(request.node.name, 3)


def test_a_sample_is_the_share_that_was_asked_for():
    for share in (2, 3, 5):
        assert sum(is_sampled(f"case-{number}", share) for number in range(3000)) == pytest.approx(
            3000 / share, rel=0.1
        )
