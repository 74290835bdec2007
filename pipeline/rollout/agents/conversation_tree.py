"""Find the turn of an episode that a request of its agent continues.

An agent sends its whole history with each request. If the history is one that the policy has seen, with the answers that the
policy gave, then the tokens of the new request are those of the earlier turn, and only what follows it is encoded. So the
policy's own tokens are never decoded and encoded again. An agent that changed the history (it compacted it, cut a tool's
output, or asks as another agent) begins a new branch: after the last turn before the change, or, if there is none, with the
request's own tokens. Answers of the policy that come after a change are then encoded like any other message (`unmatched`).

Histories are compared by message: roles, texts, names, and tool calls by name and arguments. Ids of calls, the order of keys in
arguments, white space around an answer, and an answer's reasoning do not count, since clients drop or rewrite them. Where
messages differ but the rendered tokens begin with all tokens of a turn, the request continues that turn too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.rollout.engine_client import DrawnTurn

Message = dict[str, Any]


@dataclass(frozen=True)
class AgentTurn:
    """A turn of the policy, and the message that the agent got for it."""

    turn: DrawnTurn
    message: Message  # of the assistant


@dataclass
class ConversationTree:
    """The turns of one episode by the histories that end in them."""

    matched: int = 0  # answers in the requests' histories that are the policy's own tokens
    unmatched: int = 0  # answers in them that are not
    _turns: dict[bytes, AgentTurn] = field(default_factory=dict)  # by the history that ends in them
    _drawn: list[DrawnTurn] = field(default_factory=list)

    def find(self, messages: Sequence[Message], tools: Any, tokens: np.ndarray) -> tuple[AgentTurn, int] | None:
        """Return (the turn that a request continues, the number of its messages up to that turn), or None.

        tokens: of the rendered request, [P] int32; a turn that is found by them has all messages of the request, so that the
        rest of `tokens` follows it.
        """
        keys = list(_keys(messages, tools))
        known = [place for place, (end, key) in enumerate(keys) if key in self._turns and end < len(messages)]
        by_tokens = None if known else self.find_tokens(tokens)
        own = len(keys) if by_tokens else known[-1] + 1 if known else 0
        self.matched, self.unmatched = self.matched + own, self.unmatched + len(keys) - own
        if by_tokens:
            return AgentTurn(by_tokens, {}), len(messages)
        if not known:
            return None
        end, key = keys[known[-1]]
        return self._turns[key], end

    def find_tokens(self, tokens: np.ndarray) -> DrawnTurn | None:
        """Return the turn, the last of its conversation, with whose tokens `tokens` begin, or None."""
        found = [turn for turn in self._drawn if _begins_with(tokens, turn)]
        return max(found, key=lambda turn: len(turn.before), default=None)

    def add_tokens(self, turn: DrawnTurn) -> None:
        """Keep a turn of a conversation without messages."""
        self._drawn.append(turn)

    def add(self, messages: Sequence[Message], tools: Any, said: AgentTurn) -> None:
        """Keep a turn that the policy drew after `messages`."""
        *_, (_, key) = _keys([*messages, said.message], tools)
        self._turns[key] = said
        self._drawn.append(said.turn)


def _keys(messages: Sequence[Message], tools: Any) -> Iterator[tuple[int, bytes]]:
    """Yield (number of messages, a digest of them) for each beginning of a conversation that ends in an assistant's message."""
    digest = hashlib.blake2b(_canonical_json(tools or None), digest_size=16)
    for number, message in enumerate(messages, 1):
        digest.update(_canonical_json(_identity(message)))
        if message.get("role") == "assistant":
            yield number, digest.digest()


def _identity(message: Message) -> list[Any]:
    """Return what must be equal for two messages to be the same."""
    content, is_answer = text_of(message.get("content")), message.get("role") == "assistant"
    calls = [_call_identity(call) for call in message.get("tool_calls") or ()]
    return [message.get("role"), content.strip() if is_answer else content, message.get("name") or "", calls]


def _call_identity(call: Any) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # a malformed call is compared as text
    return [function.get("name"), arguments]


def text_of(content: Any) -> str:
    """Return a message's content as one text. Parts that are no text are kept as JSON."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else _text_of_part(part) for part in parts)


def _text_of_part(part: Any) -> str:
    return str(part["text"]) if isinstance(part, dict) and "text" in part else _json(part)


def _begins_with(tokens: np.ndarray, turn: DrawnTurn) -> bool:
    before, own = len(turn.before), len(turn.tokens)
    return (
        len(tokens) > before + own
        and np.array_equal(tokens[:before], turn.before)
        and np.array_equal(tokens[before : before + own], turn.tokens)
    )


def _canonical_json(value: Any) -> bytes:
    return _json(value).encode(errors="surrogatepass")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
