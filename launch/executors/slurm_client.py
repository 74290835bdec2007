"""Run Slurm's commands, each within a time limit, and parse their output. The launcher calls Slurm only through `run_command`.

The fields of `scontrol -o`, `sacct -P` and `sacctmgr -P` are parsed. They are the same from Slurm 22.05 to 26.05; the fields of
--json are not.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from launch.executors.slurm_environment import unset_for_sbatch

ANSWER_S = 10.0
"""Time limit of a query. Slurm's own commands give up after a minute or more."""
CHANGE_S = 120.0
"""Time limit of sbatch and scancel, which wait for a busy controller by themselves."""
PING_S = 5.0
"""Time limit of a ping. A busy controller answers it too, because a ping takes none of its locks."""
REMEMBERED_S = 30.0
"""How long an unreachable controller is cached. Without the cache a command that lists many runs waits for each of them."""

NOT_INSTALLED = "Slurm is not installed here (there is no scontrol)"
NOT_CONFIGURED = "Slurm's commands are installed here, but no cluster is configured (`scontrol ping`: {})"
DOWN = "Slurm's controller does not answer (`scontrol ping`: {})"
LATE = "Slurm's controller does not answer (`scontrol ping`: no answer within {:g} s)"

# A state that is not listed counts as live: Slurm adds states (SIGNALING ...), and a live job must never count as ended.
TERMINAL = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"),
        "TIMEOUT",
    )
)

Fields = dict[str, str]
"""The fields of a line of Slurm's output, such as {"PartitionName": "gpu", "MaxTime": "1-00:00:00", ...}."""
ClusterKey = tuple[str | None, str | None]
"""PATH and SLURM_CONF, by which Slurm's commands choose the cluster."""

_unreachable: dict[ClusterKey, tuple[float, str | None]] = {}
_clusters: dict[ClusterKey, str] = {}


class SlurmError(Exception):
    """Raised if a Slurm command fails. The message names the command and the reason.

    kind: `missing` if the command is not installed, `late` if it exceeded its time limit, `failed` if it ended with an error.
    output: the command's stdout and stderr, if it `failed`.
    """

    def __init__(self, message: str, kind: Literal["missing", "late", "failed"], output: str = ""):
        super().__init__(message)
        self.kind = kind
        self.output = output


def run_command(*command: str, timeout_s: float | None = None, script: str | None = None) -> str:
    """Run a command and return its stdout, or its stderr if stdout is empty.

    timeout_s: ANSWER_S if None, so that a controller that hangs never hangs the launcher. script: the command's stdin.
    Raises SlurmError.
    """
    timeout = ANSWER_S if timeout_s is None else timeout_s
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # a user may have set another format
    try:
        answer = subprocess.run(
            command, input=script or "", capture_output=True, text=True, errors="replace", timeout=timeout, env=environment
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not installed here", "missing") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"`{' '.join(command)}` did not answer within {timeout:g} s", "late") from None
    if answer.returncode:
        output = f"{answer.stdout}\n{answer.stderr}".strip()
        last = output.splitlines()[-1] if output else f"status {answer.returncode}"
        raise SlurmError(f"`{' '.join(command)}` failed: {last}", "failed", output)
    return answer.stdout or answer.stderr  # sbatch --test-only writes the expected start time to stderr


def submit(script: str, *options: str) -> str:
    """Submit the text of a batch script and return the job's id. Environment variables do not override the script.

    Raises SlurmError. If the error's kind is `late`, the job may exist nevertheless.
    """
    answer = run_command(*unset_for_sbatch(), "sbatch", "--parsable", *options, timeout_s=CHANGE_S, script=script)
    return answer.strip().partition(";")[0]


# ---- the cluster --------------------------------------------------------------------------------------------------------


def _cluster_key() -> ClusterKey:
    return os.environ.get("PATH"), os.environ.get("SLURM_CONF")


def unreachable(patience_s: float = 0.0) -> str | None:
    """Return why no Slurm controller answers here; None if one does. Takes at most PING_S + patience_s.

    patience_s: how long to retry, for a controller that is being restarted
    """
    here, deadline = _cluster_key(), time.monotonic() + patience_s
    if here in _unreachable:
        pinged_at, why = _unreachable[here]
        if why is None or (not patience_s and time.monotonic() - pinged_at < REMEMBERED_S):
            return why
    why, transient = _ping()
    while transient and time.monotonic() < deadline:
        time.sleep(0.5)
        why, transient = _ping()
    _unreachable[here] = time.monotonic(), why
    return why


def _ping() -> tuple[str | None, bool]:
    """Return (why no controller answers, whether a retry may succeed)."""
    try:
        answer = run_command("scontrol", "ping", timeout_s=PING_S)
    except SlurmError as error:
        if error.kind != "failed":
            return (NOT_INSTALLED, False) if error.kind == "missing" else (LATE.format(PING_S), True)
        answer = error.output
    if re.search(r"^Slurmctld\(.*\bis UP\b", answer, re.MULTILINE):
        return None, False
    errors = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in answer.splitlines() if not line.startswith("Slurmctld(")]
    if states := re.findall(r"^Slurmctld\(.*", answer, re.MULTILINE):
        return DOWN.format("; ".join([*states, *errors[-1:]])), True
    return NOT_CONFIGURED.format(errors[-1] if errors else "no output"), False


def configuration() -> Fields:
    """Return the fields of `scontrol show config`. Raises SlurmError."""
    lines = run_command("scontrol", "show", "config").splitlines()
    return {key.strip(): value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}


def cluster_name() -> str | None:
    """Return the name of the cluster that Slurm's commands address; None if Slurm does not answer or has none."""
    here = _cluster_key()
    if here not in _clusters:  # cached, because a list of runs needs it for each run
        try:
            _clusters[here] = configuration()["ClusterName"]
        except (SlurmError, KeyError):
            return None
    return _clusters[here]


# ---- jobs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobComponent:
    """One component of a job, as Slurm describes it; a plain job has one."""

    job_id: str  # of the whole job, which is the id of its leading component
    state: str
    nodes: str = ""  # in Slurm's short form
    reason: str = ""
    offset: int = 0
    ends_by: float | None = None  # unix seconds; None: not known
    output: str = ""  # path of the batch script's log


def job_components(job_id: str) -> list[JobComponent]:
    """Return the components of a job in order; [] if neither the controller nor accounting knows it. Raises SlurmError."""
    try:
        return read_jobs(run_command("scontrol", "show", "job", "-o", job_id))
    except SlurmError as error:
        if "Invalid job id" not in error.output:
            raise
    try:
        answer = run_command("sacct", "-X", "-n", "-P", "-o", "JobID,State,NodeList", "-j", job_id)
    except SlurmError as error:
        if error.kind == "late":
            raise
        return []  # there is no accounting
    return _in_order(read_sacct(*row) for line in answer.splitlines() if len(row := line.split("|")) == 3)


def read_jobs(text: str) -> list[JobComponent]:
    """Parse the output of `scontrol show job -o`, and return the components sorted by job and offset."""
    return _in_order(_read_job(fields) for fields in parse_records(text) if "JobId" in fields)


def _read_job(fields: Fields) -> JobComponent:
    ends, reason = fields.get("EndTime", ""), fields.get("Reason", "None")
    return JobComponent(
        job_id=fields.get("HetJobId", fields["JobId"]),
        state=fields["JobState"],
        nodes=fields.get("NodeList", ""),
        reason="" if reason == "None" else reason,
        offset=int(fields.get("HetJobOffset", 0)),
        ends_by=datetime.fromisoformat(ends).timestamp() if re.match(r"\d{4}-", ends) else None,
        output=fields.get("StdOut", ""),
    )


def read_sacct(job_id: str, state: str, nodes: str) -> JobComponent:
    """Parse a row of sacct: `17+1`, `CANCELLED by 0`, `n[1-2]` is a component of job 17."""
    leader, _, offset = job_id.partition("+")
    return JobComponent(leader, state.split()[0], nodes, offset=int(offset or 0))


def _in_order(parts: Iterator[JobComponent]) -> list[JobComponent]:
    return sorted(parts, key=lambda part: (part.job_id, part.offset))


def merge_components(parts: Sequence[JobComponent]) -> JobComponent:
    """Return one JobComponent for a whole job, with the leader's state and the nodes of all components.

    While the leader has ended and others have not, the state is COMPLETING.
    """
    leader = replace(parts[0], nodes=",".join(part.nodes for part in parts if part.nodes))
    if leader.state in TERMINAL and not all(part.state in TERMINAL for part in parts):
        return replace(leader, state="COMPLETING")
    return leader


# ---- formats ------------------------------------------------------------------------------------------------------------


def parse_records(text: str) -> Iterator[Fields]:
    """Yield the fields of each line of `scontrol -o`. A repeated key has its first value, because free text comes last."""
    for line in text.splitlines():
        fields: Fields = {}
        for word in line.split():
            key, equals, value = word.partition("=")
            if equals:
                fields.setdefault(key, value)
        if fields:
            yield fields


def host_names(short: str) -> list[str]:
    """Expand a host list: `n[1-2],m3` becomes n1, n2, m3. Raises SlurmError."""
    return run_command("scontrol", "show", "hostnames", short).split() if short else []


def minutes(text: str) -> float | None:
    """Parse a time such as `1-12:00:00`, `12:00:00` or `30`, in minutes; None for no limit. Formats: sbatch(1), --time."""
    if text.upper() in ("", "UNLIMITED", "INFINITE", "NONE", "N/A"):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:  # [days-]hours[:minutes[:seconds]]
        hours, mins, seconds = [*parts, 0, 0][:3]
    else:  # minutes[:seconds]
        hours, (mins, seconds) = 0, [*parts, 0][:2]
    return (int(days or 0) * 24 + hours) * 60 + mins + seconds / 60


def megabytes(text: str) -> float:
    """Parse a size such as `500G` or `2000`, in units of 2^20 bytes as Slurm counts. Raises ValueError."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?", text.upper())
    if not size:
        raise ValueError(text)
    return float(size[1]) * 1024.0 ** ("KMGTP".index(size[2] or "M") - 1)


def gpus(gres: str) -> int:
    """Count the GPUs of all types in a gres string: `gpu:h100:8(S:0-1),nvme:1` has 8."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=[,(]|$)", gres))


def tres(text: str) -> dict[str, float]:
    """Parse a TRES string: `cpu=6,mem=2G,gres/gpu=8` is {"cpu": 6, "mem": 2048, "gres/gpu": 8}, memory in 2^20 bytes."""
    pairs = (item.split("=") for item in text.split(",") if "=" in item)
    return {name: megabytes(value) for name, value in pairs}
