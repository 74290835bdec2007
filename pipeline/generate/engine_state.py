"""State machine of an engine: it serves while it has complete weights, no update is in progress, and no memory is released.

Both backends keep one `EngineState` and check it first. Every invalid call raises RuntimeError and changes nothing.
"""

from __future__ import annotations

from typing import Literal

MemoryPart = Literal["weights", "cache"]


class EngineState:
    """The state of an engine; it decides which calls the engine accepts."""

    def __init__(self) -> None:
        self._has_weights = False
        self._updating = False
        self._asleep: list[MemoryPart] = []  # released parts, in the order in which they wake

    def check_serves(self) -> None:
        """Raise RuntimeError if the engine cannot sample now."""
        if self._asleep:
            raise RuntimeError(f"the engine sleeps; wake its {' and '.join(self._asleep)} first")
        if self._updating or not self._has_weights:
            raise RuntimeError("the engine has no complete weights; commit an update first")

    def begin_update(self) -> None:
        """Mark the weights as incomplete until `commit`. Raises RuntimeError if the memory of the weights is released."""
        if "weights" in self._asleep:
            raise RuntimeError("the engine sleeps; wake its weights before an update")
        self._updating, self._has_weights = True, False

    def commit(self) -> None:
        """Mark the weights as complete."""
        self._updating, self._has_weights = False, True

    def sleep(self, keep_weights: bool, pending: int) -> None:
        """Mark all memory as released. Raises RuntimeError if that is so already, or an update or a request is pending."""
        if self._asleep:
            raise RuntimeError(f"sleep: the engine's {' and '.join(self._asleep)} sleep already")
        if self._updating:
            raise RuntimeError("sleep: an update is in progress")
        if pending:
            raise RuntimeError(f"sleep: {pending} requests are pending")
        self._asleep = ["weights", "cache"]
        self._has_weights = self._has_weights and keep_weights

    def wake(self, part: MemoryPart) -> None:
        """Mark one part of the memory as allocated. Raises RuntimeError if it is not the next part to wake."""
        if self._asleep[:1] != [part]:
            next_part = f"the next to wake is '{self._asleep[0]}'" if self._asleep else "nothing sleeps"
            raise RuntimeError(f"wake '{part}': {next_part}")
        self._asleep.pop(0)
