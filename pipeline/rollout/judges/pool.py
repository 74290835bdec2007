"""The pool of an engine's judges, as the engine's rank sees it.

The rank starts one process (`parent.py`), which forks the judges. So environments do not hold Python's lock in the engine's
process. If the parent process dies, another one replaces it. The new one judges open first turns again; a first turn that a
judge had taken is judged alone, and if the process dies again during it, its answer is wrong. Open later turns fail, because
the state of their episodes is lost; a later turn that was the only turn in progress counts as wrong.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from pipeline.files.encoding import encode
from pipeline.rollout.function_messages import FunctionCall
from pipeline.rollout.judges import parent_process
from pipeline.rollout.judges.environment_steps import (
    CallFailure,
    EnvironmentSettings,
    StepOutcome,
    StepRequest,
    is_final,
)
from pipeline.rollout.judges.judge_process import EnvCommand, EnvReply
from pipeline.rollout.judges.parent import EnvReport
from pipeline.rollout.judges.parent_process import CLOSING_S, ParentProcess

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the process while calls are open
MAX_DEATHS = 3
"""Maximum number of consecutive deaths of the process without an answer. One more death ends the run."""
LOAD_SHARE = 5 / 6
"""Share of cluster.timeouts.setup for building all environments, so that this error, which names them, comes first."""
LOST_WITH_PROCESS = "the environments' process that held the episode has ended"
SCORED_ELSEWHERE = StepOutcome(0.0, {}, over=True, observation=None)
"""The outcome of a turn that a reward model scores on other ranks."""


class JudgePool:
    """Judges the turns of one engine in forks. Only the thread that creates it may use it; `wakeup` is set at each answer."""

    def __init__(
        self,
        settings: EnvironmentSettings,
        wakeup: threading.Event,
        connect: Callable[[], ParentProcess] = parent_process.start,
    ) -> None:
        """Start the process, if there is an environment to load, without waiting until the environments are loaded.

        connect: starts a process, on this machine or another one.
        """
        self._settings, self._wakeup, self._connect = settings, wakeup, connect
        scored = {name for name, environment in settings.env.items() if environment.kind == "reward_model"}
        self._elsewhere = set() if settings.function else scored
        self._process = self._next() if settings.env.keys() - self._elsewhere else None
        self._number = 0
        self._calls: dict[int, StepRequest | FunctionCall] = {}  # without an answer
        self._begun: set[int] = set()  # calls that a judge has taken
        self._waiting: deque[StepRequest | FunctionCall] = deque()  # requests that are not sent yet
        self._suspects: deque[StepRequest | FunctionCall] = deque()  # judged when the process died; judged again, alone
        self._alone = False  # the only open call is a suspect
        self._held: dict[str, ParentProcess] = {}  # process of each episode that has not ended
        self._answers: list[tuple[str, StepOutcome | CallFailure]] = []  # that no judge gave
        self._deaths = 0

    def _next(self) -> ParentProcess:
        process = self._connect()
        process.begin(self._settings, self._wakeup)
        return process

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until the environments are loaded; timeout_s None: without a limit.

        Raises the error of building them, or RuntimeError.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._process is not None and not self._process.loaded:
            try:
                report = self._process.reports.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self._process.end()
                failure = f"the environments' process has not loaded {', '.join(self._settings.env)}"
                raise RuntimeError(f"env: {failure} within {timeout_s:g} s") from None
            if report is None:
                raise RuntimeError(f"the environments' process {self._process.end()} before its environments were loaded")
            self._take(report)

    def submit(self, request: StepRequest | FunctionCall) -> None:
        """Let the environment judge a turn."""
        if request.environment in self._elsewhere:
            self._answers.append((request.episode, SCORED_ELSEWHERE))
            return
        self._waiting.append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send the waiting requests. After a death of the process, first send the suspected turns, one at a time."""
        if self._calls and (self._suspects or self._alone):
            return
        self._alone = bool(self._suspects)
        if self._suspects:
            self._send(self._suspects.popleft())
        while self._waiting and not self._alone:
            self._send(self._waiting.popleft())

    def _send(self, request: StepRequest | FunctionCall) -> None:
        assert self._process is not None
        begins = request.prompt is not None
        if begins:
            self._held[request.episode] = self._process
        elif self._held[request.episode] is not self._process:
            self._answers.append((request.episode, CallFailure(LOST_WITH_PROCESS)))
            return
        self._number += 1
        self._calls[self._number] = request
        self._process.send(
            EnvCommand(self._number, request.episode, encode(request), request.environment, request.title, begins)
        )

    def tell(self, message: FunctionCall) -> None:
        """Give an agent completions, or cut it, while a call waits for its next draws."""
        if self._process is not None and self._held.get(message.episode) is self._process:
            self._process.send(EnvCommand(episode=message.episode, request=encode(message), environment=message.environment))

    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        """Return (episode, answer) for each turn that was judged since the last call. Does not wait.

        Raises RuntimeError if the environments cannot continue.
        """
        answers = self._take_reports()
        if self._process is not None and self._process.has_ended():
            answers += self._take_reports()
            self._replace(self._process.end())
        self._dispatch()
        unjudged, self._answers = self._answers, []
        for episode, _ in unjudged:
            self.forget(episode)
        return answers + unjudged

    def seconds_left(self) -> float | None:
        """Return the seconds until `take` must be called even if `wakeup` is not set; None if it need not be called."""
        if self._answers:
            return 0.0
        return LOOK_S if self._calls else None

    def forget(self, episode: str) -> None:
        """Drop the state of an episode that has ended. Unknown episodes are ignored."""
        if self._held.pop(episode, None) is self._process and self._process is not None:
            self._process.send(EnvCommand(episode=episode))

    def begin_close(self) -> None:
        """Let the environments close, without waiting."""
        if self._process is not None:
            self._process.begin_close()

    def close(self, within_s: float = CLOSING_S) -> None:
        """Close the environments; kill their process after `within_s`."""
        if self._process is not None:
            self._process.close(within_s)

    def _take_reports(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = []
        while self._process is not None and not self._process.reports.empty():
            report = self._process.reports.get()
            answers += self._take(report) if report is not None else []
        return answers

    def _take(self, report: EnvReport) -> list[tuple[str, StepOutcome | CallFailure]]:
        assert self._process is not None
        if report.error:
            kind = ValueError if report.error in ("ValueError", "RecipeError") else RuntimeError
            message = report.message if report.error in (kind.__name__, "RecipeError") else f"{report.error}: {report.message}"
            error = kind(message)
            error.add_note(f"Traceback of the environments' process:\n{report.traceback}")
            raise error
        if report.apart:
            logger.info(f"{', '.join(report.apart)} started threads while loading, so each judge loads its own copy")
            self._process.close()
            self._settings = dataclasses.replace(self._settings, apart=self._settings.apart | report.apart)
            self._process = self._next()
            self._waiting.extendleft(reversed(self._calls.values()))
            self._calls = {}
            return []
        self._process.loaded = True
        self._begun.update(report.begun)
        if report.replies:
            self._deaths = 0
        return [self._answer(reply) for reply in report.replies]

    def _answer(self, reply: EnvReply) -> tuple[str, StepOutcome | CallFailure]:
        request = self._calls.pop(reply.call)
        self._begun.discard(reply.call)
        answer = reply.outcome or CallFailure(reply.failure, reply.of_answer, reply.notes)
        if is_final(request.last, answer):
            self._held.pop(request.episode, None)
        return request.episode, answer

    def _replace(self, how: str) -> None:
        """Start another process in place of one that has ended, and decide which of its turns to judge again."""
        calls, begun, self._calls, self._begun = self._calls, self._begun, {}, set()
        self._deaths += 1
        why = f"the environments' process {how}"
        if self._deaths > MAX_DEATHS:
            raise RuntimeError(f"{why}; it has ended {self._deaths} times in a row without judging anything")
        logger.warning(f"{why} while it judged {len(begun)} turns; another process takes its place")
        self._process = self._next()
        for number, request in calls.items():
            begins = request.prompt is not None
            if number in begun and (self._alone or (len(begun) == 1 and not begins)):
                self._answers.append((request.episode, CallFailure(why, of_answer=True)))
                self._deaths = 0
            elif number in begun and begins:
                self._suspects.append(request)
            else:
                self._waiting.append(request)
