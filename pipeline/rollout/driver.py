"""Run many episodes on one engine, on the rank that leads it: it receives prompts and returns groups of judged rollouts.

Between two steps of the engine the driver gives it the next requests, and gives new answers to the environments, which run
concurrently. So the engine continues while an environment computes. A work (`RolloutWork`) is a request from rank 0 for groups
of episodes. Episodes of urgent works begin first; otherwise they begin in the order of the works, of the prompts in a work, and
of the samples of a prompt. At most `max_num_seqs` episodes may use the engine at a time; later episodes wait. A group is
returned as soon as all its episodes have ended.

When a work arrives, as many of its episodes as may use the engine begin before the next step. As soon as an episode's last
answer is drawn, another episode may begin; it does not wait for the environment's judgement. So, if episodes have one turn, the
time that an environment takes does not change which requests share a step of the engine.

With a user's rollout function (`engine_client.py`), the function decides what to draw next: it runs in a judge, and the driver
gives it completions and draws what it asks for. An environment may have an agent, which does the same, but asks for draws at
any time and is not waited for. Before the next step, the driver waits for the first draws of functions that
begin, so a function of one turn has the batches of the built-in rollout. If one takes more than FIRST_DRAW_S, it waits no more.

The engine's other ranks follow in `lockstep.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from pipeline.generate.generate_backend import GenerateBackend
from pipeline.job.world import World
from pipeline.rollout.episode import Episode
from pipeline.rollout.function_episode import FunctionEpisode
from pipeline.rollout.judges.environment_steps import CallFailure, StepOutcome
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.judges.pools import JudgePools
from pipeline.rollout.lockstep import STEP, WAIT, Lockstep, Move, apply_move, waiting, working
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork, UnfinishedGroup
from pipeline.rpc import StreamingReply
from pipeline.types import NOTHING_SAID, Completion, Rollout, RolloutGroup, Turn

logger = logging.getLogger(__name__)

FIRST_DRAW_S = 5.0
"""Seconds for which the engine waits for the first draws of rollout functions that begin."""


@dataclass(slots=True)
class _OpenWork:
    """A work with at least one group that has not ended."""

    work: RolloutWork
    reply: StreamingReply[FinishedGroup]
    rollouts: dict[int, dict[int, Rollout]]  # group index -> sample -> rollout, for groups that have not ended
    episodes: dict[tuple[int, int], Episode] = field(default_factory=dict)  # (group index, sample) -> open episode


class EpisodeDriver:
    """Runs the episodes of one engine.

    The driver waits for the event `wakeup`. Environments set it when an answer is judged; the source of verbs may set it too.
    """

    def __init__(
        self,
        engine: GenerateBackend,
        environments: JudgePool | JudgePools,
        lockstep: Lockstep,
        world: World,
        wakeup: threading.Event,
        max_num_seqs: int,
        max_length: int,
        broken_rewards: Mapping[str, float] | None = None,
        function: str = "",
        agents: Collection[str] = (),
    ):
        """Bind the driver to an engine and its environments.

        max_length: maximum tokens of a prompt and its episode together. broken_rewards: environment -> reward of an answer that
        breaks it; 0 for environments that are not in the mapping. function: dotted path of the user's rollout function; "": the
        built-in rollout. agents: environments whose agents play their episodes.
        """
        self._engine, self._environments, self._lockstep, self._world = engine, environments, lockstep, world
        self._wakeup, self._max_num_seqs, self._max_length = wakeup, max_num_seqs, max_length
        self._broken_rewards, self._function, self._agents = broken_rewards or {}, function, agents
        self._works: dict[int, _OpenWork] = {}
        self._urgent: deque[Episode] = deque()  # not begun
        self._waiting: deque[Episode] = deque()  # not begun
        self._active: set[Episode] = set()  # episodes that may still use the engine
        self._to_draw: deque[Episode] = deque()  # active episodes whose next turn is to be drawn
        self._in_engine: dict[str, Episode] = {}  # by request id
        self._in_environment: dict[str, Episode] = {}  # by episode id
        self._to_cut: list[str] = []  # requests to end at the next step
        self._awaited: set[Episode] = set()  # functions that have not asked for their first draw
        self._await_until = math.inf  # time.monotonic()
        self._after_drain: list[Episode] = []  # functions that ask for a draw after their last turn, during a drain
        self._drains: list[StreamingReply[None]] = []
        self._draining = False
        self._begun, self._waits = 0, True  # functions that have begun; whether the engine waits for their first draws
        self.paused = False  # a refit is in progress, and the engine must not be used

    # ---- verbs --------------------------------------------------------------------------------------------------------------

    def rollout(self, work: RolloutWork) -> StreamingReply[FinishedGroup]:
        """Begin a work. Raises ValueError if a work with the same number is in progress."""
        if work.number in self._works:
            raise ValueError(f"work {work.number} is in progress already")
        reply: StreamingReply[FinishedGroup] = StreamingReply()
        finished = {group_index: dict(work.finished.get(group_index, {})) for group_index in range(len(work.prompts))}
        open_work = _OpenWork(work, reply, finished)
        self._works[work.number] = open_work
        queue = self._urgent if work.urgent else self._waiting
        for group_index in range(len(work.prompts)):
            for sample in range(work.samples):
                if sample not in open_work.rollouts[group_index]:
                    episode = open_work.episodes[group_index, sample] = self._new_episode(work, group_index, sample)
                    queue.append(episode)
        for group_index in range(len(work.prompts)):
            self._finish(open_work, group_index)
        if not work.prompts:
            self._close(open_work)
        return reply

    def _new_episode(self, work: RolloutWork, group_index: int, sample: int) -> Episode:
        place, environment = (work, group_index, sample), work.prompts[group_index].environment
        if environment in self._agents:
            return FunctionEpisode(*place, function=f"the agent of env.{environment}", is_agent=True)
        return FunctionEpisode(*place, function=self._function) if self._function else Episode(*place)

    def drain(self) -> StreamingReply[None]:
        """Begin no more episodes until `resume`. The reply ends when no episode uses the engine."""
        self._draining = True
        self._drains.append(StreamingReply())
        reply = self._drains[-1]
        self._end_drains()
        return reply

    def resume(self) -> None:
        """Let episodes begin and the engine step again, after a refit."""
        self._draining = self.paused = False
        self._active.update(self._after_drain)
        self._to_draw += self._after_drain
        self._after_drain = []

    def snapshot(self) -> list[UnfinishedGroup]:
        """Return the state of each unfinished group, in the order in which their `RolloutWork`s began."""
        progress = self._engine.progress()
        unfinished: dict[tuple[int, int], UnfinishedGroup] = {}
        for number, open_work in self._works.items():
            for (group_index, sample), episode in open_work.episodes.items():
                state = UnfinishedGroup(number, group_index, dict(open_work.rollouts[group_index]), {})
                group = unfinished.setdefault((number, group_index), state)
                group.open[sample] = episode.drawn_spans() + [
                    span for request_id in episode.request_ids for span in progress.get(request_id, ())
                ]
        return list(unfinished.values())

    def cut(self, numbers: list[int]) -> None:
        """End the open episodes of these works in their present state. Skip works that have ended."""
        for number in numbers:
            if number in self._works:
                for episode in list(self._works[number].episodes.values()):
                    self._cut(episode)
        self._end_drains()

    def _cut(self, episode: Episode) -> None:
        is_in_environment = episode.id in self._in_environment
        episode.cut = True
        if self._leave_engine(episode):
            return
        if isinstance(episode, FunctionEpisode) and episode.is_agent and is_in_environment:
            self._environments.tell(episode.call(self._max_length))
        self._active.discard(episode)  # an episode in an environment ends with that turn
        if not is_in_environment:
            for queue in (self._urgent, self._waiting, self._to_draw, self._after_drain):
                if episode in queue:
                    queue.remove(episode)
            self._end_unanswered(episode)

    def _leave_engine(self, episode: Episode) -> bool:
        """End an episode's requests at the next step, and return whether the engine has any."""
        requests = [request_id for request_id in episode.request_ids if request_id in self._in_engine]
        self._to_cut += [request_id for request_id in requests if request_id not in self._to_cut]
        return bool(requests)

    # ---- between verbs ------------------------------------------------------------------------------------------------------

    def work(self, verb_waits: Callable[[], bool], look_s: float | None = None) -> None:
        """Work until a verb waits, or until there is nothing to do before the next verb.

        verb_waits: returns whether a verb waits. look_s: maximum seconds to wait for environments before `verb_waits` is called
        again; None: no limit, because the arrival of a verb sets `wakeup`.
        """
        while not verb_waits():
            if self._can_step:
                with working(self._world):
                    while self._can_step and not verb_waits():
                        self._step()
            elif self._in_environment:
                self._lockstep.announce(WAIT)
                with waiting(self._world):
                    while self._in_environment and not self._can_step and not verb_waits():
                        limits = look_s, self._environments.seconds_left(), self._seconds_to_await
                        self._wakeup.wait(min((limit for limit in limits if limit is not None), default=None))
                        self._wakeup.clear()  # clear before the look for outcomes, so that no wakeup is lost
                        self._take_outcomes()
            else:
                return

    @property
    def _can_step(self) -> bool:
        if self.paused or self._seconds_to_await is not None:
            return False
        return bool(self._engine.pending or self._to_draw or self._to_cut or self._may_begin)

    @property
    def _seconds_to_await(self) -> float | None:
        """Seconds for which the engine still waits for functions that begin; None if it need not wait."""
        left = self._await_until - time.monotonic() if self._awaited else 0.0
        return left if left > 0 else None

    @property
    def _may_begin(self) -> bool:
        """True if an episode can begin now."""
        is_waiting = bool(self._urgent or self._waiting)
        return is_waiting and not self._draining and len(self._active) < self._max_num_seqs

    def _step(self) -> None:
        self._take_outcomes()
        if self._function and not self._agents and self._begin_functions():
            return
        beginning = sorted(self._to_draw, key=lambda episode: episode.order)
        self._to_draw.clear()
        while self._may_begin:
            episode = (self._urgent or self._waiting).popleft()
            self._active.add(episode)
            if isinstance(episode, FunctionEpisode):
                self._call_function(episode)
            else:
                beginning.append(episode)
        requests = [(request, episode) for episode in beginning for request in episode.requests()]
        if not (requests or self._to_cut or self._engine.pending):
            return  # agents have begun
        self._in_engine |= {request.id: episode for request, episode in requests}
        move = Move(self._to_cut, [request for request, _ in requests])
        self._to_cut = []
        self._lockstep.announce(STEP, move)
        for completion in apply_move(move, self._engine, self._lockstep.clock):
            self._judge(completion)
        self._end_drains()

    def _judge(self, completion: Completion) -> None:
        """Submit a completion to its environment; if it holds thoughts, let the policy draw its answer instead."""
        episode = self._in_engine.pop(completion.id)
        if episode.work.purpose != "train":
            completion = replace(completion, experts=None)  # nobody reads them
        if isinstance(episode, FunctionEpisode):
            self._give_to_function(episode, completion)
            return
        if episode.think(completion, self._max_length):
            self._to_draw.append(episode)
            return
        if episode.is_last_turn:
            self._active.discard(episode)
        if len(completion.tokens):
            self._submit(episode, completion)
        else:
            self._end_unanswered(episode)

    def _submit(self, episode: Episode, completion: Completion) -> None:
        episode.completion = completion
        if not episode.prompt.environment:  # the caller of `rollout` scores the answer
            self._continue(episode, StepOutcome(0.0, {}, over=True, observation=None))
            return
        self._in_environment[episode.id] = episode
        self._environments.submit(episode.step_request(self._max_length))

    def _end_unanswered(self, episode: Episode) -> None:
        """End an episode that was cut before a turn's first token. If the policy has thought, an empty answer is judged."""
        if isinstance(episode, FunctionEpisode) and episode.begun:
            self._call_function(episode)
        elif episode.has_thought:
            self._submit(episode, replace(episode.turns.pop().completion, finish="length"))
        else:
            self._end(episode, episode.cut_rollout())

    def _take_outcomes(self) -> None:
        for name, outcome in self._environments.take():
            episode = self._in_environment.pop(name)
            if isinstance(episode, FunctionEpisode):
                self._continue_function(episode, outcome)
            elif isinstance(outcome, CallFailure):
                self._end(episode, self._without_outcome(episode, outcome))
            else:
                self._continue(episode, outcome)
        self._end_drains()

    def _without_outcome(self, episode: Episode, failure: CallFailure, function: str = "") -> Rollout:
        """Return the rollout of an episode whose call has failed."""
        why = f"{function}: {failure.why}" if function else failure.why
        if isinstance(episode, FunctionEpisode) and episode.is_agent and not episode.has_said:
            return episode.failed_rollout(NOTHING_SAID if episode.cut else why, failure.notes)
        if failure.of_answer:
            return episode.broken_rollout(why, self._broken_rewards.get(episode.prompt.environment, 0.0), failure.notes)
        return episode.failed_rollout(why, failure.notes)

    def _continue(self, episode: Episode, outcome: StepOutcome) -> None:
        """Continue an episode, or end it. Rewards of all turns add up; metrics are those of the last turn."""
        is_last_turn, completion = episode.is_last_turn, episode.completion
        assert completion is not None  # the environment has judged it
        episode.reward += outcome.reward
        episode.metrics, episode.extracted, episode.notes = outcome.metrics, outcome.extracted, outcome.notes
        is_unanswered, episode.completion = episode.is_unanswered, None
        if outcome.over or is_last_turn or outcome.observation is None:
            # Without `over`, the episode ends because it is cut, or because no room is left.
            cut = is_unanswered or (not outcome.over and (episode.cut or not is_last_turn))
            completion = replace(completion, finish="length") if cut else completion
            episode.turns.append(Turn(completion, thinking=is_unanswered, reward=outcome.reward, malformed=outcome.malformed))
            self._end(episode, episode.rollout())
        else:
            turn = Turn(completion, outcome.observation, reward=outcome.reward, malformed=outcome.malformed)
            episode.turns.append(turn)
            self._to_draw.append(episode)

    # ---- rollout functions --------------------------------------------------------------------------------------------------

    def _begin_functions(self) -> bool:
        """Let functions begin while episodes may begin. Return whether the engine waits for their first draws."""
        if self._awaited:
            why = f"its first draw takes more than {FIRST_DRAW_S:g} s; the engine no longer waits for it"
            logger.warning(f"{self._function}: {why}, so which requests share a step depends on time")
            self._waits, self._awaited = False, set()
        while self._may_begin:
            episode = (self._urgent or self._waiting).popleft()
            self._active.add(episode)
            assert isinstance(episode, FunctionEpisode)
            self._begun, episode.order = self._begun + 1, self._begun
            self._call_function(episode)
            if self._waits:
                self._awaited.add(episode)
        self._await_until = time.monotonic() + FIRST_DRAW_S
        return bool(self._awaited)

    def _call_function(self, episode: FunctionEpisode) -> None:
        """Let an episode's function begin, or give it its completions."""
        self._in_environment[episode.id] = episode
        self._environments.submit(episode.call(self._max_length))

    def _give_to_function(self, episode: FunctionEpisode, completion: Completion) -> None:
        """Give a completion to its function, or keep it until the function waits. A cut function gets the last together."""
        episode.receive(completion)
        in_engine = any(request_id in self._in_engine for request_id in episode.request_ids)
        if not in_engine and episode.has_last_turn and not episode.is_agent:
            self._active.discard(episode)
        if episode.ending is not None:
            if not in_engine:
                self._end(episode, episode.ending)
        elif episode.is_agent:
            self._environments.tell(episode.call(self._max_length))
        elif episode.id not in self._in_environment and not (episode.cut and in_engine):
            self._call_function(episode)

    def _continue_function(self, episode: FunctionEpisode, outcome: StepOutcome | CallFailure) -> None:
        """Draw what a function asks for, give it the completions that it lacks, or end its episode."""
        self._awaited.discard(episode)
        if isinstance(outcome, CallFailure):
            function = "" if episode.is_agent else episode.function  # messages name the agent
            self._end_function(episode, self._without_outcome(episode, outcome, function))
            return
        assert outcome.function is not None
        if outcome.over:
            self._end_function(episode, episode.ended_rollout(outcome))
            return
        if episode.is_agent:
            if not episode.cut:
                episode.take(outcome.function.draws)
                self._draw_for(episode)
            self._call_function(episode)  # it waits for the next draws
            return
        if episode.cut:
            if not self._leave_engine(episode):
                self._call_function(episode)
            return
        if outcome.function.draws:
            episode.take(outcome.function.draws)
            self._draw_for(episode)
        if episode.unsent:
            self._call_function(episode)

    def _draw_for(self, episode: FunctionEpisode) -> None:
        if episode not in self._active and self._draining:
            self._after_drain.append(episode)
        elif episode not in self._to_draw:
            self._active.add(episode)
            self._to_draw.append(episode)

    def _end_function(self, episode: FunctionEpisode, rollout: Rollout) -> None:
        """End an episode as soon as the engine has none of its requests."""
        for queue in (self._to_draw, self._after_drain):
            if episode in queue:
                queue.remove(episode)
        episode.drop_next()
        episode.ending = rollout
        if not self._leave_engine(episode):
            self._end(episode, rollout)

    def _end(self, episode: Episode, rollout: Rollout) -> None:
        open_work = self._works[episode.work.number]
        self._active.discard(episode)
        self._environments.forget(episode.id)
        del open_work.episodes[episode.group_index, episode.sample]
        open_work.rollouts[episode.group_index][episode.sample] = rollout
        self._finish(open_work, episode.group_index)

    def _finish(self, open_work: _OpenWork, group_index: int) -> None:
        """Send a group's rollouts if all its episodes have ended, and close the work if it has no other open group."""
        work, rollouts = open_work.work, open_work.rollouts[group_index]
        if len(rollouts) < work.samples:
            return
        open_work.reply.put(
            FinishedGroup(group_index, RolloutGroup(work.prompts[group_index], tuple(rollouts[i] for i in range(work.samples))))
        )
        del open_work.rollouts[group_index]
        if not open_work.rollouts:
            self._close(open_work)

    def _close(self, open_work: _OpenWork) -> None:
        open_work.reply.end()
        del self._works[open_work.work.number]

    def _end_drains(self) -> None:
        if not self._active:
            for reply in self._drains:
                reply.end()
            self._drains = []
