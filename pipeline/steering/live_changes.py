"""Change a run between two steps, on rank 0: read requests, apply them on all ranks that need them, and answer.

Both loops call `step_ended` once a step, after the update of the weights and before the next step's data are taken. So a change
after step N is in force when the run decides whether step N is the last, validates and saves it, and in all of step N + 1. The
answer is on disk before the change is applied, so steer.jsonl has every change that any step runs with.

Runs can be replayed exactly. A checkpoint of step N keeps the changes in force there, and a run that resumes from it applies
them before it loads the checkpoint. Changes that steer.jsonl has for later steps are applied again after the same steps; new
requests wait until the last of these steps. recipe.yaml stays as it was submitted. If a later submission gives a changed key
another value than the earlier submission did, the value of the later submission holds.

The changed values are set in the recipe of each train rank; all other objects there hold sections of this recipe. Generate
ranks need no change: all values that they read at each step come with their work.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config import Problem, Recipe, RecipeError, live_keys
from pipeline.config.formatting import on_one_line
from pipeline.data.mixture import Mixture, follow
from pipeline.data.stream import Stream
from pipeline.files.storage import RetryPolicy
from pipeline.roles import TrainRole
from pipeline.rpc import RpcGroup
from pipeline.steering.steer_files import (
    FOLDER,
    ChangeAnswer,
    ChangeRequest,
    KeyChange,
    answers,
    decode,
    find_unanswered,
    read_request,
    write_answer,
)

logger = logging.getLogger(__name__)

MARKER = "steer/changes"
"""Metric of a step after which keys changed: the number of changed keys."""


class Steering:
    """The changes of a run, as rank 0 applies them."""

    def __init__(self, recipe: Recipe, folder: Path, train: RpcGroup[TrainRole], retry: RetryPolicy):
        """Bind to the run's folder and its train ranks. recipe: the recipe object of rank 0, in which changes are set."""
        self._recipe, self._folder, self._train, self._retry = recipe, folder, train, retry
        self._started = copy.deepcopy(recipe)  # as submitted: which models and outputs the ranks have
        self._answers = answers(folder)
        self._in_force: list[ChangeAnswer] = []
        self._again: list[ChangeAnswer] = []  # told of steps that this attempt repeats, by step
        (folder / FOLDER).mkdir(exist_ok=True)  # now: a node may see a new folder late

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the changes in force, as JSON values."""
        return [asdict(answer) for answer in self._in_force]

    def resume(self, step: int, state: Sequence[dict[str, Any]], stream: Stream | Mixture) -> None:
        """Apply the changes of a checkpoint, before the rest of it is loaded. step: its step; 0 without a checkpoint."""
        for answer in map(decode, state):
            self._apply(answer, stream)
        self._again = sorted((later for later in self._answers if later.changes and later.step > step), key=_order)

    def step_ended(self, step: int, stream: Stream | Mixture) -> dict[str, float]:
        """Apply the changes due after `step` steps, and return a metric that marks the step; {} if nothing changed."""
        number = 0
        while self._again and self._again[0].step <= step:
            number += self._apply(self._again.pop(0), stream)
        if not self._again:
            for request in self._requests(step):
                number += self._take(request, step, stream)
        return {MARKER: float(number)} if number else {}

    def run_ended(self, step: int) -> None:
        """Refuse the requests that came too late."""
        for request in self._requests(step):
            self._answer(request, step, (), f"the run ended at step {step} before the change could take effect")

    def _requests(self, step: int) -> Iterable[ChangeRequest]:
        for number in find_unanswered(self._folder, self._answers):
            try:
                yield read_request(self._folder, number)
            except FileNotFoundError:
                continue  # withdrawn
            except ValueError as error:
                self._answer(ChangeRequest(number, {}, "", "", time.time()), step, (), str(error))

    def _take(self, request: ChangeRequest, step: int, stream: Stream | Mixture) -> int:
        """Check a request, answer it, and apply its changes. Return their number; 0 if it was refused."""
        try:
            steered = live_keys.steered(self._started, self._recipe, live_keys.parsed(request.values))
            self._refuse_what_ranks_cannot({change.key: change.new for change in steered})
        except RecipeError as error:
            self._answer(request, step, (), str(error))
            return 0
        started = self._started
        changes = tuple(KeyChange(c.key, c.old, c.new, live_keys.value_at(started, c.key)) for c in steered)
        return self._apply(self._answer(request, step, changes), stream)

    def _refuse_what_ranks_cannot(self, values: dict[str, Any]) -> None:
        """Raise RecipeError if a train rank cannot take these values: a schedule without a needed argument, for example."""
        if wrong := next(filter(None, self._train.call(TrainRole.examine_change, values).result()), None):
            raise RecipeError(Problem("", "unsupported", wrong))

    def _answer(self, request: ChangeRequest, step: int, changes: tuple[KeyChange, ...], refused: str = "") -> ChangeAnswer:
        answer = ChangeAnswer(
            request.number, step, changes, request.user, request.host, request.time, time=time.time(), refused=refused
        )
        write_answer(self._folder, answer, self._retry)
        self._answers.append(answer)
        if refused:
            logger.warning("change %d, by %s, is refused: %s", request.number, request.user or "nobody", refused)
        return answer

    def _apply(self, answer: ChangeAnswer, stream: Stream | Mixture) -> int:
        """Apply the changes of an answer on all ranks, and return their number."""
        values = {key_change.key: key_change.new for key_change in answer.changes if self._holds(key_change)}
        if values:
            self._train.call(TrainRole.change, values).result()
            live_keys.put(self._recipe, values)
            follow(stream, self._recipe)
        for change in answer.changes:
            if change.key in values:
                old, new = on_one_line(change.old), on_one_line(change.new)
                logger.info("after step %d: %s is %s, was %s (by %s)", answer.step, change.key, new, old, answer.user)
        self._in_force.append(answer)
        return len(values)

    def _holds(self, change: KeyChange) -> bool:
        """Return whether a change still holds: the submitted recipe has the same value as when the change was made."""
        now = live_keys.value_at(self._started, change.key)
        if now == change.submitted:
            return True
        texts = on_one_line(now), on_one_line(change.new)
        logger.warning(
            "%s is %s: a later submission set this value, so the earlier change to %s no longer applies", change.key, *texts
        )
        return False


def _order(answer: ChangeAnswer) -> tuple[int, int]:
    return answer.step, answer.request
