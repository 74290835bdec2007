"""A language model as judge, behind an OpenAI-compatible endpoint (`POST <url>/chat/completions`).

The judge reads the question, the expected answer if there is one, and what the policy said; a pattern finds the score in its
reply. What may pass (no connection, a status of RETRIED, a reply without a score) is tried again after a growing pause, until
the step's time is over; anything else fails the episode at once. No reply makes a reward of 0: an episode that nobody could
judge is a failure.

Leaves out: several judges, judging many answers in one request, replies as streams.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from typing import TYPE_CHECKING, Any

from pipeline.environments.base import Environment, Outcome
from pipeline.types import Prompt

if TYPE_CHECKING:
    import httpx

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_REPLY_BYTES = 1 << 20
WORKERS = 16
TOLD = 300  # characters of a reply that an error message repeats
FIELDS = ("question", "answer", "response")


class Unjudged(RuntimeError):
    """The endpoint gave no score."""


class LLMJudge(Environment):
    """Reward: the score, moved from `scale` to 0 .. 1. Metrics: `score`, as the judge gave it; `tries`.

    url: up to and with `/v1`. prompt: a text with {response} and perhaps {question} and {answer}; other braces are left as they
    are. score_pattern: its last match in the reply counts, or that match's group if it has one. scale: the scores worth
    0 and 1; what is not between them is no score. timeout_s: for one answer, all tries and pauses together. tries: at most so
    many. workers: requests at once. api_key_env: the environment variable that has the key; none: no key is sent. request: more
    of the request's body, e.g. {temperature: 0}.
    Raises ValueError for a key that cannot be used, and never says what it is.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str,
        score_pattern: str,
        scale: list[float],
        tries: int,
        api_key_env: str | None,
        request: dict[str, Any],
        timeout_s: float,
        workers: int | None,
    ) -> None:
        import httpx

        self.workers = workers or WORKERS
        self._url, self._model, self._prompt = f"{url.rstrip('/')}/chat/completions", model, prompt
        self._score = re.compile(score_pattern)
        self._low, self._high = scale
        self._timeout_s, self._tries, self._request = timeout_s, tries, request
        headers = {}
        if api_key_env is not None:
            headers["Authorization"] = f"Bearer {_key(api_key_env)}"
        self._client = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=self.workers))

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Raises Unjudged if no try gave a score."""
        asked = self._asked(prompt, text)
        deadline = time.monotonic() + self._timeout_s
        for number in range(1, self._tries + 1):
            try:
                score = self._scored(asked, deadline)
            except _Passing as passing:
                pause = passing.pause_s or min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
                if number == self._tries or time.monotonic() + pause >= deadline:
                    raise Unjudged(f"{self._url}: no score after {number} tries; the last: {passing}") from None
                time.sleep(pause)
            else:
                return Outcome((score - self._low) / (self._high - self._low), {"score": score, "tries": float(number)})
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        self._client.close()

    def _asked(self, prompt: Prompt, text: str) -> bytes:
        question = prompt.task.get("text") or "\n\n".join(message["content"] for message in prompt.task.get("messages", []))
        values = {"question": question, "answer": prompt.task.get("answer", ""), "response": text}
        # In one pass: what the policy says may have "{answer}" in it.
        content = re.sub(f"{{({'|'.join(FIELDS)})}}", lambda field: values[field[1]], self._prompt)
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], **self._request}
        return json.dumps(body).encode()

    def _scored(self, asked: bytes, deadline: float) -> float:
        reply = self._posted(asked, deadline)
        try:
            content = json.loads(reply)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            raise Unjudged(f"{self._url}: not a chat completion: {_start(reply)}") from None
        found = self._score.findall(content or "")
        if not found:
            raise _Passing(f"a reply without a score: {_start((content or '').encode())}")
        score = float(found[-1])
        if not min(self._low, self._high) <= score <= max(self._low, self._high):
            raise _Passing(f"a score of {score:g}, which is not from {self._low:g} to {self._high:g}")
        return score

    def _posted(self, asked: bytes, deadline: float) -> bytes:
        """The reply's body. httpx bounds each of its waits, this all of them together."""
        import httpx

        left = max(1e-3, deadline - time.monotonic())
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream("POST", self._url, content=asked, headers=headers, timeout=left) as response:
                body = b""
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > MAX_REPLY_BYTES:
                        raise Unjudged(f"{self._url}: a reply of more than {MAX_REPLY_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise _Passing("the reply did not end in time")
        except httpx.TransportError as error:
            raise _Passing(f"{type(error).__name__}: {error}") from None
        if response.status_code in RETRIED:
            raise _Passing(f"status {response.status_code}: {_start(body)}", _retry_after(response))
        if response.status_code != 200:
            raise Unjudged(f"{self._url}: status {response.status_code}: {_start(body)}")
        return body


class _Passing(Exception):
    """What may be otherwise at the next try. pause_s: how long the endpoint asks to wait; None: it does not say."""

    def __init__(self, text: str, pause_s: float | None = None) -> None:
        super().__init__(text)
        self.pause_s = pause_s


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # a date, which nobody sends
        return None


def _key(variable: str) -> str:
    """What a header can hold: httpx repeats one that it cannot send in its error, and errors are logged."""
    key = os.environ[variable].strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            f"api_key_env: what the environment variable {variable} holds is no key: not all of it is printable ASCII"
        )
    return key


def _start(text: bytes) -> str:
    return repr(text[:TOLD].decode(errors="replace"))
