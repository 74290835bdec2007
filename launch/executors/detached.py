"""Start processes that outlive the program that starts them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import BinaryIO


def start_detached(command: Sequence[str], output: BinaryIO, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to an open file, and return its process. Raises OSError if it cannot start.

    The process reads nothing and leads a session, so the signals of a terminal do not reach it and can be sent to its group.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env=environment,
    )
