"""Answer the requests that read runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from launch.api.run import BaseRun
from launch.runs.status_text import plain_values
from launch.serving.access import User
from launch.serving.bodies import CheckpointAnswer, ExportAnswer, Me, MetricsAnswer, RunList
from launch.serving.run_cache import RunCache

MAX_RUNS = 1000
"""Maximum number of runs in one answer."""
MAX_RECORDS = 10_000
"""Maximum number of records of metrics in one answer."""

reading = APIRouter()


def sender(request: Request) -> User:
    """Return the user who sent a request; the application has checked the token."""
    return request.state.user


def runs(request: Request) -> RunCache:
    """Return the cache of the service's runs."""
    return request.app.state.runs


@reading.get("/me")
def me(request: Request) -> Me:
    """Return the sender of the request, and what they may do."""
    user = sender(request)
    return Me(name=user.name, role=user.role, writable=request.app.state.users.config.writable)


@reading.get("/runs")
def list_runs(
    request: Request,
    state: Annotated[str | None, Query(max_length=20, description="Only runs in this state, such as running.")] = None,
    owner: Annotated[str | None, Query(max_length=64, description="Only runs of this user.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_RUNS)] = 100,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> RunList:
    """Return the runs below the service's root, newest first."""
    found = [line for line in runs(request).lines() if state in (None, line["state"]) and owner in (None, line["owner"])]
    return RunList(total=len(found), runs=found[offset : offset + limit])


@reading.get("/runs/{run_id}")
def run_status(request: Request, run_id: str) -> dict[str, Any]:
    """Return the state of a run, as `python launch/status.py RUN_DIR json=true` prints it."""
    return runs(request).full(run_id)


@reading.get("/runs/{run_id}/metrics")
def metrics(
    request: Request,
    run_id: str,
    after_step: Annotated[int, Query(ge=-1, description="Only steps after this one.")] = -1,
    key: Annotated[list[str] | None, Query(max_length=100, description="Only these metrics.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_RECORDS)] = 1000,
) -> MetricsAnswer:
    """Return the metrics of a run by step: the first `limit` records after a step."""
    records = BaseRun(runs(request).folder(run_id)).metrics()
    kept = {"step", "time", *(key or ())}
    first = [each for each in records if each["step"] > after_step][:limit]
    return MetricsAnswer(
        records=[plain_values({name: value for name, value in each.items() if key is None or name in kept}) for each in first]
    )


@reading.get("/runs/{run_id}/rollouts")
def rollouts(
    request: Request,
    run_id: str,
    step: Annotated[int | None, Query(ge=0, description="Step of the rollouts; default: the latest with any.")] = None,
    validation: bool = False,
) -> JSONResponse:
    """Return the rollouts of a step, each with prompt, completion, reward and more."""
    run = BaseRun(runs(request).folder(run_id))
    return JSONResponse(plain_values(run.rollouts(step, validation=validation)))


@reading.get("/runs/{run_id}/checkpoints")
def checkpoints(request: Request, run_id: str) -> list[CheckpointAnswer]:
    """Return the complete checkpoints of a run, oldest first."""
    found = BaseRun(runs(request).folder(run_id)).checkpoints()
    return [CheckpointAnswer(step=each.step, folder=str(each.folder), metric=plain_values(each.metric)) for each in found]


@reading.get("/runs/{run_id}/evaluations")
def evaluations(request: Request, run_id: str) -> list[dict[str, Any]]:
    """Return what is known about a run's evaluations, for each suite, with the scores by step."""
    return runs(request).full(run_id).get("evaluations", [])


@reading.get("/runs/{run_id}/exports")
def exports(request: Request, run_id: str) -> list[ExportAnswer]:
    """Return the exports of a run: complete, running and failed ones."""
    return request.app.state.exports.of(runs(request).folder(run_id))
