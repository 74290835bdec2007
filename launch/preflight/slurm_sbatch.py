"""Ask sbatch about requests without submitting them: whether it can read the options, and whether Slurm takes the request."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from launch import slurm_client
from launch.executors.slurm import directives
from launch.preflight.slurm_nodes import Cluster
from launch.preflight.slurm_request import ComponentRequest, option_name
from launch.slurm_client import SlurmError, host_names, without_het_variables
from pipeline.config import Problem

TESTS_S = 40.0
"""How long all tests of a recipe may take together; what is left then is not looked into."""
STARTS = re.compile(r"^sbatch: Job \d+ to start at .* processors on (?:nodes )?(\S+)", re.M)
NO_ANSWER = re.compile(r"unable to contact|timed out|socket|connection|configuration source|slurm backup|munge", re.I)
"""Messages of sbatch about the cluster, not about the request."""
DECORATION = re.compile(r"^(\w+: )?((error|fatal): )?(batch job submission failed: |allocation failure: )?", re.I)
OPTION_CODES = {"unrecognized": "unknown-key", "requires an argument": "missing-value", "doesn't allow": "wrong-type"}


def sentence(said: str) -> str:
    """Return what a Slurm command said, without its name and its hints."""
    lines = [DECORATION.sub("", line).strip() for line in said.splitlines() if not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(filter(None, lines)))


# ---- whether sbatch can read the options --------------------------------------------------------------------------------


def option_problems(requests: Iterable[ComponentRequest]) -> Iterator[Problem]:
    """Yield the options that sbatch does not have or cannot read. It needs no controller for that.

    Yields nothing where there is no sbatch, or where no cluster is configured.
    """
    try:
        slurm_client.run_command("sbatch", "--version")
    except SlurmError:
        return
    for request in requests:
        bare = [option for option in request.options if "=" not in option and option != "--exclusive"]
        full = [option for option in request.options if "=" in option]
        for option in (*bare, *(full if _unreadable(*full, "--version") else ())):
            why = _unreadable(option, *(["--version"] if option in full else []))
            code = next((code for words, code in OPTION_CODES.items() if words in why), "bad-format" if option in full else "")
            if why and code:
                near = _near(option) if code == "unknown-key" else ""
                yield Problem(request.key_of(option), code, f"got {option}, which sbatch refuses: {why}{near}")


def _unreadable(*options: str) -> str:
    """Return why sbatch cannot read options; "" if it can, or does not say.

    With --version it reads those before it, and ends. An option without a value that needs one would take --version for that:
    without it sbatch reads the options, and then misses the script.
    """
    try:
        slurm_client.run_command("sbatch", *options)
    except SlurmError as error:
        return "" if error.kind != "failed" or NO_ANSWER.search(error.output) else sentence(error.output)
    return ""


def _near(option: str) -> str:
    try:
        there = re.findall(r"--([a-z][a-z-]+)", slurm_client.run_command("sbatch", "--help"))
    except SlurmError:
        return ""
    near = get_close_matches(option_name(option), there, 1)
    return f". Did you mean '{near[0]}'?" if near else ""


# ---- whether Slurm takes a request --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SbatchResult:
    refusal: str = ""  # in Slurm's words; empty: Slurm takes the request
    nodes: str = ""  # on which it would run, in Slurm's short form


class SbatchTester:
    """Asks Slurm whether it would take a request, with `sbatch --test-only`, which counts only nodes that are up."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + TESTS_S

    def __call__(self, options: Iterable[str], *instead: str) -> SbatchResult:
        """instead: options that go before those of `options`, and before the environment's. Raises SlurmError."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SlurmError(f"the tests of this recipe took more than {TESTS_S:g} s", "late")
        script = "\n".join(["#!/bin/bash", *directives(*options), ""])
        command = [*without_het_variables(), "sbatch", "--test-only", *instead]
        try:
            told = slurm_client.run_command(*command, timeout_s=min(left, slurm_client.ANSWER_S), script=script)
        except SlurmError as error:
            if error.kind != "failed" or NO_ANSWER.search(error.output):
                raise
            return SbatchResult(refusal=sentence(error.output))
        found = STARTS.search(told)
        return SbatchResult(nodes=found[1] if found else "")

    def nodes_for(self, request: ComponentRequest, cluster: Cluster) -> frozenset[str]:
        """Return all nodes that would do for a request, those that are down just now included."""
        excluded = [option.partition("=")[2] for option in request.options if option_name(option) == "exclude"]
        found: set[str] = set()
        least = cluster.least_nodes(request)
        while more := self._most_nodes(request, least, len(cluster.nodes), [*excluded, *sorted(found)]):
            found |= more
            least = 1  # what is left of a partition may be fewer
        return frozenset(found | (cluster.may_return(request) - set(host_names(",".join(excluded)))))

    def _most_nodes(self, request: ComponentRequest, least: int, there: int, excluded: list[str]) -> set[str]:
        """Return the most nodes, from `least` to `there`, that Slurm would give a request at once. excluded: in short form."""
        without = [f"--exclude={','.join(excluded)}"] if excluded else []

        def ask(count: int) -> SbatchResult:
            return self(request.options, "--time=1", f"--nodes={count}", *without)

        if (best := ask(least)).refusal:
            return set()
        low, high = least, there + 1
        while high - low > 1:
            answer = ask(count := (low + high) // 2)
            low, high, best = (low, count, best) if answer.refusal else (count, high, answer)
        if not best.nodes:  # taken, so in words of another version
            raise SlurmError("`sbatch --test-only` does not say on which nodes a job would start", "failed")
        return set(host_names(best.nodes))
