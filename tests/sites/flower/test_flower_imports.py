"""Few files import flwr, so that a new version of it changes few files."""

from __future__ import annotations

import ast
from pathlib import Path

import perfed.sites

ROOT = Path(perfed.sites.__file__).parent


def imports_flower(path: Path) -> bool:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return any(name.split(".")[0] == "flwr" for name in names)


def test_flower_is_imported_only_where_messages_are_carried():
    importers = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if imports_flower(path)}
    assert importers == {f"flower/{name}.py" for name in ("letters", "adapter", "node", "masks", "revoke_keys")}
