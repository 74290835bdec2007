"""Derive the state of a run from its job, if Slurm or this machine can be queried, and from its folder.

Queries have a time limit. If the job cannot be queried (it is on another machine, scontrol is missing, slurmctld is slow), the
folder may still tell that the run ended; else the state is `unknown`, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from launch.executors import slurm, slurm_client
from launch.executors.record import JobRecord, read_record
from launch.executors.slurm_client import TERMINAL, JobComponent, SlurmError
from launch.runs import run_files
from launch.runs.run_folder import RunFolder
from pipeline.config import RecipeError

MAX_QUERIES = 8
"""Number of jobs that are queried at the same time."""

StateName = Literal["done", "running", "waiting", "failed", "stopped", "unknown"]
"""`stopped`: somebody cancelled the run, or asked it to save and stop. `failed`: the run ended incomplete by itself."""


@dataclass(frozen=True)
class RunState:
    """The state of a run: whether it is running, how it ended, and the state of its job."""

    name: StateName
    why: str = ""
    job: str = ""  # for people, e.g. `Slurm job 17`
    components: Mapping[str, JobComponent] = field(default_factory=dict)
    ends_by: float | None = None  # unix seconds of the job's time limit; None: the job does not run, or has no known limit


@dataclass(frozen=True)
class _JobState:
    components: Mapping[str, JobComponent]
    ends_by: float | None = None
    ended: bool = False


class _Unknown(Exception):
    """Raised if the job cannot be queried. The message says why."""


def states(runs: Sequence[RunFolder]) -> list[RunState]:
    """Return the states of many runs. At most MAX_QUERIES jobs are queried at a time, and no job of a run with a done.json."""
    with ThreadPoolExecutor(MAX_QUERIES) as pool:
        return list(pool.map(state, runs))


def state(run: RunFolder) -> RunState:
    """Return the state of one run: unknown if a file cannot be read, or is being rewritten."""
    try:
        return _state(run)
    except OSError as error:
        return RunState("unknown", f"{error.filename} cannot be read: {error.strerror}")


def _state(run: RunFolder) -> RunState:
    record = read_record(run.folder)
    is_done, reason = (run.folder / "done.json").exists(), _why_early(run)
    if record is None:
        return RunState(
            "done" if is_done else "unknown", reason if is_done else "it has never been submitted: there is no job.json"
        )
    job = f"{'Slurm' if record.executor == 'slurm' else record.executor} job {record.job_id}"
    if is_done:
        return RunState("done", reason, job=job)
    try:
        job_state = _query_slurm(run, record) if record.executor == "slurm" else _query_local(run, record)
    except _Unknown as reason:
        return _state_from_folder(run, str(reason), job)
    job_states = {part.state for part in job_state.components.values()}
    reason = next((part.reason for part in job_state.components.values() if part.reason), "")
    if job_state.ended:
        as_asked = bool(run.attempts) and run.attempts[-1].stopped_as_asked
        name: StateName = "stopped" if as_asked or job_states & {"CANCELLED", "REVOKED"} else "failed"
        verdict = run.attempts[-1].verdict if run.attempts else None
        ending = f"its job ended as {' and '.join(sorted(job_states))}, and the run is not complete"
        return RunState(name, (verdict or reason).removeprefix("stop: ") or ending, job, job_state.components)
    running = bool(job_states & {"RUNNING", "COMPLETING", "SIGNALING", "SUSPENDED", "STAGE_OUT"})
    return RunState("running" if running else "waiting", reason, job, job_state.components, job_state.ends_by)


def _why_early(run: RunFolder) -> str:
    """Return why a complete run stopped early; "" if it did not stop early, or is not complete."""
    completion = run_files.completion(run.folder / "done.json")
    return (completion or {}).get("early_stop") or ""


def _state_from_folder(run: RunFolder, no_answer: str, job: str) -> RunState:
    """Return the state of a run whose job cannot be queried. no_answer: the reason why the job cannot be queried."""
    latest = run.attempts[-1] if run.attempts else None
    if latest and (verdict := latest.verdict) and verdict.startswith("stop"):
        return RunState("stopped" if latest.stopped_as_asked else "failed", verdict.removeprefix("stop: "), job)
    if latest and not latest.verdict and latest.failure:
        return RunState("failed", "a rank failed, and the attempt has no verdict", job)
    return RunState("unknown", no_answer, job)


# ---- queries ------------------------------------------------------------------------------------------------------------


def _query_local(run: RunFolder, record: JobRecord) -> _JobState:
    try:
        status = record.attach(run.folder).status(now=True)
    except RecipeError:
        raise _Unknown(f"its processes are on {record.host}; query its state on that machine") from None
    components = {name: JobComponent(record.job_id, status.state, record.host, status.reason) for name in run.components}
    start = run.attempts[-1].started if run.attempts else None
    limit = run.value("cluster.time_min")
    ends_by = start + 60 * limit if start and limit and not status.ended else None
    return _JobState(components, ends_by, status.ended)


def _query_slurm(run: RunFolder, record: JobRecord) -> _JobState:
    if reason := slurm_client.unreachable():
        raise _Unknown(reason)
    if record.cluster and (this_cluster := slurm_client.cluster_name()) not in (None, record.cluster):
        raise _Unknown(f"its job is on the cluster {record.cluster}, not on {this_cluster}; query its state on that cluster")
    names = list(run.components)
    try:
        if job_parts := slurm_client.job_components(record.job_id):
            return _name_components(job_parts, names)
    except SlurmError as error:
        raise _Unknown(f"Slurm did not answer: {error}") from None
    if run.attempts and run.attempts[-1].verdict is None:
        return _JobState({name: JobComponent(record.job_id, slurm.GONE) for name in names}, ended=True)
    raise _Unknown("Slurm no longer knows its job")


def _name_components(job_parts: list[JobComponent], names: list[str]) -> _JobState:
    """Return the state of a job with the run's names for its components.

    The one component of a plain job gets the names of all components of the run, as one text.
    """
    names = names if len(job_parts) > 1 else [", ".join(names)]
    components = {names[i] if i < len(names) else f"component {i}": part for i, part in enumerate(job_parts)}
    has_ended = all(part.state in TERMINAL for part in job_parts)
    ends = [part.ends_by for part in job_parts if part.ends_by]
    return _JobState(components, None if has_ended else min(ends, default=None), has_ended)
