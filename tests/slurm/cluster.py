"""A private Slurm cluster for tests: the real munged, slurmctld and slurmd as plain processes in one folder.

By hand:  python -m tests.slurm.cluster start DIR [NODES]   then   export SLURM_CONF=DIR/slurm.conf
          python -m tests.slurm.cluster stop DIR

Needs slurmctld, slurmd (built with multiple-slurmd, as Debian's is), the client commands and munged; no systemd, no cgroups.
Leaves out accounting: there is no slurmdbd, so sacct knows nothing.
"""

from __future__ import annotations

import glob
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

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
KillWait=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=300
JobRequeue=1
SrunPortRange={srun_first}-{srun_last}
GresTypes=gpu
NodeName=DEFAULT CPUs=8 RealMemory=16000 Gres=gpu:8 State=UNKNOWN
NodeName=127.0.0.[10-{last_node}] NodeHostname={host} Port=[{node_first}-{node_last}]
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""
SRUN_PORTS = 40


def missing() -> list[str]:
    """The commands that a cluster needs and this machine lacks."""
    return [name for name in COMMANDS if shutil.which(name, path=SEARCH) is None]


class SlurmCluster:
    """`nodes` nodes of 8 CPUs and 8 pretended GPUs below `folder`. `env` is what a client needs to talk to it."""

    def __init__(self, folder: Path, nodes: int = 4):
        self.folder = folder.absolute()
        self.nodes = [f"127.0.0.{10 + i}" for i in range(nodes)]
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH}

    def start(self, timeout: float = 60.0) -> None:
        """Returns when every node is idle. Raises RuntimeError with the daemons' last words."""
        try:
            self._write_configuration()
            self._start_daemons(deadline := time.monotonic() + timeout)
            while (states := self._node_states()) != ["idle"] * len(self.nodes):
                if time.monotonic() > deadline or not all(map(_alive, self._pids().values())):
                    raise RuntimeError(f"the Slurm cluster did not come up: nodes {states}\n{self._logs()}")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all jobs and all daemons; whatever outlasts SIGTERM by 5 s is killed."""
        pids = self._pids()
        if "slurmctld" in pids and _alive(pids["slurmctld"]):
            subprocess.run(["scancel", f"--user={_user()}"], env=self.env, capture_output=True, timeout=20)
            self._wait_for_empty_queue(5.0)
        order = [*(name for name in pids if name.startswith("slurmd.")), "slurmctld", "munged"]
        for name in order:
            if name in pids:
                _end(pids[name])
        (self.folder / "pids").unlink(missing_ok=True)

    def steps_alive(self) -> list[int]:
        """Process ids of slurmstepd daemons of this cluster: while there is one, a job's processes may live."""
        found = []
        for environ in glob.glob("/proc/[0-9]*/environ"):
            try:
                name = Path(environ).with_name("comm").read_text().strip()
                if name == "slurmstepd" and self.env["SLURM_CONF"].encode() in Path(environ).read_bytes():
                    found.append(int(environ.split("/")[2]))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or is not ours
        return found

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
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/gpu[0-7]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # newer Slurm: v2 mounted over v1 ends slurmd
        (self.folder / "plugstack.conf").write_text("")
        port = _free_ports(1 + len(self.nodes) + SRUN_PORTS)
        node_port = port + 1
        srun_port = node_port + len(self.nodes)
        plugin_folders = glob.glob("/usr/lib/*/slurm-wlm")
        plugins = f"PluginDir={plugin_folders[0]}\n" if plugin_folders else ""
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname().split(".")[0],
                user=_user(),
                folder=self.folder,
                plugins=f"{plugins}PlugStackConfig={self.folder}/plugstack.conf\n",
                port=port,
                last_node=self.nodes[-1].rpartition(".")[2],
                node_first=node_port,
                node_last=node_port + len(self.nodes) - 1,
                srun_first=srun_port,
                srun_last=srun_port + SRUN_PORTS - 1,
            )
        )

    def _start_daemons(self, deadline: float) -> None:
        (self.folder / "pids").unlink(missing_ok=True)
        munge, conf = self.folder / "munge", self.env["SLURM_CONF"]
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", ["munged", "-F", "--force", "--num-threads=2", f"--socket={munge}/socket", *files])
        while not (munge / "socket").exists():
            if time.monotonic() > deadline or not _alive(self._pids()["munged"]):
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

    def _node_states(self) -> list[str]:
        answer = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], env=self.env, capture_output=True, text=True)
        return answer.stdout.split() if answer.returncode == 0 else []

    def _wait_for_empty_queue(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.steps_alive():
            time.sleep(0.1)

    def _logs(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(logs))


def _user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


def _free_ports(count: int) -> int:
    """The first of `count` consecutive ports that nothing listens on, outside the range that the kernel hands out."""
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


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _end(pid: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _alive(pid):
            return
        os.kill(pid, number)
        deadline = time.monotonic() + 5
        while _alive(pid) and time.monotonic() < deadline:
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
