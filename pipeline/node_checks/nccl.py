"""Which network NCCL takes in a component's image, as NCCL itself says in its log when it makes a communicator of one rank.

NCCL takes the first of these that finds a device: a plugin (libnccl-net.so, or what NCCL_NET_PLUGIN names), its own InfiniBand
and RoCE, sockets (ncclNetInit in NCCL's src/plugin/net.cc). What an image brings decides it: NVIDIA's images bring a plugin,
and without libibverbs or the devices of /dev/infiniband sockets are left. Ranks that took different ones cannot connect, and
wait for ever (NVIDIA/nccl#1357), so this is asked before any communicator between images is made.

The log is made in a process of its own, so that nothing of it stays in this one: neither memory of the GPU nor a log level.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

PROBE_S = 40.0
"""For CUDA to start on one GPU and for NCCL to look for devices."""
USING = re.compile(r"NCCL INFO .*?Using network (.+)$", re.M)  # src/init.cc
UNIQUE_ID_BYTES = 128  # nccl.h


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


def library() -> str | None:
    """Return the path of the NCCL that torch has loaded into this process, or None where that cannot be told."""
    paths = re.findall(r"\s(/\S*libnccl\.so\S*)$", Path("/proc/self/maps").read_text(), re.M)
    return paths[0] if paths else None


def network(uuid: str) -> str:
    """Return the name of the network that NCCL takes on the GPU with this uuid, such as "IB", "Socket" or "AWS Libfabric".

    "" where NCCL does not say: then there is nothing to compare, and a communicator of all ranks will tell.
    """
    path = library()
    if path is None:
        return ""
    environment = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"}
    environment.pop("NCCL_DEBUG_FILE", None)
    command = [sys.executable, "-I", __file__, path]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said(answer.stdout)


def said(log: str) -> str:
    """Return the network that NCCL's log names, "" if it names none."""
    found = USING.findall(log)
    return found[-1].strip() if found else ""


def main(path: str) -> int:
    """Make a communicator of one rank on the first visible GPU, and end: NCCL logs to stdout. Returns NCCL's status."""
    nccl = ctypes.CDLL(path)
    nccl.ncclCommInitRank.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int)
    identity, communicator = _UniqueId(), ctypes.c_void_p()
    status = nccl.ncclGetUniqueId(ctypes.byref(identity))
    return status or nccl.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
