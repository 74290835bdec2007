"""Count the bytes of a node's NICs: InfiniBand ports, and Ethernet interfaces of real devices."""

from __future__ import annotations

from pathlib import Path

WORD = 4
"""Bytes of a unit of InfiniBand's data counters (InfiniBand Architecture Specification, PortXmitData)."""
SYSTEM = Path("/sys/class")


class NICBytes:
    """The counters of a node. InfiniBand over Ethernet (RoCE) is counted by its port alone."""

    def __init__(self, system: Path = SYSTEM):
        """system: where the kernel describes devices."""
        self._counters: list[tuple[Path, int]] = []  # (file, bytes of a unit)
        ports = sorted(system.glob("infiniband/*/ports/*/counters"))
        self._counters += [(port / f"port_{way}_data", WORD) for port in ports for way in ("xmit", "rcv")]
        with_ports = {net.name for net in system.glob("infiniband/*/device/net/*")}
        for interface in sorted(system.glob("net/*")):
            if (interface / "device").exists() and interface.name not in with_ports:  # loopback, bridges and veth have none
                self._counters += [(interface / "statistics" / f"{way}_bytes", 1) for way in ("tx", "rx")]

    def read(self) -> int:
        """Return the bytes sent and received so far. A counter that has gone is skipped."""
        total = 0
        for path, unit in self._counters:
            try:
                total += unit * int(path.read_text())
            except (OSError, ValueError):
                continue
        return total
