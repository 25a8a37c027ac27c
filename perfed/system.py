"""The machine that a run is on: its processor, memory, whole files, locks, signals, and the installed version.

What only some systems have is imported here alone, and done without where it is missing.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from types import FrameType, ModuleType
from urllib.parse import urlsplit
from urllib.request import url2pathname

from perfed.errors import PerfedError


def _if_there(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ImportError:
        return None


_fcntl, _resource, _msvcrt = _if_there("fcntl"), _if_there("resource"), _if_there("msvcrt")

SCRATCH = ".scratch-"
"""What names of folders begin with that hold the temporary files of a process."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h

TERMINATED = 128 + int(signal.SIGTERM)
"""Exit code of a process that SIGTERM has ended."""


def installed_version() -> str:
    """Version of perfed, "unknown" where it is not installed."""
    try:
        return metadata.version("perfed")
    except metadata.PackageNotFoundError:
        return "unknown"


def versions(library: str, version: str) -> dict[str, str]:
    """Return the versions of perfed, of the ``library`` that trained the models, and of Python, by name."""
    return {"perfed": installed_version(), library: version, "python": platform.python_version()}


def extra_command(extra: str) -> str:
    """Return the command that installs an extra from the wheel or checkout from which perfed was installed.

    The command always names a file. perfed is on no package index, and somebody else could register its name there.

    Args:
        extra: the name of the extra in ``pyproject.toml``.
    """
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        source = json.loads(metadata.distribution("perfed").read_text("direct_url.json") or "")["url"]
        if source.startswith("file://"):
            return f"pip install {shlex.quote(f'{url2pathname(urlsplit(source).path)}[{extra}]')}"
    return f"pip install 'FILE[{extra}]', with the wheel or the checkout that perfed was installed from as FILE"


def processor() -> str:
    """Name of the processor, as the system says it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def keep_freed_memory() -> None:
    """Let the C library keep up to a gigabyte that is freed, once in a process; nothing where it is not glibc.

    Otherwise glibc gives each tensor of more than some MB back to the system when it is freed. Every new one then costs
    a page fault for 4 kB: a fifth or more of stacked training. Who sets ``MALLOC_…`` variables is left alone.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def frozen_objects() -> Iterator[None]:
    """The garbage collector leaves alone what is there now, which is mostly torch: one look at it takes 0.1 s.

    Objects that are made inside are collected as always. Who has frozen objects already is left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_memory_mb() -> float | None:
    """Most memory that this process has had, in MiB; ``None`` where the system does not say it (Windows)."""
    if _resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return float(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * unit / 2**20


@contextmanager
def private_files() -> Iterator[None]:
    """Files and folders that this process, or one that it starts, makes inside are for its user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def memory() -> int | None:
    """Bytes of memory that this machine has, or this process may have if less; ``None`` where nothing says it."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if _resource is not None and (limit := _resource.getrlimit(_resource.RLIMIT_AS)[0]) != _resource.RLIM_INFINITY:
        found.append(limit)
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(found, default=None)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old or the new content, never a part.

    The new content never has more rights than ``mode``, less the process's mask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # as of a full disk
            error.filename = str(path)
        raise


def scratch(owner: object, place: Path | None) -> Path:
    """A new folder for files of this process, removed with ``owner`` or at the end of the process.

    In ``place``, or where the system has temporary files; :func:`sweep` removes it there after the process was killed.
    """
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place)).absolute()
    held = ExitStack()
    held.enter_context(locked(folder))
    weakref.finalize(owner, _removed, folder, held, os.getpid())
    return folder


def _removed(folder: Path, held: ExitStack, process: int) -> None:
    if os.getpid() == process:  # and not in a fork
        shutil.rmtree(folder, ignore_errors=True)
        held.close()


def sweep(place: Path) -> None:
    """Remove what processes that were killed have left of :func:`scratch` in ``place``."""
    for folder in place.glob(f"{SCRATCH}*"):
        with suppress(OSError), locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until files that were made in ``folder``, or moved there, would be found there after a power cut.

    Nothing to do on Windows, which opens no folders.
    """
    if _fcntl is None:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_exposed(file: Path) -> bool:
    """Return whether other users have rights on a file; always False on Windows."""
    return os.name == "posix" and bool(file.stat().st_mode & 0o077)


def read_secret(file: Path, length: int, exposed: str) -> bytes:
    """Return the ``length`` random bytes of a file for this user alone; the file is created if there is none.

    Args:
        file: its path; folders that do not exist are created.
        length: the number of bytes.
        exposed: the problem, for the message of the error, if other users have rights on the file.

    Raises:
        PerfedError: other users have rights on the file, or it has another number of bytes.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_atomic(file, os.urandom(length), mode=0o600)
        sync_folder(file.parent)
    if is_exposed(file):
        raise PerfedError(f"{file}: {exposed}; chmod 600 {file}")
    secret = file.read_bytes()
    if len(secret) != length:
        raise PerfedError(f"{file} is damaged: {len(secret)} bytes; {length} are needed")
    return secret


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; the system lets go of it when the process ends, however that happens.

    By a lock on the folder itself, on Windows on a file ``.lock`` in it, and not at all where there is neither.

    Raises:
        BlockingIOError: another process holds it.
    """
    if _fcntl is None and _msvcrt is None:
        yield
        return
    file = folder / ".lock"
    handle = os.open(folder, os.O_RDONLY) if _fcntl is not None else os.open(file, os.O_RDWR | os.O_CREAT)
    try:
        if _fcntl is not None:
            _fcntl.flock(handle, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        elif _msvcrt is not None:
            try:
                _msvcrt.locking(handle, _msvcrt.LK_NBLCK, 1)
            except OSError as error:
                raise BlockingIOError(error.errno, error.strerror, str(file)) from None
        yield
    finally:
        os.close(handle)
        if _fcntl is None:
            with suppress(OSError):  # another process has it open
                file.unlink()


_came = threading.Event()  # SIGTERM, in the last block of sigterm_as_exit


def by_sigterm(stop: SystemExit) -> bool:
    """Whether SIGTERM is what ends the program, in :func:`sigterm_as_exit`; Ray makes code 1 of it where it waits."""
    return stop.code == TERMINATED or (stop.code == 1 and _came.is_set())


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM inside raises ``SystemExit(143)``, so that what was done can be kept, as after Ctrl-C.

    Nothing changes in other threads than the main one, and where the program has a handler of its own.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        _came.set()
        raise SystemExit(TERMINATED)

    _came.clear()
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def sigint_held() -> Iterator[None]:
    """SIGINT waits until the block ends; processes that begin in it never get it (on Windows they do)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
