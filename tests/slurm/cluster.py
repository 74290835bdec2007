"""A private Slurm cluster for tests: the real munged, slurmctld and slurmd as plain processes in one folder.

By hand:  python -m tests.slurm.cluster start DIR [NODES]   then   export SLURM_CONF=DIR/slurm.conf
          python -m tests.slurm.cluster stop DIR

Needs slurmctld, slurmd (built with multiple-slurmd, as Debian's is), the client commands and munged; no systemd, no cgroups.
Leaves out accounting: there is no slurmdbd, so sacct knows nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.waiting import alive

if TYPE_CHECKING:
    import pytest

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"])

# Node names are loopback addresses so that the first host of a node list can be used as a master address. cred_expire: a
# requeue waits for old credentials to expire, 120 s by default. bf_interval: only the backfill scheduler starts het jobs.
CONF = """\
ClusterName=hetstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{plugins}ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PriorityType=priority/basic
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=15
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=300
JobRequeue=1
SrunPortRange={srun_first}-{srun_last}
GresTypes=gpu
NodeName=DEFAULT CPUs=8 RealMemory=16000 State=UNKNOWN
"""
PARTITIONS = "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP"
SRUN_PORTS = 40


def missing() -> list[str]:
    """Return the commands that a cluster needs and this machine lacks."""
    return [name for name in COMMANDS if shutil.which(name, path=SEARCH) is None]


class SlurmCluster:
    """Nodes of 8 CPUs and 16000 MB below `folder`. `env` is what a client needs to talk to it.

    nodes: how many, each with 8 pretended GPUs; or what slurm.conf says of each, e.g. "Gres=gpu:h100:4 Feature=ib".
    partitions: lines of slurm.conf. settings: more lines of it; of a setting that comes twice Slurm takes the last.
    """

    def __init__(self, folder: Path, nodes: int | list[str] = 4, partitions: str = PARTITIONS, settings: str = ""):
        self.folder = folder.absolute()
        self._kinds = ["Gres=gpu:8"] * nodes if isinstance(nodes, int) else nodes
        self._partitions, self._settings = partitions, settings
        self.nodes = [f"127.0.0.{10 + i}" for i in range(len(self._kinds))]
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH}

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of `env` that differ from the environment without a cluster."""
        return {name: self.env[name] for name in ("SLURM_CONF", "PATH")}

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
        """Point this process to the cluster until the test ends; return the cluster."""
        for name, value in self.variables.items():
            monkeypatch.setenv(name, value)
        return self

    def start(self, timeout: float = 60.0) -> None:
        """Start all daemons; return when every node is idle. Raises RuntimeError with the ends of the daemons' logs."""
        try:
            self._write_configuration()
            self._start_daemons(deadline := time.monotonic() + timeout)
            while (states := self.node_states()) != dict.fromkeys(self.nodes, "idle"):
                if time.monotonic() > deadline or not all(map(alive, self._pids().values())):
                    raise RuntimeError(f"the Slurm cluster did not come up: nodes {states}\n{self._logs()}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all jobs and all daemons; whatever outlasts SIGTERM by 5 s is killed."""
        pids = self._pids()
        if "slurmctld" in pids and alive(pids["slurmctld"]):
            subprocess.run(["scancel", f"--user={_user()}"], env=self.env, capture_output=True, timeout=20)
            self._wait_for_empty_queue(5.0)
        order = [*(name for name in pids if name.startswith("slurmd.")), "slurmctld", "munged"]
        for name in order:
            if name in pids:
                _end(pids[name])
        (self.folder / "pids").unlink(missing_ok=True)

    def steps_alive(self) -> list[int]:
        """Return process ids of this cluster's slurmstepd daemons: while there is one, a job's processes may be running."""
        found = []
        for environ in glob.glob("/proc/[0-9]*/environ"):
            try:
                name = Path(environ).with_name("comm").read_text().strip()
                if name == "slurmstepd" and self.env["SLURM_CONF"].encode() in Path(environ).read_bytes():
                    found.append(int(environ.split("/")[2]))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or is not ours
        return found

    # ---- losing a node ------------------------------------------------------------------------------------------------------

    def cut_off(self, node: str) -> None:
        """Kill a node's slurmd. Its processes continue, and slurmctld gives it up after SlurmdTimeout."""
        pid = self._pids()[f"slurmd.{node}"]
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.02)

    def lose(self, node: str) -> None:
        """Kill a node's slurmd and everything that runs on the node, as when its power fails."""
        self.cut_off(node)
        self.end_all_on(node)

    def end_all_on(self, node: str) -> None:
        """Kill what a slurmd of that node has started, and what that has."""
        while found := self.on(node):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def bring_back(self, node: str) -> None:
        """Start its slurmd again, and wait until jobs can run there."""
        self._spawn(f"slurmd.{node}", ["slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"]])
        deadline = time.monotonic() + 60
        while self.node_states().get(node) not in ("idle", "mix", "alloc"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{node} did not come back: {self.node_states()}\n{self._logs()}")
            time.sleep(0.2)

    def on(self, node: str) -> list[int]:
        """Return process ids of tasks and batch scripts on a node, of all that they started, and of their slurmstepds."""
        found = set()
        for folder in glob.glob("/proc/[0-9]*"):
            try:
                environment = Path(folder, "environ").read_bytes().split(b"\0")
                parent = int(Path(folder, "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            pid = int(folder.rpartition("/")[2])
            ours = f"SLURM_CONF={self.env['SLURM_CONF']}".encode() in environment
            if ours and f"SLURMD_NODENAME={node}".encode() in environment and alive(pid):
                found.add(pid)
                if _name(parent) == "slurmstepd":
                    found.add(parent)
        return sorted(found)

    # ---- starting -----------------------------------------------------------------------------------------------------------

    def _write_configuration(self) -> None:
        for name in ("munge", "state", "dev", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder / "munge"):
            folder.chmod(0o755)
        key = self.folder / "munge/key"
        key.unlink(missing_ok=True)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for i in range(8):  # a gres File= must be a character device, and a link to one will do
            device = self.folder / f"dev/gpu{i}"
            device.unlink(missing_ok=True)
            device.symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text("".join(map(self._gres, self.nodes, self._kinds)))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # newer Slurm: v2 mounted over v1 ends slurmd
        (self.folder / "plugstack.conf").write_text("")
        port = _free_ports(1 + len(self.nodes) + SRUN_PORTS)
        node_port = port + 1
        srun_port = node_port + len(self.nodes)
        plugin_folders = glob.glob("/usr/lib/*/slurm-wlm")
        plugins = f"PluginDir={plugin_folders[0]}\n" if plugin_folders else ""
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=_host(),
                user=_user(),
                folder=self.folder,
                plugins=f"{plugins}PlugStackConfig={self.folder}/plugstack.conf\n",
                port=port,
                srun_first=srun_port,
                srun_last=srun_port + SRUN_PORTS - 1,
            )
            + "".join(
                f"NodeName={node} NodeHostname={_host()} Port={node_port + i} {kind}\n"
                for i, (node, kind) in enumerate(zip(self.nodes, self._kinds, strict=True))
            )
            + f"{self._partitions}\n{self._settings}\n"
        )

    def _gres(self, node: str, kind: str) -> str:
        """Return a node's line of gres.conf."""
        if not (gpus := re.search(r"Gres=gpu(?::([a-z]\w*))?:(\d+)", kind)):
            return ""
        of_type = f" Type={gpus[1]}" if gpus[1] else ""
        return f"NodeName={node} Name=gpu{of_type} File={self.folder}/dev/gpu[0-{int(gpus[2]) - 1}]\n"

    def _start_daemons(self, deadline: float) -> None:
        (self.folder / "pids").unlink(missing_ok=True)
        munge, conf = self.folder / "munge", self.env["SLURM_CONF"]
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", ["munged", "-F", "--force", "--num-threads=2", f"--socket={munge}/socket", *files])
        while not (munge / "socket").exists():
            if time.monotonic() > deadline or not alive(self._pids()["munged"]):
                raise RuntimeError(f"munged did not start\n{self._logs()}")
            time.sleep(0.01)
        self._spawn("slurmctld", ["slurmctld", "-D", "-i", "-f", conf])
        for node in self.nodes:
            self._spawn(f"slurmd.{node}", ["slurmd", "-D", "-N", node, "-f", conf])

    def _spawn(self, name: str, command: list[str]) -> None:
        command = [shutil.which(command[0], path=SEARCH), *command[1:]]
        with open(self.folder / f"{name}.out", "ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.env, start_new_session=True
            )
        with open(self.folder / "pids", "a") as pids:
            pids.write(f"{name} {process.pid}\n")

    # ---- asking -------------------------------------------------------------------------------------------------------------

    def _pids(self) -> dict[str, int]:
        path = self.folder / "pids"
        return {name: int(pid) for name, pid in map(str.split, path.read_text().splitlines())} if path.exists() else {}

    def pid(self, daemon: str) -> int:
        """Return a daemon's process id. daemon: munged, slurmctld, slurmd.<node>."""
        return self._pids()[daemon]

    def node_states(self) -> dict[str, str]:
        """Return sinfo's short states by node; empty while slurmctld does not answer."""
        answer = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %t"], env=self.env, capture_output=True, text=True)
        return dict(line.split() for line in answer.stdout.splitlines())  # a node comes once for each of its partitions

    def _wait_for_empty_queue(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.steps_alive():
            time.sleep(0.1)

    def _logs(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(logs))


def _host() -> str:
    return socket.gethostname().split(".")[0]


def _user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that nothing listens on, outside the kernel's ephemeral range."""
    for _ in range(200):
        first = random.randrange(20000, 32000 - count)
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError(f"no {count} free ports in a row between 20000 and 32000")


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _end(pid: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not alive(pid):
            return
        os.kill(pid, number)
        deadline = time.monotonic() + 5
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.02)


def main() -> None:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("start", "stop"):
        sys.exit(__doc__)
    if lacking := missing():
        sys.exit(f"Slurm is not installed here: no {', '.join(lacking)} (Debian: slurmctld slurmd slurm-client munge)")
    cluster = SlurmCluster(Path(sys.argv[2]), nodes=int(sys.argv[3]) if len(sys.argv) == 4 else 4)
    if sys.argv[1] == "stop":
        cluster.stop()
    else:
        cluster.start()
        print(f"export SLURM_CONF={cluster.env['SLURM_CONF']}")


if __name__ == "__main__":
    main()
