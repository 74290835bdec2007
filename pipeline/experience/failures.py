"""Episodes that their environment failed: told, and the end of the run if nothing else comes.

A group all of whose episodes failed counts, so that one bad prompt ends no run. Those that were cut before they said anything
are not among them.
"""

from __future__ import annotations

from pipeline.types import NOTHING_SAID, RolloutGroup


class Failures:
    def __init__(self, most: int, key: str):
        """most: how many groups may fail whole, one after another. key: what in the recipe says so."""
        self._most = most
        self._key = key
        self._row = 0

    def see(self, group: RolloutGroup) -> None:
        """Raises RuntimeError if more than `most` groups have failed whole since an episode was judged."""
        begun = [(sample, rollout) for sample, rollout in enumerate(group.rollouts) if rollout.failure != NOTHING_SAID]
        failed = [(sample, rollout.failure) for sample, rollout in begun if rollout.failure]
        if not failed:
            self._row = 0 if begun else self._row
            return
        where = f"env.{group.prompt.environment}, prompt {group.prompt.index}"
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
