"""Check a recipe against Slurm. `sbatch --test-only` judges the request of each component.

Slurm gives one message for many errors ("Requested node configuration is not available"). To find the recipe's keys behind a
refusal, the demands of a request are tested one after another, and a refused demand also with smaller values.

Our own checks cover requests that Slurm accepts and never starts: components that do not fit together (here), and limits of
partitions and accounts that it does not enforce (`slurm_limits.py`). A check to which Slurm gives no answer becomes a note.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations

from launch.executors.components import components
from launch.executors.containers.runtimes import RUNTIMES
from launch.executors.nodes import takes_whole_nodes
from launch.executors.slurm_client import SlurmError, host_names
from launch.preflight import container_images, slurm_limits, slurm_request
from launch.preflight.slurm_cluster import Cluster, option_problems
from launch.preflight.slurm_limits import Accounting
from launch.preflight.slurm_request import ComponentRequest, option_name
from pipeline.config import Problem, Recipe

MISFIT = re.compile(r"configuration is not available|nodes? (are|is|not) (busy|not available|available)", re.I)
"""Refusals that Slurm also gives while suitable nodes are down."""
CODES = {
    "invalid partition": "not-a-choice",
    "no partition specified": "missing-value",
    "feature": "not-a-choice",
    "limit|node count|configuration|more processors": "over-limit",
    "permission denied|permitted|invalid (account|qos)": "permission-denied",
}
"""Pattern of a refusal -> code. Others are `refused-by-slurm`."""
OPEN = {"State": "UP", "AllowGroups": "ALL", "RootOnly": "NO", "ReqResv": "NO", "AllocNodes": "ALL"}
"""Settings of a partition that admit everybody."""
WEAK = ("job-name", "time", "signal", "partition", "exclusive")
"""Options that are not tested as the cause of a refusal: they cannot be it, or are taken as the cause if no other option is."""


def problems(recipe: Recipe, notes: list[str] | None = None) -> Iterator[Problem]:
    """Yield problems of requests that Slurm refuses, or accepts and never starts.

    notes: receives checks that were not possible, and expected waits.
    """
    notes = [] if notes is None else notes
    notes += slurm_request.notes(recipe)
    yield from container_problems(recipe, notes)
    requests = slurm_request.requests(recipe)
    if wrong := [*option_problems(requests)]:  # sbatch could not judge these components further
        yield from wrong
        bad_keys = {problem.key for problem in wrong}
        requests = [request for request in requests if not bad_keys & set(map(request.key_of, request.options))]
    try:
        yield from _site_problems(Cluster(), requests, notes)
    except SlurmError as why:
        notes.append(f"partitions, nodes and accounts were not checked: {why}")


def _site_problems(cluster: Cluster, requests: list[ComponentRequest], notes: list[str]) -> Iterator[Problem]:
    if len(requests) > 1 and (kind := cluster.config.get("SchedulerType", "sched/backfill")) != "sched/backfill":
        message = f"only Slurm's backfill scheduler starts a job of several components, and this cluster has {kind}"
        help_ = "its administrators can set SchedulerType=sched/backfill"
        yield Problem(f"{requests[-1].key}.nodes", "unsupported", f"{message}; {help_}")
    user = pwd.getpwuid(os.getuid()).pw_name
    accounting = _accounting(cluster, user, notes)
    examiner, accepted = RefusalExaminer(cluster, accounting, notes), []
    for request in requests:
        refusal = examiner.refusal(request)
        yield from refusal
        accepted += [] if refusal else [request]
    has_limits = bool(accounting.associations and cluster.enforced_parts & {"limits", "safe"})
    if len(accepted) > 1 or has_limits:
        suitable = {request: cluster.suitable(request) for request in accepted}
        yield from _start_together(suitable)
        if has_limits:
            counted = [cluster.as_counted(request, names) for request, names in suitable.items()]
            yield from slurm_limits.problems(accounting, user, [(request, cluster.partition(request)) for request in counted])


def _accounting(cluster: Cluster, user: str, notes: list[str]) -> Accounting:
    """Return the user's accounting; empty, with a note, if the cluster does not enforce it, or sacctmgr does not answer."""
    if "associations" not in cluster.enforced_parts:
        notes.append("accounts and QOS were not checked: this cluster does not enforce them")
        return Accounting()
    try:
        return slurm_limits.accounting(cluster.config["ClusterName"], user)
    except SlurmError as why:
        notes.append(f"accounts and QOS were not checked: {why}")
        return Accounting()


def _start_together(suitable: dict[ComponentRequest, frozenset[str]]) -> Iterator[Problem]:
    """Yield a problem if there are too few suitable nodes to start all components at once, each on nodes of its own.

    suitable: request of a component -> names of its suitable nodes. Slurm accepts such a job, and it waits forever. By Hall's
    theorem nodes can be assigned if and only if, for every set of components, at least as many nodes are suitable for one or
    more of them as the set requests.
    """
    for count in range(2, len(suitable) + 1):
        for group in combinations(suitable, count):
            requested = sum(request.host.nodes for request in group)
            available = len(frozenset().union(*(suitable[request] for request in group)))
            if requested > available:
                terms = " + ".join(str(request.host.nodes) for request in group)
                yield Problem(
                    f"{group[-1].key}.nodes",
                    "over-limit",
                    f"{', '.join(f'{request.key}.nodes' for request in group)} ask for {terms} nodes, but there are {available}"
                    f" suitable ones; expected at most {available} in total. Try fewer, or cluster.share_nodes=true to put"
                    " components on the same nodes",
                )
                return


def container_problems(recipe: Recipe, notes: list[str]) -> Iterator[Problem]:
    """Yield a problem for each image key if the container runtime is missing.

    notes: receives warnings that an image's import delays the start, and that the runtime could not be checked.
    """
    used = [f"cluster.{name}.container_image" for name, component in components(recipe).items() if component.container_image]
    if not used:
        return
    runtime = RUNTIMES[recipe.cluster.container_runtime]
    notes += container_images.import_notes(recipe) if runtime.pulls else []
    yield from runtime.installation_problems(used, notes)


# ---- refusals -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RefusalExaminer:
    """Finds the causes of refusals by further test requests. All methods may raise SlurmError."""

    cluster: Cluster
    accounting: Accounting
    notes: list[str]  # receives what only delays the job

    def refusal(self, request: ComponentRequest) -> list[Problem]:
        """Return the problems for which Slurm refuses a request, or accepts it and never starts it."""
        refusal, nodes = self.cluster.test(request.options)
        partitions = [self.cluster.partitions[name] for name in self.cluster.names(request)]
        against = [[*slurm_limits.partition_problems(partition, request, self.accounting)] for partition in partitions]
        # one partition without problems is enough
        problems = [problem for group in against for problem in group] if refusal or all(against) else []
        if not refusal:
            if not problems:
                self._note_idle(request, nodes)
            return problems
        if not problems and MISFIT.search(refusal) and self._waits(request):
            return []
        try:
            keys = {problem.key for problem in problems} | ({request.key_of("--partition")} if problems else set())
            problems += [problem for problem in self._causes(request, refusal) if problem.key not in keys]
        except SlurmError:  # no time left for more tests
            problems.append(_problem(request.key, "a request", refusal))
        return problems

    def _waits(self, request: ComponentRequest) -> bool:
        """Return whether Slurm refuses a request only because nodes are down or drained. The job then waits; a note says so."""
        if all(node.available for node in self.cluster.members(request)):
            return False
        suitable = self.cluster.suitable(request)
        up = sum(self.cluster.nodes[name].available for name in suitable)
        if len(suitable) < request.host.nodes:
            return False
        self.notes.append(
            f"{request.key}.nodes: {request.host.nodes}, but only {up} of {len(suitable)} suitable nodes are in service now."
            " The others are down or drained, so the job waits"
        )
        return True

    def _note_idle(self, request: ComponentRequest, nodes: str) -> None:
        """Add a note on GPUs that the job occupies and does not use. nodes: the nodes of the job, as Slurm's host list."""
        names = host_names(nodes) if takes_whole_nodes(request.host) else []
        least = min((self.cluster.nodes[name].gpus for name in names if name in self.cluster.nodes), default=0)
        if 0 < request.gpus < least:
            self.notes.append(
                f"{request.keys('gpus_per_node')}: {request.gpus}, but the job takes whole nodes of {least} or more GPUs."
                f" Try {request.key}.exclusive=false with cpus_per_task and mem to leave unused GPUs to other jobs"
            )

    def _causes(self, request: ComponentRequest, message: str) -> Iterator[Problem]:
        """Yield a problem for each key that makes Slurm refuse a request. message: Slurm's refusal of the whole request.

        The options other than demands are tested first. If Slurm accepts these, the demands are added one after another. A
        demand that Slurm refuses is reported, and replaced with the largest value that Slurm accepts. If Slurm refuses no
        demand, the time limit is too long.
        """
        demands = _demands(request)
        tested = {option_name(option) for _, _, templates in demands for option in templates}
        basic = [option for option in request.options if option_name(option) not in tested]

        def refused(options: Sequence[str]) -> str:
            """Return Slurm's refusal of a job of one minute with these options; "" if it accepts the job."""
            return self.cluster.test([f"--nodes={self.cluster.least_nodes(request)}", *options], "--time=1")[0]

        if refusal := refused(basic):
            may = (option for option in basic if option_name(option) not in WEAK)
            guilty = next((option for option in may if not refused([o for o in basic if o != option])), "--partition")
            key = request.key_of(guilty)
            value = guilty.partition("=")[2] or ",".join(request.partitions) or option_name(guilty)
            yield _problem(key, value, refusal, self._choices(request, option_name(guilty)))
            return
        accepted, is_time = [*basic], True
        for name, value, templates in demands:
            if refusal := refused([*accepted, *(template.format(value) for template in templates)]):
                low, high, is_time = 0, value if isinstance(value, int) else 0, False
                while high - low > (max(1, high // 32) if name == "mem" else 1):
                    middle = (low + high) // 2
                    fitting = not refused([*accepted, *(template.format(middle) for template in templates)])
                    low, high = (middle, high) if fitting else (low, middle)
                yield self._refused_demand(request, name, value, low, refusal, accepted[len(basic) :])
                value = low
            accepted += [template.format(value) for template in templates] if value else []
        if is_time:
            yield _problem("cluster.time_min", request.minutes, message)

    def _refused_demand(
        self, request: ComponentRequest, name: str, value: int | str, most: int, refusal: str, accepted: list[str]
    ) -> Problem:
        """Return the problem of a demand that Slurm refuses. most: the largest value that it accepts with `accepted`."""
        key = request.key_of(f"--{name}") if name == "constraint" else f"{request.key}.{name}"
        context, unit = f" with {' '.join(accepted)}" if accepted else "", "M" if name == "mem" else ""
        expected = f"; expected at most {most}{unit}{context}" if most else self._choices(request, name) or context
        requested = f"{value}{unit}" + (f" ({request.keys(name)})" if len(request.together) > 1 else "")
        return _problem(key, requested, refusal, expected)

    def _choices(self, request: ComponentRequest, name: str) -> str:
        """Return the end of a message that names the valid values of an option; "" if they are not known."""
        if name == "partition":
            settings = {partition: self.cluster.partitions[partition] for partition in self.cluster.names(request)}
            restrictions = [
                f"{partition} has {setting}={fields[setting]}"
                for partition, fields in settings.items()
                for setting, usual in OPEN.items()
                if fields.get(setting, usual) != usual
            ]
            if restrictions:
                reservation = any("ReqResv" in text for text in restrictions)
                help_ = f". Try {request.key}.sbatch_options={{reservation: NAME}}" if reservation else ""
                return f"; {', '.join(restrictions)}{help_}"
            values, choices = [*request.partitions], [*self.cluster.partitions]
        elif name == "constraint":
            values = request.features
            choices = sorted({feature for node in self.cluster.members(request) for feature in node.features})
        elif name in ("account", "qos") and self.accounting.associations:
            values, rows = [getattr(request.host, name) or ""], self.accounting.associations
            accounts = {row["Account"] + (f" (in {row['Partition']})" if row["Partition"] else "") for row in rows}
            choices = sorted(accounts if name == "account" else {qos for row in rows for qos in row["QOS"].split(",") if qos})
        else:
            return ""
        near = [close for value in values if value not in choices for close in get_close_matches(value, choices, 1)]
        return f". Did you mean '{near[0]}'?" if near else f"; available: {', '.join(choices) or 'none'}"


def _demands(request: ComponentRequest) -> list[tuple[str, int | str, list[str]]]:
    """Return (key below the component's, value, templates of sbatch's options) for what a request demands of its nodes."""
    host, tasks = request.host, "--ntasks-per-node={}"
    demands: list[tuple[str, int | str, list[str]]] = [
        ("constraint", request.host.constraint or "", ["--constraint={}"]),
        ("ranks_per_node", host.ranks_per_node or 0, [tasks]),
        ("gpus_per_node", request.gpus, ["--gpus-per-node={}", *([] if host.ranks_per_node else [tasks])]),
        ("cpus_per_task", host.cpus_per_task or 0, ["--cpus-per-task={}"]),
        ("mem", round(request.memory_mb), ["--mem={}M"]),
        ("nodes", request.host.nodes, ["--nodes={}"]),
    ]
    return [demand for demand in demands if demand[1]]


def _problem(key: str, requested: object, refusal: str, expected: str = "") -> Problem:
    code = next((code for words, code in CODES.items() if re.search(words, refusal, re.I)), "refused-by-slurm")
    return Problem(key, code, f"got {requested}, which Slurm refuses: {refusal}{expected}")
