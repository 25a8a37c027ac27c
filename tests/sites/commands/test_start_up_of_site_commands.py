"""Commands for sites that need no training import none of it."""

from __future__ import annotations

import pytest
from command_line import heavy_imports


@pytest.mark.parametrize("command", ["deploy", "submit", "site"])
def test_help_imports_nothing_heavy(command):
    assert heavy_imports(command, "--help") == []


def test_log_and_submit_do_not_wait_for_torch(tmp_path):
    (tmp_path / "site.json").write_text("{}")
    (tmp_path / "outgoing.jsonl").touch()
    assert heavy_imports("site", "log", "--dir", tmp_path) == []
    assert heavy_imports("submit", tmp_path, code=2) == []
