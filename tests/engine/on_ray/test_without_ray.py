"""What is said where Ray is not there, or not asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from command_line import EXPERIMENT, TINY, perfed


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, "--engine ray needs the package 'ray', which is not installed: pip install"),
        (SimpleNamespace(__version__="2.9.3"), "--engine ray needs Ray 2.40 or newer (installed: 2.9.3)"),
    ],
)
def test_no_ray_and_an_old_one_take_one_line_and_leave_nothing(monkeypatch, tmp_path, found, expected):
    monkeypatch.setitem(sys.modules, "ray", found)
    result = perfed("run", EXPERIMENT, *TINY, "--engine", "ray", "--out", tmp_path / "run")
    assert result.code == 2 and expected in result.err.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_workers_ask_for_ray_and_for_no_other_engine(tmp_path):
    result = perfed("run", EXPERIMENT, "--engine", "stacked", "--workers", "2", "--out", tmp_path / "run")
    assert result.code == 2 and "are of --engine ray (given: --engine stacked)" in result.err
