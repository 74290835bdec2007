"""Sampling that runs ahead of training: engines go on while the train ranks learn, and a step trains on what `Buffer` gives it.

New groups are sent right after a refit, and one for each that dynamic sampling passes over: all of an engine's new work begins
with the newest weights. With `max_trajectory_age_steps` 0 nothing runs ahead, and the run is the synchronous one to the last
bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import GRPOConfig
from pipeline.data.stream import PromptStream
from pipeline.experience import record
from pipeline.experience.base import Experience, Judge, Select, refuse_to_go_on, sampled_metrics
from pipeline.experience.buffer import Buffer
from pipeline.experience.dispatch import Dispatch, Order
from pipeline.experience.staleness import staleness
from pipeline.rollout.work import Unfinished
from pipeline.types import Prompt, RolloutGroup


class Asynchronous(Experience):
    def __init__(self, section: GRPOConfig, dispatch: Dispatch, judge: Judge | None, train: Order, validation: Order):
        super().__init__(section.num_prompts_per_step, dispatch, judge, train, validation)
        self._section = section
        self._config = section.async_grpo
        self._buffer = Buffer(section.async_grpo, section.num_prompts_per_step)

    @property
    def pending(self) -> int:
        return len(self._buffer.live)

    def room(self, step: int) -> int:
        return self._buffer.room(self._section.max_num_steps - step)

    def enough(self, prompts: Sequence[Prompt]) -> bool:
        return self.pending + len(prompts) >= self.prompts_per_step

    def send(self, prompts: Sequence[Prompt], step: int) -> None:
        self._buffer.begin(prompts, step)
        self._dispatch.send(prompts, self._train)

    # ---- a step -----------------------------------------------------------------------------------------------------------

    def collect(self, prompts: PromptStream, select: Select, step: int) -> tuple[list[RolloutGroup], dict[str, float]]:
        wanted = self.prompts_per_step
        sampled: list[RolloutGroup] = []
        selected: list[RolloutGroup] = []
        before = [live for live in self._buffer.live if live.begun < step]
        while len(selected) < wanted and (groups := self._next(step, wanted - len(selected))):
            groups = self._judge(groups)
            chosen = select(groups)
            sampled, selected = sampled + groups, selected + chosen
            if passed_over := len(groups) - len(chosen):
                self._bound(len(sampled), len(selected))
                self.send(prompts.take(passed_over), step)
        if len(selected) < wanted:  # the checkpoint that is written now is of before this step, which had these
            self._buffer.put_back(before)
        values = sampled_metrics(sampled, selected, wanted, len(sampled) / wanted)
        return selected, values | staleness(selected, step, self._buffer.max_age) | self._state()

    def _next(self, step: int, wanted: int) -> list[RolloutGroup]:
        """Groups for the step; none if the data have ended."""
        self._take_in(block=False)
        while (groups := self._buffer.take(step, wanted)) is None:
            if late := self._buffer.stragglers(wanted):
                self._dispatch.cut(late)
            self._take_in(block=not late)  # to wait for the cut was to take in messages, perhaps the last there will be
        return groups

    def _take_in(self, block: bool) -> None:
        self._dispatch.receive(block)
        for group in self._dispatch.take(self._train.purpose):
            self._buffer.complete(group)

    def _bound(self, sampled: int, selected: int) -> None:
        if sampled >= self._section.dynamic_sampling_max_gen_batches * self.prompts_per_step:
            refuse_to_go_on("grpo", f"{sampled} prompts", selected, self.prompts_per_step)

    def _state(self) -> dict[str, float]:
        """Of the buffer when the step begins to learn."""
        live, answered = self._buffer.live, self._dispatch.take_answered()
        fewest, most = min(answered), max(answered)
        return {
            "async/groups_live": float(len(live)),
            "async/groups_complete": float(sum(one.group is not None for one in live)),
            "async/groups_per_engine_min": float(fewest),  # that came since the last step
            "async/groups_per_engine_max": float(most),
            "async/engine_with_fewest": float(answered.index(fewest)),
            "time/wait": self._dispatch.take_waited_s(),  # within time/rollout and time/validation
        }

    def before_refit(self) -> None:
        if not self._config.in_flight_weight_updates and any(live.group is None for live in self._buffer.live):
            self._dispatch.drain()

    # ---- checkpoints ------------------------------------------------------------------------------------------------------

    def record(self) -> bytes:
        stands = self._dispatch.snapshot(self._train.purpose) if self.pending else {}
        self._take_in(block=False)
        samples = range(self._train.samples)

        def entry(prompt: Prompt, begun: int, group: RolloutGroup | None, stand: Unfinished | None) -> record.Entry:
            finished = dict(enumerate(group.rollouts)) if group else stand.finished
            drawn = {} if group else stand.open
            return record.Entry(prompt, begun, finished, {i: drawn.get(i, []) for i in samples if i not in finished})

        return record.write(
            [entry(live.prompt, live.begun, live.group, stands.get(live.prompt.index)) for live in self._buffer.live]
        )

    def resume(self, kept: bytes, step: int) -> dict[str, float]:
        entries = record.read(kept)
        if not entries:
            return {}
        for entry in entries:
            if (had := len(entry.rollouts) + len(entry.open)) != self._train.samples:
                raise ValueError(
                    f"grpo.num_generations_per_prompt: {self._train.samples}, but the checkpoint of step {step} has groups of"
                    f" {had} that were sampled ahead; {had}, as when it was written"
                )
            self._buffer.begin([entry.prompt], entry.begun)
            if entry.group:
                self._buffer.complete(entry.group)
        self._buffer.check(step)
        again = [entry for entry in entries if not entry.group]
        self._dispatch.send(
            [entry.prompt for entry in again], self._train, {entry.prompt.index: entry.rollouts for entry in again}
        )
        values = record.account(entries)
        print(record.told(values), flush=True)
        return values
