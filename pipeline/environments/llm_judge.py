"""Judge answers with a language model: the job's own (`cluster.judge`), or one behind an OpenAI-compatible endpoint.

The judge receives the question, the expected answer if there is one, and the policy's answer. Its reply ends in a verdict
(`judge_ratings.py`). Transient failures (no connection, a status of RETRIED, a reply without a verdict) are retried after a
growing pause until the step's time is over; other failures end the attempts at once.

An answer may address the judge. So it stands between marks that the policy cannot know, and a note before the prompt explains
the marks; chat-template marks in an answer are broken up (`judge_prompts.py`). An answer may also prevent the judge from giving
a verdict. So if no reply has one, the judge judges an empty answer: if that works, the answer caused the failure, else the
judge did.

The job's judge decodes greedily by default. It repeats its reply to a prompt, so a prompt whose reply has no verdict is asked
again with another seed and a temperature of at least AGAIN_TEMPERATURE. It limits each reply to `max_tokens`. So no answer can
make it late: if it does not reply in time, it is busy, and the episode is dropped.

Leaves out: judging many answers in one request, streamed replies.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import httpx
import msgspec
from pydantic import Field
from typing_extensions import override

from pipeline.environments.environment import (
    BuiltinEnvironment,
    EnvironmentContext,
    Outcome,
    Pattern,
    Unjudged,
)
from pipeline.environments.judge_ratings import PLACEHOLDERS, PROMPTS, AskedForm, Criterion, JudgeVerdict, Rating, RatingName
from pipeline.environments.verdicts import CUT
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import VARIABLE, Bool, Check, Float, Positive, Text

if TYPE_CHECKING:
    from pipeline.types import Prompt

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
BUSY = (408, 409, 425, 429, 503)
"""The statuses in RETRIED that no answer can cause."""
OWN_SHARE = 0.75
"""Share of `timeout_s` in which an answer is scored. In the remaining time the judge finds out why an answer has no score."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_REPLY_BYTES = 1 << 20
WORKERS, WORKERS_OF_JOB = 16, 32
SHOWN = 300  # characters of a reply in an error message
SHORTENED = 4
"""Most times that an answer is shortened to fit the judge's context."""
NOTE_CHARACTERS = 1500
"""Characters of a prompt, and of a reply, that a run's rollouts show."""
AGAIN_TEMPERATURE = 0.7
"""Lowest temperature when a prompt is asked again. A greedy judge would repeat its reply."""
MAX_TOKENS = 1024
"""Maximum tokens of a reply of the job's judge, if `request` has none."""
LEFT_OUT = "\n[... the middle is left out ...]\n"
OVERLONG = "context_length_exceeded"
"""Code of the error with which the job's judge refuses an overlong prompt."""

Reply = TypeVar("Reply")


def _password_error(url: str) -> str | None:  # never repeats the URL
    return "contains a user or a password. Try api_key_env, an environment variable with the key" if "@" in url else None


def _address_error(url: str) -> str | None:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        return f"got '{url}'; expected an http(s) address such as http://host:port/v1"
    base = url.rstrip("/").removesuffix("/chat/completions")
    return f"got '{url}'; expected it without /chat/completions. Try {base}" if base != url.rstrip("/") else None


def _scale_error(scale: list[float]) -> str | None:
    fits = len(scale) == 2 and scale[0] != scale[1]
    return None if fits else f"got {scale}; expected two different scores: of reward 0, then of reward 1"


def _variable_error(name: str) -> str | None:  # never repeats the name, which may be the key
    return None if VARIABLE.fullmatch(name) else "expected the name of the environment variable that holds the key, not the key"


def _unset_error(variable: str) -> str | None:
    unset = not os.environ.get(variable, "").strip()
    return (
        f"the environment variable {variable} is not set. Try to export it, or null if the server needs no key"
        if unset
        else None
    )


Address = Annotated[Text, Check(_password_error, "secret-in-recipe"), Check(_address_error)]
KeyVariable = Annotated[Text, Check(_variable_error), Check(_unset_error, "missing-value")]


StopText = Annotated[str, msgspec.Meta(min_length=1)]


class ChatBody(msgspec.Struct):
    """The part of a request for a chat completion that the job's judge reads; it ignores other fields."""

    messages: list[dict[str, Any]]
    model: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0  # 0 and -1: no limit
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    stop: StopText | list[StopText] | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


@dataclass
class LLMJudgeArguments:
    """The kwargs of `kind: llm_judge`."""

    url: Address | None = None
    """Address of an OpenAI-compatible server, including /v1. null: the judge that the job serves, judge.model_name."""
    model: Text | None = None
    """With a url: name of the model in requests."""
    rating: RatingName = "score"
    """score: a number. yes_no: yes or no. rubric: a number for each of criteria. pairwise: the answer against a reference, in
    both orders."""
    criteria: list[Criterion] = field(default_factory=list)
    """rating=rubric: a list of {name, description, weight}."""
    reference: Text | None = None
    """rating=pairwise: column of the record with the answer to compare with. null: the expected answer."""
    columns: list[Text] = field(default_factory=list)
    """Columns of the record that the prompt contains as {NAME}."""
    prompt: Text | None = None
    """The judge's prompt, with {response} and optionally {question} and {answer}; for a rubric also {criteria}; for pairwise
    {answer_a} and {answer_b} in place of {response}. Other braces are kept. null: a prompt for the rating."""
    second_prompt: Text | None = None
    """A second prompt, for example in another order; the worse reward counts. null: none."""
    thinking_end: Text | None = None
    """The judge reads only what follows the last of these texts in an answer, such as </think>; nothing if there is none. null:
    the whole answer."""
    marks: Bool = True
    """Put the response between marks that it cannot contain. false: for judges trained on one exact prompt."""
    score_pattern: Pattern = r"Score:\s*(-?\d+(?:\.\d+)?)(?:\s*/\s*10)?"
    """Regular expression of the whole last line of the reply. The score is its group, or the line if it has no group. A
    truncated reply, or a reply with several different scores, has no score."""
    scale: Annotated[list[Float], Check(_scale_error)] = field(default_factory=lambda: [0.0, 10.0])
    """The scores of reward 0 and of reward 1, of a score and of each criterion. A number outside of this range is no score."""
    overlong: Literal["refuse", "shorten"] = "refuse"
    """An answer with which the prompt exceeds the context of the job's judge. refuse: it counts as wrong. shorten: the judge
    reads its beginning and its end."""
    tries: Annotated[Positive, Field(le=100)] = 4
    """Maximum number of requests per prompt and answer. If all fail, at most two more find the cause."""
    api_key_env: KeyVariable | None = None
    """Environment variable with the API key. null: no key is sent."""
    request: dict[str, Any] = field(default_factory=dict)
    """More fields of the request's body, such as {temperature: 0}. The job's judge takes temperature (0 by default), top_p,
    top_k, max_tokens (1024 by default), seed and stop. For an endpoint set max_tokens, so that no answer can make the judge
    write until the time is over."""

    @property
    def max_tokens(self) -> int:
        """The maximum tokens of a reply of the job's judge."""
        return self.request.get("max_completion_tokens") or self.request.get("max_tokens") or MAX_TOKENS


def _check_request(key: str, request: dict[str, Any], of_job: bool) -> Iterator[Problem]:
    """Yield the problems of further fields of a request. of_job: whether the judge of the job reads them."""
    for name, instead in (("messages", "kwargs.prompt"), ("model", "judge.model_name" if of_job else "kwargs.model")):
        if name in request:
            yield Problem(f"{key}.{name}", "contradiction", f"got a value; expected none, since {instead} gives it")
    if not of_job:
        return
    fields = [name for name in ChatBody.__struct_fields__ if name not in ("messages", "model")]
    for name in [name for name in request if name not in ChatBody.__struct_fields__]:
        hint = "Try judge.tokenizer.chat_template_kwargs" if name == "chat_template_kwargs" else "Try to leave it out"
        message = f"got a value, which the job's judge does not read; expected one of: {', '.join(fields)}. {hint}"
        yield Problem(f"{key}.{name}", "has-no-effect", message)
    try:
        msgspec.convert({name: request[name] for name in fields if name in request} | {"messages": []}, ChatBody)
    except msgspec.ValidationError as error:
        yield Problem(key, "wrong-type", f"the job's judge refuses it: {error}")


@dataclass(frozen=True, slots=True)
class _Judged:
    """A verdict, and how it was got."""

    verdict: JudgeVerdict
    tries: int
    prompt: str
    reply: str
    shortened: bool = False


class LLMJudge(BuiltinEnvironment):
    """Rewards an answer with the judge's verdict, from 0 to 1.

    Metrics: `score`, as the judge gave it, or one for each criterion; `tries`; if the judge is asked about two orders or
    prompts, `disagreement`, the difference of the two rewards; with overlong=shorten `shortened`. `timeout_s` covers all tries
    and pauses of one answer; `workers` is the number of concurrent requests.
    """

    Arguments = LLMJudgeArguments

    def __init__(self, arguments: LLMJudgeArguments, context: EnvironmentContext) -> None:
        """Raises ValueError for an unusable API key, without repeating the key, and without a url if the job has no judge."""
        self._arguments, self._timeout_s = arguments, context.timeout_s
        self._rating = Rating(arguments)
        self._fields: dict[str, Any] = {"model": arguments.model, **arguments.request}
        if arguments.url is not None:
            url = f"{arguments.url.rstrip('/')}/chat/completions"
            self._urls, self._name, self._of_job = [url], url, False
        elif context.served_judge is None:
            raise ValueError("got no url; expected one, since the job serves no judge (judge.model_name)")
        else:
            self._urls, self._name, self._of_job = list(context.served_judge.urls), "the judge of the job", True
            self._fields = {"temperature": 0.0, "max_tokens": arguments.max_tokens, **arguments.request}
        self.workers = context.workers or (WORKERS_OF_JOB if self._of_job else WORKERS)
        headers = {}
        if arguments.api_key_env is not None:
            headers["Authorization"] = f"Bearer {_key(arguments.api_key_env)}"
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs addresses, which may have a key
        limits = httpx.Limits(max_connections=self.workers)
        self._client = httpx.Client(headers=headers, limits=limits, trust_env=not self._of_job)  # proxies lead out of the job

    @classmethod
    def check(cls, key: str, arguments: LLMJudgeArguments) -> Iterator[Problem]:
        """Yield the problems of combinations of the kwargs."""
        rating, of_job = arguments.rating, arguments.url is None
        if not of_job and arguments.model is None:
            yield Problem(f"{key}.model", "missing-value", "got null; expected the name of the model in requests to url")
        for name in ("model", "api_key_env") if of_job else ():
            if getattr(arguments, name) is not None:
                message = "got a value without url; the job's judge is judge.model_name. Try url=http://HOST:PORT/v1, or null"
                yield Problem(f"{key}.{name}", "has-no-effect", message)
        for name, wanted in (("criteria", "rubric"), ("reference", "pairwise")):
            if getattr(arguments, name) and rating != wanted:
                yield Problem(f"{key}.{name}", "has-no-effect", f"got a value with rating={rating}. Try rating={wanted}")
        names = [criterion.name.lower() for criterion in arguments.criteria]
        if rating == "rubric" and (not names or len(set(names)) < len(names)):
            message = "got no criteria" if not names else "got a name twice"
            yield Problem(f"{key}.criteria", "missing-value", f"{message}; expected a list of {{name, description, weight}}")
        if rating == "pairwise" and arguments.second_prompt is not None:
            yield Problem(f"{key}.second_prompt", "has-no-effect", "got a prompt; pairwise asks in both orders. Try null")
        if arguments.overlong == "shorten" and not of_job:
            message = "got shorten with a url, whose server does not tell the length of its context. Try refuse"
            yield Problem(f"{key}.overlong", "unsupported", message)
        yield from _check_prompts(key, arguments)
        yield from _check_request(f"{key}.request", arguments.request, of_job)

    @classmethod
    @override
    def needs_answers(cls, arguments: LLMJudgeArguments) -> bool:
        """Return whether a prompt contains the expected answer."""
        if arguments.rating == "pairwise":
            return arguments.reference is None
        default = PROMPTS[arguments.rating]
        return any("{answer}" in (text or default) for text in {arguments.prompt, arguments.second_prompt or arguments.prompt})

    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge an answer. Raises Unjudged if the judge gives no verdict, and ValueError if only this answer gets none."""
        start = time.monotonic()
        deadlines = start + OWN_SHARE * self._timeout_s, start + self._timeout_s
        if (end := self._arguments.thinking_end) is not None:
            text = text.rpartition(end)[2].strip() if end in text else ""
        judged = [self._judge(form, prompt, text, deadlines) for form in self._rating.forms]
        verdict = self._rating.combined([one.verdict for one in judged])
        metrics = {**verdict.metrics, "tries": float(sum(one.tries for one in judged))}
        if self._arguments.overlong == "shorten":
            metrics["shortened"] = float(any(one.shortened for one in judged))
        notes: dict[str, str] = {}
        for number, one in enumerate(judged, 1):
            suffix = f"_{number}" if number > 1 else ""
            notes |= {f"judge_prompt{suffix}": _noted(one.prompt), f"judge_reply{suffix}": _noted(one.reply)}
        return Outcome(verdict.reward, metrics, notes=notes)

    def _judge(self, form: AskedForm, prompt: Prompt, text: str, deadlines: tuple[float, float]) -> _Judged:
        """Return the verdict on an answer. deadlines: (the answer's deadline, the step's deadline)."""
        tries = self._arguments.tries
        try:
            return self._fitting(form, prompt, text, tries, deadlines[0])
        except NoReply as error:
            if error.busy:
                raise Unjudged(str(error)) from None
            first_error = error
        try:
            self._with_retries(form, self._content(form, prompt, ""), 1, deadlines[1])
        except NoReply:
            raise Unjudged(str(first_error)) from None
        try:
            return self._fitting(form, prompt, text, 1, deadlines[1], first_error.unreadable)  # it may have recovered
        except NoReply as error:
            if error.busy:
                raise Unjudged(str(error)) from None
            raise ValueError(f"{first_error}; the judge scores an empty answer") from None

    def _fitting(self, form: AskedForm, prompt: Prompt, text: str, tries: int, deadline: float, asked: int = 0) -> _Judged:
        """Return the verdict on an answer. With overlong=shorten it is shortened until the prompt fits."""
        most = SHORTENED if self._arguments.overlong == "shorten" else 0
        for times in range(most + 1):
            content = self._content(form, prompt, text)
            try:
                return replace(self._with_retries(form, content, tries, deadline, asked), shortened=times > 0)
            except _OverlongError as error:
                if times == most or not (text := error.shortened(text, content)):
                    raise
        raise AssertionError("the last time returns or raises")

    def ask(self, content: str, fields: dict[str, Any]) -> tuple[str, str]:
        """Return (text, finish reason) of the reply to the caller's prompt, with retries. fields: further fields of the body.

        Raises NoReply if no reply arrives within `timeout_s` and `tries`.
        """
        deadline = time.monotonic() + self._timeout_s
        request = functools.partial(self._request, content, fields, deadline)
        return self._until(lambda unreadable: request(), self._arguments.tries, deadline)[0]

    def _with_retries(self, form: AskedForm, content: str, tries: int, deadline: float, asked: int = 0) -> _Judged:
        """Return the verdict in the first reply that has one. asked: how often the prompt has been asked before."""

        def request(unreadable: int) -> tuple[JudgeVerdict, str]:
            again: dict[str, Any] = {}
            if self._of_job and (attempt := asked + unreadable):
                seed = (self._fields.get("seed", 0) + attempt) % 2**63
                again = {"seed": seed, "temperature": max(AGAIN_TEMPERATURE, self._fields["temperature"])}
            return self._readable(form, content, again, deadline)

        (verdict, reply), count = self._until(request, tries, deadline)
        return _Judged(verdict, count, content, reply)

    def _until(self, request: Callable[[int], Reply], tries: int, deadline: float) -> tuple[Reply, int]:
        """Return (reply, tries) of the first request that succeeds. request: gets the number of replies without a verdict."""
        unreadable = 0
        for number in range(1, tries + 1):
            try:
                return request(unreadable), number
            except _TransientError as error:
                unreadable += error.unreadable
                pause = error.pause_s or min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
                pause = 0.0 if error.unreadable and self._of_job else pause
                if number == tries or time.monotonic() + pause >= deadline:
                    text = f"{self._name}: no usable reply after {number} tries; the last error: {error}"
                    raise NoReply(text, error.busy, unreadable) from None
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    @override
    def close(self) -> None:
        self._client.close()

    def _content(self, form: AskedForm, prompt: Prompt, text: str) -> str:
        """Return the judge's prompt about an answer. Raises Unjudged if the record lacks a column that it needs."""
        question = prompt.task.get("text") or "\n\n".join(
            message["content"] or "" for message in prompt.task.get("messages", [])
        )
        record = prompt.task.get("record", {})
        wanted = [*self._arguments.columns, *([self._arguments.reference] if self._arguments.reference else [])]
        if missing := [name for name in wanted if record.get(name) is None]:
            raise Unjudged(f"the record has no '{missing[0]}', which the judge's prompt needs")
        answer = str(prompt.task.get("answer", ""))
        texts = {form.response: text}
        if form.reference:
            texts[form.reference] = str(record[self._arguments.reference]) if self._arguments.reference else answer
        plain = {name: str(record[name]) for name in self._arguments.columns}
        plain |= {"question": question, "answer": answer, **self._rating.values}
        if not self._arguments.marks:
            return form.prompt.fill({}, plain | texts)
        return form.prompt.fill(texts, plain)

    def _request(self, content: str, fields: dict[str, Any], deadline: float) -> tuple[str, str]:
        """Return (text, finish reason) of the reply to a prompt."""
        body = json.dumps({"messages": [{"role": "user", "content": content}], **self._fields, **fields}).encode()
        digest = hashlib.blake2b(content.encode(), digest_size=8).digest()  # the same engine for the same prompt
        reply = self._post(self._urls[int.from_bytes(digest, "big") % len(self._urls)], body, deadline)
        try:
            choice = json.loads(reply)["choices"][0]
            content = choice["message"]["content"] or ""
            if not isinstance(content, str):
                raise TypeError(content)
            return content, str(choice.get("finish_reason") or "stop")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise NoReply(f"{self._name}: not a chat completion: {_start(reply)}") from None

    def _readable(self, form: AskedForm, content: str, fields: dict[str, Any], deadline: float) -> tuple[JudgeVerdict, str]:
        """Return (verdict, text) of the reply to a prompt."""
        text, finish = self._request(content, fields, deadline)
        try:
            verdict = None if finish == CUT else form.read(text)
        except ValueError as error:
            raise _TransientError(str(error), unreadable=1) from None
        if verdict is None:
            cut, what = " that was cut," if finish == CUT else "", "score" if self._arguments.rating == "score" else "verdict"
            message = f"a reply{cut} without a {what} in its last line: {text[-SHOWN:]!r}"
            raise _TransientError(message, unreadable=1)
        return verdict, text

    def _post(self, url: str, body: bytes, deadline: float) -> bytes:
        """Return the body of the reply. The deadline limits the whole exchange, while httpx limits only each wait."""
        remaining_s = max(1e-3, deadline - time.monotonic())
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream("POST", url, content=body, headers=headers, timeout=remaining_s) as response:
                reply = b""
                for chunk in response.iter_bytes():
                    reply += chunk
                    if len(reply) > MAX_REPLY_BYTES:
                        raise NoReply(f"{self._name}: a reply of more than {MAX_REPLY_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise _TransientError("the reply did not end in time", busy=self._of_job)
        except httpx.TransportError as error:
            unreached = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            raise _TransientError(f"{type(error).__name__}: {error}", busy=self._of_job or unreached) from None
        if response.status_code in RETRIED:
            busy = response.status_code in BUSY
            raise _TransientError(f"status {response.status_code}: {_start(reply)}", busy, _retry_after(response))
        if response.status_code != 200:
            if self._of_job and (overlong := _overlong(reply)):
                raise overlong
            raise NoReply(f"{self._name}: status {response.status_code}: {_start(reply)}")
        return reply


class NoReply(Exception):
    """Raised if the endpoint gave no reply, or a reply without a verdict.

    busy: True if no answer can be the cause. unreadable: the number of replies without a verdict.
    """

    def __init__(self, text: str, busy: bool = False, unreadable: int = 0) -> None:
        super().__init__(text)
        self.busy, self.unreadable = busy, unreadable


class _TransientError(NoReply):
    """Raised for a failure that another try may avoid.

    pause_s: the wait that the endpoint requests; None: it requests none. unreadable: 1 if there is a reply, without a verdict.
    """

    def __init__(self, text: str, busy: bool = False, pause_s: float | None = None, unreadable: int = 0) -> None:
        super().__init__(text, busy, unreadable)
        self.pause_s = pause_s


class _OverlongError(NoReply):
    """Raised if a prompt does not fit the context of the job's judge."""

    def __init__(self, text: str, tokens: int, limit: int) -> None:
        super().__init__(text)
        self._tokens, self._limit = tokens, limit

    def shortened(self, text: str, content: str) -> str:
        """Return an answer without a part of its middle, so that the prompt with it may fit; "" if there is no room for it.

        content: the prompt that did not fit. Its tokens are assumed to have equally many characters.
        """
        cut = math.ceil(1.1 * (self._tokens - self._limit) * len(content) / self._tokens) + len(LEFT_OUT)
        kept = max(0, len(text) - cut)
        return f"{text[: kept - kept // 2]}{LEFT_OUT}{text[len(text) - kept // 2 :]}" if kept else ""


def _overlong(reply: bytes) -> _OverlongError | None:
    """Return the error in a refusal of the job's judge; None if it has another cause."""
    try:
        error = json.loads(reply)["error"]
        if error["code"] != OVERLONG:
            return None
        return _OverlongError(f"the judge of the job: {error['message']}", error["tokens"], error["limit"])
    except (ValueError, LookupError, TypeError):
        return None


def _retry_after(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):  # no such header, or a date, which endpoints do not send
        return None


def _key(variable: str) -> str:
    """Return the API key in an environment variable. Raises ValueError for a key that an HTTP header cannot hold.

    httpx would repeat such a key in its error message, which is logged.
    """
    key = os.environ[variable].strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(f"api_key_env: the environment variable {variable} does not hold a key; expected printable ASCII only")
    return key


def _check_prompts(key: str, arguments: LLMJudgeArguments) -> Iterator[Problem]:
    """Yield a problem for each placeholder that a prompt lacks, or that looks misspelt."""
    needed = PLACEHOLDERS.get(arguments.rating, ("response",))
    known = {*needed, "question", "answer", *arguments.columns}
    prompts = {name: text for name in ("prompt", "second_prompt") if (text := getattr(arguments, name)) is not None}
    for name, text in prompts.items():
        absent = [placeholder for placeholder in needed if f"{{{placeholder}}}" not in text]
        for placeholder in absent:
            yield Problem(f"{key}.{name}", "bad-format", f"got {text!r}; expected a string with {{{placeholder}}} in it")
        if absent:
            continue
        for written in sorted(set(re.findall(r"\{(\w+)\}", text)) - known):
            if close := difflib.get_close_matches(written, known, 1, 0.75):
                message = f"got {{{written}}} in it, which would reach the judge as it is. Try {{{close[0]}}}"
                yield Problem(f"{key}.{name}", "bad-format", message)
    for column in arguments.columns:
        if not any(f"{{{column}}}" in text for text in prompts.values()):
            message = f"got {column}, and the prompt has no {{{column}}}. Try a prompt with it"
            yield Problem(f"{key}.columns", "has-no-effect", message)


def _noted(text: str) -> str:
    """Return a text for the rollouts: if it is long, its beginning and its end."""
    half = NOTE_CHARACTERS // 2
    return text if len(text) <= NOTE_CHARACTERS else f"{text[:half]}{LEFT_OUT}{text[-half:]}"


def _start(text: bytes) -> str:
    return repr(text[:SHOWN].decode(errors="replace"))
