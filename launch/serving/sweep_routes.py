"""Answer the requests that begin, read and cancel sweeps and hyperparameter searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, RedirectResponse

from launch.api import sweeps as api
from launch.api.overrides import arguments, naming_arguments
from launch.api.sweeps import SweepRun
from launch.pages.document import PLOTLY
from launch.runs import run_folder
from launch.runs.status_text import plain_values
from launch.serving.access import AccessError
from launch.serving.bodies import SubmittedSweep, SweepAnswer, SweepBody, SweepLine
from launch.serving.changes import REFUSED, SWEEPS, check_overrides, checked, closed, in_threads_of, refuse_file
from launch.serving.routes import runs
from launch.serving.run_cache import SEPARATOR, RunCache
from launch.sweeps import suite as suites
from launch.sweeps.suite import Suite
from launch.sweeps.verdict import read as read_verdict
from pipeline.config import RECIPES, Problem, RecipeError

MARKS = ("sweep.json", api.LOG)
"""Files that mark a folder as a sweep's.

The log is there first. sweep.json can follow a minute later, because a search is checked before.
"""
DEPTH = 4
"""Maximum number of levels from the root to a sweep: USER/sweeps/SUITE/ID."""

sweeps = APIRouter(responses=REFUSED)  # pyright: ignore[reportArgumentType]  # the type is of a wider dict


class Sweeps:
    """Finds sweeps by id, and holds those that this service has begun, with their processes."""

    def __init__(self, found: RunCache):
        """Create it without sweeps. found: the cache of the service's runs."""
        self._runs = found
        self._begun: dict[str, SweepRun] = {}

    def keep(self, run: SweepRun) -> str:
        """Hold a sweep that has just begun, and return its id."""
        sweep_id = self._runs.id(run.folder)
        self._begun[sweep_id] = run
        self._runs.forget(sweep_id)
        return sweep_id

    def get(self, sweep_id: str) -> SweepRun:
        """Return a sweep. Raises AccessError with status 404 if the id is not of a sweep below the root."""
        if folder := self._runs.below(sweep_id, *MARKS):
            return self._begun.get(sweep_id) or SweepRun(folder)
        raise AccessError(404, "not-a-run", "got an id of no sweep; expected an id from GET /api/v1/sweeps")

    def ids(self) -> list[str]:
        """Return the ids of all sweeps."""
        found = run_folder.find(self._runs.root, DEPTH, MARKS)
        return sorted(sweep_id for folder in found if self._runs.below(sweep_id := self._runs.id(folder), *MARKS))

    def lines(self) -> list[SweepLine]:
        """Return the states of all sweeps, sorted by id."""
        return [SweepLine(**self.full(each).model_dump(include={*SweepLine.model_fields})) for each in self.ids()]

    def full(self, sweep_id: str) -> SweepAnswer:
        """Return the state of a sweep, at most `cache_s` seconds old.

        The state is `unknown` if the sweep's files or jobs cannot be read.
        """
        run = self.get(sweep_id)
        known: dict[str, Any] = {"id": sweep_id, "owner": self._runs.owner(sweep_id)}

        def read() -> tuple[SweepAnswer, None]:
            try:
                return SweepAnswer(**known, **self._values(run)), None
            except Exception as error:  # damaged files of one sweep do not hide the others
                return SweepAnswer(**known, state="unknown", why=f"{type(error).__name__}: {error}"), None

        return self._runs.kept((sweep_id, "sweep"), read)

    def _values(self, run: SweepRun) -> dict[str, Any]:
        state = run.state()
        ids = {name: self._runs.id(each.folder) for name, each in run.runs().items() if self._is_below(each.folder)}
        judged = state in ("passed", "failed")
        verdict = plain_values(read_verdict(run.folder)) if judged else None
        why = "\n".join(run.log()) if state == "stopped" else ""
        summary = verdict["summary"] if verdict else ""
        return {"state": state, "why": why, "summary": summary, "jobs": run.states(), "runs": ids, "verdict": verdict}

    def _is_below(self, folder: Path) -> bool:
        return folder.is_relative_to(self._runs.root)


def sweeps_of(request: Request) -> Sweeps:
    """Return the sweeps of the service."""
    return request.app.state.sweeps


@sweeps.get("/sweeps")
def list_sweeps(request: Request) -> list[SweepLine]:
    """Return the sweeps and searches below the service's root."""
    return sweeps_of(request).lines()


@sweeps.post("/sweeps", status_code=201)
@in_threads_of("sweep_submissions")
def begin(request: Request, body: SweepBody) -> SubmittedSweep:
    """Begin or continue a sweep or a search of the sender. A process of the service submits its runs."""
    user = checked(request)
    check_overrides(request, {name: value for name, value in body.overrides.items() if name != "folder"}, of_suite=True)
    refuse_file("suite", body.suite, suites.SUITES)
    given = arguments({**body.overrides, "folder": str(_own_folder(request, user.name, body.overrides))}, {})
    with closed(), naming_arguments():
        loaded = suites.load(body.suite, given)
        _refuse_files(loaded.suite)
        run = api.begin(loaded, body.suite, given, body.id)
    return SubmittedSweep(id=sweeps_of(request).keep(run))


def _own_folder(request: Request, user: str, overrides: dict[str, Any]) -> Path:
    """Return the folder of a user's sweeps. Raises RecipeError or AccessError."""
    if "folder" in overrides:
        raise RecipeError(Problem("folder", "contradiction", "got a folder; expected none, since the service chooses it"))
    folder = runs(request).root / user / SWEEPS
    if not folder.resolve().is_relative_to(runs(request).root):
        raise AccessError(404, "not-a-run", "got a user whose folder is outside of the service's root; expected one inside")
    return folder


def _refuse_files(suite: Suite) -> None:
    """Raise RecipeError if a recipe of the suite is not a name in recipes/."""
    if suite.search is not None:
        refuse_file("search.recipe", suite.search.recipe, RECIPES)
    for name, run in suite.runs.items():
        refuse_file(f"runs.{name}.recipe", run.recipe or name, RECIPES)


@sweeps.get("/sweeps/{sweep_id}")
def sweep_status(request: Request, sweep_id: str) -> SweepAnswer:
    """Return the state of a sweep or a search, the states of its jobs, and its verdict."""
    return sweeps_of(request).full(sweep_id)


@sweeps.get("/sweeps/{sweep_id}/report", response_class=FileResponse)
def sweep_report(request: Request, sweep_id: str) -> FileResponse:
    """Return the report as HTML. A search has one after its first trial has ended, a sweep after its check."""
    return _file(request, sweep_id, "report.html")


@sweeps.get(f"/sweeps/{{sweep_id}}/{PLOTLY}", include_in_schema=False)
def plotly(request: Request, sweep_id: str) -> FileResponse:
    """Return Plotly's script, which the report loads."""
    return _file(request, sweep_id, PLOTLY)


@sweeps.get("/sweeps/{sweep_id}/runs/{name}/{file:path}", include_in_schema=False)
def run_of_sweep(request: Request, sweep_id: str, name: str, file: str) -> RedirectResponse:
    """Redirect a browser from a link in the report to the page of the run."""
    sweeps_of(request).get(sweep_id)
    run_id = SEPARATOR.join([sweep_id, "runs", name])
    runs(request).folder(run_id)
    return RedirectResponse(request.app.url_path_for("report", run_id=run_id))


def _file(request: Request, sweep_id: str, name: str) -> FileResponse:
    path = sweeps_of(request).get(sweep_id).folder / name
    if not path.is_file():
        raise AccessError(404, "file-not-found", f"the sweep has not written {name} yet. Try again later")
    return FileResponse(path)


@sweeps.post("/sweeps/{sweep_id}/cancel")
@in_threads_of("changes")
def cancel(request: Request, sweep_id: str) -> SweepAnswer:
    """Make a sweep submit nothing more, cancel its jobs, and return its state.

    POST sweeps with the same id continues it.
    """
    user = checked(request)
    run = sweeps_of(request).get(sweep_id)
    request.app.state.users.check_owner(user, runs(request).owner(sweep_id))
    run.cancel()
    runs(request).forget(sweep_id)
    return sweeps_of(request).full(sweep_id)
