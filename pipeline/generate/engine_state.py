"""What an engine may do next: it serves when it has a whole set of weights, no update is under way, and no memory is asleep.

Both backends keep one of these and ask it first; every wrong call raises RuntimeError and changes nothing.
"""

from __future__ import annotations

from typing import Literal

MemoryPart = Literal["weights", "cache"]


class EngineState:
    def __init__(self) -> None:
        self._has_weights = False
        self._updating = False
        self._asleep: list[MemoryPart] = []  # in the order in which they wake

    def check_serves(self) -> None:
        if self._asleep:
            raise RuntimeError(f"the engine sleeps: its {' and '.join(self._asleep)} must wake first")
        if self._updating or not self._has_weights:
            raise RuntimeError("the engine has no whole set of weights; an update must be committed first")

    def begin_update(self) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("the engine sleeps: its weights must wake before they are written")
        self._updating, self._has_weights = True, False

    def commit(self) -> None:
        self._updating, self._has_weights = False, True

    def sleep(self, keep_weights: bool, pending: int) -> None:
        if self._asleep:
            raise RuntimeError(f"sleep: the engine's {' and '.join(self._asleep)} sleep already")
        if self._updating:
            raise RuntimeError("sleep: an update is under way")
        if pending:
            raise RuntimeError(f"sleep: {pending} requests are pending")
        self._asleep = ["weights", "cache"]
        self._has_weights = self._has_weights and keep_weights

    def wake(self, part: MemoryPart) -> None:
        if self._asleep[:1] != [part]:
            next_part = f"the next to wake is '{self._asleep[0]}'" if self._asleep else "nothing sleeps"
            raise RuntimeError(f"wake '{part}': {next_part}")
        self._asleep.pop(0)
