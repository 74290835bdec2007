"""Report episodes that nobody could judge, and end the run if nothing else comes.

Two things are counted. Groups in a row all of whose episodes failed, through no doing of the answers: one bad prompt ends no
run. And groups all of whose answers broke an environment that has judged none yet: then it is the environment that is broken.
One that has judged an answer can judge; however many answers break it, they are wrong, and the run goes on. Episodes that were
cut before they said anything are not counted.
"""

from __future__ import annotations

from pipeline.types import NOTHING_SAID, Rollout, RolloutGroup

FIRST_GROUPS = 10
"""Of an environment: as many groups may break it before it has judged an answer. One more ends the run."""


class FailureMonitor:
    def __init__(self, most: int, key: str):
        """most: how many groups may fail whole, one after another. key: what in the recipe says so."""
        self._most = most
        self._key = key
        self._row = 0
        self._can_judge: set[str] = set()  # environments that have judged an answer
        self._broken: dict[str, int] = {}  # of the others: groups that broke them

    def record(self, group: RolloutGroup) -> None:
        """Count the failures of a group. Raises RuntimeError if more than `most` groups have failed whole since an episode was
        judged, or if none of the first FIRST_GROUPS groups of an environment could be judged for what they said."""
        begun = [(sample, rollout) for sample, rollout in enumerate(group.rollouts) if rollout.failure != NOTHING_SAID]
        self._record_broken(group, [rollout for _, rollout in begun])
        failed = [(sample, rollout.failure) for sample, rollout in begun if rollout.failure]
        if not failed:
            self._row = 0 if begun else self._row
            return
        where = _where(group)
        sample, why = failed[0]
        print(
            f"hetstep: {where}: {len(failed)} of {len(group.rollouts)} episodes failed, and are not learned from;"
            f" episode {sample}: {why}",
            flush=True,
        )
        self._row = self._row + 1 if len(failed) == len(begun) else 0
        if self._row > self._most:
            raise RuntimeError(
                f"{where}: {why}; all episodes of {self._row} groups failed, one after another, and {self._most} may"
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
                f"{_where(group)}: {broken[0]}; it has judged none of the answers of its first {self._broken[name]} groups."
                " Try its code on one of them: an answer in an unexpected form should get a reward, too"
            )


def _where(group: RolloutGroup) -> str:
    return f"env.{group.prompt.environment}, prompt {group.prompt.index}"
