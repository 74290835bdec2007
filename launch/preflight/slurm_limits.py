"""Compare requests with limits of partitions, accounts and QOS. Slurm never starts a job beyond such a limit.

Unless EnforcePartLimits is set, sbatch and its --test-only accept jobs beyond a partition's time limit, with too few nodes, and
of accounts that may not use it. They refuse accounts and QOS that a user may not use, but accept most jobs beyond their limits.
For the precedence of limits see https://slurm.schedmd.com/resource_limits.html. Each heterogeneous component counts as a job.

Leaves out: current usage of other jobs, limits of minutes (TRESMins), and limits per type of GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from launch.executors.slurm_client import Fields, SlurmError, minutes, run_command, tres
from launch.preflight.slurm_request import ComponentRequest
from pipeline.config import Problem

ASSOCIATION = (
    *("Account", "User", "ParentName", "Partition", "QOS", "DefaultQOS"),
    *("GrpTRES", "GrpJobs", "MaxTRES", "MaxTRESPerNode", "MaxWall", "MaxJobs"),
)
QOS = (
    *("Name", "Flags", "GrpTRES", "GrpJobs", "MaxTRES", "MaxTRESPerNode", "MaxWall"),
    *("MaxTRESPU", "MaxJobsPU", "MaxTRESPA", "MaxJobsPA", "MinTRES"),
)
UNITS = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs", "mem": "MB of memory"}


@dataclass(frozen=True)
class Accounting:
    """One user's rows of the accounting database for this cluster, which have the fields named in ASSOCIATION and QOS.

    Without any, nothing is known of the user's accounts.
    """

    associations: tuple[Fields, ...] = ()  # the user's own
    accounts: dict[str, Fields] = field(default_factory=dict)  # those of the user and the accounts above them, by name
    qos: dict[str, Fields] = field(default_factory=dict)
    default_account: str | None = None

    def account(self, request: ComponentRequest) -> str | None:
        """Return the requested account, else the user's default; None if it is not known."""
        return request.host.account or self.default_account

    def association(self, request: ComponentRequest, partition: str) -> Fields | None:
        """Return the account's association for the partition, else its association for all partitions, else None."""
        rows = {row["Partition"]: row for row in self.associations if row["Account"] == self.account(request)}
        return rows.get(partition) or rows.get("")

    def qos_of(self, request: ComponentRequest, partition: str) -> str | None:
        """Return the requested QOS, else the association's default; None if it is not known."""
        if request.host.qos or (row := self.association(request, partition)) is None:
            return request.host.qos
        names = _names(row["QOS"])
        return row["DefaultQOS"] or ("normal" if "normal" in names else names[0] if len(names) == 1 else None)


def accounting(cluster: str, user: str) -> Accounting:
    """Return the rows that sacctmgr reports for a user. Raises SlurmError, also on a cluster without accounting."""
    of_cluster = ("sacctmgr", "-nP", "show", "assoc", f"format={','.join(ASSOCIATION)}", "where", f"cluster={cluster}")
    associations = _rows(ASSOCIATION, run_command(*of_cluster, f"user={user}"))
    accounts: dict[str, Fields] = {}
    names = {row["Account"] for row in associations}
    while names:
        rows = _rows(ASSOCIATION, run_command(*of_cluster, f"account={','.join(sorted(names))}"))
        above = [row for row in rows if not row["User"]]
        accounts |= {row["Account"]: row for row in above}
        names = {row["ParentName"] for row in above if row["ParentName"]} - accounts.keys()
    qos = {row["Name"]: row for row in _rows(QOS, run_command("sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS)}"))}
    default = run_command("sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount").strip()
    return Accounting(tuple(associations), accounts, qos, default or None)


def _rows(names: tuple[str, ...], text: str) -> list[Fields]:
    """Parse the output of `sacctmgr -nP` into rows of field -> text. Raises SlurmError."""
    rows = [line.split("|") for line in text.splitlines() if line]
    if any(len(row) != len(names) for row in rows):
        first = text.splitlines()[0]
        raise SlurmError(f"expected {len(names)} fields from sacctmgr; got: {first}", "failed")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def partition_problems(partition: Fields, request: ComponentRequest, accounting: Accounting) -> Iterator[Problem]:
    """Yield a problem for each limit of a partition that a request exceeds. Flags of a QOS may lift limits."""
    name = partition["PartitionName"]
    account, qos = accounting.account(request), accounting.qos_of(request, name)
    flags = accounting.qos.get(qos or "", {}).get("Flags", "")
    least, limit = partition.get("MinNodes", "0"), minutes(partition.get("MaxTime", "UNLIMITED"))
    if least.isdigit() and request.host.nodes < int(least) and "PartitionMinNodes" not in flags:
        message = f"got {request.host.nodes}; expected at least {least} in partition {name}"
        yield Problem(f"{request.key}.nodes", "too-small", message)
    if limit is not None and request.minutes > limit and "PartitionTimeLimit" not in flags:
        message = f"got {request.minutes}; expected at most {limit:g} minutes in partition {name} ({request.key})"
        yield Problem("cluster.time_min", "over-limit", message)
    for value, option, kind in ((account, "account", "Accounts"), (qos, "qos", "Qos")):
        allowed, denied = partition.get(f"Allow{kind}", "ALL"), partition.get(f"Deny{kind}", "")
        expected = f"one of {allowed}" if allowed != "ALL" else f"any but {denied}"
        if value is not None and (value in denied.split(",") or (allowed != "ALL" and value not in allowed.split(","))):
            message = f"got {value}, which may not use partition {name}; expected {expected}"
            yield Problem(request.key_of(f"--{option}"), "permission-denied", message)


# ---- whose limits count -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ApplicableLimits:
    """A component's request and the rows of accounting that limit it.

    The field `who` of a row names the holder of its limits, such as `QOS short`.
    """

    request: ComponentRequest
    qos: list[Fields]  # in order of precedence
    association: Fields
    accounts: list[Fields]  # the account and its ancestors

    @property
    def rows(self) -> dict[str, Fields]:
        """Return holder -> row, for all rows that limit the request."""
        return {row["who"]: row for row in (*self.qos, self.association, *self.accounts)}


def problems(accounting: Accounting, user: str, requests: list[tuple[ComponentRequest, Fields]]) -> Iterator[Problem]:
    """Yield problems of requests beyond the limits. requests: (request, a partition that accepts it) pairs."""
    applicable = [limits for request in requests if (limits := _applicable(accounting, user, *request))]
    for limits in applicable:
        yield from _job_problems(limits)
    yield from _sum_problems(applicable)


def _applicable(accounting: Accounting, user: str, request: ComponentRequest, partition: Fields) -> ApplicableLimits | None:
    """Return the limits of a component; None without an association, which Slurm itself refuses."""
    name, account = partition["PartitionName"], accounting.account(request)
    if (row := accounting.association(request, name)) is None:
        return None
    of_job = accounting.qos.get(accounting.qos_of(request, name) or "")
    rows = [row for row in (accounting.qos.get(partition.get("QoS", "")), of_job) if row]
    if of_job and "OverPartQOS" in of_job["Flags"]:
        rows.reverse()
    chain, above = [], account
    while above in accounting.accounts:
        chain.append({**accounting.accounts[above], "who": f"account {above}"})
        above = accounting.accounts[above]["ParentName"]
    qos = [{**of, "who": f"QOS {of['Name']}"} for of in rows]
    return ApplicableLimits(request, qos, {**row, "who": f"{user}'s account {account}"}, chain)


# ---- how much -----------------------------------------------------------------------------------------------------------


def _job_problems(limits: ApplicableLimits) -> Iterator[Problem]:
    request, rows = limits.request, [*limits.qos, limits.association]
    other_names = ", ".join(sorted(set(_names(limits.association["QOS"])) - {row["Name"] for row in limits.qos}))
    instead = f"another QOS (of {other_names})" if other_names else "another account, since there is no other QOS"
    for name, per_node in _per_node(request).items():
        for column, count, of in (("MaxTRES", request.host.nodes, "a job"), ("MaxTRESPerNode", 1, "a node of a job")):
            holder, limit = _first(rows, column, name)
            if limit is not None and per_node * count > limit:
                most_text = f"{int(limit // per_node)} nodes" if count > 1 or name == "node" else f"{limit:g}"
                message = (
                    f"got {_times(count, per_node, name)}, but {holder} allows {of} {limit:g}; expected at most {most_text}"
                )
                yield Problem(f"{request.key}.nodes", "over-limit", f"{message}. Try {instead}")
        holder, least = _first(limits.qos, "MinTRES", name)
        if least is not None and name in ("node", "gres/gpu") and per_node * request.host.nodes < least:
            message = f"got {_times(request.host.nodes, per_node, name)}, but {holder} is for jobs of {least:g} or more"
            yield Problem(request.key_of("--qos"), "too-small", f"{message}. Try {instead}")
    # A limit of a QOS takes precedence over the association.
    holder, most = next(((row["who"], most) for row in rows if (most := minutes(row["MaxWall"])) is not None), ("", None))
    if most is not None and request.minutes > most:
        message = f"got {request.minutes}; expected at most {most:g} minutes, the limit of {holder} for {request.key}"
        yield Problem("cluster.time_min", "over-limit", f"{message}. Try less, or {instead}")


def _sum_problems(applicable: list[ApplicableLimits]) -> Iterator[Problem]:
    """Yield a problem for each limit that the components' requests exceed together."""
    for holder, row in {holder: row for limits in applicable for holder, row in limits.rows.items()}.items():
        under = [limits for limits in applicable if holder in limits.rows]
        key, of = under[-1].request.key, " + ".join(limits.request.key for limits in under)
        # A resource that a QOS limits is not limited by associations.
        settled = set() if holder.startswith("QOS ") else {t for s in under for qos in s.qos for t in tres(qos["GrpTRES"])}
        for column, whom in (("GrpTRES", ""), ("MaxTRESPU", " a user"), ("MaxTRESPA", " an account")):
            for resource, limit in tres(row.get(column, "")).items():
                amounts = [s.request.host.nodes * _per_node(s.request).get(resource, 0) for s in under]
                if sum(amounts) > limit and resource not in settled:
                    terms = " + ".join(f"{amount:g}" for amount in amounts)
                    most = f"expected at most the {limit:g} that {holder} allows{whom}"
                    message = f"got {terms} {UNITS[resource]} at once ({of}); {most}"
                    yield Problem(f"{key}.nodes", "over-limit", f"{message}. Try fewer nodes, or another QOS or account")
        for column, whom in (("GrpJobs", ""), ("MaxJobs", ""), ("MaxJobsPU", " a user"), ("MaxJobsPA", " an account")):
            if (text := row.get(column, "")) and len(under) > int(text):
                most = f"expected at most the {text} that {holder} allows{whom} at once"
                message = f"got {len(under)} components ({of}), each a job to Slurm; {most}. Try another QOS or account"
                yield Problem(under[-1].request.key_of("--qos"), "over-limit", message)


def _per_node(request: ComponentRequest) -> dict[str, float]:
    return {"node": 1, "cpu": request.cpus, "gres/gpu": request.gpus, "mem": request.memory_mb}


def _first(rows: list[Fields], column: str, name: str) -> tuple[str, float | None]:
    """Return (holder, limit) of the first row with this limit; ("", None) if there is none."""
    limits = ((row["who"], tres(row.get(column, "")).get(name)) for row in rows)
    return next(((holder, limit) for holder, limit in limits if limit is not None), ("", None))


def _times(count: int, amount: float, name: str) -> str:
    return f"{count} nodes" if name == "node" else f"{f'{count} x ' * (count > 1)}{amount:g} {UNITS[name]}"
