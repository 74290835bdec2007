"""The files that a program in the sandbox can see: Python, the system's libraries and programs, and a scratch folder.

A program sees only the programs and libraries of Python's folder, because Conda keeps its settings, which may contain
passwords, and other environments in the same folder.

Everything but the scratch folder is read-only, and set-user-id bits have no effect. Nothing else exists in the sandbox.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.sandbox.limits import SandboxError

SCRATCH = "/tmp"
USER = 65534  # user and group id of the program, `nobody` in most systems
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
"""Device files of the sandbox. /dev/zero is left out: a shared mapping of it is memory that no process's size shows."""
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
"""Environment variables of every program; see `environment`."""
PYTHON_FOLDERS = ("bin", "lib", "lib64")
SECRET = ("HF_HOME", "HF_TOKEN_PATH", "HETSTEP_RUN_DIR")
"""Environment variables with the path of a token or of the run's own files."""


@dataclass(frozen=True, slots=True)
class FileSystemView:
    """The part of this machine's file system that a program sees."""

    mounted: list[str]  # files and folders, each at its own path
    links: list[tuple[str, str]]  # (path, target)
    libraries: list[str]  # the program's LD_LIBRARY_PATH, for the interpreter; see library_path.py


def environment(libraries: Sequence[str]) -> dict[str, str]:
    """Return all environment variables of a program. libraries: its LD_LIBRARY_PATH, for the interpreter."""
    return {**ENVIRONMENT, **({"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {})}


def python() -> str:
    """Return the path of this process's interpreter, outside of its virtual environment."""
    return os.path.realpath(sys.executable)


def file_system_view(readable: tuple[str, ...] = (), libraries: Sequence[str] = ()) -> FileSystemView:
    """Return a view of the system's files, of `readable` and of `libraries`.

    readable: files and folders that the user adds. libraries: folders that the interpreter needs. Raises SandboxError if one of
    them does not exist, or if the view contains the home folder or a path in SECRET.
    """
    mounted: list[str] = []
    links: list[tuple[str, str]] = []
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            links.append((path, os.readlink(path)))
        elif os.path.exists(path):
            mounted.append(path)
    of_python = (f"{os.path.realpath(sys.base_prefix)}/{name}" for name in PYTHON_FOLDERS)
    for path in (*filter(os.path.isdir, of_python), *readable, *libraries):
        if not os.path.isabs(path) or not os.path.exists(path):
            raise SandboxError(f"sandbox: got readable path {path}; expected an absolute path that exists")
        if not any(_is_in(path, mount) for mount in mounted):
            mounted.append(path)
    secrets = {"the home folder": "~", **{name: os.environ[name] for name in SECRET if os.environ.get(name)}}
    for name, secret in secrets.items():
        real_path = os.path.realpath(os.path.expanduser(secret))
        for path in mounted:
            if _is_in(real_path, os.path.realpath(path)):
                message = (
                    f"sandbox: programs could read {path}, which contains {name} ({real_path}). Try to move one of the two"
                )
                raise SandboxError(message)
    return FileSystemView(mounted, links, list(libraries))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
