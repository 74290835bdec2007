"""Find the network that NCCL chooses in a component's image, from NCCL's log of a communicator of one rank.

NCCL chooses the first of these that finds a device: a plugin (libnccl-net.so, or the one that NCCL_NET_PLUGIN names), its own
InfiniBand and RoCE, sockets (ncclNetInit in NCCL's src/plugin/net.cc). The choice depends on the image: NVIDIA's images contain
a plugin, and without libibverbs or the devices of /dev/infiniband only sockets remain. Ranks with different networks cannot
connect and wait forever (NVIDIA/nccl#1357), so this check runs before any communicator between images is made.

A separate process makes the communicator, so that this one keeps neither its GPU memory nor its log level.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

PROBE_S = 40.0
"""Seconds for CUDA to start on one GPU and for NCCL to look for devices."""
USING = re.compile(r"NCCL INFO .*?Using network (.+)$", re.M)  # src/init.cc
UNIQUE_ID_BYTES = 128  # nccl.h


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


def library() -> str | None:
    """Return the path of the NCCL that torch has loaded into this process, or None if none is loaded."""
    paths = re.findall(r"\s(/\S*libnccl\.so\S*)$", Path("/proc/self/maps").read_text(), re.M)
    return paths[0] if paths else None


def network(uuid: str) -> str:
    """Return the name of the network that NCCL chooses on the GPU with this uuid, such as "IB", "Socket" or "AWS Libfabric".

    Returns "" if NCCL does not log it: then nodes are not compared, and the first communicator of all ranks shows a mismatch.
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
    return parse_network(answer.stdout)


def parse_network(log: str) -> str:
    """Return the network that NCCL's log names, "" if it names none."""
    found = USING.findall(log)
    return found[-1].strip() if found else ""


def main(path: str) -> int:
    """Make a communicator of one rank on the first visible GPU, and return NCCL's status. NCCL logs to stdout."""
    nccl = ctypes.CDLL(path)
    nccl.ncclCommInitRank.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int)
    identity, communicator = _UniqueId(), ctypes.c_void_p()
    status = nccl.ncclGetUniqueId(ctypes.byref(identity))
    return status or nccl.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
