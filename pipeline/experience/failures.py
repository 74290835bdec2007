"""Episodes that their environment failed: told, and the end of the run if nothing else comes.

Those that were cut before they said anything are not among them.
"""

from __future__ import annotations

from pipeline.types import NOTHING_SAID, RolloutGroup


class Failures:
    def __init__(self, most: int, key: str):
        """most: how many may come one after another. key: what in the recipe says so."""
        self._most = most
        self._key = key
        self._row = 0

    def see(self, group: RolloutGroup) -> None:
        """Raises RuntimeError if more than `most` episodes have failed since one was judged."""
        judged = [(sample, rollout) for sample, rollout in enumerate(group.rollouts) if rollout.failure != NOTHING_SAID]
        failed = [(sample, rollout.failure) for sample, rollout in judged if rollout.failure]
        if failed:
            where = f"env.{group.prompt.environment}, prompt {group.prompt.index}"
            sample, why = failed[0]
            print(
                f"hetstep: {where}: {len(failed)} of {len(group.rollouts)} episodes failed, and are not learned from;"
                f" episode {sample}: {why}",
                flush=True,
            )
        for _, rollout in judged:
            self._row = self._row + 1 if rollout.failure else 0
            if self._row > self._most:
                raise RuntimeError(
                    f"{self._key}: {self._row} episodes failed one after another, and {self._most} may; the last in {where}:"
                    f" {rollout.failure}"
                )
