"""The interface that gloo uses is chosen by real connections to a real store."""

import functools
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.job import world
from pipeline.node import network_interface
from pipeline.store.child_process import Address, start
from pipeline.store.client import RunStore
from tests.problems import refused

ROOT = Path(__file__).parents[2]
KEY = b"k" * 32


def other_address() -> tuple[str, str]:
    """Return (interface, IPv4 address) of this machine that is not loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family == socket.AF_INET and not network_interface.is_loopback(found.address):
                return name, found.address
    pytest.skip("this machine has no interface but loopback")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_known_in_every_notation(address):
    assert network_interface.is_loopback(address)


def test_an_ipv4_address_in_ipv6_notation_is_the_same_address():
    name, address = other_address()
    assert not network_interface.is_loopback(f"::ffff:{address}")
    assert network_interface.find_interface(f"::ffff:{address}") == name


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-mu", "true"], capture_output=True).returncode == 0


@pytest.fixture
def join(monkeypatch):
    """Return a function that returns the interface each rank chooses.

    Its arguments: the addresses at which ranks reach rank 0's store, and the ranks per node.
    """
    process, (_, port) = start("localhost", KEY)  # a name, not an address: it listens on every interface
    monkeypatch.setenv(network_interface.VARIABLE, "")

    def choose(*addresses: str, per_node: int = 1) -> list[str]:
        ranks = []
        for rank, address in enumerate(addresses):
            store = RunStore(Address(address, port), KEY, 10)
            info = SimpleNamespace(local_rank=rank % per_node, node=f"node{rank // per_node}")
            joining = SimpleNamespace(rank=rank, size=len(addresses), info=info, store=store, describe=str)
            joining.nodes = functools.partial(world.World.nodes, joining)
            ranks.append(joining)
        for rank in (*ranks[1:], ranks[0]):
            world.wait_for_all(rank, 10)
        chosen = []
        for rank in ranks:
            os.environ[network_interface.VARIABLE] = ""
            world._choose_interface(rank)
            chosen.append(os.environ[network_interface.VARIABLE])
        return chosen

    yield choose
    process.kill()
    process.wait()


def test_rank_0_uses_the_interface_at_which_other_nodes_reach_it(join):
    """Its host name resolves to loopback on its own node, as on Debian, and to its address on other nodes."""
    name, address = other_address()
    assert join("127.0.0.1", "127.0.0.1", address) == [name] * 3


def test_gloo_uses_loopback_if_all_ranks_do(join):
    """Gloo's own choice, the address of the host name, may be reachable from other machines."""
    loopback = network_interface.find_interface("127.0.0.1")
    assert join("127.0.0.1", "127.0.0.1") == [loopback, loopback]


def test_gloo_uses_loopback_on_one_node_whatever_address_reaches_rank_0(join):
    """Slurm passes the node's name, which often resolves to the address that other nodes use."""
    loopback = network_interface.find_interface("127.0.0.1")
    _, address = other_address()
    assert join(address, address, "127.0.0.1", per_node=3) == [loopback] * 3
    assert join("127.0.0.1", address, per_node=2) == [loopback] * 2


def test_each_rank_uses_the_interface_that_leads_to_rank_0(join):
    name, address = other_address()
    assert join(address, address) == [name, name]


def test_the_users_interface_is_kept_and_must_exist(monkeypatch):
    monkeypatch.setenv(network_interface.VARIABLE, "lo")
    assert network_interface.keep_user_setting()
    monkeypatch.setenv(network_interface.VARIABLE, "lo,eth77")
    with refused((network_interface.VARIABLE, "not-a-choice")):
        network_interface.keep_user_setting()


def test_an_address_that_this_machine_does_not_have_is_named():
    with refused((network_interface.VARIABLE, "missing-value")):
        network_interface.use_interface_of("203.0.113.7")  # RFC 5737: an address that no host has


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes a machine, chooses its interface eth0, and returns NCCL's variable.

    Its arguments: RDMA adapters, the text of /etc/nccl.conf, and the speed of each interface in Mbit/s, 0 for one that is down.
    """
    monkeypatch.setenv(network_interface.VARIABLE, "")
    monkeypatch.delenv(network_interface.NCCL_VARIABLE, raising=False)
    monkeypatch.setattr(network_interface, "find_interface", lambda address: "lo" if address.startswith("127.") else "eth0")
    monkeypatch.setattr(network_interface, "RDMA", tmp_path / "infiniband")
    monkeypatch.setattr(network_interface, "NCCL_FILES", (str(tmp_path / "nccl.conf"),))

    def choose(rdma: int = 0, file: str = "", address: str = "10.0.0.1", gloo: str = "", **speeds: int) -> str | None:
        for i in range(rdma):
            (tmp_path / f"infiniband/mlx5_{i}").mkdir(parents=True)
        if file:
            (tmp_path / "nccl.conf").write_text(file)
        states = {name: SimpleNamespace(isup=bool(speed), speed=speed) for name, speed in speeds.items()}
        monkeypatch.setattr(network_interface.psutil, "net_if_stats", lambda: states)
        monkeypatch.setattr(network_interface.psutil, "net_if_addrs", lambda: states)
        monkeypatch.setenv(network_interface.VARIABLE, gloo)
        if not network_interface.keep_user_setting():
            network_interface.use_interface_of(address)
        return os.environ.get(network_interface.NCCL_VARIABLE)

    return choose


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"eth0": 1000, "idrac": 100, "lo": 65536, "docker0": 10000}, "=eth0"),
        ({"eth0": 1000, "ib0": 200000}, None),  # it may carry the data
        ({"eth0": 100000, "eth1": 100000}, None),  # NCCL uses both
        ({"eth0": 1000, "ib0": 0}, "=eth0"),
        ({"eth0": 1000, "ib0": 200000, "rdma": 8}, "=eth0"),  # data does not use sockets
        ({"eth0": 1000, "file": "NCCL_SOCKET_IFNAME=bond0\n"}, None),
        ({"eth0": 1000, "address": "127.0.0.1"}, None),
        ({"eth0": 1000, "eth1": 1000, "gloo": "eth1,eth0"}, "=eth1,eth0"),  # the user's choice for gloo
        ({"eth0": 1000, "ib0": 200000, "gloo": "ib0"}, "=ib0"),
        ({"eth0": 1000, "ib0": 200000, "gloo": "eth0"}, None),
        ({"eth0": 1000, "lo": 65536, "gloo": "lo"}, None),
    ],
)
def test_nccl_starts_over_the_interface_that_leads_to_rank_0(machine, given, chosen):
    """But its data keeps all networks, and a choice of the user or the site stays."""
    assert machine(**given) == chosen


@pytest.mark.parametrize("variable", ["NCCL_NET", "NCCL_IB_DISABLE"])
def test_adapters_that_nccl_may_not_use_are_no_reason_to_leave_a_fast_network(machine, monkeypatch, variable):
    monkeypatch.setenv(variable, "Socket" if variable == "NCCL_NET" else "1")
    assert machine(eth0=1000, ib0=200000, rdma=8) is None


def test_the_users_interface_of_nccl_is_kept(machine, monkeypatch):
    monkeypatch.setenv(network_interface.NCCL_VARIABLE, "ib0")
    assert machine(eth0=1000) == "ib0"


LISTENS = """
import psutil, torch.distributed as dist
from pipeline.node import network_interface
for address in ("", ADDRESS):
    address and network_interface.use_interface_of(address)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(*(found.laddr.ip for found in psutil.Process().net_connections() if found.status == psutil.CONN_LISTEN))
    dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.skipif(not can_unshare(), reason="no namespaces here")
def test_gloo_listens_where_other_nodes_can_connect(tmp_path):
    """Without a choice gloo would listen at 127.0.1.1, to which Debian's /etc/hosts maps the host name."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 debian\n")
    address = other_address()[1]
    (tmp_path / "listens.py").write_text(f"ADDRESS = {address!r}\n{LISTENS}")
    python = shlex.join([sys.executable, str(tmp_path / "listens.py")])
    command = f"mount --bind {shlex.quote(str(tmp_path))}/hosts /etc/hosts && hostname debian && exec {python}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), network_interface.VARIABLE: ""}
    answer = subprocess.run(
        ["unshare", "-mu", "sh", "-c", command], env=environment, capture_output=True, text=True, timeout=120
    )
    assert answer.stdout.split() == ["127.0.1.1", address], answer.stderr
