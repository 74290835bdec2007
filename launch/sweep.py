"""Run a suite of recipes over seeds and check its gates with `python launch/sweep.py sweep=NAME [key=value ...]`.

On Slurm the command submits all jobs, and a check that depends on them, and returns. On this machine it runs to the end. The
sweep's folder, runs/sweeps/NAME/ID, holds the reports: report.html, report.md, junit.xml. A suite with a section `search`
searches hyperparameters instead: the command runs to its end.

A search resolves the recipe at all corners of the space; with more than 64, at both ends of each parameter. The price of a
search is the plan of the costliest corner; with more than four corners, only the lowest and the highest are planned. Once a
search has begun, dry_run=true prints the overrides of each trial, and `python launch/status.py DIR` shows the runs. The report
of a search has the best value over trials, parallel coordinates, the importance of each parameter (PED-ANOVA), the curves, and
all trials with their recipes.

Exit status: 0 if the sweep passed or was submitted; 1 if a gate failed; 2 if the suite has problems (nothing is submitted).

Imports neither torch nor transformers, so it starts fast on a login node.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.recipes.trust import Trust, trusting
from launch.sweeps import gates, search_loop, search_space, submission, suite, verdict
from launch.sweeps.gates import GateResult
from launch.sweeps.submission import Price
from launch.sweeps.sweep_folder import LOCK_S, PROBE_S, Queue, SweepFolder, SweepJob, SweepPlan
from launch.terminal import command_line, console
from launch.terminal.command_line import Key
from launch.terminal.safe_text import on_one_line, plain
from pipeline.config import Problem, RecipeError

POLL_S = 2.0


@dataclass(frozen=True)
class SweepRequest:
    """The command line."""

    sweep: Annotated[str | None, Key("NAME", "a file in recipes/sweeps/, without .yaml, or a path to one")] = None
    overrides: Annotated[
        list[str],
        Key(
            "key=value",
            "a key of the suite (max_concurrent=2, runs.NAME.overrides.sft.max_num_steps=50) or of all recipes",
            others=True,
        ),
    ] = field(default_factory=list)
    id: Annotated[
        str | None, Key("ID", "the sweep's id; default: today's date. The same command again continues the sweep")
    ] = None
    wait: Annotated[bool, Key("true", "on Slurm: wait for the check, and exit with its verdict")] = False
    update_baseline: Annotated[bool, Key("true", "write this sweep's values as the new baseline")] = False
    dry_run: Annotated[bool, Key("true", "print the jobs; write nothing")] = False
    trust: Annotated[bool, Key("true", "dry run: also import the code that the recipes name")] = False
    check: Annotated[Path | None, Key("DIR", "check a sweep's gates, as its last job does; retry failed runs, once")] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that is missing, malformed or contradicts another one."""
        if self.sweep is None and self.check is None:
            yield Problem("sweep", "missing-value", "got no sweep; expected sweep=NAME, or check=DIR")
        if self.check and (self.sweep or self.overrides or self.id or self.wait or self.dry_run):
            yield Problem(
                "check",
                "contradiction",
                "got other keys too; expected at most update_baseline=true, since a sweep that has begun cannot change",
            )
        if self.id is not None and not suite.NAME.fullmatch(self.id):
            yield suite.bad_name("id", self.id)


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, SweepRequest, execute, arguments)


def execute(request: SweepRequest) -> int:
    """Begin, continue or check a sweep. Raises RecipeError."""
    own = _unset_slurm_variables()
    try:
        if request.check:
            return check(request.check, request.update_baseline, own)
        with trusting(Trust.LISTED if request.dry_run and not request.trust else Trust.EVERYTHING):
            return begin(request)
    except KeyboardInterrupt:
        print("\nsubmitted jobs go on; the same command continues the sweep", file=sys.stderr)
        raise


def _unset_slurm_variables() -> str | None:
    """Unset the variables of the surrounding Slurm job (the check, or scrontab's), which new jobs must not inherit.

    Return the id of that job; None outside of one.
    """
    own = os.environ.get("SLURM_JOB_ID")
    for key in [key for key in os.environ if key.startswith("SLURM_") and key != "SLURM_CONF"]:
        del os.environ[key]
    return own


# ---- begin and continue -------------------------------------------------------------------------------------------------


def begin(request: SweepRequest) -> int:
    """Begin or continue a sweep, and return the exit status. Raises RecipeError."""
    assert request.sweep is not None, "SweepRequest.problems lets no such request pass"
    loaded = suite.load(request.sweep, request.overrides)
    name = request.id or date.today().isoformat()
    folder = SweepFolder(loaded.folder(name))
    if folder.begun:
        folder.refuse_other(loaded.suite, loaded.overrides)
    searched = loaded.suite.search
    if searched and request.update_baseline:
        raise RecipeError(Problem("update_baseline", "has-no-effect", "a search has no gates, and so no baseline"))
    compares = any(gate.needs_baseline for run in loaded.suite.runs for gate in loaded.suite.gates_of(run).values())
    if compares and gates.read_baseline(loaded.baseline) is None and not request.update_baseline:
        note = f"no baseline yet ({loaded.baseline}): gates that need a baseline fail; update_baseline=true writes it"
        console.print_field("note", note, f"# {note}")
    if folder.begun and (searched or not request.dry_run):
        jobs, executor, price = [], folder.plan.executor, None
    else:
        jobs, executor, price = submission.jobs_of(loaded, folder.path)
    if request.dry_run:
        show(loaded, folder, jobs, executor, price)
        return 0
    with folder.locked(PROBE_S):
        folder.take_up()
        if not folder.begun:
            stored = "" if searched else str(loaded.baseline)
            folder.begin(loaded.suite, SweepPlan(name, executor, str(Path.cwd()), stored, loaded.overrides, jobs))
        folder.refuse_other(loaded.suite, loaded.overrides)  # with which another process may have begun it meanwhile
        if request.update_baseline:
            folder.request_baseline(True)
        if (over := verdict.read(folder.path)) and not request.update_baseline:
            for gate in over["verdicts"]:
                if gate["outcome"] != GateResult.PASSED.value:
                    console.print_state(gate["outcome"], on_one_line(f"{gate['run']}, {gate['gate']}: {gate['said']}"))
            print(f"{over['summary']}\n{folder.path} is complete; id=NAME begins another {'search' if searched else 'sweep'}")
            return 0 if over["passed"] else 1
        size = searched and f"{searched.number_of_trials} trials, {searched.parallel} at once"
        print(f"{folder.title}: {size or f'{len(folder.plan.jobs)} jobs'}, in {folder.path}", flush=True)
        if price:
            print(price, flush=True)
        if searched:
            return search_loop.run(folder)
        if executor == "local":
            submission.run_jobs(folder, folder.plan.jobs)
            return report(folder)
        if not submission.submit(folder):
            return report(folder)
    return follow(folder) if request.wait else 0


def show(loaded: suite.LoadedSuite, folder: SweepFolder, jobs: list[SweepJob], executor: str, price: Price | None) -> None:
    """Print the jobs of a sweep; of a search its price and its corners or, once it has begun, its trials."""
    if searched := loaded.suite.search:
        size = f"{searched.number_of_trials} trials by {searched.sampler}, {searched.parallel} at once"
    else:
        size = f"{len(jobs)} jobs on {executor}, at most {loaded.suite.max_concurrent} at once"
    print(f"{folder.title}: {size}, in {folder.path}")
    if searched and folder.begun:
        search_loop.show(folder)
    elif searched:
        print(price or "its price is not known: the plan has no times")
        for corner in search_space.corners(searched):
            values = [*loaded.suite.overrides_of(searched, loaded.overrides), *suite.as_arguments(corner)]
            print(f"corner: recipe={searched.recipe} {' '.join(values)}")
    else:
        print(*jobs, sep="\n")


# ---- check and report ---------------------------------------------------------------------------------------------------


def check(path: Path, update_baseline: bool, own: str | None) -> int:
    """Retry failed jobs under Slurm; if no job is due or live, evaluate the gates and write the reports.

    own: the id of this process's Slurm job. Raises RecipeError.
    """
    folder = SweepFolder(path)
    executor = folder.plan.executor
    os.chdir(folder.plan.cwd)
    with folder.locked(LOCK_S):
        if folder.suite.search is not None:
            return search_loop.report(folder)
        if update_baseline:
            folder.request_baseline(True)
        if executor == "slurm" and not verdict.read(folder.path) and submission.submit(folder, own):
            return 0
        return report(folder)


def report(folder: SweepFolder) -> int:
    """Check the gates, write the reports, and print failed, skipped and retried gates. Return 0 if the sweep passed, else 1."""
    result = verdict.conclude(folder)
    folder.request_baseline(False)  # it is written, or cannot be
    verdict.write(result)
    for gate in result.verdicts:
        if gate.outcome is not GateResult.PASSED or "RETRIED" in gate.message:
            console.print_state(gate.outcome.value, on_one_line(f"{gate.run}, {gate.gate}: {gate.message}"))
    for note in map(on_one_line, result.notes):
        console.print_field("note", note, f"note: {note}")
    print(f"{result.summary}\n{result.folder}/report.html", flush=True)
    return 0 if result.passed else 1


def follow(folder: SweepFolder) -> int:
    """Wait until a check has written the verdict, and return the exit status."""
    printed: dict[str, str] = {}
    while not (over := verdict.read(folder.path)):
        now = Queue("slurm")
        submission.print_changes(folder.job_states(queue=now), printed)
        if not folder.check_job(queue=now):
            time.sleep(POLL_S)  # it may have submitted the next check, or be writing the verdict
            if not folder.check_job() and not verdict.read(folder.path):
                print(f"error: the check ended without a verdict. See {folder.path}/check.log", file=sys.stderr)
                return 1
        time.sleep(POLL_S)
    print(plain((folder.path / "report.md").read_text()))
    return 0 if over["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
