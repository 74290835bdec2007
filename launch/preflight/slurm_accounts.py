"""Whether Slurm's accounting lets this user run the job: accounts, QOS, and the limits that they set.

sbatch takes most jobs that no limit will ever let start, and they wait for ever. The order in which limits count:
https://slurm.schedmd.com/resource_limits.html. Heterogeneous components are jobs of their own to these limits.

Leaves out what other jobs use at the moment (it passes), limits of minutes (TRESMins), and limits of a GPU's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from launch.preflight.slurm_cluster import Accounting, Fields, SlurmCluster, minutes, tres
from launch.preflight.slurm_request import Request

WHAT = {"node": "nodes", "cpu": "CPUs", "gres/gpu": "GPUs", "mem": "MB of memory"}


@dataclass(frozen=True)
class Holder:
    """Something that sets limits."""

    name: str  # "QOS short"
    row: Fields


@dataclass(frozen=True)
class Standing:
    """As what a component's job runs, once that is clear."""

    request: Request
    qos: tuple[Holder, ...]  # whose limits come first, first
    association: Holder
    accounts: tuple[Holder, ...]  # the account, and those above it


def effective_account(request: Request, accounting: Accounting | None) -> str | None:
    return request.account or (accounting.default_account if accounting else None)


def effective_qos(accounting: Accounting | None, request: Request, partition: str) -> str | None:
    """The one that is asked for, or the association's default; None where that cannot be told."""
    if request.qos or accounting is None:
        return request.qos
    row = _association(accounting, effective_account(request, accounting), partition)
    allowed = _names(row["QOS"]) if row else []
    return (row and row["DefaultQOS"]) or ("normal" if "normal" in allowed else allowed[0] if len(allowed) == 1 else None)


def problems(cluster: SlurmCluster, accounting: Accounting, user: str, requests: list[tuple[Request, Fields]]) -> Iterator[str]:
    """requests: each with a partition that will do for it."""
    standings = []
    for request, partition in requests:
        found = [*_standing(cluster, accounting, user, request, partition)]
        yield from (each for each in found if isinstance(each, str))
        standings += [each for each in found if isinstance(each, Standing)]
    if "limits" in cluster.enforced or "safe" in cluster.enforced:
        for standing in standings:
            yield from _of_one_job(standing)
        yield from _of_all(standings)


# ---- who may ------------------------------------------------------------------------------------------------------------


def _standing(
    cluster: SlurmCluster, accounting: Accounting, user: str, request: Request, partition: Fields
) -> Iterator[str | Standing]:
    """Problems, or, if there are none, what limits count."""
    account, name = effective_account(request, accounting), partition["PartitionName"]
    key, own = f"{request.key}.account", sorted({row["Account"] for row in accounting.associations})
    if not own:
        yield f"{key}: {user} has no account on cluster {cluster.config['ClusterName']}; its administrators give one"
        return
    if account not in own:
        yield f"{key}: {user} may not use account '{account}'; {_nearest(account or '', own)}"
        return
    row = _association(accounting, account, name)
    if row is None:
        only = sorted({row["Partition"] for row in accounting.associations if row["Account"] == account})
        others = ", ".join(other for other in own if other != account) or "none"
        yield f"{key}: account '{account}' is {user}'s in partition {', '.join(only)} only, not in {name}; others: {others}"
        return
    qos = effective_qos(accounting, request, name)
    if "qos" in cluster.enforced and request.qos:
        allowed = _names(row["QOS"])
        if qos not in accounting.qos:
            yield f"{request.key}.qos: there is no QOS '{qos}'; {_nearest(qos, allowed)}"
            return
        if qos not in allowed:
            yield f"{request.key}.qos: account '{account}' of {user} may not use QOS '{qos}'; {_nearest(qos, allowed)}"
            return
    of_job, of_partition = (accounting.qos.get(each or "") for each in (qos, partition.get("QoS")))
    holders = [Holder(f"QOS {of['Name']}", of) for of in (of_partition, of_job) if of]
    if of_job and "OverPartQOS" in of_job["Flags"]:
        holders.reverse()
    chain, above = [], account
    while above in accounting.accounts:
        chain.append(Holder(f"account {above}", accounting.accounts[above]))
        above = accounting.accounts[above]["ParentName"]
    yield Standing(request, tuple(holders), Holder(f"{user}'s account {account}", row), tuple(chain))


def _association(accounting: Accounting, account: str | None, partition: str) -> Fields | None:
    """The one for that partition, else the one for all of them."""
    rows = {row["Partition"]: row for row in accounting.associations if row["Account"] == account}
    return rows.get(partition) or rows.get("")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _nearest(name: str, among: list[str]) -> str:
    near = get_close_matches(name, among, 1)
    return f"did you mean '{near[0]}'?" if near else f"one of: {', '.join(among) or 'none'}"


# ---- how much -----------------------------------------------------------------------------------------------------------


def _on_a_node(request: Request) -> dict[str, float]:
    return {"node": 1, "cpu": request.cpus, "gres/gpu": request.gpus, "mem": request.memory_mb}


def _of_one_job(standing: Standing) -> Iterator[str]:
    request, holders = standing.request, (*standing.qos, standing.association)
    in_use = {holder.name.removeprefix("QOS ") for holder in standing.qos}
    instead = ", ".join(sorted(set(_names(standing.association.row["QOS"])) - in_use)) or "which there is none"
    for name, each in _on_a_node(request).items():
        for field, count, of in (("MaxTRES", request.nodes, "a job"), ("MaxTRESPerNode", 1, "a node of a job")):
            limit = _first(holders, field, name)
            if limit and each * count > limit[1]:
                fewer = f"at most {int(limit[1] // each)} nodes" if count > 1 or name == "node" else f"at most {limit[1]:g}"
                yield (
                    f"{request.key}.nodes: {_times(count, each, name)}, and {limit[0]} allows {of} {limit[1]:g}; {fewer}, or"
                    f" another QOS (of {instead})"
                )
        least = _first(standing.qos, "MinTRES", name)
        if least and name in ("node", "gres/gpu") and each * request.nodes < least[1]:
            yield (
                f"{request.key}.qos: {_times(request.nodes, each, name)}, and {least[0]} is for jobs of {least[1]:g} or more;"
                f" another QOS (of {instead})"
            )
    for holder in holders:
        if (most := minutes(holder.row["MaxWall"])) is not None:
            if request.minutes > most:
                yield (
                    f"cluster.time_min: {request.minutes} minutes, and {holder.name} allows {most:g} ({request.key}.qos); at"
                    f" most {most:g}, or another QOS (of {instead})"
                )
            break  # a QOS that says something goes before the association


def _of_all(standings: list[Standing]) -> Iterator[str]:
    """What is counted over all components."""
    holders = {
        holder.name: holder for standing in standings for holder in (*standing.qos, standing.association, *standing.accounts)
    }
    for name, holder in holders.items():
        under = [s for s in standings if name in [each.name for each in (*s.qos, s.association, *s.accounts)]]
        keys = ", ".join(f"{s.request.key}.nodes" for s in under)
        # What a QOS limits, associations no longer do.
        settled = set() if name.startswith("QOS ") else {t for s in under for q in s.qos for t in tres(q.row["GrpTRES"])}
        for field in ("GrpTRES", "MaxTRESPU", "MaxTRESPA"):
            for what, limit in tres(holder.row.get(field, "")).items():
                amounts = [s.request.nodes * _on_a_node(s.request).get(what, 0) for s in under]
                if sum(amounts) > limit and what not in settled:
                    terms = " + ".join(f"{amount:g}" for amount in amounts)
                    yield (
                        f"{keys}: {terms} {WHAT[what]} at once, and {name} allows {_whom(field)}{limit:g}; fewer nodes, or"
                        " another QOS or account"
                    )
        for field in ("GrpJobs", "MaxJobs", "MaxJobsPU", "MaxJobsPA"):
            if (text := holder.row.get(field, "")) and len(under) > int(text):
                yield (
                    f"{', '.join(f'{s.request.key}.qos' for s in under)}: each component is a job to Slurm, and {name} allows"
                    f" {_whom(field)}{text} at once, not {len(under)}; another QOS or account"
                )


def _first(holders: tuple[Holder, ...], field: str, name: str) -> tuple[str, float] | None:
    """(who sets the limit, the limit): the first who does."""
    found = ((holder.name, tres(holder.row.get(field, "")).get(name)) for holder in holders)
    return next(((who, limit) for who, limit in found if limit is not None), None)


def _times(count: int, each: float, name: str) -> str:
    return f"{count} nodes" if name == "node" else f"{count} x {each:g} {WHAT[name]}" if count > 1 else f"{each:g} {WHAT[name]}"


def _whom(field: str) -> str:
    return "a user " if field.endswith("PU") else "an account " if field.endswith("PA") else ""
