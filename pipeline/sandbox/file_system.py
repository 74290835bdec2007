"""The files that a program in the sandbox can see: Python, the system's libraries and programs, a scratch folder.

Of Python's folder only the programs and libraries: conda keeps its settings, which may have passwords in them, and the
environments of others beside these.

All but the scratch folder is read-only, and all of it stays out of set-user-id's way. What is not named here is not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.sandbox.limits import SandboxError

SCRATCH = "/tmp"
USER = 65534  # the program's user and group, nobody's in most systems
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Not /dev/zero: a shared mapping of it is memory that no process's size shows."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": SCRATCH,
    "TMPDIR": SCRATCH,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # the same program gives the same output
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""What every program has; see `environment`."""
OF_PYTHON = ("bin", "lib", "lib64")
SECRET = ("HF_HOME", "HF_TOKEN_PATH", "HETSTEP_RUN_DIR")
"""Environment variables that say where a token is, and the run's own files."""


@dataclass(frozen=True, slots=True)
class FileSystemView:
    """What is shown of this machine."""

    mounted: list[str]  # files and folders, each where it is here
    links: list[tuple[str, str]]  # (where, to what)
    libraries: list[str]  # the program's LD_LIBRARY_PATH, for the interpreter; see library_path.py


def environment(shown: FileSystemView) -> dict[str, str]:
    """All that a program has."""
    return {**ENVIRONMENT, **({"LD_LIBRARY_PATH": ":".join(shown.libraries)} if shown.libraries else {})}


def python() -> str:
    """The interpreter that runs here, without its virtual environment."""
    return os.path.realpath(sys.executable)


def file_system_view(readable: tuple[str, ...] = (), libraries: Sequence[str] = ()) -> FileSystemView:
    """readable: files and folders to be shown besides. libraries: folders that the interpreter needs, shown too.

    Raises SandboxError if one of them is not there; or if the home folder, or what SECRET names, is in anything that is shown.
    """
    mounted: list[str] = []
    links: list[tuple[str, str]] = []
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            links.append((path, os.readlink(path)))
        elif os.path.exists(path):
            mounted.append(path)
    python_at = (f"{os.path.realpath(sys.base_prefix)}/{name}" for name in OF_PYTHON)
    for path in (*filter(os.path.isdir, python_at), *readable, *libraries):
        if not os.path.isabs(path) or not os.path.exists(path):
            raise SandboxError(f"sandbox: {path} is to be readable, and is no path of this machine from / on")
        if not any(_is_in(path, other) for other in mounted):
            mounted.append(path)
    secrets = {"the home folder": "~", **{name: os.environ[name] for name in SECRET if os.environ.get(name)}}
    for name, secret in secrets.items():
        place = os.path.realpath(os.path.expanduser(secret))
        for path in mounted:
            if _is_in(place, os.path.realpath(path)):
                raise SandboxError(f"sandbox: {path} would be readable, and {name}, {place}, is in it; move either elsewhere")
    return FileSystemView(mounted, links, list(libraries))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
