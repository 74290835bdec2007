"""Choose prompts by how well the policy answers them: pools of easy and hard records, and replay of these.

The mean reward of a prompt's latest group puts its record into a pool: `easy` from `data.curriculum.easy` on, `hard` up to
`data.curriculum.hard`, otherwise none. Prompts come from the data set's stream in its order, which passes over the records in
pools. A share of the prompts is instead drawn at random from each pool, so these records are measured again, and leave their
pool when their mean reward is between the bounds. Records that were never sampled are in no pool. (prime-rl's buffer has such
pools; verl calls them a curriculum.)

The draw of a prompt depends only on the seed, the number of prompts before it and the pools. The state has all of these, so a
resumed run sees the prompts that it would have seen without the interruption. In asynchronous runs with a positive age, what is
known of the groups when a prompt is chosen depends on time.

If the pools have all records of a whole epoch, the stream passes over none of them until a pool loses a record.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.config import CurriculumConfig
from pipeline.data.stream import PromptStream, Stream
from pipeline.types import Prompt, RolloutGroup

logger = logging.getLogger(__name__)


class Pool:
    """A set of records of which one is drawn in constant time. Its order is part of a run's state."""

    def __init__(self, records: Iterable[int] = ()) -> None:
        self.records = list(records)
        self._places = {record: place for place, record in enumerate(self.records)}

    def __contains__(self, record: int) -> bool:
        return record in self._places

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: int) -> None:
        """Add a record that the pool lacks."""
        self._places[record] = len(self.records)
        self.records.append(record)

    def remove(self, record: int) -> None:
        """Remove a record. The last one takes its place."""
        place, last = self._places.pop(record), self.records.pop()
        if last != record:
            self.records[place], self._places[last] = last, place


class Curriculum(Stream[Prompt]):
    """A stream of one data set's prompts, of which `observe` learns how hard they are."""

    def __init__(self, stream: PromptStream, config: CurriculumConfig, seed: int) -> None:  # pyright: ignore[reportMissingSuperCall]
        """Choose among the prompts of a stream, which nothing else reads."""
        self._stream, self._config, self._seed = stream, config, seed
        self._pools = {"easy": Pool(), "hard": Pool()}
        self._taken = self.passed_over = 0
        self._is_exhausted = False  # which is told once

    def take(self, n: int) -> list[Prompt]:
        """Return the next n prompts, fewer only if the stream has ended."""
        prompts: list[Prompt] = []
        while len(prompts) < n and (prompt := self._next()) is not None:
            prompts.append(dataclasses.replace(prompt, index=self._taken))
            self._taken += 1
        return prompts

    def _next(self) -> Prompt | None:
        drawn = np.random.default_rng([self._seed, self._taken])
        chance, config = drawn.random(), self._config
        for name, share in (("easy", config.easy_share), ("hard", config.hard_share)):
            pool = self._pools[name]
            if chance < share and len(pool) and (prompts := self._stream.of_record(pool.records[drawn.integers(len(pool))])):
                return prompts[0]
            chance -= share
        for _ in range(self._stream.records):
            items = self._stream.take(1)
            if not items or not any(items[0].record in pool for pool in self._pools.values()):
                break
            self.passed_over += 1
        else:
            if not self._is_exhausted:
                logger.warning("data.curriculum: all records of an epoch are easy or hard; prompts are any of them")
            self._is_exhausted = True
            items = self._stream.take(1)
        return items[0] if items else None

    def observe(self, groups: Iterable[RolloutGroup]) -> None:
        """Put the records of judged groups into pools, or out of them. Groups without a reward change nothing."""
        for group in groups:
            rewards = [rollout.reward for rollout in group.rollouts if not rollout.failure]
            if not rewards or group.prompt.record < 0:  # -1 in checkpoints of older versions
                continue
            mean, record = sum(rewards) / len(rewards), group.prompt.record
            name = "easy" if mean >= self._config.easy else "hard" if mean <= self._config.hard else None
            for pool_name, pool in self._pools.items():
                if record in pool and pool_name != name:
                    pool.remove(record)
                elif record not in pool and pool_name == name:
                    pool.add(record)

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of records in pools, and of prompts that were passed over."""
        sizes = {f"curriculum/{name}": float(len(pool)) for name, pool in self._pools.items()}
        return {**sizes, "curriculum/passed_over": float(self.passed_over)}

    # ---- as of a stream ------------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """The number of records that the stream has skipped because they cannot be used."""
        return self._stream.dropped

    @property
    def dropped_at_start(self) -> int:
        """The number of those that the check at the start skipped."""
        return self._stream.dropped_at_start

    @property
    def records(self) -> int:
        """The number of records of an epoch."""
        return self._stream.records

    @property
    def usable(self) -> int:
        """The number of records of an epoch, minus those that the check at the start skipped."""
        return self._stream.usable

    def end_after(self, max_num_epochs: int) -> None:
        """Change the number of epochs, as `Stream.end_after` does."""
        self._stream.end_after(max_num_epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which JSON can represent."""
        pools = {name: pool.records for name, pool in self._pools.items()}
        return {
            **self._stream.state_dict(),
            "curriculum": {"taken": self._taken, "passed_over": self.passed_over, "pools": pools},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`, which may be a stream's, from a run without a curriculum. Raise RecipeError as a stream does."""
        saved = state.get("curriculum")
        self._stream.load_state_dict({name: value for name, value in state.items() if name != "curriculum"})
        saved = saved or {"taken": self._stream.position, "passed_over": 0, "pools": {}}
        self._taken, self.passed_over = saved["taken"], saved["passed_over"]
        self._pools = {name: Pool(saved["pools"].get(name, ())) for name in self._pools}
