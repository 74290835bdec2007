"""Run the ranks as processes of this machine, under a controller that outlives the terminal.

The controller (`python -m launch.executors.local RUN_DIR`) ends all ranks when the first one fails, as Slurm does with
--kill-on-bad-exit. The ranks also end at the time limit, and with the controller. When all ranks have ended, verdict.sh decides
as at the end of a batch script, and the controller may start them again, as another attempt with a new time limit. A signal to
the controller ends the ranks and the run.

A component's "nodes" are only a number here: all ranks share this machine, and each "node" of a component has its own range of
GPUs. Components that use the same GPUs in turn have the same ranges. Containers are ignored.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from submitit.core.core import Job
from submitit.local import local
from typing_extensions import override

from launch.executors import forks, gpus, rank_task
from launch.executors.executor import ROOT, JobStatus, start_detached
from launch.executors.nodes import COMPILERS, MOST_COMPILERS, hosts, shares_gpus
from pipeline.config import ClusterConfig, ComponentConfig, RequeueConfig, ranks, ranks_per_node
from pipeline.files import small_files
from pipeline.files.storage import REMEDY, write_durably
from pipeline.node import python_path
from pipeline.node.memory_kills import MemoryKills
from pipeline.observe.warning_file import MEMORY_CHECKS, last_warning

GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
REQUEUE = 75
"""Exit status of verdict.sh that requests a restart of all ranks."""
SECONDARY_STATUSES = (123, 124)
"""Exit statuses of ranks that ended because of another one: EXIT_WITH_ANOTHER and EXIT_STATUS of pipeline/job/watchdog.py."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
VERDICT_S = 600.0
"""Time limit of verdict.sh, which only reads and writes files of the run folder."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
DISK_ERROR = re.compile("|".join(map(re.escape, map(os.strerror, DISK_ERRORS))))
KILLED = "killed"
"""Name of an attempt's file that says which rank was the first that a signal ended."""
TAIL_BYTES = 256 << 10
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None)


# ---- the ranks ----------------------------------------------------------------------------------------------------------


def rank_environments(components: dict[str, ComponentConfig]) -> list[dict[str, str]]:
    """Return the variables to add to each rank's environment, in rank order. Raises RecipeError for too few GPUs."""
    world_size = sum(ranks(component) for component in components.values())
    owners = [component for component in components.values() if not shares_gpus(component)]
    keys = [f"cluster.{name}.gpus_per_node" for name, component in components.items() if component.gpus_per_node]
    devices = gpus.assign(sum(component.nodes * component.gpus_per_node for component in owners), keys)
    threads = max(1, len(os.sched_getaffinity(0)) // sum(map(ranks, hosts(components).values())))
    environments, first_gpu, next_gpu = [], 0, 0
    for name, component in components.items():
        if not shares_gpus(component):
            first_gpu, next_gpu = next_gpu, next_gpu + component.nodes * component.gpus_per_node
        per_node = ranks_per_node(component)
        for index in range(ranks(component)):
            environment = {
                "HETSTEP_COMPONENT": name,
                "HETSTEP_RANK": str(len(environments)),
                "HETSTEP_WORLD_SIZE": str(world_size),
                "HETSTEP_LOCAL_RANK": str(index % per_node),
                "HETSTEP_MASTER_ADDR": "127.0.0.1",
                "HETSTEP_NODE": socket.gethostname(),
            }
            if component.gpus_per_node:
                node_gpu = first_gpu + index // per_node * component.gpus_per_node
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[node_gpu : node_gpu + component.gpus_per_node])
                environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
                environment[COMPILERS] = os.environ.get(COMPILERS, str(min(threads, MOST_COMPILERS)))
            else:
                environment["CUDA_VISIBLE_DEVICES"] = ""  # torch uses any visible GPU
                environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
            environments.append({**environment, **component.env_vars})
    return environments


def rank_command(run_dir: Path) -> list[str]:
    """Return the command that starts a rank."""
    return [sys.executable, "-P", "-u", "-m", "launch.executors.rank_task", f"{run_dir}/submitit"]


def commands(run_dir: Path, components: dict[str, ComponentConfig]) -> str:
    """Return the commands of all ranks for people, one per line."""
    return "".join(
        " ".join([*(f"{key}={shlex.quote(value)}" for key, value in environment.items()), shlex.join(rank_command(run_dir))])
        + "\n"
        for environment in rank_environments(components)
    )


# ---- the controller -----------------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Raised when the controller must end the ranks. The message says why.

    It is no Exception, because code around a failing import may catch every Exception.
    """

    def __init__(self, state: str, reason: str = "", status: int = 0, secondary: bool = False):
        """status: the attempt's exit status, for the verdict. secondary: whether a rank ended because of another one."""
        super().__init__(reason)
        self.state = state
        self.status = status
        self.secondary = secondary


class Controller:
    """Starts, watches and restarts the ranks, in a session of its own.

    The job's id is the controller's process id. The controller writes how the job ended into submitit/<id>_end.json.
    """

    def __init__(self, run_dir: Path, plan: dict[str, Any]):
        """plan: submitit/plan.json, written by `HetLocalExecutor`."""
        self.run_dir = run_dir
        self.environments: list[dict[str, str]] = plan["environments"]
        self.fork: bool = plan["fork"]
        self.limit_s = plan["time_min"] * 60
        self.requeue = RequeueConfig(**plan["requeue"])
        self.job = f"local-{os.getpid()}-{int(time.time())}"  # with the time, because process ids are reused
        self.attempt = ""
        self.processes: list[subprocess.Popen] = []  # ranks that are not forks
        self.kills = MemoryKills()
        self.rank_of: dict[int, int] = {}  # process id -> rank, of ranks that are not reaped yet

    def run(self) -> int:
        """Run attempts until the end, and return the exit status: 0 if the run is complete, else 1."""
        for number in SIGNALS:
            signal.signal(number, self._stop)
        try:
            end = self._attempts()
            self._ignore_signals()
        except Stop as stop:
            self._ignore_signals()
            self._kill_all(signal.SIGTERM, signal.SIGKILL)
            end = stop
        small_files.write(self.run_dir / f"submitit/{os.getpid()}_end.json", {"state": end.state, "reason": str(end)})
        return 0 if end.state == "COMPLETED" else 1

    def _attempts(self) -> Stop:
        """Run attempts until a verdict requests no further one, and return how the run ended."""
        restarts = itertools.count()
        while True:
            self.attempt = f"{self.job}-{next(restarts)}"
            end = self._one_attempt()
            status, verdict = self._verdict(end.status)
            if end.secondary and "failed first" in verdict:
                end = Stop(end.state, status=end.status)  # `end` names another rank than the one that failed first
            print(f"hetstep: {self.attempt}: {'; '.join(filter(None, (str(end), verdict)))}", flush=True)
            if status == 0:
                return Stop("COMPLETED")
            if status != REQUEUE:
                return Stop(end.state, "; ".join(filter(None, (str(end), verdict.removeprefix("stop: ")))))

    def _one_attempt(self) -> Stop:
        """Start all ranks, wait for their end, and return how the attempt ended. Raises Stop if the controller must end too."""
        try:
            self._start()
            signal.setitimer(signal.ITIMER_REAL, self.limit_s)
            while self.rank_of:
                self._reap_one()
            end = Stop("FAILED")  # unless the verdict finds that the run is complete
        except Stop as stop:
            if stop.state == "CANCELLED":
                raise
            end = stop
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._kill_all(signal.SIGKILL)
        return end

    def _verdict(self, status: int) -> tuple[int, str]:
        """Run launch/executors/verdict.sh, and return (exit status, verdict)."""
        command = [
            *(str(ROOT / "launch/executors/verdict.sh"), str(self.run_dir), self.attempt, str(status)),
            *(str(self.requeue.max_restarts), str(self.requeue.enabled).lower()),
        ]
        try:
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=VERDICT_S)
        except subprocess.TimeoutExpired as error:  # the file system of the folder hangs
            return 1, f"stop: {error}"
        return answer.returncode, answer.stdout.strip()

    def _stop(self, number: int, _frame) -> None:
        if number == signal.SIGALRM:
            raise Stop("TIMEOUT", "the time limit, cluster.time_min", 124)  # as timeout(1)
        raise Stop("CANCELLED", f"by {signal.Signals(number).name}")

    def _ignore_signals(self) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _start(self) -> None:
        now = time.time()
        logs = self.run_dir / "attempts" / self.attempt
        logs.mkdir(parents=True)
        (logs / "signals").touch()
        write_durably(logs / "started", f"{now}\n")
        shared = {
            "HETSTEP_RUN_DIR": str(self.run_dir),
            "HETSTEP_ATTEMPT": self.attempt,
            "HETSTEP_JOB_ID": str(os.getpid()),
            "HETSTEP_END_TIME": f"{now + self.limit_s:.0f}",
            "HETSTEP_SIGNALS": str(logs / "signals"),
            "PYTHONPATH": python_path.with_package(os.environ)["PYTHONPATH"],
        }
        self.rank_of = {}
        for process in self.processes:  # Popen does not know that `_reap_one` or `_kill_all` has reaped it
            process.returncode = 0
        self.processes.clear()
        self.fork = self.fork and forks.import_shared()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what is raised inside a fork is lost; `_begin` unblocks them
        for rank, environment in enumerate(self.environments):
            with open(logs / f"rank{rank:05d}.log", "ab") as log:
                pid = self._start_rank({**shared, **environment}, log)
            self.rank_of[pid] = rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _start_rank(self, environment: dict[str, str], log: BinaryIO) -> int:
        """Start a rank and return its process id. It leads a process group, so that its children end with it."""
        begin = functools.partial(_begin, os.getpid())
        if self.fork:
            rank_main = functools.partial(rank_task.main, f"{self.run_dir}/submitit")
            return forks.start(rank_main, environment, log, begin)
        process = subprocess.Popen(
            rank_command(self.run_dir),
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            preexec_fn=begin,
        )
        self.processes.append(process)  # otherwise the next Popen reaps it, and its end is missed
        return process.pid

    def _reap_one(self) -> None:
        """Wait for a rank to end. Raises Stop if it failed, without reaping it, so that its process group stays valid."""
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "only WNOHANG returns None"
        if (rank := self.rank_of.get(ended.si_pid)) is None:  # a slow rank of the previous attempt
            os.waitpid(ended.si_pid, 0)
            return
        if ended.si_code != os.CLD_EXITED:
            name = signal.Signals(ended.si_status).name
            why = f"{self._name(rank)} was ended by {name}"
            if ended.si_status == signal.SIGKILL:
                why += self._memory_of(rank)
            with contextlib.suppress(OSError):  # a full disk
                (self.run_dir / "attempts" / self.attempt / KILLED).write_text(why + "\n")
            raise Stop("FAILED", why, 128 + ended.si_status)  # as bash does
        if ended.si_status != 0:
            secondary = ended.si_status in SECONDARY_STATUSES
            raise Stop("FAILED", f"{self._name(rank)} exited with status {ended.si_status}", ended.si_status, secondary)
        os.waitpid(ended.si_pid, 0)
        del self.rank_of[ended.si_pid]

    def _memory_of(self, rank: int) -> str:
        """Return the end of a message about a killed rank: the kernel's out-of-memory record and the last memory warning."""
        node = self.environments[rank]["HETSTEP_NODE"]
        warning = last_warning(self.run_dir / "attempts" / self.attempt, MEMORY_CHECKS, node)
        warned = f"the last warning about memory, after step {warning['step']}: {warning['message']}" if warning else ""
        return "".join(f": {text}" for text in (self.kills.record(), warned) if text)

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.environments[rank]['HETSTEP_COMPONENT']})"

    def _kill_all(self, *signals: signal.Signals) -> None:
        """Send the signals to all ranks, one signal after another, and wait at most GRACE_S after each for the ranks to end."""
        for number in signals:
            for pid in self.rank_of:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)  # the group exists, because its leader is not reaped yet
            deadline = time.monotonic() + GRACE_S
            while any(not _has_ended(pid) for pid in self.rank_of) and time.monotonic() < deadline:
                time.sleep(0.02)
        for pid in [pid for pid in self.rank_of if _has_ended(pid)]:
            os.waitpid(pid, 0)
            del self.rank_of[pid]


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _begin(parent: int) -> None:
    """Unblock signals, and end this rank when its controller dies, even of SIGKILL. Called in the child, before exec."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the controller died before the call
        os._exit(1)


# ---- submitting ---------------------------------------------------------------------------------------------------------


class _End(TypedDict):
    """submitit/JOB_end.json: how a local job ended."""

    state: str
    reason: str


class HetLocalJob(local.LocalJob):
    """A local job, identified by the process id and start time of its controller, which need not be our child."""

    def __init__(self, folder: Path, job_id: str, tasks=(0,), process=None, start_time: int | None = None):
        super().__init__(folder, job_id, tasks, process)
        self.start_time = start_time

    def status(self, now: bool = False) -> JobStatus:
        """Return RUNNING while the controller lives, then the status that it wrote; FAILED if it wrote none."""
        alive = self._is_alive()  # before reading the end, which the controller writes before it exits
        end = self.paths.folder / f"{self.job_id}_end.json"
        if alive:
            return JobStatus("RUNNING")
        if (record := small_files.read(end, _End)) is not None:
            return JobStatus(record["state"], record["reason"], ended=True)
        return JobStatus("FAILED", self._why_no_end(), ended=True)

    def _why_no_end(self) -> str:
        """Return why the controller did not write how the job ended.

        The reason is a disk error in a log, a disk that is full now, or else that the controller was killed.
        """
        run_dir, symptom = self.paths.folder.parent, "the controller ended without recording how the job ended"
        logs = sorted(run_dir.glob(f"attempts/local-{self.job_id}-*/rank*.log"))
        for log in (*logs, self.paths.folder / "controller.log"):
            if line := disk_error(log):
                return f"{symptom}; {log} says: {line}"
        free = os.statvfs(run_dir)
        if not free.f_bavail or (free.f_files and not free.f_favail):
            return f"{symptom}; the file system of {run_dir} is full. {REMEDY[errno.ENOSPC].capitalize()}"
        return "the controller was killed"

    def _is_alive(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            return False
        return self.start_time is not None and start_time(int(self.job_id)) == self.start_time

    @override
    def cancel(self, check: bool = True) -> None:
        if self._is_alive():
            os.kill(int(self.job_id), signal.SIGTERM)

    def name(self) -> str:
        """Return the job's name for people."""
        return f"local job {self.job_id}"


def disk_error(log: Path) -> str:
    """Return the last line of a log about a full or failing disk; "" if there is none, or it cannot be read."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if DISK_ERROR.search(line)), "")


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot; None for a zombie or no such process.

    proc(5): /proc/pid/stat, fields 3 and 22.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


class HetLocalExecutor(local.LocalExecutor):
    """Runs one function on every rank of `components`. Pickles and the controller's log are in <run_dir>/submitit."""

    job_class = HetLocalJob

    def __init__(self, run_dir: Path, cluster: ClusterConfig, components: dict[str, ComponentConfig]):
        super().__init__(run_dir / "submitit")
        self.run_dir = run_dir
        self.requeue = cluster.requeue
        self.environments = rank_environments(components)
        self.script = commands(run_dir, components)
        self.parameters = {"timeout_min": cluster.time_min}

    @override
    def submit(self, fn: Callable[..., Any], *args: object, **kwargs: object) -> Job[Any]:
        """Submit `fn(*args, **kwargs)` for every rank. Ranks that run the pipeline share its imports as forks if possible."""
        self.fork = fn.__module__ == rank_task.__name__ and forks.possible(self.environments)
        return super().submit(fn, *args, **kwargs)

    def _num_tasks(self) -> int:
        return len(self.environments)

    def _submit_command(self, command: str) -> HetLocalJob:
        plan = {
            "time_min": self.parameters["timeout_min"],
            "requeue": asdict(self.requeue),
            "environments": self.environments,
            "fork": self.fork,
        }
        shared = forks.common(self.environments) if self.fork else {}
        small_files.write(self.folder / "plan.json", plan)
        variables = python_path.with_package({**os.environ, **shared})
        process = start_controller(self.run_dir, variables, self.folder / "controller.log")
        tasks = range(self._num_tasks())
        return HetLocalJob(self.folder, str(process.pid), tasks, process, start_time=start_time(process.pid))


def start_controller(run_dir: Path, environment: dict[str, str], log: Path) -> subprocess.Popen:
    """Start a run's controller with this environment, and append its output to `log`."""
    with open(log, "ab") as output:
        return start_detached([sys.executable, "-P", "-m", "launch.executors.local", str(run_dir)], output, environment)


def control(run_dir: Path) -> int:
    """Run the controller of the run in `run_dir` to its end, and return the exit status."""
    path = run_dir / "submitit/plan.json"
    plan = small_files.read(path, dict)
    if plan is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return Controller(run_dir, plan).run()


if __name__ == "__main__":
    sys.exit(control(Path(sys.argv[1])))
