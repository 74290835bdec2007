"""The folders of LD_LIBRARY_PATH that the interpreter needs.

Some images set the variable because their Python finds libpython by nothing else. All other variables stay outside of the
sandbox, and so do the folders that hold nothing of the interpreter's.
"""

from __future__ import annotations

import os
import re
import subprocess

from pipeline.sandbox.limits import SandboxError

VARIABLE = "LD_LIBRARY_PATH"
LISTED = re.compile(r"=> (/.*) \(0x")  # ld.so(8): LD_TRACE_LOADED_OBJECTS
PATIENCE_S = 30.0


def library_folders(interpreter: str) -> list[str]:
    """In the order of the variable; none where it is not set, or where the interpreter's libraries are found without it.

    The dynamic linker is asked, which starts no program. Raises SandboxError if it says nothing.
    """
    given = [os.path.normpath(folder) for folder in os.environ.get(VARIABLE, "").split(":") if os.path.isabs(folder)]
    if not given:
        return []
    asked = {"LD_TRACE_LOADED_OBJECTS": "1", VARIABLE: ":".join(given)}
    try:
        answer = subprocess.run([interpreter], env=asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"sandbox: the libraries of {interpreter} cannot be listed: {error}") from None
    found = {os.path.dirname(os.path.normpath(path)) for path in LISTED.findall(answer.stdout.decode(errors="replace"))}
    return [folder for folder in dict.fromkeys(given) if folder in found]
