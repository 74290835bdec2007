"""Ask a cluster: its partitions and nodes, and by `sbatch --test-only` whether Slurm accepts a request."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

from launch.executors import slurm_client
from launch.executors.nodes import memory, takes_whole_nodes
from launch.executors.slurm import directives
from launch.executors.slurm_client import Fields, SlurmError, configuration, gpus, host_names, parse_records, run_command
from launch.executors.slurm_environment import unset_for_sbatch
from launch.preflight.slurm_request import ComponentRequest, option_name
from pipeline.config import Problem

TESTS_S = 40.0
"""Time for all tests of a recipe together. A test after that raises SlurmError."""
STARTS = re.compile(r"^sbatch: Job \d+ to start at .* processors on (?:nodes )?(\S+)", re.M)
NO_ANSWER = re.compile(r"unable to contact|timed out|socket|connection|configuration source|slurm backup|munge", re.I)
"""Matches errors of sbatch about the cluster rather than the request."""
DECORATION = re.compile(r"^(\w+: )?((error|fatal): )?(batch job submission failed: |allocation failure: )?", re.I)
OPTION_CODES = {"unrecognized": "unknown-key", "requires an argument": "missing-value", "doesn't allow": "wrong-type"}
UNAVAILABLE = frozenset(
    ("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "INVAL", "INVALID_REG", "UNKNOWN", "NOT_RESPONDING")
)
"""States in which a node takes no jobs until an administrator repairs it."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node's resources and state."""

    name: str
    cpus: int
    memory_mb: int  # available to jobs
    gpus: int
    features: frozenset[str]
    partitions: frozenset[str]
    available: bool  # False in a state of UNAVAILABLE


class Cluster:
    """The cluster's settings, partitions and nodes, read from Slurm, which also tests requests. Methods raise SlurmError."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + TESTS_S
        self.config = configuration()
        # -a: includes partitions hidden from this user, who may still request them
        records = parse_records(run_command("scontrol", "-a", "-o", "show", "partition"))
        self.partitions = {fields["PartitionName"]: fields for fields in records}

    @cached_property
    def nodes(self) -> dict[str, ClusterNode]:
        """Return name -> node for all nodes, which are read on first use."""
        nodes = map(_node, parse_records(run_command("scontrol", "-a", "-o", "show", "node")))
        return {node.name: node for node in nodes}

    @property
    def enforced_parts(self) -> frozenset[str]:
        """Return the parts of accounting that Slurm enforces: associations, limits, qos, safe."""
        return frozenset(self.config.get("AccountingStorageEnforce", "none").lower().split(","))

    def names(self, request: ComponentRequest) -> list[str]:
        """Return the names of a request's partitions that exist; Slurm's default partition if the request names none."""
        default = [name for name, fields in self.partitions.items() if fields.get("Default") == "YES"]
        return [name for name in request.partitions or default if name in self.partitions]

    def partition(self, request: ComponentRequest) -> Fields:
        """Return the first existing partition of a request."""
        return self.partitions[self.names(request)[0]]

    def least_nodes(self, request: ComponentRequest) -> int:
        """Return the minimum number of nodes of a job in the request's partitions."""
        return max(1, min((int(self.partitions[name].get("MinNodes", 1)) for name in self.names(request)), default=1))

    def members(self, request: ComponentRequest) -> list[ClusterNode]:
        """Return the nodes in the request's partitions."""
        names = set(self.names(request))
        return [node for node in self.nodes.values() if names & node.partitions]

    def _may_return(self, request: ComponentRequest) -> set[str]:
        """Return the names of unavailable nodes whose resources would satisfy a request."""
        needs, features = (request.cpus, request.gpus, request.memory_mb), set(request.features)
        return {
            node.name
            for node in self.members(request)
            if not node.available
            and all(has >= need for has, need in zip((node.cpus, node.gpus, node.memory_mb), needs, strict=True))
            and (not features or features & node.features)
        }

    def as_counted(self, request: ComponentRequest, names: Collection[str]) -> ComponentRequest:
        """Return the request as limits count it: a whole node counts with all its CPUs and GPUs, mem=0 with all its memory.

        names: names of suitable nodes, whose smallest values are taken.
        """
        nodes = [self.nodes[name] for name in names if name in self.nodes]
        if memory(request.host) == "0" and nodes:
            request = replace(request, memory_mb=min(node.memory_mb for node in nodes))
        if takes_whole_nodes(request.host) and nodes:
            request = replace(request, cpus=min(node.cpus for node in nodes), gpus=min(node.gpus for node in nodes))
        return request

    # ---- sbatch ---------------------------------------------------------------------------------------------------------

    def test(self, options: Iterable[str], *instead: str) -> tuple[str, str]:
        """Return (Slurm's refusal of a request with `options`, where it would run); "" for what there is not.

        `sbatch --test-only` considers only nodes that are up. instead: options that override `options`.
        """
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise SlurmError(f"the tests of this recipe took more than {TESTS_S:g} s", "late")
        script = "\n".join(["#!/bin/bash", *directives(*options), ""])
        command = [*unset_for_sbatch(), "sbatch", "--test-only", *instead]
        try:
            output = slurm_client.run_command(*command, timeout_s=min(remaining_s, slurm_client.ANSWER_S), script=script)
        except SlurmError as error:
            if error.kind != "failed" or NO_ANSWER.search(error.output):
                raise
            return _sentence(error.output), ""
        match = STARTS.search(output)
        return "", match[1] if match else ""

    def suitable(self, request: ComponentRequest) -> frozenset[str]:
        """Return the names of all nodes suitable for a request, including nodes that are down."""
        excluded = [option.partition("=")[2] for option in request.options if option_name(option) == "exclude"]
        nodes: set[str] = set()
        least = self.least_nodes(request)
        while more := self._most_nodes(request, least, len(self.nodes), [*excluded, *sorted(nodes)]):
            nodes |= more
            least = 1  # the rest of a partition may have fewer
        return frozenset(nodes | (self._may_return(request) - set(host_names(",".join(excluded)))))

    def _most_nodes(self, request: ComponentRequest, least: int, available: int, excluded: list[str]) -> set[str]:
        """Return the nodes of the largest request of `least` to `available` nodes that Slurm accepts; none if it refuses all.

        excluded: host lists of nodes that the request excludes.
        """
        without = [f"--exclude={','.join(excluded)}"] if excluded else []
        low, count, high, best = least - 1, least, available + 1, None
        while high - low > 1:
            refusal, names = self.test(request.options, "--time=1", f"--nodes={count}", *without)
            low, high, best = (low, count, best) if refusal else (count, high, names)
            count = (low + high) // 2
        if best is None:
            return set()
        if not best:  # accepted, with the message of another version
            raise SlurmError("`sbatch --test-only` does not report the nodes of a job", "failed")
        return set(host_names(best))


def _node(fields: Fields) -> ClusterNode:
    features = fields.get("AvailableFeatures", "(null)")
    states = {state.strip("*~#!%$@^-") for state in fields["State"].split("+")}
    return ClusterNode(
        name=fields["NodeName"],
        cpus=int(fields.get("CPUEfctv") or fields["CPUTot"]),
        memory_mb=int(fields["RealMemory"]) - int(fields.get("MemSpecLimit", 0)),
        gpus=gpus(fields.get("Gres", "")),
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        partitions=frozenset(fields.get("Partitions", "").split(",")),
        available=not states & UNAVAILABLE and "*" not in fields["State"],
    )


def _sentence(output: str) -> str:
    """Return the error message in a Slurm command's output, without the command's name and its hints."""
    lines = [DECORATION.sub("", line).strip() for line in output.splitlines() if not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(filter(None, lines)))


# ---- whether sbatch parses the options ----------------------------------------------------------------------------------


def option_problems(requests: Iterable[ComponentRequest]) -> Iterator[Problem]:
    """Yield problems of options that sbatch does not have or cannot parse.

    Parsing needs no Slurm controller. Yields nothing without sbatch or without a configured cluster.
    """
    try:
        slurm_client.run_command("sbatch", "--version")
    except SlurmError:
        return
    for request in requests:
        flags = [option for option in request.options if "=" not in option and option != "--exclusive"]
        assignments = [option for option in request.options if "=" in option]
        for option in (*flags, *(assignments if _parse_error(*assignments, "--version") else ())):
            reason = _parse_error(option, *(["--version"] if option in assignments else []))
            usual = "bad-format" if reason and option in assignments else ""  # a flag is refused for the missing script
            if code := next((code for words, code in OPTION_CODES.items() if words in reason), usual):
                near = _near(option) if code == "unknown-key" else ""
                yield Problem(request.key_of(option), code, f"got {option}, which sbatch refuses: {reason}{near}")


def _parse_error(*options: str) -> str:
    """Return why sbatch cannot parse options; "" if it can, or if the reason is not known.

    If --version is the last option, sbatch parses the options before it and exits. But an option that lacks its value would
    take --version as the value. Without --version, sbatch parses the options and then reports that the script is missing.
    """
    try:
        slurm_client.run_command(*unset_for_sbatch(), "sbatch", *options)
    except SlurmError as error:
        return "" if error.kind != "failed" or NO_ANSWER.search(error.output) else _sentence(error.output)
    return ""


def _near(option: str) -> str:
    try:
        option_names = re.findall(r"--([a-z][a-z-]+)", slurm_client.run_command("sbatch", "--help"))
    except SlurmError:
        return ""
    near = get_close_matches(option_name(option), option_names, 1)
    return f". Did you mean '{near[0]}'?" if near else ""
