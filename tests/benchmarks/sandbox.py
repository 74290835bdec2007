"""Benchmark sandbox starts and Python tool calls of this checkout and of another, in turns.

    python -m tests.benchmarks sandbox [--against FOLDER]

FOLDER is the root of another checkout, say of the commit before a change: `git worktree add FOLDER COMMIT`. The `pipeline` of
each runs in a process of its own, and they take turns, so other load on the machine affects both. Printed are medians over
turns: programs that do nothing and interpreters with one call, each in a sandbox of its own, and calls of one interpreter, one
after the other, all per second; CPU milliseconds of the first two, their guard and sandbox with them; and what this checkout
has of each for 1 of the other's, the median of each turn's ratio.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.environments.tools import ToolConfig, build_tool
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from tests.benchmarks.contender import Contender, Turns

ROOT = Path(__file__).parents[2]
TURNS, PROGRAMS, INTERPRETERS, CALLS = 15, 8, 4, 100
TIMEOUT_S = 60.0
CHILD = "child"
FIGURES = {
    "programs": "programs/s",
    "program": "CPU ms a program",
    "interpreters": "interpreters/s",
    "interpreter": "CPU ms an interpreter",
    "calls": "calls/s",
}


def main(against: Path | None) -> None:
    roots = {"this": ROOT} | ({"other": against.resolve()} if against else {})
    with tempfile.TemporaryDirectory() as folder:
        contenders = [Contender(name, _command(root), Path(folder) / name) for name, root in roots.items()]
        turns = [[contender.step() for contender in contenders] for _ in range(TURNS + 1)][1:]
        for contender in contenders:
            contender.close()
    for figure, title in FIGURES.items():
        medians = [statistics.median(turn[n][figure] for turn in turns) for n in range(len(contenders))]
        told = ", ".join(f"{name} {value:.2f}" for name, value in zip(roots, medians, strict=True))
        if against:
            told += f"; this / other {statistics.median(turn[0][figure] / turn[1][figure] for turn in turns):.3f}"
        print(f"{title}: {told}", flush=True)


def _command(root: Path) -> list[str]:
    return ["env", f"PYTHONPATH={root}", sys.executable, "-P", __file__, CHILD]


def _work() -> None:
    """Run the child's end."""
    turns, sandbox = Turns(), Sandbox(ResourceLimits())
    tool = build_tool(ToolConfig("python", {}))
    turns.reply({})
    while turns.wait():
        session = tool.open()
        session.call({"code": "1"}, TIMEOUT_S)
        calls, _ = _rate(lambda opened=session: opened.call({"code": "print(sum(range(100)))"}, TIMEOUT_S), CALLS)
        session.close()
        programs, program_ms = _rate(lambda: sandbox.run(["/usr/bin/true"]), PROGRAMS)
        interpreters, interpreter_ms = _rate(lambda: _call_once(tool), INTERPRETERS)
        turns.reply(
            {
                "programs": programs,
                "program": program_ms,
                "interpreters": interpreters,
                "interpreter": interpreter_ms,
                "calls": calls,
            }
        )


def _call_once(tool) -> None:
    session = tool.open()
    session.call({"code": "1"}, TIMEOUT_S)
    session.close()


def _rate(work: Callable[[], object], times: int) -> tuple[float, float]:
    """Return calls per second, and CPU milliseconds of each."""
    cpu_s, begun = _cpu_s(), time.perf_counter()
    for _ in range(times):
        work()
    return times / (time.perf_counter() - begun), 1e3 * (_cpu_s() - cpu_s) / times


def _cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    if sys.argv[1:] == [CHILD]:
        _work()
    else:
        parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sandbox")
        parser.add_argument("--against", type=Path)
        main(parser.parse_args().against)
