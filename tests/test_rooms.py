"""The house: imports run from the ground up, no circles, and nobody goes through the face."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import perfed

ROOT = Path(perfed.__file__).parent
GROUND = {"errors", "rng", "tree", "codec", "settings", "plugins", "system"}
ROOMS = (  # from the bottom to the top; a room may use those before it
    "data",
    "tables",
    "maths",
    "aggregation",
    "participation",
    "datasets",
    "model",
    "training",
    "method",
    "methods",
    "engine",
    "privacy",
    "client_model",
    "run",
    "report",
    "experiment",
    "cli",
    "sites",
    "testing",  # for users and tests: nothing here imports it
)
DATA = (  # modules and packages inside data/ from the bottom to the top; a line may use the lines before it
    "augment csv_text groups names originals.reading originals.sources partition problems reading target_scale tokens",
    "checksums column facts files folder inputs labels",
    "client federation_schema originals",
    "checks columns summary",
    "lazy site_arrays",
    "federation",
    "held_out",
    "domain_input new_client",
)
# Short names for users; nothing inside imports them.
FACES = {"aggregate", "placement", "registry", "extensions"}


@cache
def modules() -> dict[str, Path]:
    """Every module of perfed by its full name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        if path == ROOT / "__main__.py":
            continue  # the door of ``python -m perfed``
        name = ".".join(("perfed", *path.relative_to(ROOT).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of perfed that ``path`` imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "perfed":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "perfed")


@cache
def arrows() -> dict[str, set[str]]:
    """Module -> the modules that it imports; a package's own ``__init__`` is a door, not an importer."""
    known = modules()
    return {name: set(imported(path, known)) - {name} for name, path in known.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def floor(name: str) -> int:
    return 0 if name in GROUND else 1 + ROOMS.index(name)


def test_every_file_is_in_a_room_that_is_known():
    optional = {"sites"}  # tests/without_sites.sh removes it
    assert {room(name) for name in modules() if "." in name} | optional == GROUND | set(ROOMS) | FACES


def test_no_arrow_runs_back_up():
    upwards = [
        f"{name} -> {other}"
        for name, others in arrows().items()
        if room(name) and room(name) not in FACES
        for other in others
        if not room(other) or room(other) in FACES or floor(room(other)) > floor(room(name))
    ]
    assert not upwards, upwards


def height_in_data(module: str) -> int:
    """Return the line of DATA with this module of data/, or with the package in which it is."""
    name = module.removeprefix("perfed.data.")
    places = {part: line for line, parts in enumerate(DATA) for part in parts.split()}
    return places[name] if name in places else places[name.split(".")[0]]


def test_no_import_inside_data_points_upwards():
    inside = {name: others for name, others in arrows().items() if name.startswith("perfed.data.")}
    package = {name: name.removeprefix("perfed.data.").rpartition(".")[0] for name in inside}
    upwards = [
        f"{name} -> {other}"
        for name, others in inside.items()
        for other in others & inside.keys()
        if height_in_data(other) >= height_in_data(name) and not (package[name] and package[name] == package[other])
    ]
    assert not upwards, upwards


def test_nothing_outside_imports_what_only_real_sites_need():
    outside = ((name, other) for name, others in arrows().items() if room(name) != "sites" for other in others)
    importers = [name for name, other in outside if room(other) == "sites"]
    assert not importers, importers


def test_there_is_no_circle():
    inner = {name: others for name, others in arrows().items() if modules()[name].name != "__init__.py"}
    list(TopologicalSorter(inner).static_order())  # raises where there is one


def test_no_import_is_for_types_alone():
    assert not [name for name, path in modules().items() if "TYPE_CHECKING" in path.read_text()]


def test_the_house_has_at_most_twelve_floors():
    rooms = {name: {room(o) for n, others in arrows().items() if room(n) == name for o in others} for name in ROOMS}
    height = dict.fromkeys(GROUND, 1)
    for name in ROOMS:
        height[name] = 1 + max((height[other] for other in rooms[name] if other != name and other in height), default=0)
    assert max(height.values()) <= 12, height


def test_a_run_asks_the_server_and_reaches_through_nothing_of_it():
    parts = re.compile(r"\bserver\.(?:initialiser|engine|selection|state|clock)\b\S*")
    found = {path.name: parts.findall(path.read_text()) for path in (ROOT / "run").glob("*.py")}
    assert not any(found.values()), found


def private(path: Path) -> Iterator[str]:
    """Names with an underscore in front that ``path`` takes from perfed: as attributes, imports or texts."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    stored = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    own = {n.attr for n in stored if ast.unparse(n.value) == "self"} | {"_replace"}  # a named tuple's is public
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "perfed":
            names = [part for name in (node.module or "", *(a.name for a in node.names)) for part in name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1].endswith("attr"):
            given = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [part for name in given for part in name.split(".")]
        yield from (f"{path.name}: {n}" for n in names if re.match(r"_(?!_)", n) and n not in own)


def test_tests_touch_nothing_private(tmp_path):
    found = [name for path in Path(__file__).parent.rglob("*.py") for name in private(path)]
    assert not found, found
    wrong = "from perfed.a import _b\nfrom perfed._c import d\nd._e(patch.setattr(d, '_f', 1), getattr(d, '_g.h'))"
    (tmp_path / "wrong.py").write_text(wrong)
    assert sorted(private(tmp_path / "wrong.py")) == [f"wrong.py: _{letter}" for letter in "bcefg"]
