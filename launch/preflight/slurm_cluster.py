"""What Slurm says of its cluster: settings, partitions, nodes, and what accounting allows a user.

By `scontrol -o` and `sacctmgr -P`, whose fields are the same from Slurm 22.05 to 26.05; --json is not. Asks only, and waits
TIMEOUT_S at most for each answer. Leaves out reservations, licences, and what other jobs use just now.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from launch import slurm_client

TIMEOUT_S = 10

UNAVAILABLE = frozenset(
    ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "INVAL", "INVALID_REG", "UNKNOWN", "NOT_RESPONDING")
)
"""States in which a node takes no jobs until someone mends it."""

ASSOCIATION = (
    *("Account", "User", "ParentName", "Partition", "QOS", "DefaultQOS"),
    *("GrpTRES", "GrpJobs", "MaxTRES", "MaxTRESPerNode", "MaxWall", "MaxJobs"),
)
QOS = (
    *("Name", "Flags", "GrpTRES", "GrpJobs", "MaxTRES", "MaxTRESPerNode", "MaxWall"),
    *("MaxTRESPU", "MaxJobsPU", "MaxTRESPA", "MaxJobsPA", "MinTRES"),
)

Fields = dict[str, str]
"""A line of Slurm's answer, e.g. {"PartitionName": "gpu", "MaxTime": "1-00:00:00", ...}."""


class Unanswered(Exception):
    """Slurm did not answer a question; says which, and why."""


def ask(*command: str) -> str:
    """Its output. Raises Unanswered."""
    try:
        answer = slurm_client.ask(*command, timeout_s=TIMEOUT_S)
    except FileNotFoundError:
        raise Unanswered(f"there is no {command[0]} here") from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"`{' '.join(command)}` gave no answer in {TIMEOUT_S} s") from None
    if answer.returncode:
        last = (answer.stderr or answer.stdout).strip().splitlines()
        raise Unanswered(f"`{' '.join(command)}` failed: {last[-1] if last else answer.returncode}")
    return answer.stdout


def configuration() -> Fields:
    """Slurm's, by key. Raises Unanswered."""
    lines = ask("scontrol", "show", "config").splitlines()
    return {key.strip(): value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    cpus: int
    memory_mb: int  # what jobs may have
    gpus: int
    features: frozenset[str]
    partitions: frozenset[str]
    available: bool  # in no state of UNAVAILABLE


@dataclass(frozen=True)
class Accounting:
    """What the accounting database says of one user on this cluster. Rows have the fields of ASSOCIATION and QOS."""

    associations: tuple[Fields, ...]  # the user's own
    accounts: dict[str, Fields]  # those of the user and the accounts above them, by name
    qos: dict[str, Fields]
    default_account: str | None


class SlurmCluster:
    """Asked when it is made. Raises Unanswered if slurmctld does not answer."""

    def __init__(self) -> None:
        self.config = configuration()
        # -a: those too that are hidden from this user, who may name them all the same
        self.partitions = {
            fields["PartitionName"]: fields for fields in _lines(ask("scontrol", "-a", "-o", "show", "partition"))
        }

    @cached_property
    def nodes(self) -> list[Node]:
        return [_node(fields) for fields in _lines(ask("scontrol", "-a", "-o", "show", "node"))]

    @property
    def default_partition(self) -> str | None:
        return next((name for name, fields in self.partitions.items() if fields.get("Default") == "YES"), None)

    @property
    def enforced(self) -> frozenset[str]:
        """Of associations, limits, qos, safe: what of accounting keeps jobs from running."""
        return frozenset(self.config.get("AccountingStorageEnforce", "none").lower().split(","))

    def accounting(self, user: str) -> Accounting:
        """Raises Unanswered, also where there is no accounting."""
        cluster = self.config["ClusterName"]
        of_cluster = ("sacctmgr", "-nP", "show", "assoc", f"format={','.join(ASSOCIATION)}", "where", f"cluster={cluster}")
        associations = _rows(ASSOCIATION, ask(*of_cluster, f"user={user}"))
        accounts: dict[str, Fields] = {}
        wanted = {row["Account"] for row in associations}
        while wanted:
            above = [
                row for row in _rows(ASSOCIATION, ask(*of_cluster, f"account={','.join(sorted(wanted))}")) if not row["User"]
            ]
            accounts |= {row["Account"]: row for row in above}
            wanted = {row["ParentName"] for row in above if row["ParentName"]} - accounts.keys()
        qos = {row["Name"]: row for row in _rows(QOS, ask("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS)}"))}
        default = ask("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount").strip()
        return Accounting(tuple(associations), accounts, qos, default or None)


def _lines(text: str) -> Iterator[Fields]:
    """Of `scontrol -o`. Of a key that comes twice the first counts: what is free text comes last."""
    for line in text.splitlines():
        fields: Fields = {}
        for word in line.split():
            key, equals, value = word.partition("=")
            if equals:
                fields.setdefault(key, value)
        if fields:
            yield fields


def _rows(names: tuple[str, ...], text: str) -> list[Fields]:
    """Of `sacctmgr -nP`."""
    rows = [line.split("|") for line in text.splitlines() if line]
    if any(len(row) != len(names) for row in rows):
        raise Unanswered(f"sacctmgr's answer does not have the {len(names)} fields that were asked for: {text.splitlines()[0]}")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _node(fields: Fields) -> Node:
    features = fields.get("AvailableFeatures", "(null)")
    states = {state.strip("*~#!%$@^-") for state in fields["State"].split("+")}
    return Node(
        name=fields["NodeName"],
        cpus=int(fields.get("CPUEfctv") or fields["CPUTot"]),
        memory_mb=int(fields["RealMemory"]) - int(fields.get("MemSpecLimit", 0)),
        gpus=gpus(fields.get("Gres", "")),
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        partitions=frozenset(fields.get("Partitions", "").split(",")),
        available=not states & UNAVAILABLE and "*" not in fields["State"],
    )


def gpus(gres: str) -> int:
    """`gpu:h100:8(S:0-1),nvme:1` -> 8, whatever their types."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)(?=[,(]|$)", gres))


def minutes(text: str) -> float | None:
    """`1-12:00:00`, `12:00:00`, `30` -> minutes; None for no limit. Slurm's formats: sbatch(1), --time."""
    if text.upper() in ("", "UNLIMITED", "INFINITE", "NONE", "N/A"):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, mins, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, mins, seconds = parts
    else:  # minutes[:seconds]
        hours, (mins, seconds) = 0, [*parts, 0][:2]
    return (int(days or 0) * 24 + hours) * 60 + mins + seconds / 60


def megabytes(text: str) -> float:
    """`500G`, `2000` -> units of 2^20 bytes, in which Slurm counts. Raises ValueError."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?", text.upper())
    if not size:
        raise ValueError(text)
    return float(size[1]) * 1024.0 ** ("KMGTP".index(size[2] or "M") - 1)


def tres(text: str) -> dict[str, float]:
    """`cpu=6,mem=2G,gres/gpu=8` -> {"cpu": 6, "mem": 2048, "gres/gpu": 8}: memory in 2^20 bytes."""
    pairs = (item.split("=") for item in text.split(",") if "=" in item)
    return {name: megabytes(value) for name, value in pairs}
