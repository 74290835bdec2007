"""Judges for tests: what they say is a function of what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.evaluation.judge import JudgeReply, JudgeRequest


@dataclass
class SaidJudge:
    """Replies with `says(request)`: a text, or a JudgeReply without an id."""

    says: Callable[[JudgeRequest], str | JudgeReply]
    asked: list[JudgeRequest] = field(default_factory=list)
    _ready: list[JudgeReply] = field(default_factory=list)

    def submit(self, requests: Sequence[JudgeRequest]) -> None:
        self.asked += requests
        for request in requests:
            said = self.says(request)
            if isinstance(said, str):
                said = JudgeReply("", said)
            self._ready.append(JudgeReply(request.id, said.text, said.finish, said.failure, said.busy))

    def take(self, wait: bool) -> list[JudgeReply]:
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        pass
