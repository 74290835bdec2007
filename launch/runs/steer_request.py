"""Ask a live run for other values of its keys, and wait for the answer. Nothing here prints.

pipeline/steering/steer_files.py describes the files, and pipeline/steering/live_changes.py how the run handles a request.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.preflight import libraries
from launch.runs import run_changes, run_events, run_state
from launch.runs.run_folder import RunFolder, read_recipe
from launch.runs.run_state import RunState
from pipeline.config import Problem, Recipe, RecipeError, config_tree, live_keys, only_evaluates, refuse, trains
from pipeline.config.live_keys import Change
from pipeline.steering import steer_files
from pipeline.steering.steer_files import ChangeAnswer, ChangeRequest

LIVE_STATES = ("running", "waiting")
POLL_S = 0.3
STATE_S = 5.0
"""Seconds between two queries of the run's job while a request waits."""
TIMEOUT_S = 600.0
"""Seconds to wait for an answer, by default. A run answers at the end of its step."""


class NotAnswered(TimeoutError):
    """Raised if the run has not answered a request in time. The request stays."""


def ask(run_dir: Path, overrides: Sequence[str]) -> ChangeRequest:
    """Check `key=value` overrides for a live run, write them as a request, and return the request.

    Raises RecipeError if the run is not live, if a key cannot change, if the whole recipe with the values has a problem, or if
    this user may not write into the run's folder.
    """
    if not overrides:
        raise RecipeError(
            Problem("key=value", "missing-value", "got no key; expected a key to change. Try policy.optimizer.kwargs.lr=1e-6")
        )
    run = RunFolder.at(run_dir)
    original = read_recipe(run_dir)
    if not trains(original) or only_evaluates(original):
        message = f"{run_dir} is an evaluation, which has no steps; expected a run that trains"
        raise RecipeError(Problem("run", "not-running", message))
    _refuse_ended(run, run_state.state(run))
    now = copy.deepcopy(original)
    live_keys.put(now, run.changed_values)
    for earlier in run_changes.pending(run):
        live_keys.put(now, earlier["values"])
    overridden = list(config_tree.parse_overrides(overrides))
    changes = live_keys.steered(original, now, overridden)
    values = {change.key: change.new for change in changes}
    refuse(_of_torch(now, values))
    refuse(_of_validations(run, changes))
    run_events.emit(lambda observer: observer.changing(run_dir, values))
    with run_events.refusals(run_dir):
        return steer_files.ask(run_dir, values)


def _refuse_ended(run: RunFolder, state: RunState) -> None:
    """Raise RecipeError unless the run goes on."""
    if state.name in LIVE_STATES:
        return
    if state.name == "unknown":
        message = f"the state of {run.folder} is unknown: {state.why}"
        raise RecipeError(Problem("run", "unreachable", message))
    reason = f" ({state.why})" if state.why else ""
    message = f"{run.folder} is {state.name}{reason}; expected a running or waiting run. Try to submit it again with the values"
    raise RecipeError(Problem("run", "not-running", message))


def _of_torch(recipe: Recipe, values: dict[str, Any]) -> list[Problem]:
    """Return the problems of changed arguments of optimizers and schedules, as the checks before a submission find them."""
    changed_recipe = copy.deepcopy(recipe)
    live_keys.put(changed_recipe, values)
    return [problem for problem in libraries.problems(changed_recipe) if any(problem.key.startswith(key) for key in values)]


def _of_validations(run: RunFolder, changes: Sequence[Change]) -> list[Problem]:
    """Return a problem if a change sets the metric of an early stop to one that validations lack: it would end the run."""
    for change in changes:
        if not change.key.endswith(".stop_at_validation_metric") or change.new is None:
            continue
        metrics = [name for name in run.metrics().columns if name.startswith("val/")]
        if change.new.replace(":", "/", 1) not in metrics:
            expected = f"expected one of {', '.join(metrics)}" if metrics else "the run has not validated yet. Try again later"
            return [Problem(change.key, "not-a-choice", f"got {change.new}; {expected}")]
    return []


def wait(run_dir: Path, request: ChangeRequest, timeout_s: float | None = TIMEOUT_S) -> ChangeAnswer:
    """Wait until the run has answered a request, and return the answer.

    Raises RecipeError if the run refuses the request, or if it ends before it answers; then nothing has changed, and the
    request is withdrawn. Raises NotAnswered after `timeout_s` (None: no limit); then the request stays.
    """
    began_at = asked_at = time.monotonic()
    while True:
        if answer := _answer_to(run_dir, request):
            return answer
        if time.monotonic() - asked_at >= STATE_S:
            asked_at = time.monotonic()
            run = RunFolder.at(run_dir)
            state = run_state.state(run)
            if state.name not in (*LIVE_STATES, "unknown"):
                if answer := _answer_to(run_dir, request):
                    return answer
                steer_files.path_of(run_dir, request.number).unlink(missing_ok=True)
                _refuse_ended(run, state)
        if timeout_s is not None and time.monotonic() - began_at >= timeout_s:
            path = steer_files.path_of(run_dir, request.number)
            raise NotAnswered(
                f"{run_dir} has not answered change {request.number} within {timeout_s:g} s (timeout). A run answers at the end"
                f" of a step. The request stays, and takes effect then. To withdraw it, delete {path}"
            )
        time.sleep(POLL_S)


def _answer_to(run_dir: Path, request: ChangeRequest) -> ChangeAnswer | None:
    """Return the answer to a request; None before there is one. Raises RecipeError if it was refused."""
    answer = next((reply for reply in steer_files.answers(run_dir) if reply.request == request.number), None)
    if answer and answer.refused:
        raise RecipeError(Problem("run", "unsupported", f"refused change {request.number}: {answer.refused}"))
    return answer
