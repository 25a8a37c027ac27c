"""``import perfed``: quick, and every name of the face is there, with the type that the stub gives it."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import perfed

STUB = ast.parse(Path(perfed.__file__).with_suffix(".pyi").read_text())
IMPORTS = {alias.name: node.module for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names}
MODULES = {name for name, module in IMPORTS.items() if module == "perfed"}


def in_a_process_of_its_own(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_stub_lists_what_the_face_has():
    (listed,) = [ast.literal_eval(node.value) for node in STUB.body if isinstance(node, ast.Assign)]
    assert set(listed) == set(IMPORTS)
    assert set(perfed.__all__) == set(IMPORTS) - MODULES
    assert set(IMPORTS) <= set(dir(perfed))


@pytest.mark.parametrize("name", IMPORTS)
def test_the_stub_says_where_it_comes_from(name):
    expected = import_module(f"perfed.{name}") if name in MODULES else getattr(import_module(IMPORTS[name]), name)
    assert getattr(perfed, name) is expected


def test_the_version_is_that_which_is_installed():
    assert perfed.__version__ == metadata.version("perfed")


def test_an_unknown_name_is_said():
    with pytest.raises(AttributeError, match="'perfed' has no attribute 'Fderation'"):
        perfed.Fderation  # noqa: B018


def test_importing_perfed_imports_no_torch():
    assert in_a_process_of_its_own("import sys, perfed; print('torch' in sys.modules)") == "False"


@pytest.mark.long
def test_modules_are_attributes_and_perfed_s_own_names_are_taken():
    program = """
import perfed
assert "digits-views" in perfed.datasets.dataset_names()
try:
    perfed.register("fedavg")(type("Mine", (perfed.Method,), {}))
except perfed.PerfedError as error:
    print(error)
assert "fedrep-srpfl" in perfed.registry.known_names()
"""
    assert in_a_process_of_its_own(program).startswith("method 'fedavg' is registered twice")


@pytest.mark.long
def test_extensions_are_known_before_anything_else_is_imported():
    assert (
        in_a_process_of_its_own("import perfed; print(*perfed.extensions.extension_names())")
        == "anchors clip prototypes proximal server-optimizer top-k"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["Run", "start"])
def test_any_name_may_be_asked_for_first(name):
    assert in_a_process_of_its_own(f"import perfed; print(callable(perfed.{name}))") == "True"


def test_what_a_shell_completes_is_the_face_and_nothing_else():
    shown = {name for name in dir(perfed) if not name.startswith("__")}
    assert shown == set(IMPORTS)


SHOW_POLICY = "import os, perfed; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in __import__('sys').modules)"


@pytest.mark.parametrize("variable", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch, variable):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "ACTIVE" if variable == "OMP_WAIT_POLICY" else "100")
    expected = {None: "PASSIVE", "OMP_WAIT_POLICY": "ACTIVE"}.get(variable)
    assert in_a_process_of_its_own(SHOW_POLICY) == f"{expected} False"  # set before torch is imported


WAIT = """
import os, time
os.environ.pop("OMP_NUM_THREADS", None)
if %r:
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
import perfed, torch
torch.set_num_threads(2)
numbers = torch.rand(400_000)
numbers.exp()
start = time.process_time()
for _ in range(20):
    numbers.exp()
    time.sleep(0.02)
print(time.process_time() - start)
"""


@pytest.mark.long
def test_a_sleeping_thread_takes_no_processor_time():
    spinning, sleeping = (float(in_a_process_of_its_own(WAIT % active)) for active in (True, False))
    assert sleeping < spinning / 2  # a spinning thread computes through the 0.4 seconds of pauses
