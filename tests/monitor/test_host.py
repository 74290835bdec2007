"""Readings of real processes, and of a kernel's files."""

import os
import subprocess
import sys

import pytest

from pipeline.monitor.host import HostReader, NICBytes, cgroup_memory, descendants

GRANDCHILD = """
import subprocess, sys, time
held = bytearray(200 << 20)
for i in range(0, len(held), 4096):
    held[i] = 1
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"])
time.sleep(60)
"""


def test_memory_of_the_process_and_of_its_descendants(tmp_path):
    reader = HostReader(tmp_path, reads_node=False)
    before = reader.read()
    child = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout and child.stdout.readline() == "up\n"
        found = descendants(os.getpid())
        after = reader.read()
    finally:
        child.kill()
        child.wait()
    assert child.pid in found and len(descendants(os.getpid())) < len(found)
    assert after["children_gb"] - before["children_gb"] > 0.2
    assert after["cpu"] > before["cpu"]
    assert reader.read()["cpu"] > after["cpu"] - 1e-6, "the CPU seconds of a process that has ended still count"


def test_the_first_rank_of_a_node_reads_the_node(tmp_path):
    found = HostReader(tmp_path, reads_node=True).read()
    assert 0 < found["node_memory"] < 1 and 0 < found["disk"] < 1
    assert found["node_memory_free_gb"] > 0 and found["disk_free_gb"] > 0 and found["node_cpu"] > 0


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_cgroup_bounds_memory(tmp_path, version):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n" if version == 2 else "4:memory:/job/step\n3:cpu:/\n")
    limit, use = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    top = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    for folder, bound, used in ((top / "job", 1000, 900), (top / "job/step", "max" if version == 2 else 1 << 62, 800)):
        folder.mkdir(parents=True)
        (folder / limit).write_text(f"{bound}\n")
        (folder / use).write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    assert cgroup_memory(tmp_path) == (1000, 800)
    assert cgroup_memory(tmp_path / "elsewhere") is None


def test_nics_are_infiniband_ports_and_ethernet_devices(tmp_path):
    port = tmp_path / "infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_xmit_data").write_text("100\n")
    (port / "port_rcv_data").write_text("200\n")
    (tmp_path / "infiniband/mlx5_0/device/net/rdma0").mkdir(parents=True)
    for name, real in (("eth0", True), ("rdma0", True), ("lo", False)):
        (tmp_path / "net" / name / "statistics").mkdir(parents=True)
        (tmp_path / "net" / name / "statistics/tx_bytes").write_text("7\n")
        (tmp_path / "net" / name / "statistics/rx_bytes").write_text("3\n")
        if real:
            (tmp_path / "net" / name / "device").mkdir()
    assert NICBytes(tmp_path).read() == 4 * 300 + 10, "the port's Ethernet interface and loopback do not count"
