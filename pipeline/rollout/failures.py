"""Count and log episodes that could not be judged, and end the run if no episode of several groups can be judged.

The monitor has two counts. The first is of consecutive groups in which every episode failed for a reason other than its
answers; one bad prompt does not end a run. The second is of groups in which every answer broke an environment that has not
judged an answer yet; such an environment is faulty. Once an environment has judged an answer, answers that break it count as
wrong, however many there are, and the run continues. Episodes that were cut before their first token do not count.
"""

from __future__ import annotations

import logging

from pipeline.types import NOTHING_SAID, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

FIRST_GROUPS = 10
"""Number of groups that may break an environment before it has judged an answer. Another such group ends the run."""


class FailureMonitor:
    """Counts groups whose episodes failed, and ends the run if there are too many."""

    def __init__(self, limit: int, key: str):
        """Allow `limit` consecutive groups to fail completely. key: the recipe's key that sets `limit`, for the message."""
        self._limit = limit
        self._key = key
        self._consecutive = 0  # groups that have failed completely since the last other group
        self._can_judge: set[str] = set()  # environments that have judged an answer
        self._broken: dict[str, int] = {}  # groups that broke each of the other environments
        self._broke: set[str] = set()  # environments that an answer has broken, which is told once

    def record(self, group: RolloutGroup) -> None:
        """Count and log the failures of a group.

        Raises RuntimeError if more than `limit` consecutive groups have failed completely, or if an environment cannot judge
        any answer of its first FIRST_GROUPS groups.
        """
        rollouts = [(sample, rollout) for sample, rollout in enumerate(group.rollouts) if rollout.failure != NOTHING_SAID]
        self._record_broken(group, [rollout for _, rollout in rollouts])
        failures = [(sample, rollout.failure) for sample, rollout in rollouts if rollout.failure]
        if not failures:
            self._consecutive = 0 if rollouts else self._consecutive
            return
        location = _location(group)
        sample, cause = failures[0]
        logger.warning(
            f"{location}: {len(failures)} of {len(group.rollouts)} episodes failed and are not trained on;"
            f" episode {sample}: {cause}"
        )
        self._consecutive = self._consecutive + 1 if len(failures) == len(rollouts) else 0
        if self._consecutive > self._limit:
            raise RuntimeError(
                f"{location}: {cause}. With this group, all episodes of {self._consecutive} consecutive groups failed;"
                f" at most {self._limit} may fail ({self._key})"
            )

    def _record_broken(self, group: RolloutGroup, rollouts: list[Rollout]) -> None:
        name = group.prompt.environment
        if any(not rollout.failure and not rollout.broke for rollout in rollouts):
            self._can_judge.add(name)
        causes = [rollout.broke for rollout in rollouts if rollout.broke]
        if causes and name not in self._broke:
            self._broke.add(name)
            count = f"{len(causes)} of {len(rollouts)} answers broke the environment and count as wrong"
            logger.warning(f"{_location(group)}: {count}: {causes[0]}. Later ones are in rollouts/ (broke_judge)")
        if not causes or name in self._can_judge:
            return
        self._broken[name] = self._broken.get(name, 0) + 1
        if self._broken[name] > FIRST_GROUPS:
            raise RuntimeError(
                f"{_location(group)}: {causes[0]}; it could judge no answer of its first {self._broken[name]} groups."
                " Try the environment's code on such an answer: an answer in an unexpected form must get a reward too"
            )


def _location(group: RolloutGroup) -> str:
    return f"env.{group.prompt.environment}, prompt {group.prompt.index}"
