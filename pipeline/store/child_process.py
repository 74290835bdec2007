"""Start a process that listens beside a rank and ends with it: the store (`server.py`) or a relay (`relay.py`).

The process reads its parameters as JSON from the first line of stdin, prints the port on which it listens, and ends when stdin
closes. The key is on no command line and in no environment, where others could see it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import Any, NamedTuple

from pipeline.node import python_path
from pipeline.sandbox import linux

START_S = 60.0  # until a process listens; Python starts slowly on a busy file system


class Address(NamedTuple):
    """The address at which a store or a relay listens."""

    host: str
    port: int


def start(host: str, key: bytes, timeout_s: float = START_S) -> tuple[subprocess.Popen, Address]:
    """Start the store's process on this machine. It ends with the calling thread or the returned handle.

    host: an address at which other ranks reach this machine. Raises the errors of `launch`.
    """
    return launch("pipeline.store.server", host, {"key": key.hex()}, timeout_s)


def launch(module: str, host: str, parameters: dict[str, Any], timeout_s: float) -> tuple[subprocess.Popen, Address]:
    """Start a process of a module that calls `read_parameters`, and wait until the process listens.

    Return its handle and its address. Raises RuntimeError if the process ends first, TimeoutError after timeout_s.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=python_path.with_package(os.environ),
        text=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"parent": os.getpid(), "address": host, **parameters}) + "\n")
    process.stdin.flush()
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        process.kill()
        process.communicate()
        raise TimeoutError(f"the process of {module} does not listen after {timeout_s:g} s")
    port = process.stdout.readline()
    if not port:
        raise RuntimeError(f"the process of {module} has ended with status {process.wait()} before it listened")
    return process, Address(host, int(port))


def read_parameters() -> dict[str, Any]:
    """Return the parameters from stdin, and end this process when its parent ends."""
    parameters = json.loads(sys.stdin.readline())
    _end_with(parameters["parent"])
    return parameters


def _end_with(parent: int) -> None:
    """Make this process end when the rank that started it ends, and not before.

    Slurm sends its signals to all processes of a step; this process ignores them, because rank 0 may still have to save.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    linux.die_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    linux.raise_open_files()  # a rank opens three connections
