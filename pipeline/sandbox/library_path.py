"""Find the folders of LD_LIBRARY_PATH that the interpreter needs.

Some images set the variable because their Python cannot find libpython without it. All other variables stay outside of the
sandbox, and so do folders of LD_LIBRARY_PATH that hold no library of the interpreter.
"""

from __future__ import annotations

import os
import re
import subprocess

from pipeline.sandbox.limits import SandboxError

VARIABLE = "LD_LIBRARY_PATH"
LISTED = re.compile(r"=> (/.*) \(0x")  # ld.so(8): LD_TRACE_LOADED_OBJECTS
TIMEOUT_S = 30.0


def library_folders(interpreter: str) -> list[str]:
    """Return the folders that the interpreter needs, in the variable's order; [] if it is not set or none is needed.

    The dynamic linker lists the libraries and starts no program. Raises SandboxError if it fails.
    """
    set_folders = [os.path.normpath(folder) for folder in os.environ.get(VARIABLE, "").split(":") if os.path.isabs(folder)]
    if not set_folders:
        return []
    variables = {"LD_TRACE_LOADED_OBJECTS": "1", VARIABLE: ":".join(set_folders)}
    try:
        listed = subprocess.run([interpreter], env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"sandbox: the libraries of {interpreter} cannot be listed: {error}") from None
    linked_folders = {
        os.path.dirname(os.path.normpath(path)) for path in LISTED.findall(listed.stdout.decode(errors="replace"))
    }
    return [folder for folder in dict.fromkeys(set_folders) if folder in linked_folders]
