"""Probe each rank's GPU, and the node by the first rank of a component on it. `diagnosis.py` compares the reports.

An error on a broken node becomes a `problem` in the report, so that rank 0 can name the node and the rank does not fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import resource
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import torch.cuda.nccl

from pipeline.config import ComponentConfig
from pipeline.job.world import RankInfo
from pipeline.node import c_compiler, caches, network_interface, torch_features
from pipeline.node.builds import CUDA, NCCL, TORCH
from pipeline.node.python_path import ROOT
from pipeline.node_checks import nccl

SOURCES = ("pipeline", "launch")
SHARED_S = 15.0
"""Seconds until another node's file must be readable. Its name is new, so no NFS client has cached that it does not exist
(lookupcache, nfs(5)); this time is for a slow server."""
NETWORK = "NCCL's network"
"""Name under which NCCL's network is reported among a component's versions, besides those of pipeline/node/builds.py."""
DRIVERS = {12: 525, 13: 580}
"""Major release of CUDA -> its oldest driver (release notes, "CUDA Driver"); data-center GPUs with cuda-compat accept older."""
REMAPPING = ("pending", "failure")
"""Problems of a GPU's memory. "pending": a row with an error is replaced at the GPU's next reset; "failure": no row is left to
replace it (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, "Row Remapping"). A GPU that has replaced its rows is healthy."""
SMI_S = 20.0
"""Maximum seconds for nvidia-smi, which takes several without a persistence daemon. A driver that is stuck never answers."""


class GPUReport(msgspec.Struct, array_like=True):
    """The state of a GPU, reported by its rank."""

    uuid: str = ""
    name: str = ""
    memory_gb: float = 0.0  # 10^9 bytes, as everywhere here
    used_gb: float = 0.0  # by all processes, including this one's CUDA context
    visible: list[str] = []  # the uuids of all GPUs that the rank may use
    problem: str = ""


class GPUState(msgspec.Struct, array_like=True):
    """The state of a GPU that nvidia-smi shows."""

    errors: int  # uncorrected memory errors since its driver was loaded
    rows: list[str]  # of REMAPPING, what is the case
    mode: str  # compute mode


class NodeReport(msgspec.Struct, array_like=True):
    """The state of a node inside a component's container; containers may differ."""

    code: str  # digest of the sources
    versions: dict[str, str]
    free_gb: dict[str, float]  # folder -> GB that can still be written
    memory_gb: float  # available, 10^9 bytes
    shared: str = ""  # why the run folder is not shared; empty if it is
    gpus: dict[str, GPUState] = {}  # by uuid, without the beginning GPU-
    driver: str = ""  # why nvidia-smi did not report them
    lockable_gb: float | None = None  # memory that a process may lock, where RDMA adapters need that; None: any or no matter
    cpu: str = ""  # e.g. "32 x AMD EPYC 9454": the CPUs that the job may use
    lacks: list[str] = []  # what ranks of the component need and its installation does not have


class RankReport(msgspec.Struct, array_like=True):
    """The report of a rank."""

    rank: int
    seconds: float
    gpu: GPUReport | None = None  # None in a component without GPUs
    node: NodeReport | None = None  # of the first rank of a component on a node


class InstallationNeeds(NamedTuple):
    """What a component's ranks need of its installation."""

    training: bool  # what train ranks call of PyTorch
    compiler: bool  # what Triton compiles with


def probe_rank(
    info: RankInfo, device: torch.device, component: ComponentConfig, token: str, needs: InstallationNeeds
) -> RankReport:
    """Return this rank's report. token: of rank 0's marker in the shared folder; empty if there is only one node."""
    start = time.perf_counter()
    uses_gpus = component.gpus_per_node > 0
    gpu = probe_gpu(device) if uses_gpus else None
    node = probe_node(info, token, uses_gpus) if info.local_rank == 0 else None
    if node:
        node.lacks = lacking(needs)
    if node and token and gpu and not gpu.problem and (network := nccl.network(gpu.uuid)):
        node.versions[NETWORK] = network
    return RankReport(info.rank, time.perf_counter() - start, gpu, node)


# ---- GPUs -------------------------------------------------------------------------------------------------------------------


def probe_gpu(device: torch.device) -> GPUReport:
    """Report this rank's GPU. device: the CPU if torch finds no GPU."""
    if device.type != "cuda":
        return GPUReport(problem=f"torch finds no GPU that it can use{_driver_note(torch.version.cuda, driver_version())}")
    gpu = GPUReport()
    try:
        properties = torch.cuda.get_device_properties(device)
        gpu.uuid, gpu.name = str(properties.uuid), properties.name
        gpu.visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        free, total = torch.cuda.mem_get_info(device)
        gpu.memory_gb, gpu.used_gb = total / 1e9, (total - free) / 1e9
        gpu.problem = check_matmul(device)
    except (RuntimeError, AssertionError) as error:  # torch raises both when CUDA does not start
        gpu.problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    return gpu


def _driver_note(cuda: str | None, driver: str | None) -> str:
    """Return why torch may find no GPU, "" if unknown. cuda: the release that torch is built for, such as "13.0"."""
    if cuda is None:
        return f": {torch.__version__} is built without CUDA"
    if driver is None:
        return ": there is no NVIDIA driver here (no /proc/driver/nvidia/version)"
    oldest = DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if not driver.partition(".")[0].isdigit() or int(driver.partition(".")[0]) >= oldest:
        return ""
    return f": torch is built for CUDA {cuda}, which needs driver {oldest} or newer; this node has {driver}"


def check_matmul(device: torch.device) -> str:
    """Return the problem with products of 0/1 matrices, or "". Their sums of 128 terms are exact in both precisions."""
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randint(0, 2, size, generator=draw).float() for size in ((1024, 128), (128, 1024)))
    right = one @ other
    for precision in (torch.float32, torch.bfloat16):
        result = (one.to(device, precision) @ other.to(device, precision)).float().cpu()
        if wrong := int((result != right).sum()):
            return f"{wrong} of the {right.numel()} numbers of a product of {str(precision)[6:]} matrices are wrong"
    return ""


def gpu_states() -> tuple[dict[str, GPUState], str]:
    """Return (uuid -> state of the GPU by nvidia-smi, the reason why an installed nvidia-smi does not show it)."""
    rows, why = _nvidia_smi("--query-gpu=uuid,ecc.errors.uncorrected.volatile.total,compute_mode")
    # A GPU without row remapping, such as a V100, has [N/A] here, and an old nvidia-smi does not know the option.
    remapped, _ = (
        _nvidia_smi("--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure") if rows else ([], "")
    )
    bad_rows = {uuid: [REMAPPING[i] for i, value in enumerate(row) if value in ("Yes", "1")] for uuid, *row in remapped}
    found = {}
    for uuid, count, mode in rows:
        errors = int(count) if count.isdigit() else 0  # [N/A] without ECC
        found[uuid.removeprefix("GPU-")] = GPUState(errors, bad_rows.get(uuid, []), mode)
    return found, why


def _nvidia_smi(query: str) -> tuple[list[list[str]], str]:
    """Return (the rows of the answer, why an installed nvidia-smi does not answer)."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S)
    except FileNotFoundError:
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {SMI_S:g} s"
    if answer.returncode:
        return [], f"nvidia-smi failed: {' '.join((answer.stdout + answer.stderr).split())[:300]}"
    rows = [line.split(", ") for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == query.count(",") + 1], ""  # warnings, as of the infoROM, may stand among them


# ---- the node ---------------------------------------------------------------------------------------------------------------


def probe_node(info: RankInfo, token: str, uses_gpus: bool) -> NodeReport:
    """Report this node: code, versions, free space, memory and CPUs."""
    try:
        code = code_digest(ROOT)
    except OSError as error:
        code = f"unreadable ({error.strerror})"
    node = NodeReport(code, versions(uses_gpus), free_space(), available_memory(), cpu=processors())
    if token:
        node.shared = check_shared_folder(info, token)
    if uses_gpus:
        node.gpus, node.driver = gpu_states()
        node.lockable_gb = lockable_gb()
    return node


def lockable_gb() -> float | None:
    """Return the GB that a process may lock in memory, which RDMA adapters need; None without a limit or such adapters."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return limit / 1e9 if limit != resource.RLIM_INFINITY and network_interface.has_rdma() else None


def code_digest(root: Path) -> str:
    """Return a digest of the names and contents of the code: an older copy or a stale mount differs."""
    digest = hashlib.sha256()
    for path in sorted(path for part in SOURCES for path in (root / part).rglob("*") if path.suffix in (".py", ".sh")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def versions(uses_gpus: bool) -> dict[str, str]:
    """Return the versions of Python, torch, CUDA, NCCL and the driver."""
    found = {"python": platform.python_version(), TORCH: torch_build()}
    if uses_gpus and torch.version.cuda:
        found[CUDA] = torch.version.cuda
    if uses_gpus and torch.cuda.is_available():
        found[NCCL] = ".".join(map(str, torch.cuda.nccl.version()))
    if uses_gpus and (driver := driver_version()):
        found["driver"] = driver
    return found


def lacking(needs: InstallationNeeds) -> list[str]:
    """Return the parts that the ranks need and this installation lacks."""
    found = []
    if needs.training and (names := torch_features.lacking()):
        has = f"train ranks need PyTorch {torch_features.RELEASES}"
        found.append(f"{has}; torch {torch_build()} has no {', '.join(names)}")
    if needs.compiler and (missing := c_compiler.missing()):
        found.append(f"there is no {missing}, which Triton needs to compile kernels")
    if unwritable := caches.problem():  # of the installation, as the user may name one read-only folder for all nodes
        found.append(unwritable)
    return found


def torch_build() -> str:
    """Return the version and the commit, such as "2.13.0+cu130 (1a2b3c4d5e6f)": builds of one release may differ."""
    return f"{torch.__version__} ({(torch.version.git_version or 'unknown')[:12]})"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return None
    parts = path.read_text().split()  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ..."
    return next((part for part in parts if part[0].isdigit() and part.count(".") >= 1), "unknown")


def free_space() -> dict[str, float]:
    """Return the GB that this user may still write, by folder; 0 for a missing folder."""
    return {folder: _free_gb(folder) for folder in (os.environ.get("TMPDIR", "/tmp"), "/dev/shm")}


def _free_gb(folder: str) -> float:
    try:
        tempfile.TemporaryFile(dir=folder).close()
        return _statvfs_gb(folder)
    except OSError:  # missing, read-only, or full
        return 0.0


def _statvfs_gb(folder: str) -> float:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize / 1e9


def available_memory() -> float:
    """Return the available GB. proc(5): MemAvailable of /proc/meminfo, in kB of 1024 bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("MemAvailable:"))


def processors() -> str:
    """Return the number and the model of the CPUs. proc(5): /proc/cpuinfo; not every architecture has a model name there."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{len(os.sched_getaffinity(0))} x {next(names, platform.machine())}"


# ---- the shared folder ------------------------------------------------------------------------------------------------------


def check_shared_folder(info: RankInfo, token: str) -> str:
    """Write this rank's marker into the shared folder, and check that rank 0's is readable. Return the problem, or ""."""
    if info.rank:
        try:
            write_marker(info, token)
        except OSError as error:
            return f"{info.folder} cannot be written: {error.strerror}"
    return _misread(info, 0, token, time.monotonic() + SHARED_S)


def unreadable_markers(info: RankInfo, reports: dict[int, RankReport], token: str) -> dict[int, str]:
    """Return, on rank 0, rank -> the problem with its marker, for ranks that wrote a marker which rank 0 cannot read."""
    writers = [rank for rank, report in reports.items() if rank and report.node is not None and not report.node.shared]
    deadline = time.monotonic() + SHARED_S
    with ThreadPoolExecutor(16) as pool:  # a file server answers many at once
        answers = pool.map(lambda rank: _misread(info, rank, token, deadline), writers)
        return {rank: why for rank, why in zip(writers, answers, strict=True) if why}


def write_marker(info: RankInfo, token: str) -> None:
    """Write this rank's marker into the shared folder, onto the disk."""
    with open(_file(info, info.rank, token), "w") as file:
        file.write(_content(info.rank, token))
        file.flush()
        os.fsync(file.fileno())


def remove_marker(info: RankInfo, token: str) -> None:
    """Remove this rank's marker."""
    with contextlib.suppress(OSError):  # `check_shared_folder` has reported a faulty folder
        _file(info, info.rank, token).unlink()


def _file(info: RankInfo, rank: int, token: str) -> Path:
    return info.folder / f".check-{rank}-{token[:8]}"


def _content(rank: int, token: str) -> str:
    """Return the marker's text. The token is random, so a copy of the folder cannot contain it."""
    return f"{rank} {token}"


def _misread(info: RankInfo, rank: int, token: str, deadline: float) -> str:
    """Wait until the marker of `rank` is readable. Return "", or after `deadline` why it is not."""
    path, expected = _file(info, rank, token), _content(rank, token)
    while True:
        try:
            content = path.read_text()
            why = f"{path} has other content ({len(content)} characters, not {len(expected)})"
        except (OSError, UnicodeDecodeError) as error:
            content, why = None, f"{path}: {getattr(error, 'strerror', 'it is not text')}"
        if content == expected:
            return ""
        if time.monotonic() > deadline:
            return f"{why}, {SHARED_S:g} s after it was written"
        time.sleep(0.1)
