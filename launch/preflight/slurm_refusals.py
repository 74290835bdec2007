"""Find the recipe's keys that make Slurm refuse a component's request, and values that it would accept.

Slurm gives one message for many errors ("Requested node configuration is not available"). So the module tests the demands of a
request one after another, and a refused demand also with smaller values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from launch.executors.nodes import takes_whole_nodes
from launch.executors.slurm_client import SlurmError, host_names
from launch.preflight import slurm_limits
from launch.preflight.slurm_limits import Accounting
from launch.preflight.slurm_nodes import Cluster
from launch.preflight.slurm_request import ComponentRequest, option_name
from launch.preflight.slurm_sbatch import SbatchTester
from pipeline.config import Problem

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


@dataclass(frozen=True)
class RefusalExaminer:
    """Finds the causes of refusals by further test requests. All methods may raise SlurmError."""

    cluster: Cluster
    accounting: Accounting | None
    tester: SbatchTester
    notes: list[str]  # receives what only delays the job

    def refusal(self, request: ComponentRequest) -> list[Problem]:
        """Return the problems for which Slurm refuses a request, or accepts it and never starts it."""
        answer = self.tester(request.options)
        partitions = [self.cluster.partitions[name] for name in self.cluster.names(request)]
        against = [[*slurm_limits.partition_problems(partition, request, self.accounting)] for partition in partitions]
        # one partition without problems is enough
        problems = [problem for group in against for problem in group] if answer.refusal or all(against) else []
        if not answer.refusal:
            if not problems:
                self._note_idle(request, answer.nodes)
            return problems
        if not problems and MISFIT.search(answer.refusal) and self._waits(request):
            return []
        try:
            keys = {problem.key for problem in problems} | ({request.key_of("--partition")} if problems else set())
            problems += [problem for problem in self._causes(request, answer.refusal) if problem.key not in keys]
        except SlurmError:  # no time left for more tests
            problems.append(_problem(request.key, "a request", answer.refusal))
        return problems

    def _waits(self, request: ComponentRequest) -> bool:
        """Return whether Slurm refuses a request only because nodes are down or drained. The job then waits; a note says so."""
        if all(node.available for node in self.cluster.members(request)):
            return False
        suitable = self.tester.nodes_for(request, self.cluster)
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
            return self.tester([f"--nodes={self.cluster.least_nodes(request)}", *options], "--time=1").refusal

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
        elif name in ("account", "qos") and self.accounting:
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
