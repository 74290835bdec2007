"""The pools of an engine whose environments run on several environment ranks."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from pipeline.rollout.function_messages import FunctionCall
from pipeline.rollout.judges.environment_steps import CallFailure, StepOutcome, StepRequest
from pipeline.rollout.judges.parent_process import CLOSING_S
from pipeline.rollout.judges.pool import JudgePool


class JudgePools:
    """Divides the episodes of an engine among pools, by a hash of their names. Has the methods of `JudgePool`."""

    def __init__(self, pools: Sequence[JudgePool]) -> None:
        self._pools = pools

    def _of(self, episode: str) -> JudgePool:
        return self._pools[zlib.crc32(episode.encode()) % len(self._pools)]

    def wait_until_loaded(self, timeout_s: float | None = None) -> None:
        """Wait until the environments of all pools are loaded."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for pool in self._pools:
            pool.wait_until_loaded(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def submit(self, request: StepRequest | FunctionCall) -> None:
        """Let the environment judge a turn."""
        self._of(request.episode).submit(request)

    def tell(self, message: FunctionCall) -> None:
        """Give an agent completions, or cut it."""
        self._of(message.episode).tell(message)

    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        """Return (episode, answer) for each turn that was judged since the last call."""
        return [answer for pool in self._pools for answer in pool.take()]

    def seconds_left(self) -> float | None:
        """Return the seconds until `take` must be called; None if it need not be called."""
        return min((left for pool in self._pools if (left := pool.seconds_left()) is not None), default=None)

    def forget(self, episode: str) -> None:
        """Drop the state of an episode that has ended."""
        self._of(episode).forget(episode)

    def close(self) -> None:
        """Close the environments of all pools, at once."""
        deadline = time.monotonic() + CLOSING_S
        for pool in self._pools:
            pool.begin_close()
        for pool in self._pools:
            pool.close(max(0.0, deadline - time.monotonic()))
