"""Run many episodes on one engine, on the rank that leads it: prompts in, groups of judged rollouts out.

Between two steps of the engine the driver gives it the next requests, and gives new answers to the environments, which run
concurrently. So the engine continues while an environment computes. Episodes begin in the order of the works, urgent ones
first, and the samples of a prompt one after another. At most `max_num_seqs` of them may still use the engine; the others have
not begun. A group is answered as soon as all its episodes have ended.

All that can begin of a work begins before the first step after it arrives, and an episode's place is free as soon as its last
answer is drawn, whatever its environment does. So, with episodes of one turn, which requests share a step does not depend on
time.

The engine's other ranks follow in `lockstep.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.generate.generate_backend import GenerateBackend
from pipeline.job.world import World
from pipeline.rollout.episode import Episode
from pipeline.rollout.judges.environment_steps import CallFailure, StepOutcome
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.lockstep import STEP, WAIT, Lockstep, Move, apply_move, waiting, working
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork, UnfinishedGroup
from pipeline.rpc import StreamingReply
from pipeline.types import Completion, Rollout, RolloutGroup, Turn


@dataclass(slots=True)
class _OpenWork:
    """A work some of whose groups have not ended."""

    work: RolloutWork
    later: StreamingReply[FinishedGroup]
    ended: dict[int, dict[int, Rollout]]  # place -> sample -> rollout, for groups that have not ended
    episodes: dict[tuple[int, int], Episode] = field(default_factory=dict)  # (place, sample) -> episode that has not ended


class EpisodeDriver:
    """Runs episodes. The environments set `wakeup`, and so may the source of verbs, to end a wait of the driver."""

    def __init__(
        self,
        engine: GenerateBackend,
        environments: JudgePool,
        lockstep: Lockstep,
        world: World,
        wakeup: threading.Event,
        max_num_seqs: int,
        max_length: int,
        broken_rewards: Mapping[str, float] | None = None,
    ):
        """Bind the driver to an engine and its environments.

        max_length: tokens of a prompt and all that follows. broken_rewards: by environment, the reward of an answer that breaks
        it; 0 if not given.
        """
        self._engine, self._environments, self._lockstep, self._world = engine, environments, lockstep, world
        self._wakeup, self._max_num_seqs, self._max_length = wakeup, max_num_seqs, max_length
        self._broken_rewards = broken_rewards or {}
        self._works: dict[int, _OpenWork] = {}
        self._urgent: deque[Episode] = deque()  # not begun
        self._waiting: deque[Episode] = deque()  # not begun
        self._active: set[Episode] = set()  # that may still use the engine
        self._next: deque[Episode] = deque()  # active episodes whose next turn is to be drawn
        self._in_engine: dict[str, Episode] = {}  # by request id
        self._in_environment: dict[str, Episode] = {}  # by episode id
        self._to_cut: list[str] = []  # requests to end at the next step
        self._drains: list[StreamingReply[None]] = []
        self._draining = False
        self.paused = False  # a refit is in progress, and the engine must not be used

    # ---- verbs --------------------------------------------------------------------------------------------------------------

    def rollout(self, work: RolloutWork) -> StreamingReply[FinishedGroup]:
        """Begin a work. Raises ValueError if there is a work of that number already."""
        if work.number in self._works:
            raise ValueError(f"work {work.number} is in progress already")
        later: StreamingReply[FinishedGroup] = StreamingReply()
        open_work = _OpenWork(work, later, {place: dict(work.finished.get(place, {})) for place in range(len(work.prompts))})
        self._works[work.number] = open_work
        queue = self._urgent if work.urgent else self._waiting
        for place in range(len(work.prompts)):
            for sample in range(work.samples):
                if sample not in open_work.ended[place]:
                    episode = open_work.episodes[place, sample] = Episode(work, place, sample)
                    queue.append(episode)
        for place in range(len(work.prompts)):
            self._finish(open_work, place)
        if not work.prompts:
            self._close(open_work)
        return later

    def drain(self) -> StreamingReply[None]:
        """Begin no more episodes until `resume`. The reply ends when no episode may use the engine any more."""
        self._draining = True
        self._drains.append(StreamingReply())
        later = self._drains[-1]
        self._end_drains()
        return later

    def resume(self) -> None:
        """Continue after a refit."""
        self._draining = self.paused = False

    def snapshot(self) -> list[UnfinishedGroup]:
        """Return the state of each group that has not ended, in the order of the works."""
        progress = self._engine.progress()
        unfinished: dict[tuple[int, int], UnfinishedGroup] = {}
        for number, open_work in self._works.items():
            for (place, sample), episode in open_work.episodes.items():
                group = unfinished.setdefault((number, place), UnfinishedGroup(number, place, dict(open_work.ended[place]), {}))
                group.open[sample] = episode.drawn() + list(progress.get(episode.request_id, ()))
        return list(unfinished.values())

    def cut(self, numbers: list[int]) -> None:
        """End the open episodes of these works where they are. Skip works that have been answered."""
        for number in numbers:
            if number in self._works:
                for episode in list(self._works[number].episodes.values()):
                    self._cut(episode)
        self._end_drains()

    def _cut(self, episode: Episode) -> None:
        in_engine, in_environment = episode.request_id in self._in_engine, episode.id in self._in_environment
        if in_engine and not episode.cut:
            self._to_cut.append(episode.request_id)
        episode.cut = True
        if in_engine:
            return
        self._active.discard(episode)  # an episode in an environment ends with that turn
        if not in_environment:
            for queue in (self._urgent, self._waiting, self._next):
                if episode in queue:
                    queue.remove(episode)
            self._end_unsaid(episode)

    # ---- between verbs ------------------------------------------------------------------------------------------------------

    def work(self, verb_waits: Callable[[], bool], look_s: float | None = None) -> None:
        """Work until a verb waits, or there is nothing to do before one arrives.

        look_s: longest wait between two calls of `verb_waits`. None: `wakeup` is set when a verb arrives.
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
                        limits = (look_s, self._environments.seconds_left())
                        self._wakeup.wait(min((limit for limit in limits if limit is not None), default=None))
                        self._wakeup.clear()  # before looking for outcomes, so that no wakeup is lost
                        self._take_outcomes()
            else:
                return

    @property
    def _can_step(self) -> bool:
        if self.paused:
            return False
        return bool(self._engine.pending or self._next or self._to_cut or self._may_begin)

    @property
    def _may_begin(self) -> bool:
        """True if an episode can begin now."""
        unbegun = self._urgent or self._waiting
        return bool(unbegun) and not self._draining and len(self._active) < self._max_num_seqs

    def _step(self) -> None:
        self._take_outcomes()
        adding = list(self._next)
        self._next.clear()
        while self._may_begin:
            episode = (self._urgent or self._waiting).popleft()
            self._active.add(episode)
            adding.append(episode)
        self._in_engine |= {episode.request_id: episode for episode in adding}
        move = Move(self._to_cut, [episode.request() for episode in adding])
        self._to_cut = []
        self._lockstep.announce(STEP, move)
        for completion in apply_move(move, self._engine, self._lockstep.clock):
            self._judge(completion)
        self._end_drains()

    def _judge(self, completion: Completion) -> None:
        """Give an answer of the policy to its environment, or let the policy answer after it has thought."""
        episode = self._in_engine.pop(completion.id)
        if episode.think(completion, self._max_length):
            self._next.append(episode)
            return
        if episode.last_turn:
            self._active.discard(episode)
        if len(completion.tokens):
            self._submit(episode, completion)
        else:
            self._end_unsaid(episode)

    def _submit(self, episode: Episode, completion: Completion) -> None:
        episode.completion = completion
        if not episode.prompt.environment:  # what asked scores it
            self._go_on(episode, StepOutcome(0.0, {}, over=True, observation=None))
            return
        self._in_environment[episode.id] = episode
        self._environments.submit(episode.step_request(self._max_length))

    def _end_unsaid(self, episode: Episode) -> None:
        """End an episode that was cut before the first token of a turn. After thinking its answer is empty, and is judged."""
        if episode.thought:
            self._submit(episode, replace(episode.turns.pop().completion, finish="length"))
        else:
            self._end(episode, episode.cut_short())

    def _take_outcomes(self) -> None:
        for name, answer in self._environments.take():
            episode = self._in_environment.pop(name)
            if isinstance(answer, CallFailure):
                reward = self._broken_rewards.get(episode.prompt.environment, 0.0)
                self._end(episode, episode.broke(answer.why, reward) if answer.of_answer else episode.failed(answer.why))
            else:
                self._go_on(episode, answer)
        self._end_drains()

    def _go_on(self, episode: Episode, outcome: StepOutcome) -> None:
        """Continue an episode, or end it. Rewards of all turns add up; metrics are those of the last turn."""
        last, completion = episode.last_turn, episode.completion
        assert completion is not None  # the environment has judged it
        episode.reward += outcome.reward
        episode.metrics, episode.extracted = outcome.metrics, outcome.extracted
        unanswered, episode.completion = episode.unanswered, None
        if outcome.over or last or outcome.observation is None:
            # It ends because of a cut, or because no room is left.
            cut = unanswered or (not outcome.over and (episode.cut or not last))
            episode.turns.append(Turn(replace(completion, finish="length") if cut else completion, thinking=unanswered))
            self._end(episode, episode.rollout())
        else:
            episode.turns.append(Turn(completion, outcome.observation))
            self._next.append(episode)

    def _end(self, episode: Episode, rollout: Rollout) -> None:
        open_work = self._works[episode.work.number]
        self._active.discard(episode)
        self._environments.forget(episode.id)
        del open_work.episodes[episode.place, episode.sample]
        open_work.ended[episode.place][episode.sample] = rollout
        self._finish(open_work, episode.place)

    def _finish(self, open_work: _OpenWork, place: int) -> None:
        """Answer a group if all its episodes have ended, and close its work if it is the last."""
        work, ended = open_work.work, open_work.ended[place]
        if len(ended) < work.samples:
            return
        open_work.later.put(
            FinishedGroup(place, RolloutGroup(work.prompts[place], tuple(ended[i] for i in range(work.samples))))
        )
        del open_work.ended[place]
        if not open_work.ended:
            self._close(open_work)

    def _close(self, open_work: _OpenWork) -> None:
        open_work.later.end()
        del self._works[open_work.work.number]

    def _end_drains(self) -> None:
        if not self._active:
            for later in self._drains:
                later.end()
            self._drains = []
