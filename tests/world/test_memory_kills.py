"""A process that the kernel ends for memory: the kernel's record, the signal, and the last warning about memory."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from launch.executors.local import Controller, HetLocalJob
from launch.runs.attempts import all_attempts
from launch.runs.failure_logs import killed_lines
from pipeline.job.watchdog import Heartbeat, Watchdog
from pipeline.node.memory_kills import MemoryKills
from pipeline.observe.warning_file import FILE, append, last_warning, warning

V1 = Path("/sys/fs/cgroup/memory")
LIMIT = 64 << 20
EATER = "import sys; sys.stdin.readline(); found = [bytearray(b'1' * (1 << 20)) for _ in range(4096)]"


@contextlib.contextmanager
def limited_group():
    """Make a cgroup with little memory below this process's own. Skip where this user may not."""
    own = next((line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if "memory" in line), None)
    at = V1 / own.lstrip("/") if own is not None else Path("/sys/fs/cgroup")
    group = at / f"hetstep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if own is not None else "memory.max")).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"this user may not limit memory here: {error}")
    try:
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def eat(group: Path) -> subprocess.Popen:
    """Start a process in a group that fills its memory once it is told to."""
    process = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE, text=True)
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


def test_the_kernels_record_of_a_real_kill(tmp_path):
    with limited_group() as group:
        # The rank's own view, with the limited group as its own: a file system whose /proc/self/cgroup names it.
        root = tmp_path / "root"
        (root / "proc/self").mkdir(parents=True)
        (root / "sys/fs").mkdir(parents=True)
        (root / "sys/fs/cgroup").symlink_to("/sys/fs/cgroup")
        head, top = ("4:memory:/", V1) if group.is_relative_to(V1) else ("0::/", Path("/sys/fs/cgroup"))
        (root / "proc/self/cgroup").write_text(f"{head}{group.relative_to(top)}\n")
        kills = MemoryKills(root)
        assert kills.record() == ""
        process = eat(group)
        process.communicate("go\n", timeout=60)
        assert process.returncode == -9
        assert "the kernel ended a process for memory: oom_kill in " in kills.record() and kills.record().endswith("grew by 1")
        assert MemoryKills(root).record() == ""


@pytest.mark.parametrize(
    ("line", "file", "before", "after"),
    [
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "oom_kill 4\n"),
        ("4:memory:/job/a", "memory/job/b/memory.oom_control", "oom_kill 0\n", "oom_kill 2\n"),
        ("0::/slurm/job_17/step_0", "slurm/job_17/memory.events", "low 0\noom 1\noom_kill 1\n", "low 0\noom 3\noom_kill 3\n"),
    ],
)
def test_groups_of_both_versions_around_and_beside_a_process(tmp_path, line, file, before, after):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    path = tmp_path / "sys/fs/cgroup" / file
    path.parent.mkdir(parents=True)
    path.write_text(before)
    kills = MemoryKills(tmp_path)
    assert kills.record() == ""
    path.write_text(after)
    assert kills.record() == f"the kernel ended 2 processes for memory: oom_kill in {path} grew by 2"
    path.write_text("nonsense\n")
    assert kills.record() == "" and MemoryKills(tmp_path / "absent").record() == ""


def test_the_innermost_group_that_grew_counts(tmp_path):
    """The groups around it count the kills of other jobs too."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_17\n")
    inner, outer = (tmp_path / "sys/fs/cgroup/slurm" / name for name in ("job_17/memory.events", "memory.events"))
    inner.parent.mkdir(parents=True)
    for path in (inner, outer):
        path.write_text("oom_kill 0\n")
    kills = MemoryKills(tmp_path)
    outer.write_text("oom_kill 2\n")
    assert kills.record().endswith(f"oom_kill in {outer} grew by 2")
    inner.write_text("oom_kill 1\n")
    assert kills.record().endswith(f"oom_kill in {inner} grew by 1")


def test_the_last_warning_about_memory_of_a_node(tmp_path):
    assert last_warning(tmp_path, ("full_memory",), "n1") is None
    given = [("full_memory", "n1"), ("full_memory", "n2"), ("slow_rank", "n1"), ("full_memory", "n1"), ("full_disk", "n1")]
    append(tmp_path / FILE, [warning(at, check, 0, node, f"{check} {at}") for at, (check, node) in enumerate(given, 1)])
    found = last_warning(tmp_path, ("full_memory", "host_leak"), "n1")
    assert found and found["message"] == "full_memory 4"


def test_the_controller_tells_the_kernels_record_and_the_last_warning(tmp_path):
    plan = {"environments": [{"HETSTEP_COMPONENT": "train", "HETSTEP_NODE": "n1"}], "fork": False, "time_min": 1}
    controller = Controller(tmp_path, {**plan, "requeue": {"enabled": False, "max_restarts": 0}})
    controller.attempt = "local-1-1-0"
    assert controller._memory_of(0) == ""
    append(tmp_path / "attempts/local-1-1-0" / FILE, [warning(7, "full_memory", 0, "n1", "host memory of n1 is 96.8% full")])
    controller.kills.record = lambda: "the kernel ended a process for memory"
    told = ": the last warning about memory, after step 7: host memory of n1 is 96.8% full"
    assert controller._memory_of(0) == f": the kernel ended a process for memory{told}"


def test_a_lost_rank_is_told_with_its_memory(tmp_path):
    sample = msgspec.msgpack.encode({"rss_gb": 3.456, "node_memory": 0.968})
    watchdog = object.__new__(Watchdog)
    watchdog._heartbeats = {3: (Heartbeat(9, "n1", "step", "", sample), 0.0)}
    watchdog._world = SimpleNamespace(info=SimpleNamespace(node="n1", folder=tmp_path))
    watchdog._kills = SimpleNamespace(record=lambda: "the kernel ended a process for memory")
    last = "its last sample: 3.46 GB in its process, n1's host memory 96.8% full"
    assert watchdog._describe_death(3) == f"died without an error message (the kernel ended a process for memory); {last}"
    watchdog._world.info.node = "n2"  # whose kernel says nothing of n1
    append(tmp_path / FILE, [warning(7, "full_memory", 0, "n1", "host memory of n1 is 96.8% full")])
    guess = "died without an error message (killed, out of memory, or crashed in a library)"
    warned = "the last warning about memory, after step 7: host memory of n1 is 96.8% full"
    assert watchdog._describe_death(3) == f"{guess}; {last}; {warned}"
    assert watchdog._describe_death(4) == guess  # it was never heard


def test_slurms_record_of_a_task_killed_for_memory(tmp_path):
    (tmp_path / "attempts/17-0").mkdir(parents=True)
    (tmp_path / "attempts/17-0/started").write_text("1.0\n")
    killed = "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM Killed."
    task = "srun: error: n1: task 1: Out Of Memory"
    (tmp_path / "attempts/17-0/srun-train.out").write_text(f"hello\n{killed}\n{task}\n{task}\n")
    (attempt,) = all_attempts(tmp_path)
    assert killed_lines(attempt) == [killed, task]


def test_a_full_disk_is_not_told_as_a_killed_controller(tmp_path):
    folder = tmp_path / "submitit"
    folder.mkdir()
    job = HetLocalJob(folder, "4194300", start_time=1)
    assert job.status().reason == "the controller was killed"
    log = tmp_path / "attempts/local-4194300-17-0/rank00000.log"
    log.parent.mkdir(parents=True)
    log.write_text("Traceback ...\nOSError: [Errno 28] No space left on device: '/runs/x/attempts/current'\nhello\n")
    reason = job.status().reason
    assert f"{log} says: OSError: [Errno 28] No space left on device" in reason and "was killed" not in reason


@pytest.mark.long
def test_a_full_file_system_is_told(tmp_path):
    """A real one, of 1 MB: the controller cannot write its end, and no log has the error."""
    folder = tmp_path / "full"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        (folder / "submitit").mkdir()
        job = HetLocalJob(folder / "submitit", "4194300", start_time=1)
        assert job.status().reason == "the controller was killed"
        with contextlib.suppress(OSError):
            (folder / "filler").write_bytes(bytes(2 << 20))
        assert f"the file system of {folder} is full" in job.status().reason
    finally:
        subprocess.run(["umount", folder], check=True)
