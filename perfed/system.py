"""The machine and process of a run: processor, memory, atomic files, locks, signals, and the installed version.

Modules that only some systems have are imported only here, and are optional.
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


def _import_if_available(module: str) -> ModuleType | None:
    try:
        return import_module(module)
    except ImportError:
        return None


_fcntl, _resource, _msvcrt = (
    _import_if_available("fcntl"),
    _import_if_available("resource"),
    _import_if_available("msvcrt"),
)

SCRATCH = ".scratch-"
"""Prefix of the names of folders with the temporary files of a process."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # constants of malloc.h

TERMINATED = 128 + int(signal.SIGTERM)
"""Exit code of a process that was terminated by SIGTERM."""


def installed_version() -> str:
    """Return the version of perfed, "unknown" if it is not installed."""
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


def read_processor_name() -> str:
    """Return the name of the processor as reported by the system."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def keep_freed_memory() -> None:
    """Let glibc keep up to a gigabyte of freed memory, once in a process; with other C libraries nothing happens.

    Otherwise glibc returns the memory of each tensor of more than some MB to the system when it is freed. Every new
    tensor then costs a page fault per 4 kB, which takes a fifth or more of the time of stacked training. If the user
    has set ``MALLOC_…`` variables, nothing changes.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 1 << 30)


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Exclude existing objects, mostly of torch, from garbage collection inside the block: examining them takes 0.1 s.

    Objects that are created inside are collected as usual. If objects are already frozen, nothing changes.
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
    """Return the peak memory of this process in MiB, or ``None`` if the system does not report it (Windows)."""
    if _resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, others KiB
    return float(_resource.getrusage(_resource.RUSAGE_SELF).ru_maxrss) * unit / 2**20


@contextmanager
def create_private_files() -> Iterator[None]:
    """Create files and folders of this process and its child processes with rights for this user only, inside the
    block.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def available_memory() -> int | None:
    """Return the bytes of memory of this machine, or the limit of this process if it is lower; ``None`` if unknown."""
    limits = []
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if _resource is not None and (limit := _resource.getrlimit(_resource.RLIMIT_AS)[0]) != _resource.RLIM_INFINITY:
        limits.append(limit)
    with suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(limits, default=None)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Write ``data`` to ``path`` so that a reader sees the old or the new content, never a part.

    The file never has more rights than ``mode``, less the process's mask.
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
        if isinstance(error, OSError) and error.filename is None:  # for example, if the disk is full
            error.filename = str(path)
        raise


def create_scratch_folder(owner: object, place: Path | None) -> Path:
    """Return a new folder for files of this process, removed with ``owner`` or at the end of the process.

    It is in ``place``, or in the system's folder of temporary files. :func:`remove_stale_folders` removes it from
    ``place`` if the process was killed.
    """
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place)).absolute()
    lock = ExitStack()
    lock.enter_context(lock_folder(folder))
    weakref.finalize(owner, _remove_scratch_folder, folder, lock, os.getpid())
    return folder


def _remove_scratch_folder(folder: Path, lock: ExitStack, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_stale_folders(place: Path) -> None:
    """Remove folders of :func:`create_scratch_folder` in ``place`` that killed processes have left."""
    for folder in place.glob(f"{SCRATCH}*"):
        with suppress(OSError), lock_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until files that were created in ``folder``, or moved there, are stored durably.

    On Windows, which cannot open folders, nothing happens.
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
    """Return the ``length`` random bytes of a file that only this user may read; the file is created if it is missing.

    Args:
        file: its path; missing folders are created.
        length: the number of bytes.
        exposed: the problem, for the message of the error, if other users have rights on the file.

    Raises:
        PerfedError: if other users have rights on the file, or it has another number of bytes.
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
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for this process; the system releases the lock whenever the process ends.

    The lock is on the folder, or on Windows on a file ``.lock`` in it. If the system has no locks, nothing happens.

    Raises:
        BlockingIOError: if another process has locked it.
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


_sigterm_received = threading.Event()  # whether SIGTERM arrived in the last block of exit_on_sigterm


def is_sigterm_exit(stop: SystemExit) -> bool:
    """Return whether SIGTERM exits the program in :func:`exit_on_sigterm`; Ray converts it to code 1 while it waits."""
    return stop.code == TERMINATED or (stop.code == 1 and _sigterm_received.is_set())


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise ``SystemExit(143)`` on SIGTERM inside the block, so that results can be saved as after Ctrl-C.

    In threads other than the main one, and if the program has a SIGTERM handler, nothing changes.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        _sigterm_received.set()
        raise SystemExit(TERMINATED)

    _sigterm_received.clear()
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def delay_sigint() -> Iterator[None]:
    """Delay SIGINT until the block ends; processes that start in it never receive it (except on Windows)."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
