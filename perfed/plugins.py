"""Methods, policies, extensions and data sets in the user's files."""

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

from perfed.errors import PerfedError, suggest_name
from perfed.system import is_sigterm_exit

SKLEARN = "sklearn:"
"""Prefix of the names of scikit-learn models (:mod:`perfed.experiment.sklearn_run`), which are not user modules."""
POOLED = "pooled:"
"""Prefix of the names of a single scikit-learn model on the samples of all clients."""

BLEND = "blend"
"""The row of a comparison that blends the models of the other rows (:mod:`perfed.experiment.blend`); not a method."""

OPTIONAL_PACKAGES = ("perfed.sites",)
"""Packages that other parts of perfed do not import by name, and without which perfed works."""

TABLES = "perfed.tables.frames"
"""The module that builds federations from data frames, which the package ``data`` below it finds by this name."""

IMPORTED: dict[str, None] = {}
"""The modules of all ``module:NAME`` since the command began, without duplicates."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Restriction:
    """The modules that may be imported, and the reason why other modules may not."""

    allowed: Collection[str]
    reason: str


_RESTRICTION: ContextVar[_Restriction | None] = ContextVar("restriction", default=None)


def bare_name(name: str) -> str:
    """Return NAME of ``module:NAME``, also on both sides of METHOD+POLICY; other names are returned unchanged.

    Example:
        >>> bare_name("mine:avg"), bare_name("mine:avg+mine:lazy"), bare_name("ditto")
        ('avg', 'avg+lazy', 'ditto')
    """
    return "+".join(part.rpartition(":")[2] for part in name.split("+"))


def list_modules(name: str) -> list[str]:
    """Return the modules in a name: that of ``module:NAME``, or those of both parts of METHOD+POLICY.

    Example:
        >>> list_modules("mine:avg+policies:lazy"), list_modules("ditto")
        (['mine', 'policies'], [])
    """
    return [part.rpartition(":")[0] for part in name.split("+") if ":" in part]


def match_name(name: str, known_names: Iterable[str]) -> str | None:
    """Return the known name that equals ``name``, or equals it in another case; ``None`` if there is none.

    Example:
        >>> match_name("FedPAC", ["fedavg", "fedpac"]), match_name("fedpak", ["fedavg", "fedpac"])
        ('fedpac', None)
    """
    names = list(known_names)
    if name in names:
        return name
    return next((candidate for candidate in names if candidate.casefold() == name.casefold()), None)


def import_registered(name: str, kind: str) -> str:
    """Return NAME of ``module:NAME`` after importing the module, which registers it; other names unchanged.

    Raises:
        PerfedError: if the module cannot be imported; the message starts with ``kind``.
    """
    module, colon, registered_name = name.partition(":")
    if not colon:
        return name
    if module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        raise PerfedError(f"{kind} '{name}': '{module}' is no module's name; a file mine.py is 'mine'")
    try:
        import_user_module(module)
    except Exception as error:  # a user's file may raise anything
        raise PerfedError(f"{kind} '{name}': cannot import '{module}': {describe_user_error(error) or error}") from None
    return registered_name


def import_user_module(module: str) -> ModuleType:
    """Import and return the module of this name, which may run any code.

    Python also searches the working directory, which is appended to its path at this point and not earlier, so that
    files there are only imported if the user names a module.

    Raises:
        PerfedError: the module belongs to Python's standard library, exits the program, or is not allowed by
            :func:`allow_modules`.
    """
    restriction = _RESTRICTION.get()
    installed = module.partition(".")[0] == "sklearn"  # a dependency of perfed
    if restriction is not None and module not in restriction.allowed and not installed:
        raise PerfedError(f"'{module}' is not imported: {restriction.reason}")
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise PerfedError(f"'{module}' is a module of Python's own; name one of yours, or of an installed package")
    IMPORTED[module] = None
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    with refuse_exit():
        return importlib.import_module(module)


def import_from_optional_packages(module: str) -> list[ModuleType]:
    """Import and return the module of this name of every optional package that is installed."""
    installed = (package for package in OPTIONAL_PACKAGES if importlib.util.find_spec(package) is not None)
    return [importlib.import_module(f"{package}.{module}") for package in installed]


@contextmanager
def allow_modules(allowed: Collection[str], reason: str) -> Iterator[None]:
    """Restrict :func:`import_user_module` to the modules ``allowed``, for settings that somebody else wrote.

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
def refuse_modules(directory: Path, trust: bool, named: Collection[str] = ()) -> Iterator[None]:
    """Prevent the import of modules that a run directory names, except those in ``named`` or with ``trust``."""
    if trust:
        yield
        return
    reason = f"{directory} names it, and its code would run; --trust imports it, if you know who made the directory"
    with allow_modules(named, reason):
        yield


@contextmanager
def refuse_exit() -> Iterator[None]:
    """Convert an attempt of a user's file to exit the program into an error.

    Raises:
        PerfedError: if it exits; the message has the file and line if they are known.
    """
    try:
        yield
    except SystemExit as stop:
        if is_sigterm_exit(stop):
            raise
        raise PerfedError(describe_user_error(stop) or f"it ends the program (SystemExit: {stop})") from None


def describe_user_error(error: BaseException) -> str | None:
    """Return the place in a user's file where ``error`` arose, and its message; ``None`` if no such file is involved.

    The place is the last one of the traceback that belongs neither to perfed nor to an installed package.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative_path(error.filename)}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    if not frames:
        return None
    last = frames[-1]
    inside = "" if last.name.startswith("<") else f", in {last.name}"
    kind = "" if isinstance(error, PerfedError) else f"{type(error).__name__}: "
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{_relative_path(last.filename)}, line {last.lineno}{inside}: {kind}{text}"


@contextmanager
def report_user_errors() -> Iterator[None]:
    """Convert an exception that arises in a user's file into an error of one line; others are raised unchanged.

    Raises:
        PerfedError: with file, line and function.
    """
    try:
        yield
    except (PerfedError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        mistake = None if isinstance(error, SystemExit) and is_sigterm_exit(error) else describe_user_error(error)
        if mistake is None:
            raise
        raise PerfedError(mistake) from error


def _is_user_file(file: str) -> bool:
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    ours = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    return not (file.startswith("<frozen") or installed or any(path.is_relative_to(folder) for folder in ours))


def _relative_path(file: str) -> Path:
    """Return the path relative to the working directory if it is below it."""
    path = Path(file)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class Registry(dict[str, T]):
    """Objects that modules of perfed and of users have registered by name.

    Args:
        kind: the kind of objects, for messages: "method", "policy", "kind of aggregation",
            "extension", "data set" or "metric".
        module: returns the module that registered an object; empty for perfed.
    """

    def __init__(self, kind: str, module: Callable[[T], str]) -> None:
        super().__init__()
        self.kind = kind
        self._module = module

    def check_free(self, name: str, module: str) -> None:
        """Check that ``module`` may register ``name``; the same module may do so again, for example from a notebook.

        Raises:
            PerfedError: if another module has registered it, in any case.
        """
        registered = match_name(name, self)
        owner = module if registered is None else self._module(self[registered])
        if owner not in ("", module, "__main__"):  # a script may import itself
            raise PerfedError(f"{self.kind} '{name}' is registered twice, by '{owner}' and by '{module}'")

    def check_registration(self, request: str, name: str) -> None:
        """Check that the module of ``request``, if it is ``module:NAME``, has registered ``name``, which was requested
        by it.

        Raises:
            PerfedError: if it has not, or the name belongs to perfed.
        """
        module, colon, _ = request.partition(":")
        if not colon:
            return
        if name not in self:
            names = [registered for registered, item in sorted(self.items()) if self._module(item) == module]
            has = f"it has: {', '.join(names)}" if names else f"it registers no {self.kind} at all"
            raise PerfedError(f"{self.kind} '{request}': '{module}' registers no '{name}'; {has}")
        if self._module(self[name]).startswith("perfed."):
            raise PerfedError(f"{self.kind} '{request}': '{module}' registers no '{name}'; perfed has it")

    def resolve_name(self, request: str) -> str:
        """Return the registered name of ``request``, in any case; ``module:NAME`` imports the module first.

        An unknown name is returned unchanged, without a module.

        Raises:
            PerfedError: if the module cannot be imported, or does not register the name.
        """
        bare = import_registered(request, self.kind)
        registered_name = match_name(bare, self) or bare
        self.check_registration(request, registered_name)
        return registered_name

    def qualify_name(self, request: str, setting: str, noun: str) -> str:
        """Return the name of ``request`` as files have it: as it was registered, after its module if it has one.

        Args:
            request: a name in any case; ``module:NAME`` imports the module first.
            setting: the setting that has the name, for the message.
            noun: what the name is of, for the message.

        Raises:
            PerfedError: if nothing is registered under the name, or its module cannot be imported.
        """
        module, colon, _ = request.rpartition(":")
        name = self.resolve_name(request)
        if name not in self:
            names = sorted(self)
            raise PerfedError(
                f"{setting} = '{request}': there is no such {noun}{suggest_name(name, names)}; allowed: "
                f"{', '.join(names)}, or module:NAME for one in a file of yours"
            )
        return f"{module}{colon}{name}"
