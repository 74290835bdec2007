"""Set the network interface of gloo and of NCCL: the one over which this rank and rank 0 reach each other.

gloo listens on the address that the host name resolves to. Debian and Ubuntu resolve it to 127.0.1.1 (/etc/hosts), to which no
other node can connect, and on a node with several networks it may be an address that other nodes have no route to. The path to
rank 0 works: each rank has a connection to its store. If a user has set GLOO_SOCKET_IFNAME, it stays, for NCCL as well. If all
ranks are on one node, the interface is loopback, to which no other node can connect.

By itself, NCCL connects over the first interface that is neither loopback nor Docker's. On nodes with a management or a storage
network, this interface may not lead to the other nodes, and then the first collective hangs. So NCCL gets gloo's interface,
unless this is loopback, NCCL_SOCKET_IFNAME is set, or NCCL would then stop using another interface that is as fast.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import psutil

from pipeline.recipe.problems import Problem, RecipeError

VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
NCCL_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
"""Files with NCCL's variables, which the environment overrides (NCCL's documentation, "Environment Variables")."""
UNUSED = ("lo", "docker")
"""NCCL by itself does not use interfaces whose names begin so."""
RDMA = Path("/sys/class/infiniband")
"""Has an entry for each adapter over which NCCL moves data without sockets: InfiniBand, RoCE or EFA."""
LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether `address`, an IPv4 or IPv6 address, is a loopback address."""
    return _parse(address).is_loopback


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address without its zone (fe80::1%eth0), and an IPv4-mapped IPv6 address (::ffff:10.0.0.7) as IPv4.

    In Python 3.11.7 `is_loopback` is False for ::ffff:127.0.0.1. Raises ValueError if `address` is no address.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return getattr(parsed, "ipv4_mapped", None) or parsed


def find_interface(address: str) -> str | None:
    """Return the name of this machine's interface that has `address`, an IPv4 or IPv6 address; None if none has."""
    target = _parse(address)
    for name, addresses in psutil.net_if_addrs().items():
        for candidate in addresses:
            try:
                if _parse(candidate.address) == target:
                    return name
            except ValueError:  # a hardware address
                continue
    return None


def keep_user_setting() -> bool:
    """Return whether the user has set GLOO_SOCKET_IFNAME; if so, set NCCL's variable to the same interfaces.

    Raises RecipeError if this node lacks an interface that the variable names.
    """
    setting = os.environ.get(VARIABLE, "")
    present = psutil.net_if_addrs()
    for name in filter(None, setting.split(",")):
        if name not in present:
            raise RecipeError(
                Problem(
                    VARIABLE,
                    "not-a-choice",
                    f"got {name!r}; expected one of {', '.join(present)}. Try an interface that every node has",
                )
            )
    if setting:
        _set_for_nccl([name for name in setting.split(",") if name])
    return bool(setting)


def use_interface_of(address: str) -> None:
    """Set gloo's variable, and NCCL's as `_set_for_nccl` allows, to the interface that has `address`.

    Raises RecipeError if no interface has it.
    """
    name = find_interface(address)
    if name is None:
        names = ", ".join(psutil.net_if_addrs())
        message = (
            f"got no interface with {address}, the address at which other nodes reach this node; expected one of {names}. Try"
            " the interface that other nodes reach"
        )
        raise RecipeError(Problem(VARIABLE, "missing-value", message))
    os.environ[VARIABLE] = name
    _set_for_nccl([name])


def _set_for_nccl(names: list[str]) -> None:
    """Set NCCL's variable to these interfaces, unless it is set, one is loopback, or NCCL's data would become slower."""
    if not _is_set_for_nccl() and find_interface(LOOPBACK) not in names and _leaves_data_alone(names):
        os.environ[NCCL_VARIABLE] = f"={','.join(names)}"  # "=": exactly these names, not all that begin with them


def has_rdma() -> bool:
    """Return whether this node has an adapter over which NCCL moves data without sockets."""
    return RDMA.is_dir() and any(RDMA.iterdir())


def _is_set_for_nccl() -> bool:
    """Return whether the user or the site has chosen NCCL's interface."""
    files = map(Path, map(os.path.expanduser, NCCL_FILES))
    return NCCL_VARIABLE in os.environ or any(NCCL_VARIABLE in path.read_text() for path in files if os.access(path, os.R_OK))


def _leaves_data_alone(names: list[str]) -> bool:
    """Return whether NCCL's data does not slow down if NCCL uses these interfaces alone.

    The variable also limits the sockets that carry data, and these are used only without RDMA.
    """
    if has_rdma() and not {"NCCL_NET", "NCCL_IB_DISABLE"} & os.environ.keys():  # with either, sockets may carry the data
        return True
    states = psutil.net_if_stats()
    alternatives = [state for interface, state in states.items() if interface not in names and not interface.startswith(UNUSED)]
    return not any(state.isup and state.speed >= max(states[name].speed for name in names) for state in alternatives)
