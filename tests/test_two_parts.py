"""`make test` and `make test-long` are all tests together, and every method has its turn."""

from __future__ import annotations

import re
from datetime import date, timedelta
from pathlib import Path

import pytest
from test_golden import METHODS as SHAPES
from turns import A_DAY, OTHERS, has_turn, methods_of, today

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


def test_every_method_has_its_turn():
    first = date(2026, 12, 31)
    days = [methods_of(first + timedelta(i)) for i in range(-(-len(OTHERS) // A_DAY))]
    assert all(len(chosen) == len(SHAPES) + A_DAY and chosen > set(SHAPES) for chosen in days)
    assert set.union(*days) == {*SHAPES, *OTHERS}


@pytest.mark.every_method("name")
@pytest.mark.parametrize("name", method_names())
def test_a_method_whose_turn_it_is_not_is_in_the_long_part(request, name):
    assert (request.node.get_closest_marker("long") is None) == (name in methods_of(today()))


def test_every_case_has_its_turn():
    first = date(2026, 12, 31)
    for share in (2, 3):
        turns = {case: [has_turn(case, share, first + timedelta(i)) for i in range(share)] for case in "abcdefghijkl"}
        assert all(sum(days) == 1 for days in turns.values())
        assert all(any(days[i] for days in turns.values()) for i in range(share))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", range(9))
def test_a_case_whose_turn_it_is_not_is_in_the_long_part(request, case):
    assert (request.node.get_closest_marker("long") is None) == has_turn(request.node.name, 3, today())
