"""What a checkpoint keeps of sampling that runs ahead, as bytes: `buffer.msgpack` in its folder.

Of each group that was begun and not trained on: the prompt, the version that began it, the rollouts that have ended, and what
had been drawn of the others by which versions. Those are drawn anew after a restart: an engine's keys and values are not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.encoding import decode, encode
from pipeline.types import Prompt, Rollout, RolloutGroup, Span


@dataclass(frozen=True, slots=True)
class Entry:
    prompt: Prompt
    begun: int  # the version of the weights
    rollouts: dict[int, Rollout]  # by sample: those that have ended
    open: dict[int, list[Span]]  # by sample: what had been drawn of the others; empty if they had not begun

    @property
    def group(self) -> RolloutGroup | None:
        """The whole group, if all its episodes have ended."""
        if self.open:
            return None
        return RolloutGroup(self.prompt, tuple(rollout for _, rollout in sorted(self.rollouts.items())))


def write(entries: Sequence[Entry]) -> bytes:
    return encode(list(entries)) if entries else b""


def read(record: bytes) -> list[Entry]:
    """Raises msgspec.ValidationError if it is not a record."""
    return decode(record, list[Entry]) if record else []


def account(entries: Sequence[Entry]) -> dict[str, float]:
    """What a restart keeps and what it does again, as metrics."""
    open_ = [sum(span.tokens for span in spans) for entry in entries for spans in entry.open.values()]
    redone = [tokens for tokens in open_ if tokens]
    return {
        "async/resumed_rollouts_kept": float(sum(len(entry.rollouts) for entry in entries)),
        "async/resumed_rollouts_redone": float(len(redone)),
        "async/resumed_tokens_redone": float(sum(redone)),
        "async/resumed_rollouts_not_begun": float(len(open_) - len(redone)),
    }


def told(values: dict[str, float]) -> str:
    kept, redone, tokens, rest = (int(value) for value in values.values())
    redo = f"{redone} redone (of which {tokens} tokens had been drawn), {rest} not begun yet"
    return f"resumed: {kept} finished rollouts kept, {redo}"
