"""Run a suite of recipes over seeds and judge what came of it: python launch/sweep.py sweep=NAME [key=value ...]

On Slurm the command submits all jobs, with the check behind them, and returns. On this machine it stays to the end. The reports
are in the sweep's folder, runs/sweeps/NAME/ID: report.html, report.md, junit.xml.

Ends with status 0 if the sweep passed, or was submitted; 1 if a gate failed; 2 if the suite is wrong (nothing is submitted).

Imports neither torch nor transformers: a login node answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch import command_line
from launch.command_line import Key
from launch.pages.document import add_plotly
from launch.sweeps import baseline, submission, suite, verdict
from launch.sweeps.folder import LOCK_S, SweepFolder, SweepPlan
from launch.sweeps.html_report import page
from launch.sweeps.jobs import jobs_of
from launch.sweeps.queue import Queue
from launch.sweeps.text_reports import junit, markdown
from launch.sweeps.verdict import Outcome, SweepResult
from launch.terminal import on_one_line, plain
from pipeline.config import Problem
from pipeline.storage import write_durably

POLL_S = 2.0


@dataclass(frozen=True)
class SweepRequest:
    """The command line."""

    sweep: Annotated[str | None, Key("NAME", "a file in recipes/sweeps/, without .yaml, or a path to one")] = None
    overrides: Annotated[
        list[str],
        Key(
            "key=value",
            "a key of the suite (max_concurrent=2, runs.NAME.overrides.sft.max_num_steps=50), or of every recipe",
            others=True,
        ),
    ] = field(default_factory=list)
    id: Annotated[
        str | None, Key("ID", "which one of this name; default: today's date. The same command again goes on with it")
    ] = None
    wait: Annotated[bool, Key("true", "on Slurm: stay until it has been judged, and end with the verdict")] = False
    update_baseline: Annotated[bool, Key("true", "make what this sweep measures the baseline of later ones")] = False
    dry_run: Annotated[bool, Key("true", "print the jobs, and write nothing")] = False
    check: Annotated[
        Path | None, Key("DIR", "judge a sweep that was begun, as the job at its end does; retry what failed, once")
    ] = None

    def problems(self) -> Iterator[Problem]:
        if self.sweep is None and self.check is None:
            yield Problem("sweep", "missing-value", "the command line needs sweep=NAME, or check=DIR")
        if self.check and (self.sweep or self.overrides or self.id or self.wait or self.dry_run):
            yield Problem(
                "check",
                "contradiction",
                "got other keys too; expected update_baseline=true at most: the sweep is what it was begun as",
            )
        if self.id is not None and not suite.NAME.fullmatch(self.id):
            yield suite.bad_name("id", self.id)


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, SweepRequest, execute, arguments)


def execute(request: SweepRequest) -> int:
    """Raises RecipeError."""
    own = _forget_own_job()
    try:
        return check(request.check, request.update_baseline, own) if request.check else begin(request)
    except KeyboardInterrupt:
        print("\nwhat was submitted goes on; the same command goes on with the sweep", file=sys.stderr)
        raise


def _forget_own_job() -> str | None:
    """Remove the variables of the Slurm job around us (the check, or scrontab's): new jobs must not get them. Return its id."""
    own = os.environ.get("SLURM_JOB_ID")
    for key in [key for key in os.environ if key.startswith("SLURM_") and key != "SLURM_CONF"]:
        del os.environ[key]
    return own


# ---- beginning, and going on --------------------------------------------------------------------------------------------


def begin(request: SweepRequest) -> int:
    """Raises RecipeError."""
    asked = suite.load(request.sweep, request.overrides)
    name = request.id or date.today().isoformat()
    folder = SweepFolder(Path(asked.suite.folder) / asked.suite.name / name)
    if folder.begun:
        folder.refuse_other(asked.suite, asked.overrides)
    if baseline.read(asked.baseline) is None and not request.update_baseline:
        print(f"# no baseline yet, {asked.baseline}: gates that need it will fail; update_baseline=true writes it")
    if request.dry_run:
        return show(asked, folder)
    jobs, executor = ([], folder.plan.executor) if folder.begun else jobs_of(asked, folder.path)
    with folder.locked():
        if not folder.begun:
            plan = SweepPlan(name, executor, str(Path.cwd()), str(asked.baseline), asked.overrides, jobs)
            folder.begin(asked.suite, plan)
        if request.update_baseline:
            folder.want_baseline(True)
        if (over := _verdict(folder)) and not request.update_baseline:
            print(f"{over['summary']}\n{folder.path} is complete; id=NAME begins another")
            return 0 if over["passed"] else 1
        print(f"{folder.title}: {len(folder.plan.jobs)} jobs, in {folder.path}", flush=True)
        if executor == "local":
            submission.run_here(folder)
            return report(folder)
        if not _submit(folder):
            return report(folder)
    return follow(folder) if request.wait else 0


def show(asked: suite.LoadedSuite, folder: SweepFolder) -> int:
    jobs, executor = jobs_of(asked, folder.path)
    print(f"{folder.title}: {len(jobs)} jobs on {executor}, at most {asked.suite.max_concurrent} at once, in {folder.path}")
    for job in jobs:
        after = f"  after {', '.join(job.needs)}" if job.needs else ""
        print(f"{job.name}: recipe={job.recipe} {' '.join(job.overrides)}{after}")
    return 0


def _submit(folder: SweepFolder, own: str | None = None) -> bool:
    """Submit under Slurm what is missing, and the check behind it. Return whether there is anything to wait for.

    own: the id of the job that this is, if it is the check. While another check waits, what failed is left to that.
    """
    queue = Queue("slurm")
    job_states = folder.job_states(queue)
    checker = folder.check_job(queue, but=own)
    live = [each for each in job_states if each.state == "live"]
    todo = submission.due(job_states, folder.suite.retries)
    if checker:
        todo = [each for each in todo if each.state == "missing"]
    if not live and not todo:
        return checker is not None
    submission.submit_all(folder, todo, live)
    if checker and not todo:
        print(f"{len(live)} jobs are under way, and Slurm job {checker} judges them")
        return True
    waits_for = [each.record.job_id for each in folder.job_states(Queue("slurm")) if each.state == "live"]
    print(
        f"the check: Slurm job {submission.submit_check(folder, waits_for)}, when {len(waits_for)} jobs have ended", flush=True
    )
    return True


# ---- the end ------------------------------------------------------------------------------------------------------------


def check(path: Path, update_baseline: bool, own: str | None) -> int:
    """Judge, unless something has to be tried again first. own: the Slurm job that this is. Raises RecipeError."""
    folder = SweepFolder(path)
    executor = folder.plan.executor
    os.chdir(folder.plan.cwd)
    with folder.locked(LOCK_S):
        if update_baseline:
            folder.want_baseline(True)
        if executor == "slurm" and not _verdict(folder) and _submit(folder, own):
            return 0
        return report(folder)


def report(folder: SweepFolder) -> int:
    """Judge, and write the reports into the folder. Return 0 if the sweep passed, else 1."""
    result = verdict.conclude(folder)
    write_durably(folder.path / "junit.xml", junit(result))
    write_durably(folder.path / "report.md", markdown(result))
    write_durably(folder.path / "report.html", page(result))
    add_plotly(folder.path)
    folder.want_baseline(False)  # it has been written, or could not be
    verdict.write(result)
    tell(result)
    return 0 if result.passed else 1


def tell(result: SweepResult) -> None:
    for each in result.verdicts:
        if each.outcome is not Outcome.PASSED or "RETRIED" in each.said:
            print(on_one_line(f"{each.outcome.value}: {each.run}, {each.gate}: {each.said}"))
    for note in result.notes:
        print(on_one_line(f"note: {note}"))
    print(f"{result.summary}\n{result.folder}/report.html", flush=True)


def _verdict(folder: SweepFolder) -> dict | None:
    path = folder.path / "verdict.json"
    return json.loads(path.read_text()) if path.exists() else None


def follow(folder: SweepFolder) -> int:
    """Wait until the sweep has been judged, by whichever check, and return its exit status."""
    said: dict[str, str] = {}
    while not (over := _verdict(folder)):
        queue = Queue("slurm")
        job_states = folder.job_states(queue)
        submission.tell(job_states, said)
        if not folder.check_job(queue) and not _verdict(folder):
            time.sleep(POLL_S)  # it may have submitted the next, or just have written
            if not folder.check_job(Queue("slurm")) and not _verdict(folder):
                print(f"error: the check ended without a verdict: {folder.path}/check.log", file=sys.stderr)
                return 1
        time.sleep(POLL_S)
    print(plain((folder.path / "report.md").read_text()))
    return 0 if over["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
