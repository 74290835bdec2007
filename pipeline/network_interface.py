"""The network interface of gloo: the one over which this rank and rank 0 reach each other.

gloo listens on the address that the host name resolves to. Debian and Ubuntu resolve it to 127.0.1.1 (/etc/hosts), to which no
other node can connect, and on a node with several networks it may be an address that other nodes have no route to. That rank 0
is reached is known: each rank has a connection to its store. GLOO_SOCKET_IFNAME, where a user has set it, is left as it is.
Where all ranks are on one node it is loopback, at which no other node can connect.

NCCL chooses for itself, among interfaces that are neither loopback nor Docker's (NCCL_SOCKET_IFNAME).
"""

from __future__ import annotations

import ipaddress
import os

import psutil

VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether `address`, an IPv4 or IPv6 address, is one at which a machine reaches only itself."""
    return _parsed(address).is_loopback


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address without its zone (fe80::1%eth0), and as IPv4 where a socket of both versions writes ::ffff:10.0.0.7.

    Python 3.11.7 says of ::ffff:127.0.0.1 that it is not loopback. Raises ValueError if it is no address.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed


def of(address: str) -> str | None:
    """Return the name of this machine's interface that has `address`, an IPv4 or IPv6 address; None if none has."""
    wanted = _parsed(address)
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            try:
                if _parsed(found.address) == wanted:
                    return name
            except ValueError:  # a hardware address
                continue
    return None


def check_given() -> bool:
    """Return whether a user has chosen. Raises ValueError if this node lacks an interface that was chosen."""
    given = os.environ.get(VARIABLE, "")
    here = psutil.net_if_addrs()
    for name in filter(None, given.split(",")):
        if name not in here:
            raise ValueError(f"{VARIABLE}: got {name!r}; this node has {', '.join(here)}. Try one that every node has")
    return bool(given)


def use(address: str) -> None:
    """Have gloo's groups of this process use the interface with this address of this machine.

    Raises RuntimeError if none has it.
    """
    name = of(address)
    if name is None:
        raise RuntimeError(
            f"{VARIABLE}: other nodes reach this one at {address}, and none of its interfaces"
            f" ({', '.join(psutil.net_if_addrs())}) has that address. Try to set it to the interface that does"
        )
    os.environ[VARIABLE] = name
