"""Node probes: what a rank finds on its node, and worlds of forked ranks with faulty nodes."""

import json
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from launch.runs.attempts import AttemptFolder
from pipeline.node import builds, network_interface, torch_features
from pipeline.node_checks import nccl, probe
from pipeline.node_checks.probe import GPUState
from tests.fork_server import Program
from tests.world import node_ranks
from tests.world.secret import write_secret

# ---- what a rank measures ---------------------------------------------------------------------------------------------------


def test_matrix_products_are_compared_bit_by_bit(monkeypatch):
    assert probe.check_matmul(torch.device("cpu")) == ""
    right = torch.Tensor.__matmul__

    def wrong(one, other):
        product = right(one, other)
        if one.dtype == torch.bfloat16:
            product[3, 4] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert probe.check_matmul(torch.device("cpu")) == "1 of the 1048576 numbers of a product of bfloat16 matrices are wrong"


@pytest.mark.gpu
def test_a_real_gpu_is_reported():
    gpu = probe.probe_gpu(torch.device("cuda", 0))
    assert gpu.problem == ""
    assert gpu.uuid in gpu.visible and len(gpu.visible) == torch.cuda.device_count()
    assert gpu.memory_gb > 1 and gpu.name == torch.cuda.get_device_name(0)
    states, why = probe.gpu_states()
    assert why == "" and not states[gpu.uuid].rows and states[gpu.uuid].mode
    assert {builds.NCCL, "driver"} <= set(probe.versions(uses_gpus=True))
    assert nccl.network(gpu.uuid)


# As NCCL 2.30.7 prints them, NCCL_DEBUG=INFO: src/init.cc, src/plugin/net.cc and src/transport/net_ib/init.cc.
LOG = """\
node1:4242:4242 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
node1:4242:4242 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
node1:4242:4250 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>
node1:4242:4250 [0] NCCL INFO Initialized NET plugin IB
node1:4242:4250 [0] NCCL INFO Assigned NET plugin IB to comm
node1:4242:4250 [0] NCCL INFO Using network IB
"""


@pytest.mark.parametrize(
    ("log", "network"),
    [(LOG, "IB"), (LOG.replace("network IB", "network AWS Libfabric"), "AWS Libfabric"), ("", ""), (LOG[:300], "")],
)
def test_nccls_network_is_read_from_its_log(log, network):
    assert nccl.parse_network(log) == network


# NCCL's interface (nccl.h) as far as it is called. The second call fails unless the id of the first came with it by value.
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetUniqueId(ncclUniqueId *id) { memset(id->internal, 7, 128); return 0; }
int ncclCommInitRank(void **communicator, int size, ncclUniqueId id, int rank) {
    for (int i = 0; i < 128; i++) if (id.internal[i] != 7) return 1;
    if (size != 1 || rank != 0 || !communicator) return 2;
    if (!strcmp(getenv("NCCL_DEBUG"), "INFO") && !getenv("NCCL_DEBUG_FILE"))
        printf("node1:1:1 [0] NCCL INFO Using network %s\\n", getenv("CUDA_VISIBLE_DEVICES"));
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler here")
def test_nccl_is_called_in_a_separate_process(tmp_path, monkeypatch):
    path = tmp_path / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=LIBRARY, text=True, check=True)
    monkeypatch.setattr(nccl, "library", lambda: str(path))
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "elsewhere"))
    assert nccl.network("12-ab") == "GPU-12-ab"
    monkeypatch.setattr(nccl, "library", lambda: str(tmp_path / "absent.so"))
    assert nccl.network("12-ab") == ""


@pytest.mark.parametrize(
    ("cuda", "driver", "note"),
    [
        ("13.0", "535.104.05", ": torch is built for CUDA 13.0, which needs driver 580 or newer; this node has 535.104.05"),
        ("12.8", "535.104.05", ""),
        ("13.0", "580.159.04", ""),
        ("13.0", None, ": there is no NVIDIA driver here (no /proc/driver/nvidia/version)"),
        ("13.0", "unknown", ""),
    ],
)
def test_reasons_why_torch_finds_no_gpu(cuda, driver, note):
    assert probe._driver_note(cuda, driver) == note
    assert probe._driver_note(None, driver).endswith(" is built without CUDA")


# As nvidia-smi 580 prints them.
STATES = """\
GPU-aa-1, 0, Default
GPU-bb-2, 3, Exclusive_Process
GPU-cc-3, [N/A], Default"""
ROWS = """\
GPU-aa-1, No, No
GPU-bb-2, Yes, No
GPU-cc-3, [N/A], [N/A]"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that makes nvidia-smi a script of bash."""

    def make(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/bash\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return make


@pytest.mark.parametrize("rows", [ROWS, ROWS.replace("Yes", "1").replace("No", "0")])
def test_the_states_of_gpus(nvidia_smi, rows):
    nvidia_smi(f"case $1 in --query-gpu=*) echo '{STATES}';; --query-remapped-rows=*) echo '{rows}';; esac")
    assert probe.gpu_states() == (
        {
            "aa-1": GPUState(0, [], "Default"),
            "bb-2": GPUState(3, ["pending"], "Exclusive_Process"),
            "cc-3": GPUState(0, [], "Default"),
        },
        "",
    )


def test_lines_of_nvidia_smi_that_are_no_rows_are_passed_over(nvidia_smi):
    warning = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0"
    nvidia_smi(f"case $1 in --query-gpu=*) echo '{STATES}';; *) echo '{ROWS}';; esac; echo; echo '{warning}'")
    states, why = probe.gpu_states()
    assert why == "" and list(states) == ["aa-1", "bb-2", "cc-3"]


def test_an_nvidia_smi_that_does_not_know_rows_is_no_fault(nvidia_smi):
    nvidia_smi(f"case $1 in --query-gpu=*) echo '{STATES}';; *) echo 'Invalid combination of input arguments'; exit 2;; esac")
    states, why = probe.gpu_states()
    assert why == "" and [state.errors for state in states.values()] == [0, 3, 0] and not any(s.rows for s in states.values())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Unable to determine the device handle'; exit 15", "nvidia-smi failed: Unable to determine the device handle"),
        ("exec sleep 100", "nvidia-smi did not answer within 0.5 s"),
    ],
)
def test_faults_of_nvidia_smi(nvidia_smi, monkeypatch, script, why):
    if "sleep" in script:
        monkeypatch.setattr(probe, "SMI_S", 0.5)
    nvidia_smi(script)
    assert probe.gpu_states() == ({}, why)


def test_without_nvidia_smi_no_states_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.gpu_states() == ({}, "")


def test_memory_to_lock_matters_to_rdma_adapters(monkeypatch, tmp_path):
    monkeypatch.setattr(network_interface, "RDMA", tmp_path / "infiniband")
    monkeypatch.setattr(probe.resource, "getrlimit", lambda kind: (8_000_000, 8_000_000))
    assert probe.lockable_gb() is None
    (tmp_path / "infiniband/mlx5_0").mkdir(parents=True)
    assert probe.lockable_gb() == 0.008
    monkeypatch.setattr(probe.resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert probe.lockable_gb() is None


def test_the_codes_digest_covers_names_and_contents(tmp_path):
    for part in probe.SOURCES:
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.py").write_text("x = 1\n")
    before = probe.code_digest(tmp_path)
    (tmp_path / "launch/__pycache__").mkdir()
    (tmp_path / "launch/__pycache__/a.cpython-311.pyc").write_text("compiled")
    assert probe.code_digest(tmp_path) == before
    (tmp_path / "launch/a.py").rename(tmp_path / "launch/b.py")
    renamed = probe.code_digest(tmp_path)
    (tmp_path / "launch/b.py").write_text("x = 2\n")
    assert len({before, renamed, probe.code_digest(tmp_path)}) == 3
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert probe.code_digest(tmp_path / "copy") == probe.code_digest(tmp_path)


def test_a_folder_that_cannot_be_written_has_no_space(tmp_path):
    assert probe._free_gb(str(tmp_path)) > 0
    assert probe._free_gb(str(tmp_path / "absent")) == 0


# ---- real ranks -------------------------------------------------------------------------------------------------------------


def check_nodes(run_dir: Path, nodes: list[str], faults: dict[str, str]) -> tuple[int, dict, AttemptFolder]:
    """Run `tests.world.node_ranks`. Return (status, nodes.json, the attempt)."""
    (run_dir / "attempts/1").mkdir(parents=True)
    write_secret(run_dir)
    status = Program(node_ranks.main, (run_dir, nodes, faults), os.environ, run_dir / "printed").wait(120)
    logs = "\n".join(f"--- {log}\n{log.read_text()}" for log in sorted(run_dir.glob("*.log")))
    assert (run_dir / "attempts/1/nodes.json").exists(), logs
    assert not list((run_dir / "attempts/1").glob(".check*")), "files were left behind"
    return (
        status,
        json.loads((run_dir / "attempts/1/nodes.json").read_text()),
        AttemptFolder(run_dir / "attempts/1", time.time()),
    )


def test_healthy_nodes_are_measured_and_the_world_continues(tmp_path):
    status, record, attempt = check_nodes(tmp_path, ["a", "a", "b", "b", "c"], {})
    assert status == 0, (tmp_path / "0.log").read_text()
    assert attempt.bad_nodes == {} and attempt.failure is None
    nodes = record["nodes"]
    assert {name: node["ranks"] for name, node in nodes.items()} == {"a": [0, 1], "b": [2, 3], "c": [4]}
    assert {name: sorted(node["gb_per_s"]) for name, node in nodes.items()} == {
        "a": ["b", "c"],
        "b": ["a", "c"],
        "c": ["a", "b"],
    }
    assert all(speed > 0.003 for node in nodes.values() for speed in node["gb_per_s"].values())
    assert all(abs(node["clock_skew_s"]) <= node["clock_error_s"] + 0.01 for node in nodes.values())
    assert len({node["code"] for node in nodes.values()}) == 1
    assert "3 nodes checked in" in (tmp_path / "0.log").read_text()


@pytest.mark.full
def test_nothing_is_sent_within_one_node(tmp_path):
    status, record, _ = check_nodes(tmp_path, ["a", "a"], {})
    assert status == 0, (tmp_path / "0.log").read_text()
    assert record["nodes"]["a"]["gb_per_s"] == {} and record["nodes"]["a"]["clock_skew_s"] is None


def test_each_bad_node_is_named_with_its_fault(tmp_path):
    faults = {"node1": "clock", "node2": "stale folder", "node3": "slow", "node4": "other code", "node6": "full"}
    status, record, attempt = check_nodes(tmp_path, [f"node{i}" for i in range(7)], faults)
    assert status != 0
    told = {
        "node1": " s ahead of the others'; at most 5 s are expected",
        "node2": "it does not share the run folder with rank 0",
        "node3": "a slow network",
        "node4": "the code in pipeline/ and launch/",
        "node6": "only 1 MB can be written",
    }
    assert sorted(attempt.bad_nodes) == sorted(told)
    for node, why in told.items():
        assert why in attempt.bad_nodes[node]
        assert [part for part in told.values() if part in attempt.bad_nodes[node]] == [why]  # with no other fault
        assert why in record["nodes"][node]["problems"][0]
    assert (attempt.failure["verb"], attempt.failure["host"]) == ("check nodes", "node1")
    assert "5 of 7 nodes failed the checks: node1: its clock is " in attempt.failure["message"]


@pytest.mark.full
def test_if_all_nodes_fail_none_is_excluded(tmp_path):
    """The nodes are not the cause then, and the run would have no nodes left."""
    nodes = [f"node{i}" for i in range(3)]
    status, _, attempt = check_nodes(tmp_path, nodes, dict.fromkeys(nodes, "full"))
    assert status != 0
    assert attempt.bad_nodes == {}
    assert (
        "3 of 3 nodes failed the checks, so the cause is the recipe or something that all nodes share: node0: /"
        in attempt.failure["message"]
    )


def test_components_on_different_networks_are_named_and_no_node_is_excluded(tmp_path):
    """This is checked before any message, which would never arrive."""
    status, record, attempt = check_nodes(tmp_path, ["a", "b"], {"a": "one network", "b": "other network"})
    assert status != 0
    assert attempt.bad_nodes == {} and not (tmp_path / "attempts/1/bad_nodes").exists()
    assert attempt.failure["message"] == (
        "the components use different networks: NCCL's network is IB in cluster.train, Socket in cluster.generate."
        " Try env_vars: {NCCL_NET: Socket} in cluster.train and cluster.generate"
    )
    assert record["nodes"]["a"]["gb_per_s"] == {} and len(record["images"]) == 1


@pytest.mark.parametrize("bad", [["b"], pytest.param(["a", "b", "c"], marks=pytest.mark.full)])
def test_what_torch_lacks_is_named_before_anything_is_loaded(tmp_path, bad):
    """Some nodes are at fault, but not all of a component: their installation is."""
    status, _, attempt = check_nodes(tmp_path, ["a", "b", "c"], dict.fromkeys(bad, "other torch"))
    assert status != 0
    what = f"train ranks need PyTorch {torch_features.RELEASES}; torch {probe.torch_build()} has no torch.nn.attention"
    if bad == ["b"]:
        assert attempt.bad_nodes == {"b": f"{what}.absent"}
    else:
        assert attempt.bad_nodes == {} and attempt.failure["message"] == (
            f"an installation lacks what its ranks need: train ranks: {what}.absent. Install or change it, or"
            " try another cluster.train.python"
        )


def test_a_read_only_cache_that_the_user_named_excludes_no_node(tmp_path):
    status, _, attempt = check_nodes(tmp_path, ["a", "b"], dict.fromkeys("ab", "read-only cache"))
    assert status != 0
    assert attempt.bad_nodes == {} and not (tmp_path / "attempts/1/bad_nodes").exists()
    what = "no file can be written to VLLM_CACHE_ROOT=/proc/vllm, where compilers keep their output"
    assert f"an installation lacks what its ranks need: train ranks: {what}. Install or change it" in attempt.failure["message"]


@pytest.mark.parametrize("nodes", [["a", "b"], pytest.param(["a", "b", "c", "d"], marks=pytest.mark.full)])
def test_without_a_majority_no_node_is_excluded(tmp_path, nodes):
    status, record, attempt = check_nodes(tmp_path, nodes, dict.fromkeys(nodes[1::2], "older Python"))
    assert status != 0
    assert not (tmp_path / "attempts/1/bad_nodes").exists()
    message = attempt.failure["message"]
    assert f"{len(nodes)} of {len(nodes)} nodes failed the checks; nodes differ without a majority, so" in message
    assert "so no node is excluded and the run stops: a: python (train): 3." in message
    assert message.endswith(" elsewhere. Try without the faulty node: sbatch --exclude=NODE ... launch/hetstep.sbatch")
    assert record["nodes"]["b"]["problems"][0].startswith("python (train): 3.1, but 3.")


@pytest.mark.long
def test_silent_nodes_are_named_and_their_neighbours_are_not(tmp_path):
    status, record, attempt = check_nodes(tmp_path, [f"node{i}" for i in range(6)], {"node1": "dead", "node3": "stuck"})
    assert status != 0
    assert sorted(attempt.bad_nodes) == ["node1", "node3"]
    assert attempt.bad_nodes["node1"].startswith("no network to node0 (no answer for 3 s) and node2")
    assert "in verb 'check nodes', phase 'probe the node'" in attempt.bad_nodes["node3"]
    assert record["nodes"]["node0"]["gb_per_s"]["node5"] > 0  # measured after its wait for node1
