"""Answer the requests that plan, submit, end, export and evaluate.

Each request calls the Python API in one of a few threads that are only for such requests, so that requests that read never wait
for them; a plan runs in its own process. A run belongs to the user who started the service, so `governed.py` says what the
overrides of a request may set. Nothing here imports code that a recipe names, or resolves a variable of the service's
environment.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request

from launch.api import evaluating, submitting
from launch.api.overrides import arguments, naming_arguments
from launch.api.training import Run
from launch.governance import audit_log
from launch.recipes.trust import Trust, trusting
from launch.runs import steer_request, suites
from launch.serving import governed
from launch.serving.access import AccessError, User
from launch.serving.bodies import (
    ChangeAsked,
    ChangeBody,
    EvaluationAnswer,
    EvaluationBody,
    ExportAnswer,
    ExportBody,
    PlanAnswer,
    ProblemsAnswer,
    RecipeBody,
    SubmissionBody,
    Submitted,
)
from launch.serving.routes import runs, sender
from launch.serving.run_cache import SEPARATOR
from launch.submission.prepare import Prepared
from pipeline.config import RECIPES, Problem, RecipeError, config_tree, interpolation

REFUSED = {status: {"model": ProblemsAnswer} for status in (401, 403, 404, 409, 413, 422)}
"""The answers of refused requests, for the OpenAPI page."""

changing = APIRouter(responses=REFUSED)  # pyright: ignore[reportArgumentType]  # the type is of a wider dict
SWEEPS = "sweeps"
"""The folder in ROOT/USER with the sweeps that USER submits."""
AT_ONCE = {"submissions": 1, "sweep_submissions": 1, "changes": 8}
"""Kind of request -> how many of them run at once.

There is one submission at a time, so that two for the same folder run one after the other.
"""
Answer = TypeVar("Answer")
Parameters = ParamSpec("Parameters")


def in_threads_of(kind: str) -> Callable[[Callable[Parameters, Answer]], Callable[Parameters, Awaitable[Answer]]]:
    """Return a decorator that makes a request run in one of the threads for a kind of AT_ONCE.

    Meanwhile the request holds no other thread.
    """

    def made(function: Callable[Parameters, Answer]) -> Callable[Parameters, Awaitable[Answer]]:
        @functools.wraps(function)
        async def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Answer:
            request: Any = kwargs["request"]
            work = functools.partial(function, *args, **kwargs)
            return await anyio.to_thread.run_sync(work, limiter=request.app.state.threads[kind])

        return run

    return made


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Inside the block, import no code that a recipe names, and resolve no environment variable."""
    with trusting(Trust.NOTHING), interpolation.without_environment():
        yield


def checked(request: Request, run_id: str | None = None, changes: bool = True) -> User:
    """Return the sender of a request, after checks of what they may do. Raises AccessError.

    The sender must have the role submitter. With `run_id`, they must own the run or be an admin. changes: whether the request
    changes something.
    """
    user, users = sender(request), request.app.state.users
    users.check_role(user, "submitter", changes)
    if run_id is not None:
        runs(request).folder(run_id)
        users.check_owner(user, runs(request).owner(run_id))
    audit_log.requested_by.set(user.name)  # of this request, which has a context of its own
    return user


def _own(request: Request, user: User, name: str, overrides: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (the id of a user's run with this name, the overrides with its folder). Raises AccessError and RecipeError."""
    _refuse_run_dir(overrides)
    if name == SWEEPS:
        raise RecipeError(Problem("name", "contradiction", f"got {SWEEPS}, the folder of your sweeps; expected another name"))
    folder = runs(request).root / user.name / name
    if not folder.resolve().is_relative_to(runs(request).root):
        raise AccessError(404, "not-a-run", "got a name whose folder is outside of the service's root; expected another name")
    return f"{user.name}{SEPARATOR}{name}", {**overrides, "run_dir": str(folder)}


def refuse_file(key: str, name: str, folder: Path) -> None:
    """Raise RecipeError if a name refers to a file outside of `folder`, such as one in the service's working directory."""
    if config_tree.find_file(name, folder, key).parent != folder:
        raise RecipeError(Problem(key, "file-not-found", f"got '{name}', a file elsewhere; expected a name in {folder.name}/"))


def _refuse_run_dir(overrides: dict[str, Any]) -> None:
    if "run_dir" in overrides:
        raise RecipeError(Problem("run_dir", "contradiction", "got a folder; expected none, since the service chooses it"))


def check_overrides(request: Request, overrides: dict[str, Any], of_suite: bool = False) -> None:
    """Raise RecipeError for overrides that a request may not set."""
    further = map(Path, request.app.state.users.config.folders)
    governed.check(overrides, [runs(request).root, *further], of_suite)


@changing.post("/plans")
async def plan(request: Request, body: RecipeBody) -> PlanAnswer:
    """Return the plan of a recipe: memory, seconds, GPU-hours. Writes nothing, and ends when the client leaves."""
    user = checked(request, changes=False)
    _refuse_run_dir(body.overrides)
    check_overrides(request, body.overrides)
    refuse_file("recipe", body.recipe, RECIPES)
    made = await request.app.state.plans.make(user.name, body.recipe, body.overrides, request.is_disconnected)
    if "plan" not in made:
        raise RecipeError(*(Problem(**each) for each in made["problems"]))
    return PlanAnswer(**made["plan"])


@changing.post("/runs", status_code=201)
@in_threads_of("submissions")
def submit(request: Request, body: SubmissionBody) -> Submitted:
    """Submit a recipe as a run of the sender, or continue it."""
    user = checked(request)
    run_id, overrides = _own(request, user, body.name, body.overrides)
    check_overrides(request, body.overrides)
    refuse_file("recipe", body.recipe, RECIPES)
    given = arguments(overrides, {})
    with closed():
        prepared = submitting.prepare_submission(body.recipe, given)
        _refuse_long(prepared)
        run = submitting.start(prepared, body.recipe, given)
    runs(request).forget(run_id)
    return Submitted(id=run_id, job_id=run.job_id, notes=list(run.notes))


def _refuse_long(prepared: Sequence[Prepared]) -> None:
    """Raise RecipeError if a recipe needs other recipes and the executor is not Slurm.

    The needed recipes would run inside this request, because nothing queues them.
    """
    if len(prepared) > 1 and prepared[-1].executor.name != "slurm":
        message = f"got {len(prepared) - 1} needed recipes; expected none without Slurm. Try to submit them first"
        raise RecipeError(Problem("needs", "unsupported", message))


@changing.post("/runs/{run_id}/cancel")
@in_threads_of("changes")
def cancel(request: Request, run_id: str) -> dict[str, Any]:
    """Cancel a run, and return its state. Steps after its last checkpoint are lost."""
    checked(request, run_id)
    Run(runs(request).folder(run_id)).cancel()
    return _changed(request, run_id)


@changing.post("/runs/{run_id}/stop", status_code=202)
@in_threads_of("changes")
def stop(request: Request, run_id: str) -> dict[str, Any]:
    """Ask a run to save and stop at the end of its step, and return its state now. It stops later."""
    checked(request, run_id)
    run = Run(runs(request).folder(run_id))
    try:
        run.stop_and_save(timeout=0)
    except TimeoutError:
        pass  # it has been asked
    return _changed(request, run_id)


@changing.post("/runs/{run_id}/changes", status_code=202)
@in_threads_of("changes")
def change(request: Request, run_id: str, body: ChangeBody) -> ChangeAsked:
    """Ask a live run to change live keys. The new values take effect at the end of the current step."""
    checked(request, run_id)
    check_overrides(request, body.overrides)
    with naming_arguments(), closed():
        asked = steer_request.ask(runs(request).folder(run_id), arguments(body.overrides, {}))
    runs(request).forget(run_id)
    return ChangeAsked(number=asked.number)


@changing.post("/runs/{run_id}/exports", status_code=202)
@in_threads_of("changes")
def export(request: Request, run_id: str, body: ExportBody) -> ExportAnswer:
    """Start to write a checkpoint in Hugging Face format into the run's folder. GET of the same address returns its state."""
    checked(request, run_id)
    run = Run(runs(request).folder(run_id))
    return request.app.state.exports.start(run.folder, run.checkpoint(body.step).step, body.adapter)


@changing.post("/runs/{run_id}/evaluations", status_code=201)
@in_threads_of("submissions")
def evaluate(request: Request, run_id: str, body: EvaluationBody) -> EvaluationAnswer:
    """Submit the evaluation of a checkpoint of the run. GET of the same address returns the scores."""
    checked(request, run_id)
    _refuse_run_dir(body.overrides)
    check_overrides(request, body.overrides)
    if body.suite and not body.suite.startswith(f"{suites.HARNESS}:"):
        refuse_file("suite", body.suite, suites.SUITES)
    with closed():
        found = evaluating.evaluate(body.suite, body.overrides, run=runs(request).folder(run_id), step=body.step)
    runs(request).forget(run_id)
    return EvaluationAnswer(folder=str(found.folder), job_id=found.job_id)


def _changed(request: Request, run_id: str) -> dict[str, Any]:
    runs(request).forget(run_id)
    return runs(request).full(run_id)
