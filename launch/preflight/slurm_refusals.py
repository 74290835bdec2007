"""Find the recipe's keys that make Slurm refuse a component's request, and values that it would accept.

Slurm gives one message for many errors ("Requested node configuration is not available"). So the module tests the demands of a
request one after another, and a refused demand also with smaller values.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from launch.executors.slurm_client import SlurmError, host_names
from launch.preflight import slurm_limits
from launch.preflight.slurm_limits import Accounting
from launch.preflight.slurm_nodes import Cluster, partition_problems
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
TRIED, SHOWN = 12, 3
"""Maximum numbers of other partitions that are tried, and that are reported."""


@dataclass(frozen=True)
class ResourceDemand:
    """A resource or property that a component requests of its nodes."""

    key: str  # below the component's key
    value: int | str  # a number if a smaller value may be accepted
    template: str  # options of sbatch, separated by blanks; {} is the value
    step: int = 1  # precision of the largest accepted value

    def options(self, value: int | str) -> list[str]:
        """Return the options of sbatch that request `value` of this resource."""
        return [word.format(value) for word in self.template.split()]

    def most(self, fits: Callable[[list[str]], bool]) -> int:
        """Return the largest value below the demanded one that `fits` accepts; 0 if there is none.

        fits: a function from options of sbatch to whether Slurm accepts them.
        """
        low, high = 0, self.value if isinstance(self.value, int) else 0
        while high - low > self.step:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(self.options(middle)) else (low, middle)
        return low


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
        against = {name: [*self._partition_problems(request, name)] for name in self.cluster.names(request)}
        if not answer.refusal and not (against and all(against.values())):  # one partition without problems is enough
            self._note_idle(request, answer.nodes)
            return []
        problems = [problem for group in against.values() for problem in group]
        if answer.refusal:
            if not problems and MISFIT.search(answer.refusal) and self._waits(request):
                return []
            try:
                keys = {problem.key for problem in problems}
                keys |= {request.key_of("--partition")} if problems else set()  # already reported
                diagnosis = self._diagnosis(request, answer.refusal)
                problems += [problem for problem in diagnosis if problem.key not in keys]
            except SlurmError:  # no time left for more tests
                problems.append(_problem(request.key, "a request", answer.refusal))
        instead, key = self._other_partitions(request), request.key_of("--partition")
        if instead and not any(problem.key == key for problem in problems):
            message = f"got {_requested_value(request, key)}. Try {' or '.join(instead)}, which accepts all of {request.key}"
            problems.append(Problem(key, "refused-by-slurm", message))
        return problems

    def _partition_problems(self, request: ComponentRequest, name: str) -> Iterator[Problem]:
        account = slurm_limits.effective_account(request, self.accounting)
        qos = slurm_limits.effective_qos(self.accounting, request, name)
        flags = self.accounting.qos.get(qos or "", {}).get("Flags", "") if self.accounting else ""
        return partition_problems(self.cluster.partitions[name], request, account, qos, flags)

    def _waits(self, request: ComponentRequest) -> bool:
        """Return whether Slurm refuses a request only because nodes are down or drained. The job then waits; a note says so."""
        if all(node.available for node in self.cluster.members(request)):
            return False
        suitable = self.tester.nodes_for(request, self.cluster)
        up = sum(self.cluster.nodes[name].available for name in suitable)
        if len(suitable) < request.nodes:
            return False
        self.notes.append(
            f"{request.key}.nodes: {request.nodes}, but only {up} of {len(suitable)} suitable nodes are in service now."
            " The others are down or drained, so the job waits"
        )
        return True

    def _note_idle(self, request: ComponentRequest, nodes: str) -> None:
        """Add a note on GPUs that the job occupies and does not use. nodes: the nodes of the job, as Slurm's host list."""
        cluster_nodes = self.cluster.nodes
        gpus = (
            [cluster_nodes[name].gpus for name in host_names(nodes) if name in cluster_nodes]
            if request.takes_whole_nodes
            else []
        )
        if gpus and 0 < request.gpus < min(gpus):
            self.notes.append(
                f"{request.keys('gpus_per_node')}: {request.gpus}, but the job takes whole nodes of {min(gpus)} or more GPUs."
                f" Try {request.key}.exclusive=false with cpus_per_task and mem to leave unused GPUs to other jobs"
            )

    def _diagnosis(self, request: ComponentRequest, message: str) -> Iterator[Problem]:
        """Yield a problem for each key that makes Slurm refuse a request. message: Slurm's refusal of the whole request.

        The options other than demands are tested first. If Slurm accepts these, the demands are added one after another. A
        demand that Slurm refuses is reported, and replaced with the largest value that Slurm accepts. If Slurm refuses no
        demand, the time limit is too long.
        """
        demands = _demands(request)
        tested = {option_name(option) for demand in demands for option in demand.options(demand.value)}
        basic = [option for option in request.options if option_name(option) not in tested]

        def refused(options: Sequence[str]) -> str:
            """Return Slurm's refusal of a job of one minute with these options; "" if it accepts the job."""
            nodes = (
                []
                if any(option.startswith("--nodes=") for option in options)
                else [f"--nodes={self.cluster.least_nodes(request)}"]
            )
            return self.tester([*nodes, *options], "--time=1").refusal

        if refusal := refused(basic):
            may = (option for option in basic if option_name(option) not in WEAK)
            guilty = next(
                (option for option in may if not refused([candidate for candidate in basic if candidate != option])),
                "--partition",
            )
            key = request.key_of(guilty)
            yield _problem(key, _requested_value(request, key), refusal, self._choices(request, key))
            return
        accepted: list[str] = []
        fits = False
        for demand in demands:
            options = demand.options(demand.value)
            if refusal := refused([*basic, *accepted, *options]):
                fits, most = True, demand.most(lambda options: not refused([*basic, *accepted, *options]))  # noqa: B023 called here
                context = f" with {' '.join(accepted)}" if accepted else ""
                unit = "M" if demand.key == "mem" else ""
                key = request.key_of("--constraint") if demand.key == "constraint" else f"{request.key}.{demand.key}"
                expected = f"; expected at most {most}{unit}{context}" if most else self._choices(request, key) or context
                requested = f"{demand.value}{unit}" + (f" ({request.keys(demand.key)})" if len(request.together) > 1 else "")
                yield _problem(key, requested, refusal, expected)
                options = demand.options(most) if most else []
            accepted += options
        if not fits:
            yield _problem("cluster.time_min", request.minutes, message)

    def _choices(self, request: ComponentRequest, key: str) -> str:
        """Return the end of a message that names the valid values of a key; "" if they are not known."""
        name, chosen = _option(key), ""
        if name == "partition":
            choices: list[str] = [*self.cluster.partitions]
            settings = [(partition, name, usual) for partition in self.cluster.names(request) for name, usual in OPEN.items()]
            if restrictions := [
                f"{partition} has {name}={value}"
                for partition, name, usual in settings
                if (value := self.cluster.partitions[partition].get(name, usual)) != usual
            ]:
                reservation = any("ReqResv" in text for text in restrictions)
                help_ = f". Try {request.key}.sbatch_options={{reservation: NAME}}" if reservation else ""
                return f"; {', '.join(restrictions)}{help_}"
            chosen = next((partition for partition in request.partitions if partition not in choices), "")
        elif name == "constraint":
            choices = sorted({feature for node in self.cluster.members(request) for feature in node.features})
            words = re.findall(r"[\w.-]+", request.constraint or "")
            chosen = next((word for word in words if word not in choices), "")
        elif name in ("account", "qos") and self.accounting:
            chosen, rows = getattr(request, name), self.accounting.associations
            accounts = {row["Account"] + (f" (in {row['Partition']})" if row["Partition"] else "") for row in rows}
            choices = sorted(accounts if name == "account" else {qos for row in rows for qos in row["QOS"].split(",") if qos})
        else:
            return ""
        near = get_close_matches(chosen or "", choices, 1)
        return f". Did you mean '{near[0]}'?" if near else f"; available: {', '.join(choices) or 'none'}"

    def _other_partitions(self, request: ComponentRequest) -> list[str]:
        """Return a few other partitions that accept the request unchanged."""
        accepting: list[str] = []
        names = [name for name in self.cluster.partitions if name not in self.cluster.names(request)]
        with contextlib.suppress(SlurmError):  # no time left for more tests
            for name in names[:TRIED]:
                if len(accepting) == SHOWN:
                    break
                if not any(self._partition_problems(request, name)):
                    accepting += [] if self.tester(request.options, f"--partition={name}").refusal else [name]
        return accepting


def _demands(request: ComponentRequest) -> list[ResourceDemand]:
    host, memory, tasks_option = request.host, round(request.memory_mb), "--ntasks-per-node={}"
    demands = [
        ResourceDemand("constraint", request.constraint or "", "--constraint={}"),
        ResourceDemand("ranks_per_node", host.ranks_per_node or 0, tasks_option),
        ResourceDemand(
            "gpus_per_node",
            request.gpus,
            "--gpus-per-node={}" if host.ranks_per_node else f"--gpus-per-node={{}} {tasks_option}",
        ),
        ResourceDemand("cpus_per_task", host.cpus_per_task or 0, "--cpus-per-task={}"),
        ResourceDemand("mem", memory, "--mem={}M", step=max(1, memory // 32)),
        ResourceDemand("nodes", request.nodes, "--nodes={}"),
    ]
    return [demand for demand in demands if demand.value]


def _requested_value(request: ComponentRequest, key: str) -> str:
    name = _option(key)
    if name == "partition":
        return ",".join(request.partitions) or "null"
    return next((o.partition("=")[2] or name for o in request.options if request.key_of(o) == key), name)


def _option(key: str) -> str:
    """Return the option that a recipe's key or an environment variable sets: cluster.train.qos or SBATCH_QOS -> qos."""
    return key.removeprefix("SBATCH_").lower() if key.startswith("SBATCH_") else key.rpartition(".")[2]


def _problem(key: str, requested: object, refusal: str, expected: str = "") -> Problem:
    code = next((code for words, code in CODES.items() if re.search(words, refusal, re.I)), "refused-by-slurm")
    return Problem(key, code, f"got {requested}, which Slurm refuses: {refusal}{expected}")
