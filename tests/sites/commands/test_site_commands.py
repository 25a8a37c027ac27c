"""Commands for sites that need no training import none of it."""

from __future__ import annotations

import pytest
from command_line import heavy_imports, perfed


@pytest.mark.long
@pytest.mark.parametrize("command", ["deploy", "submit", "site"])
def test_help_imports_nothing_heavy(command):
    assert heavy_imports(command, "--help") == []


@pytest.mark.long
def test_log_and_submit_do_not_wait_for_torch(tmp_path):
    (tmp_path / "site.json").write_text("{}")
    (tmp_path / "outgoing.jsonl").touch()
    assert heavy_imports("site", "log", "--dir", tmp_path) == []
    assert heavy_imports("submit", tmp_path, code=2) == []


def test_an_unknown_command_of_sites_is_answered_with_those_that_exist():
    result = perfed("site", "logs")
    assert result.code == 2 and "No such command 'logs'" in result.err and "did you mean 'log'?" in result.err
    assert "commands: preview, log, key, leave, export" in " ".join(result.err.split())
