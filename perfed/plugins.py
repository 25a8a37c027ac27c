"""Methods, policies, extensions and data sets in files of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from perfed.errors import PerfedError
from perfed.system import by_sigterm

SKLEARN = "sklearn:"
"""Names that begin so are of scikit-learn models (:mod:`perfed.experiment.sklearn_run`), of no module of the user's."""
POOLED = "pooled:"
"""Names that begin so are of one scikit-learn model on the samples of all clients together."""

BLEND = "blend"
"""The row of a comparison that mixes the other rows' models (:mod:`perfed.experiment.blend`), which is no method."""

OPTIONAL_PACKAGES = ("perfed.sites",)
"""Packages that the rest of perfed does not import by name, and without which it works."""

TABLES = "perfed.tables.frames"
"""The module that builds federations from data frames, which the package ``data`` below it finds by this name."""

IMPORTED: dict[str, None] = {}
"""The modules that ``module:NAME`` has named since the command began, each once."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Restriction:
    """The modules that may be imported, and the reason why other modules may not."""

    allowed: Collection[str]
    reason: str


_RESTRICTION: ContextVar[_Restriction | None] = ContextVar("restriction", default=None)


def bare_name(name: str) -> str:
    """Return NAME of ``module:NAME``, also on both sides of METHOD+POLICY; any other name as it is.

    Example:
        >>> bare_name("mine:avg"), bare_name("mine:avg+mine:lazy"), bare_name("ditto")
        ('avg', 'avg+lazy', 'ditto')
    """
    return "+".join(part.rpartition(":")[2] for part in name.split("+"))


def modules_in(name: str) -> list[str]:
    """Return the modules that a name mentions: that of ``module:NAME``, of METHOD+POLICY those of both.

    Example:
        >>> modules_in("mine:avg+policies:lazy"), modules_in("ditto")
        (['mine', 'policies'], [])
    """
    return [part.rpartition(":")[0] for part in name.split("+") if ":" in part]


def known_as(name: str, known: Iterable[str]) -> str | None:
    """The one of the ``known`` names that is ``name``, or else is so in another case; ``None``: there is none.

    Example:
        >>> known_as("FedPAC", ["fedavg", "fedpac"]), known_as("fedpak", ["fedavg", "fedpac"])
        ('fedpac', None)
    """
    names = list(known)
    if name in names:
        return name
    return next((other for other in names if other.casefold() == name.casefold()), None)


def own_name(name: str, what: str) -> str:
    """NAME of ``module:NAME``, after importing the module, which registers it; any other name as it is.

    Raises:
        PerfedError: the module cannot be imported; starts with ``what``.
    """
    module, colon, own = name.partition(":")
    if not colon:
        return name
    if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        raise PerfedError(f"{what} '{name}': '{module}' is no module's name; a file mine.py is 'mine'")
    try:
        own_module(module)
    except Exception as error:  # whatever a user's file does
        raise PerfedError(f"{what} '{name}': cannot import '{module}': {own_mistake(error) or error}") from None
    return own


def own_module(module: str) -> ModuleType:
    """Import and return the module of this name, which may run any code.

    Python also searches the working directory, which is appended to its path at this point and not earlier, so that
    files there are only imported if the user names a module.

    Raises:
        PerfedError: the module belongs to Python's standard library, exits the program, or is not allowed by
            :func:`only_modules`.
    """
    restriction = _RESTRICTION.get()
    installed = module.partition(".")[0] == "sklearn"  # a dependency of perfed, which it imports anyway
    if restriction is not None and module not in restriction.allowed and not installed:
        raise PerfedError(f"'{module}' is not imported: {restriction.reason}")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise PerfedError(f"'{module}' is a module of Python's own; name one of yours, or of an installed package")
    IMPORTED[module] = None
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    with endings_refused():
        return importlib.import_module(module)


def import_from_optional_packages(module: str) -> list[ModuleType]:
    """Import and return the module of this name of every optional package that is installed."""
    installed = (package for package in OPTIONAL_PACKAGES if importlib.util.find_spec(package) is not None)
    return [importlib.import_module(f"{package}.{module}") for package in installed]


@contextmanager
def only_modules(allowed: Collection[str], reason: str) -> Iterator[None]:
    """Restrict :func:`own_module` to the modules ``allowed``, for settings that somebody else wrote.

    Args:
        allowed: the names of the modules.
        reason: the reason in the message about any other module, after "is not imported: ".
    """
    before = _RESTRICTION.set(_Restriction(allowed, reason))
    try:
        yield
    finally:
        _RESTRICTION.reset(before)


@contextmanager
def no_modules_of(directory: Path, trust: bool, named: Collection[str] = ()) -> Iterator[None]:
    """Prevent the import of modules that a run directory names, except those in ``named`` or with ``trust``."""
    if trust:
        yield
        return
    reason = f"{directory} names it, and its code would run; --trust imports it, if you know who made the directory"
    with only_modules(named, reason):
        yield


@contextmanager
def endings_refused() -> Iterator[None]:
    """Make one line of it when a file of the user's own ends the program.

    Raises:
        PerfedError: it does; names file and line where they are known.
    """
    try:
        yield
    except SystemExit as stop:
        if by_sigterm(stop):
            raise
        raise PerfedError(own_mistake(stop) or f"it ends the program (SystemExit: {stop})") from None


def own_mistake(error: BaseException) -> str | None:
    """Where ``error`` arose in a file of the user's own, and what it says; ``None`` if no such file is to blame.

    The place is the last one of the traceback that belongs neither to perfed nor to an installed package.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_beside(error.filename)}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not frames:
        return None
    last = frames[-1]
    inside = "" if last.name.startswith("<") else f", in {last.name}"
    kind = "" if isinstance(error, PerfedError) else f"{type(error).__name__}: "
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{_beside(last.filename)}, line {last.lineno}{inside}: {kind}{text}"


@contextmanager
def own_mistakes() -> Iterator[None]:
    """Make one line of an exception that arises in a file of the user's own; others pass as they are.

    Raises:
        PerfedError: names file, line and function.
    """
    try:
        yield
    except (PerfedError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        mistake = None if isinstance(error, SystemExit) and by_sigterm(error) else own_mistake(error)
        if mistake is None:
            raise
        raise PerfedError(mistake) from error


def _is_own(file: str) -> bool:
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    ours = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    return not (file.startswith("<frozen") or installed or any(path.is_relative_to(folder) for folder in ours))


def _beside(file: str) -> Path:
    """Relative to the working directory if it is below."""
    path = Path(file)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class Registry(dict[str, T]):
    """What modules, perfed's and the user's own, have made known by name.

    Args:
        what: is registered, as messages say it: "method", "policy", "extension", "data set" or "metric".
        module: which registered an item; none: it is perfed's own.
    """

    def __init__(self, what: str, module: Callable[[T], str]) -> None:
        super().__init__()
        self.what = what
        self._module = module

    def check_free(self, name: str, module: str) -> None:
        """Check that ``module`` may register ``name``: it may do so again, as a notebook's cell that is run twice does.

        Raises:
            PerfedError: another module has registered it, in whatever case.
        """
        known = known_as(name, self)
        taken = module if known is None else self._module(self[known])
        if taken not in ("", module, "__main__"):  # a script may import itself
            raise PerfedError(f"{self.what} '{name}' is registered twice, by '{taken}' and by '{module}'")

    def check_own(self, given: str, name: str) -> None:
        """Check that the module of ``given``, if it is ``module:NAME``, has registered ``name``, which was meant by it.

        Raises:
            PerfedError: it has not, or the name is perfed's own.
        """
        module, colon, _ = given.partition(":")
        if not colon:
            return
        if name not in self:
            names = [known for known, item in sorted(self.items()) if self._module(item) == module]
            has = f"it has: {', '.join(names)}" if names else f"it registers no {self.what} at all"
            raise PerfedError(f"{self.what} '{given}': '{module}' registers no '{name}'; {has}")
        if self._module(self[name]).startswith("perfed."):
            raise PerfedError(f"{self.what} '{given}': '{module}' registers no '{name}'; perfed has it")

    def own(self, given: str) -> str:
        """Return what ``given`` is registered as, in any case; ``module:NAME`` imports the module first, which does so.

        A name that is not known is returned as it is, without a module.

        Raises:
            PerfedError: the module cannot be imported, or does not register the name.
        """
        bare = own_name(given, self.what)
        own = known_as(bare, self) or bare
        self.check_own(given, own)
        return own
