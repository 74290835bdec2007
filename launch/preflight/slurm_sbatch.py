"""Test requests with sbatch without submitting them: whether sbatch parses the options, and whether Slurm accepts them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import NamedTuple

from launch.executors import slurm_client
from launch.executors.slurm import directives
from launch.executors.slurm_client import SlurmError, host_names
from launch.executors.slurm_environment import unset_for_sbatch
from launch.preflight.slurm_nodes import Cluster
from launch.preflight.slurm_request import ComponentRequest, option_name
from pipeline.config import Problem

TESTS_S = 40.0
"""Time for all tests of a recipe together. A test after that raises SlurmError."""
STARTS = re.compile(r"^sbatch: Job \d+ to start at .* processors on (?:nodes )?(\S+)", re.M)
NO_ANSWER = re.compile(r"unable to contact|timed out|socket|connection|configuration source|slurm backup|munge", re.I)
"""Matches errors of sbatch about the cluster rather than the request."""
DECORATION = re.compile(r"^(\w+: )?((error|fatal): )?(batch job submission failed: |allocation failure: )?", re.I)
OPTION_CODES = {"unrecognized": "unknown-key", "requires an argument": "missing-value", "doesn't allow": "wrong-type"}


def sentence(output: str) -> str:
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
        return "" if error.kind != "failed" or NO_ANSWER.search(error.output) else sentence(error.output)
    return ""


def _near(option: str) -> str:
    try:
        option_names = re.findall(r"--([a-z][a-z-]+)", slurm_client.run_command("sbatch", "--help"))
    except SlurmError:
        return ""
    near = get_close_matches(option_name(option), option_names, 1)
    return f". Did you mean '{near[0]}'?" if near else ""


# ---- whether Slurm accepts a request ------------------------------------------------------------------------------------


class SbatchResult(NamedTuple):
    """The result of one test request."""

    refusal: str = ""  # Slurm's message; empty: Slurm accepts the request
    nodes: str = ""  # where it would run, in Slurm's short form


class SbatchTester:
    """Tests requests with `sbatch --test-only`, which considers only nodes that are up."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + TESTS_S

    def __call__(self, options: Iterable[str], *instead: str) -> SbatchResult:
        """Return the result of a test request with `options`. instead: options that override them. Raises SlurmError."""
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
            return SbatchResult(refusal=sentence(error.output))
        match = STARTS.search(output)
        return SbatchResult(nodes=match[1] if match else "")

    def nodes_for(self, request: ComponentRequest, cluster: Cluster) -> frozenset[str]:
        """Return all nodes suitable for a request, including nodes that are down."""
        excluded = [option.partition("=")[2] for option in request.options if option_name(option) == "exclude"]
        nodes: set[str] = set()
        least = cluster.least_nodes(request)
        while more := self._most_nodes(request, least, len(cluster.nodes), [*excluded, *sorted(nodes)]):
            nodes |= more
            least = 1  # the rest of a partition may have fewer
        return frozenset(nodes | (cluster.may_return(request) - set(host_names(",".join(excluded)))))

    def _most_nodes(self, request: ComponentRequest, least: int, available: int, excluded: list[str]) -> set[str]:
        """Return the nodes of the largest request of `least` to `available` nodes that Slurm accepts; none if it refuses all.

        excluded: host lists of nodes that the request excludes.
        """
        without = [f"--exclude={','.join(excluded)}"] if excluded else []
        low, count, high, best = least - 1, least, available + 1, None
        while high - low > 1:
            answer = self(request.options, "--time=1", f"--nodes={count}", *without)
            low, high, best = (low, count, best) if answer.refusal else (count, high, answer)
            count = (low + high) // 2
        if best is None:
            return set()
        if not best.nodes:  # accepted, with the message of another version
            raise SlurmError("`sbatch --test-only` does not report the nodes of a job", "failed")
        return set(host_names(best.nodes))
