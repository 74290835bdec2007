"""The state of a run, from its job, where that can be asked, and from its folder.

Asking is bounded in time. If a job cannot be asked (another machine's, no scontrol here, a slow slurmctld), the state says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from launch import slurm_client
from launch.executors import slurm
from launch.executors.record import JobRecord, read_record
from launch.run_folder import RunFolder
from launch.slurm_client import TERMINAL, JobPart, SlurmError
from pipeline.config import RecipeError

ASKERS = 8
"""Number of jobs that are asked for at the same time."""

Word = Literal["done", "running", "waiting", "failed", "stopped", "unknown"]


@dataclass(frozen=True)
class Part:
    """A component of the job."""

    name: str
    state: str  # Slurm's word, or the same for a local job
    nodes: str = ""  # in Slurm's short form
    reason: str = ""


@dataclass(frozen=True)
class RunState:
    word: Word  # stopped: by somebody, before its end; failed: by itself
    why: str = ""
    job: str = ""  # for people, e.g. `Slurm job 17`
    parts: Sequence[Part] = ()
    ends_by: float | None = None  # unix seconds: the job's time limit, if it runs and that is known


@dataclass(frozen=True)
class _Answer:
    parts: Sequence[Part]
    ends_by: float | None = None
    ended: bool = False


class _NoAnswer(Exception):
    """The job cannot be asked: why."""


def states(runs: Sequence[RunFolder]) -> list[RunState]:
    """Return the states of many runs. Jobs are asked for several at a time, and only those of runs without a done.json."""
    with ThreadPoolExecutor(ASKERS) as askers:
        return list(askers.map(state, runs))


def state(run: RunFolder) -> RunState:
    """Return the state of one run: unknown if a file cannot be read, or is being written anew."""
    try:
        return _state(run)
    except OSError as error:
        return RunState("unknown", f"{error.filename} cannot be read: {error.strerror}")


def _state(run: RunFolder) -> RunState:
    record = read_record(run.folder)
    done = (run.folder / "done.json").exists()
    if record is None:
        return RunState("done" if done else "unknown", "" if done else "it has never been submitted: there is no job.json")
    job = f"{'Slurm' if record.executor == 'slurm' else record.executor} job {record.job_id}"
    if done:
        return RunState("done", job=job)
    try:
        answer = _ask_slurm(run, record) if record.executor == "slurm" else _ask_local(run, record)
    except _NoAnswer as why:
        return _by_folder(run, str(why), job)
    words = {part.state for part in answer.parts}
    why = next((part.reason for part in answer.parts if part.reason), "")
    if answer.ended:
        word: Word = "stopped" if words & {"CANCELLED", "REVOKED"} else "failed"
        verdict = run.attempts[-1].verdict if run.attempts else None
        ending = f"its job ended as {' and '.join(sorted(words))}, and the run is not complete"
        return RunState(word, (verdict or why).removeprefix("stop: ") or ending, job, answer.parts)
    running = bool(words & {"RUNNING", "COMPLETING", "SIGNALING", "SUSPENDED", "STAGE_OUT"})
    return RunState("running" if running else "waiting", why, job, answer.parts, answer.ends_by)


def _by_folder(run: RunFolder, silence: str, job: str) -> RunState:
    """Return the state of a run whose job cannot be asked. silence: why."""
    latest = run.attempts[-1] if run.attempts else None
    if latest and (verdict := latest.verdict) and verdict.startswith("stop"):
        return RunState("failed", verdict.removeprefix("stop: "), job)
    if latest and not latest.verdict and latest.failure:
        return RunState("failed", "a rank failed, and nobody has said what follows", job)
    return RunState("unknown", silence, job)


# ---- asking -----------------------------------------------------------------------------------------------------------------


def _ask_local(run: RunFolder, record: JobRecord) -> _Answer:
    try:
        status = record.attach(run.folder).status(now=True)
    except RecipeError:
        raise _NoAnswer(f"its processes are on {record.host}; ask there") from None
    parts = [Part(name, status.state, record.host, status.reason) for name in run.components]
    started = run.attempts[-1].started if run.attempts else None
    limit = run.of("cluster.time_min")
    ends_by = started + 60 * limit if started and limit and not status.ended else None
    return _Answer(parts, ends_by, status.ended)


def _ask_slurm(run: RunFolder, record: JobRecord) -> _Answer:
    if why := slurm_client.unreachable():
        raise _NoAnswer(why)
    if record.cluster and (here := slurm_client.cluster_name()) not in (None, record.cluster):
        raise _NoAnswer(f"its job is on the cluster {record.cluster}, and this is {here}; ask there")
    names = list(run.components)
    try:
        if parts := slurm_client.job_parts(record.job_id):
            return _of_parts(parts, names)
    except SlurmError as error:
        raise _NoAnswer(f"Slurm did not answer: {error}") from None
    if run.attempts and run.attempts[-1].verdict is None:
        return _Answer([Part(name, slurm.GONE) for name in names], ended=True)
    raise _NoAnswer("Slurm does not know its job any more")


def _of_parts(found: list[JobPart], names: list[str]) -> _Answer:
    names = names if len(found) > 1 else [", ".join(names)]  # of a plain job, which holds them all
    parts = [
        Part(names[i] if i < len(names) else f"component {i}", part.state, part.nodes, part.reason)
        for i, part in enumerate(found)
    ]
    ended = all(part.state in TERMINAL for part in found)
    ends = [part.ends_by for part in found if part.ends_by]
    return _Answer(parts, None if ended else min(ends, default=None), ended)
