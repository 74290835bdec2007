"""Check that a machine with a GPU has the C compiler and headers with which Triton compiles a launcher for each kernel.

`python -m pipeline.node.c_compiler` prints what is missing. This imports only the standard library, as commands use it too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

COMPILER = "C compiler (gcc, clang or CC)"
_PYTHON = "python{}.{}".format(*sys.version_info[:2])
HEADER = f"Python.h of {sys.executable} (of Debian's and Ubuntu's Python: apt install {_PYTHON}-dev)"
COMPILER_S = 60.0
"""Time for the preprocessor, of which it needs less than 1 s unless its file system hangs."""


def missing() -> str | None:
    """Return COMPILER or HEADER if this machine lacks it, else None. The search is the same as in triton/runtime/build.py."""
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None or shutil.which(compiler) is None:
        return COMPILER
    return None if has_header(compiler) else HEADER


def has_header(compiler: str, language: str = "c") -> bool:
    """Return whether a program can include Python.h: this Python's, or one in CPATH, C_INCLUDE_PATH or the like.

    False also if the compiler does not answer within COMPILER_S.
    """
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # of Debian's Python: for packages that its user adds, below /usr/local
        scheme = "posix_prefix"
    command = [compiler, "-E", "-x", language, f"-I{sysconfig.get_paths(scheme)['include']}", "-"]
    try:
        answer = subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True, timeout=COMPILER_S)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


if __name__ == "__main__" and (lacking := missing()):
    print(f"there is no {lacking}; on GPUs, vLLM and compiled layers need it")  # noqa: T201
