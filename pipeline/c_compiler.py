"""Check what Triton needs of a machine with a GPU: it compiles a C program that starts each kernel.

`python -m pipeline.c_compiler` prints what is missing. This imports only the standard library, because commands ask too.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

COMPILER = "C compiler (gcc, clang or CC)"
_PYTHON = "python{}.{}".format(*sys.version_info[:2])
HEADER = f"Python.h of {sys.executable} (of Debian's and Ubuntu's Python: apt install {_PYTHON}-dev)"


def missing() -> str | None:
    """Return COMPILER or HEADER if this machine has none, else None. The same search as in triton/runtime/build.py."""
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        return COMPILER
    return None if has_header() else HEADER


def has_header() -> bool:
    """Return whether C programs can include this Python's Python.h."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # of Debian's Python: for packages that its user adds, below /usr/local
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme)["include"], "Python.h").exists()


if __name__ == "__main__" and (lacking := missing()):
    print(f"there is no {lacking}; on GPUs, vLLM and compiled layers need it")  # noqa: T201
