"""Count episodes that could not be judged, log them, and end the run if nothing else comes back.

Two things are counted. First, consecutive groups all of whose episodes failed for reasons other than the answers: one bad
prompt does not end a run. Second, groups all of whose answers broke an environment that has not judged an answer yet: then the
environment is faulty. Once an environment has judged an answer, further answers that break it are wrong answers, however many,
and the run continues. Episodes that were cut before their first token are not counted.
"""

from __future__ import annotations

import logging

from pipeline.types import NOTHING_SAID, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

FIRST_GROUPS = 10
"""Number of groups that may break an environment before it has judged an answer. One more ends the run."""


class FailureMonitor:
    """Counts failures of groups."""

    def __init__(self, most: int, key: str):
        """Allow `most` consecutive groups to fail completely. key: the recipe's key that sets `most`."""
        self._most = most
        self._key = key
        self._row = 0
        self._can_judge: set[str] = set()  # environments that have judged an answer
        self._broken: dict[str, int] = {}  # groups that broke each of the others

    def record(self, group: RolloutGroup) -> None:
        """Count and log the failures of a group.

        Raises RuntimeError if more than `most` consecutive groups have failed completely, or if an environment could judge none
        of its first FIRST_GROUPS groups.
        """
        begun = [(sample, rollout) for sample, rollout in enumerate(group.rollouts) if rollout.failure != NOTHING_SAID]
        self._record_broken(group, [rollout for _, rollout in begun])
        failed = [(sample, rollout.failure) for sample, rollout in begun if rollout.failure]
        if not failed:
            self._row = 0 if begun else self._row
            return
        where = _where(group)
        sample, why = failed[0]
        logger.warning(
            f"{where}: {len(failed)} of {len(group.rollouts)} episodes failed; they are not trained on; episode {sample}: {why}"
        )
        self._row = self._row + 1 if len(failed) == len(begun) else 0
        if self._row > self._most:
            raise RuntimeError(
                f"{where}: {why}. With this group, all episodes of {self._row} consecutive groups failed; {self._most} may fail"
                f" ({self._key})"
            )

    def _record_broken(self, group: RolloutGroup, begun: list[Rollout]) -> None:
        name = group.prompt.environment
        if any(not rollout.failure and not rollout.broke for rollout in begun):
            self._can_judge.add(name)
        broken = [rollout.broke for rollout in begun if rollout.broke]
        if not broken or name in self._can_judge:
            return
        self._broken[name] = self._broken.get(name, 0) + 1
        if self._broken[name] > FIRST_GROUPS:
            raise RuntimeError(
                f"{_where(group)}: {broken[0]}; it could judge no answer of its first {self._broken[name]} groups."
                " Try its code on one of them: an answer in an unexpected form must get a reward too"
            )


def _where(group: RolloutGroup) -> str:
    return f"env.{group.prompt.environment}, prompt {group.prompt.index}"
