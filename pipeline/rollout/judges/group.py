"""Fork the judges of one environment on demand, keep them for later episodes, and replace those that die, hang or are suspect.

An episode has a judge of its own from its first turn to its last, so an answer that breaks its judge costs no other episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.config import agents
from pipeline.environments.environment import Environment, JudgeLimits
from pipeline.rollout.judges.environment_steps import (
    PARTS_BEFORE_ANSWER,
    WAITS,
    EnvironmentSettings,
    StepOutcome,
    brief,
    checked_outcome,
)
from pipeline.rollout.judges.judge_process import EnvCommand, EnvReply, Progress, frame, how_ended, read_message

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
MOST_JUDGES = 256
"""Maximum number of judges of an environment, unless it has more workers; further open episodes share these judges."""
MAX_REPLY_BYTES = 1 << 24
BUILD_S = 300.0  # for an environment that a judge builds for itself
LAST_REPLY_S = 0.2  # for the reply of a judge that has ended, whose children may hold the connection open
LOG_INTERVAL_S = 30.0  # least time between two log lines about failures of an environment, after the first few
LOGGED_AT_ONCE = 5
MOST_TRIES = 3  # of a call whose judges die before they see its answer
LOST_WITH_JUDGE = "the judge that held the episode has ended"


@dataclass(eq=False, slots=True)
class _WaitingCall:
    command: EnvCommand
    content: bytes  # the command's frame
    tries: int = 0  # judges that it has lost; the next one must be fresh


class ForkedJudge:
    """A judge, as its parent sees it."""

    def __init__(self, pid: int, connection: socket.socket, progress: Progress) -> None:
        self.pid, self.connection, self.progress = pid, connection, progress
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # its exit status
        self.calls = 0
        self.busy = self.suspect = False
        self.episodes: set[str] = set()  # that are open
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def tell(self, content: bytes) -> None:
        """Send a command to a judge that has taken a call. Does not wait."""
        if self._writer is not None and not self.ended.done():
            self._writer.write(content)

    async def ask(self, call: int, content: bytes, limit_s: float) -> EnvReply | str:
        """Let the judge take a call, and return its reply, or a text that says how the judge ended.

        The text is "" if the judge exceeded `limit_s`. When a text is returned, the judge's process has been ended.
        """
        if self.progress.read()[0] != "build":
            self.progress.begin("")
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self.connection)
        self.tell(content)
        reading = asyncio.ensure_future(read_message(self._reader, EnvReply, MAX_REPLY_BYTES))
        while not reading.done() and not self.ended.done():
            part, begun = self.progress.read()
            allowed = {"build": BUILD_S, WAITS: math.inf}.get(part, limit_s)
            remaining = begun + allowed - time.monotonic()
            if remaining <= 0:
                reading.cancel()
                self.kill()
                return ""
            await asyncio.wait({reading, self.ended}, timeout=min(remaining, limit_s), return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            await asyncio.wait({reading}, timeout=LAST_REPLY_S)
        if not reading.done():
            reading.cancel()
        elif (error := reading.exception()) is None:
            reply, _ = reading.result()
            if reply.call == call:
                return reply
            self.kill()
            return "replied to another call"
        elif not isinstance(error, asyncio.IncompleteReadError | OSError):
            self.kill()
            return f"gave an answer that cannot be read ({brief(error)})"
        await asyncio.wait({self.ended}, timeout=CLOSE_S)
        self.kill()
        return how_ended(self.ended.result() if self.ended.done() else -signal.SIGKILL)

    def kill(self) -> None:
        """End the judge and its process group."""
        if self.ended.done():
            return
        for end in (os.killpg, os.kill):  # the judge may have left its group
            with contextlib.suppress(OSError):
                end(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection to a judge that has ended."""
        if self._writer is not None:
            self._writer.transport.abort()
        self.connection.close()


Fork = Callable[["JudgeGroup"], ForkedJudge]


class JudgeGroup:
    """The judges of one environment, forked on demand.

    Each open episode has a judge of its own from its first turn to its last. Episodes share judges if more are open than the
    environment has workers and, unless each judge builds its own environment, than MOST_JUDGES. At most as many judges compute
    at a time as the environment has workers. Episodes of agents share no judge: the environment's workers limit how many are
    open, and the others wait.
    """

    def __init__(
        self, name: str, environment: Environment | None, settings: EnvironmentSettings, fork: Fork, reply: Callable
    ) -> None:
        """Prepare to fork judges. environment: None if each judge builds the environment for itself."""
        self.name, self.environment, self._fork, self._send_reply = name, environment, fork, reply
        self._timeout_s = settings.env[name].timeout_s
        self.limits: JudgeLimits = getattr(environment, "limits", None) or JudgeLimits()
        self._limit_s = self.limits.call_s if self.limits.call_s is not None else self._timeout_s + settings.grace_s
        self._workers = settings.apart[name] if environment is None else environment.workers
        self._most = self._workers if environment is None else max(self._workers, MOST_JUDGES)
        self._shared = name not in agents(settings.env)  # whether episodes may share a judge
        if not self._shared:
            self._most = self._workers
        self.judges: list[ForkedJudge] = []
        self._holders: dict[str, ForkedJudge] = {}  # judge of each open episode
        self._waiting: deque[_WaitingCall] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._log = _FailureLog(name)

    def submit(self, command: EnvCommand, content: bytes) -> None:
        """Queue a call, which a judge takes as soon as possible."""
        self._waiting.append(_WaitingCall(command, content))
        self._start()

    def tell(self, episode: str, content: bytes) -> None:
        """Send an open episode's judge a message without a reply."""
        if (held := self._holders.get(episode)) is not None:
            held.tell(content)

    def forget(self, episode: str, content: bytes) -> None:
        """Drop an open episode."""
        if (held := self._holders.pop(episode, None)) is not None:
            held.episodes.discard(episode)
            held.tell(content)
            self._start()  # an agent may wait for the judge
            if held.suspect and not held.busy and not held.episodes:
                self._retire(held)

    def gone(self, ended: ForkedJudge) -> None:
        """Notice that a judge has ended."""
        if ended in self.judges:
            self.judges.remove(ended)
        if not ended.busy:
            ended.close()
        self._start()

    def _start(self) -> None:
        """Start queued calls while a worker is free, and a judge is free or can be forked."""
        held_back: list[_WaitingCall] = []
        while self._waiting and len(self._running) < self._workers:
            call = self._waiting.popleft()
            try:
                chosen = self._choose(call)
            except LookupError:
                self._holders.pop(call.command.episode, None)
                self._fail(call, LOST_WITH_JUDGE, of_answer=False)
            except OSError as error:
                if self._running:  # a process may be free when a call ends
                    held_back.append(call)
                    break
                self._fail(call, f"no judge could be started: {brief(error)}", of_answer=False)
            else:
                if chosen is None:
                    held_back.append(call)
                    continue
                fresh, chosen.busy, chosen.calls = not chosen.calls, True, chosen.calls + 1
                task = asyncio.ensure_future(self._run(call, chosen, fresh))
                task.add_done_callback(self._finish)
                self._running.add(task)
        self._waiting.extendleft(reversed(held_back))

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        task.result()  # its error is raised in the loop, whose handler reports it
        self._start()

    def _choose(self, call: _WaitingCall) -> ForkedJudge | None:
        """Return a judge for a call; None if all are busy. Raises LookupError if the judge that held its episode has ended."""
        if not call.command.begins:
            held = self._holders[call.command.episode]
            if held.ended.done():
                raise LookupError
            return None if held.busy else held
        idle = [judge for judge in self.judges if not judge.busy and not judge.suspect]
        free = [judge for judge in idle if not judge.episodes]
        if free and not call.tries:
            return free[-1]
        if call.tries or len(self.judges) < self._most:
            self.judges.append(self._fork(self))
            return self.judges[-1]
        if not self._shared:
            return None
        return min(idle, key=lambda judge: len(judge.episodes), default=None)

    async def _run(self, call: _WaitingCall, taken: ForkedJudge, fresh: bool) -> None:
        self._send_reply(call.command.call)
        reply = await taken.ask(call.command.call, call.content, self._limit_s)
        lost = isinstance(reply, str)
        part, how = taken.progress.read()[0], reply if lost else reply.failure
        taken.busy = False
        suspect_s = self.limits.suspect_s
        if lost or reply.stuck or (suspect_s is not None and (how or reply.cpu_s > suspect_s)):
            taken.suspect = True
        # Another judge takes a first turn if an earlier answer, or something else than an answer, may have broken this judge.
        another = not fresh or (part in ("", "build") and call.tries < MOST_TRIES)
        unseen = lost and part == ""  # an earlier answer may have left the judge hanging
        again = call.command.begins and (bool(how) or unseen) and taken.suspect and another
        if not lost and reply.open:
            taken.episodes.add(call.command.episode)
            self._holders[call.command.episode] = taken
        else:
            taken.episodes.discard(call.command.episode)
            self._holders.pop(call.command.episode, None)
        if lost or taken.ended.done() or (taken.suspect and not taken.episodes):
            self._retire(taken)
        if again:
            self._waiting.appendleft(_WaitingCall(call.command, call.content, call.tries + 1))
        elif lost:
            self._fail(call, self._loss(part, how), part not in PARTS_BEFORE_ANSWER, "crash" if how else "timeout")
        elif reply.outcome is None:
            self._fail(call, reply.failure, reply.of_answer, "crash", reply)
        else:
            self._send_reply(reply)

    def _loss(self, part: str, how: str) -> str:
        if not how:
            return f"{part or 'it'} took more than {self._timeout_s:g} s (env.{self.name}.timeout_s)"
        return f"its judge {how}" if part else LOST_WITH_JUDGE

    def _fail(self, call: _WaitingCall, why: str, of_answer: bool, how: str = "", reply: EnvReply | None = None) -> None:
        if of_answer and (outcome := self._outcome_of(how)) is not None:
            self._send_reply(EnvReply(call.command.call, outcome))
            return
        self._log.log(call.command.title, why, of_answer, reply.traceback if reply else "")
        self._send_reply(EnvReply(call.command.call, None, why, of_answer, notes=reply.notes if reply else {}))

    def _outcome_of(self, how: str) -> StepOutcome | None:
        """Return the outcome by which the environment's `broken` judges an answer that broke a judge; None if it gives none."""
        broken = getattr(self.environment, "broken", None)
        try:
            outcome = broken(how) if broken is not None else None
            return None if outcome is None else checked_outcome(outcome)
        except Exception as error:
            logger.warning(f"env.{self.name}: broken raised {brief(error)}; the answer counts as wrong")
            return None

    def _retire(self, ending: ForkedJudge) -> None:
        if ending in self.judges:
            self.judges.remove(ending)
        ending.kill()
        if ending.ended.done():
            ending.close()

    async def close(self) -> None:
        """Let the judges close the environment; kill those that do not end in time."""
        self._waiting.clear()
        used = [judge for judge in self.judges if judge.calls and not judge.busy]
        for judge in used:
            judge.tell(frame(EnvCommand()))
        if used:
            await asyncio.wait({judge.ended for judge in used}, timeout=CLOSE_S)
        for judge in self.judges:
            judge.kill()


@dataclass
class _FailureLog:
    """Logs one line for each failure, the first that has a traceback or stderr with it.

    After LOGGED_AT_ONCE lines, it logs one line per LOG_INTERVAL_S.
    """

    environment: str
    traced: bool = field(default=False, init=False)
    lines: int = field(default=0, init=False)
    suppressed: int = field(default=0, init=False)
    last: float = field(default=0.0, init=False)

    def log(self, title: str, why: str, of_answer: bool, trace: str) -> None:
        now = time.monotonic()
        explains = bool(trace) and not self.traced
        if self.lines >= LOGGED_AT_ONCE and now < self.last + LOG_INTERVAL_S and not explains:
            self.suppressed += 1
            return
        note = f" (and {self.suppressed} others before that were not logged)" if self.suppressed else ""
        consequence = "broke its environment and counts as wrong" if of_answer else "failed"
        first, self.traced = "" if self.traced else "\n" + trace, self.traced or bool(trace)
        logger.warning(f"env.{self.environment}: {title} {consequence}: {why}{note}{first.rstrip()}")
        self.lines, self.suppressed, self.last = self.lines + 1, 0, now
