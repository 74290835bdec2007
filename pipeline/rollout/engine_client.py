"""The engine as a user's rollout function sees it. The recipe's key `rollout` has the function's dotted path.

    async def generate(engine, prompt, seed):
        turn = await engine.generate(prompt)
        await engine.judge(turn)
        return [turn]

The function plays one episode: it draws turns as often as it likes, also in parallel (`asyncio.gather`), and returns the turns
of one conversation, which begins with the prompt. The rewards of its turns add up; `engine.judge` sets them by the recipe's
environment, or the function sets `turn.reward` itself. The loss counts exactly the tokens that the engine drew in these turns.
Everything between two turns is an observation, which the loss leaves out. Tokens that the engine drew are never decoded and
encoded again.

    prompt   pipeline.types.Prompt: `tokens`; `task`, with "messages" or "text", "answer" and "record"; `index`
    seed     a number of the episode alone: the same after a restart. `random.Random(seed)` makes the function repeatable

A draw's seed derives from the episode, the tokens before it, and the number of earlier draws after the same tokens. So it does
not depend on the order in which parallel draws end. Where only the first draws after the prompt and after each of its turns are
used, seeds equal those of the built-in rollout.

Limits: `max_rollout_turns` turns in a conversation, DRAWS_PER_TURN draws in all for each of them, the model's context, and
`env.<name>.timeout_s` seconds between two calls of the engine, or until the function returns. Time in which the engine draws
does not count. `generate` raises `EpisodeEnded` if an episode can draw no further turn. A function that does not catch it
returns, in effect, the conversation that it wanted to continue.

A function that raises, hangs or returns something else costs its own episode only. Before it has seen a turn, the episode is
dropped; later it counts as a wrong answer with reward `env.<name>.broken_reward`, since an answer can be the cause.

The function runs in a judge, a process beside the engine that the episode has for itself, with the environment in it. There it
cannot delay the engine's steps, and it can be killed when it hangs, unlike a thread in the engine's process. Its module is
imported once per engine, before judges are forked. An environment may remove variables from a judge's process environment, so
read those at the module's top level.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np

from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.rollout.function_messages import Draw, EpisodeSettings
from pipeline.rollout.judges.environment_steps import checked_outcome
from pipeline.rollout.seeds import derived_seed, sampling_seed
from pipeline.types import REWARDS, Completion, Prompt, Sampling, is_reward

if TYPE_CHECKING:
    from pipeline.environments.environment import Outcome
    from pipeline.rollout.judges.conversation_text import ConversationText

DRAWS_PER_TURN = 64
"""Most draws of an episode for each of its `max_rollout_turns`, so that a function that never returns ends."""
BOUNDS: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 1, 2**30),
    "temperature": (float, 0, 1e6),
    "top_p": (float, 1e-6, 1),
    "top_k": (int, 0, 2**30),
    "seed": (int, 0, 2**63 - 1),
}
"""Option of `generate` -> its type and bounds. Engines refuse other values."""
SIGNATURE = "async def generate(engine, prompt, seed)"


class EpisodeEnded(Exception):
    """Raised by `EngineClient.generate` if the episode can draw no further turn: too many turns, no room, or a cut."""

    def __init__(self, why: str, turn: DrawnTurn | None = None) -> None:
        super().__init__(why)
        self.turn = turn  # that was to be continued


@dataclass(eq=False)
class DrawnTurn:
    """A turn that the engine drew."""

    text: str  # without special tokens, up to the stop string
    tokens: np.ndarray  # [C] int32
    finish: str  # "stop" or "length", see pipeline.types.Completion
    stop: str  # the stop string that ends it; "" if none
    before: np.ndarray  # [P] int32, all tokens before it
    previous: DrawnTurn | None  # the turn that `before` continues
    number: int  # of the draw in the episode
    sampling: Sampling
    reward: float | None = None  # set by `judge` or by the function; None counts as 0
    metrics: dict[str, float] = field(default_factory=dict)  # those of the last turn count
    extracted: str = ""  # the answer that the environment found in it
    malformed: bool = False  # set by `judge` or by the function, see Outcome.malformed
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [C] float32, of the sampled distribution

    @property
    def conversation(self) -> list[DrawnTurn]:
        """The turns up to this one."""
        turns: list[DrawnTurn] = [self]
        while turns[-1].previous is not None:
            turns.append(turns[-1].previous)
        return turns[::-1]


class SamplingOptions(TypedDict, total=False):
    """How to draw a turn."""

    max_new_tokens: int  # at most; the context may leave room for fewer
    temperature: float
    top_p: float
    top_k: int  # 0: no limit
    stop: str | Sequence[str]  # texts; the token that completes one ends the turn
    seed: int  # in [0, 2**63)


Reply = str | dict[str, Any] | Sequence[dict[str, Any]] | np.ndarray | Sequence[int]
"""An observation: a message of the user, a message {"role", "content"} or a list of them, or tokens."""
Context = Prompt | DrawnTurn | Reply
"""The conversation before a turn: the prompt, a drawn turn, or a new conversation (messages, a text, or tokens)."""
RolloutFunction = Callable[["EngineClient", Prompt, int], Coroutine[Any, Any, list[DrawnTurn]]]


class EngineClient:
    """Draws and judges the turns of one episode."""

    def __init__(
        self,
        prompt: Prompt,
        settings: EpisodeSettings,
        judge: Callable[[str, tuple[int, ...]], Awaitable[Outcome]],
        text: ConversationText,
    ) -> None:
        """Begin an episode. judge: steps the episode's environment with a text and its tokens."""
        self.settings = settings
        self._prompt, self._step, self._text = prompt, judge, text
        self._numbers = 0
        self._after: dict[bytes, int] = {}  # digest of tokens -> number of draws after them
        self._contexts: dict[int, tuple[Draw, DrawnTurn | None]] = {}  # draws without a completion
        self._futures: dict[int, asyncio.Future[DrawnTurn]] = {}
        self._built_in: set[int] = set()  # draws that the built-in rollout would make too
        self._latest: DrawnTurn | None = None  # of a conversation that begins with the prompt
        self._cut = False
        self.unsent: list[Draw] = []
        self.asked = asyncio.Event()  # there are unsent draws
        self.was_cut = asyncio.Event()
        self.drawn: list[DrawnTurn] = []

    @overload
    async def generate(
        self, context: Context, reply: Reply | None = None, *, n: None = None, **options: Unpack[SamplingOptions]
    ) -> DrawnTurn: ...

    @overload
    async def generate(
        self, context: Context, reply: Reply | None = None, *, n: int, **options: Unpack[SamplingOptions]
    ) -> list[DrawnTurn]: ...

    async def generate(
        self, context: Context, reply: Reply | None = None, *, n: int | None = None, **options: Unpack[SamplingOptions]
    ) -> DrawnTurn | list[DrawnTurn]:
        """Draw a turn after `context` and, if that is a drawn turn, a reply to it. n: draw that many, and return a list.

        Options that are absent are the recipe's (policy.generation). Raises EpisodeEnded if no turn can be drawn, and TypeError
        or ValueError for wrong arguments.
        """
        turn = context if isinstance(context, DrawnTurn) else None
        if self._cut:
            raise EpisodeEnded("the episode is cut", turn or self._latest)
        tokens, count = self._tokens(context, reply), 1 if n is None else _number("n", n, int, 1)
        self._check_limits(tokens, turn, count)
        chosen = _checked_options(options)
        first = chosen.pop("seed", None)
        seeds = [self._seed(tokens, turn, self._numbers + place) for place in range(count)]
        if first is not None:
            seeds = [derived_seed(first, place) if place else first for place in range(count)]
        if "top_k" in chosen:
            chosen["top_k"] = min(chosen["top_k"], self._text.vocabulary)
        sampling = replace(self.settings.sampling, thinking=None, **chosen)
        turns = await asyncio.gather(*[self._draw(tokens, turn, seed, sampling) for seed in seeds])
        return turns[0] if n is None else turns

    async def judge(self, turn: DrawnTurn) -> Outcome:
        """Let the recipe's environment judge a turn: set the turn's reward, metrics and answer, and return the outcome.

        The environment sees the judged turns as one episode. Its observation, if it has one, is in the outcome: a reply for
        `generate`.
        """
        outcome = await self._step(turn.text, tuple(turn.tokens.tolist()))
        checked = checked_outcome(outcome)
        turn.reward, turn.metrics, turn.extracted = checked.reward, checked.metrics, checked.extracted
        turn.malformed = checked.malformed
        return outcome

    def tokens_of(self, text: str) -> np.ndarray:
        """Return the tokens, `[N]` int32, of a text without a chat template. As a reply they continue the policy's turn."""
        return self._text.plain(text)

    # ---- the other side ------------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Number of draws without a completion."""
        return len(self._futures)

    def deliver(self, completions: Sequence[tuple[int, Completion]], cut: bool) -> None:
        """Return completions to the function. cut: end its other draws, and draw no more."""
        self._cut |= cut
        if cut:
            self.was_cut.set()
        for number, completion in completions:
            if number not in self._contexts:  # the episode was cut before
                continue
            draw, previous = self._contexts.pop(number)
            future = self._futures.pop(number)
            if not len(completion.tokens):
                if future.cancelled():
                    continue
                future.set_exception(EpisodeEnded("the turn was cut before its first token", previous))
                continue
            text = self._text.decoded(completion)
            parts = text, completion.tokens, completion.finish, completion.stop, draw.tokens, previous, number, draw.sampling
            turn = DrawnTurn(*parts, logprobs=completion.logprobs)
            self.drawn.append(turn)
            if future.cancelled():
                continue
            if self._begins_with_prompt(turn):
                self._latest = turn
            future.set_result(turn)
        for number in [*self._futures] if self._cut else ():
            _, previous = self._contexts.pop(number)
            if not (future := self._futures.pop(number)).cancelled():
                future.set_exception(EpisodeEnded("the episode is cut", previous or self._latest))
        if self._cut:
            self.unsent = []

    def close(self) -> None:
        """End what an ended function has not waited for."""
        self._cut = True
        for future in self._futures.values():
            future.cancel()

    def checked(self, turns: Any) -> list[DrawnTurn]:
        """Return what the function returned. Raises TypeError or ValueError if it is not a rewarded conversation."""
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, DrawnTurn) for turn in turns):
            raise TypeError(f"it returned {_shown(turns)}; expected a list of turns that engine.generate returned")
        if not turns:
            raise ValueError("it returned no turns; expected at least one")
        for place, turn in enumerate(turns):
            if turn.previous is not (turns[place - 1] if place else None):
                raise ValueError(self._not_a_conversation(turns, place))
            if not self._as_in_training(turn.sampling):
                wanted = self.settings.sampling
                raise ValueError(
                    f"turn {place} was drawn with temperature {turn.sampling.temperature:g}, top_p {turn.sampling.top_p:g} and"
                    f" top_k {turn.sampling.top_k}, but the loss learns from the distribution of the recipe:"
                    f" {wanted.temperature:g}, {wanted.top_p:g} and {wanted.top_k}. Return turns that are drawn with these"
                )
            reward = turn.reward
            if reward is not None and not (isinstance(reward, float | int | np.number) and is_reward(float(reward))):
                raise ValueError(f"turn {place} has the reward {reward!r}; expected {REWARDS}")
        if not self._begins_with_prompt(turns[-1]):
            raise ValueError("its first turn was not drawn after the prompt. Try engine.generate(prompt)")
        if all(turn.reward is None for turn in turns):
            raise ValueError("it returned no reward. Try `await engine.judge(turn)` or turn.reward=NUMBER")
        if not is_reward(total := math.fsum(turn.reward or 0.0 for turn in turns)):
            raise ValueError(f"its rewards add up to {total}; expected {REWARDS}")
        return list(turns)

    def _not_a_conversation(self, turns: Sequence[DrawnTurn], place: int) -> str:
        previous = turns[place].previous
        if previous in turns[:place]:
            branch = turns.index(previous) if previous else 0
            return f"turns {branch + 1} and {place} both continue turn {branch}; expected one conversation. Return the best one"
        if previous is not None:
            return f"turn {place} continues a turn that it did not return; expected all turns of the conversation, in order"
        return f"turn {place} begins a conversation of its own; expected one conversation. Return the best one"

    def _as_in_training(self, sampling: Sampling) -> bool:
        wanted = self.settings.sampling
        return (sampling.temperature, sampling.top_p, sampling.top_k) == (wanted.temperature, wanted.top_p, wanted.top_k)

    def _begins_with_prompt(self, turn: DrawnTurn) -> bool:
        return np.array_equal(turn.conversation[0].before, self._prompt.tokens)

    # ---- draws ---------------------------------------------------------------------------------------------------------------

    def _tokens(self, context: Context, reply: Reply | None) -> np.ndarray:
        """Return the tokens before a new turn."""
        if isinstance(context, DrawnTurn):
            parts = [context.before, context.tokens]
            if reply is not None:
                room = self.settings.max_length - len(context.before) - len(context.tokens) - 1
                if (observation := self._text.reply(reply, int(context.tokens[-1]), room)) is None:
                    raise EpisodeEnded("the context has no room for a reply", context)
                parts.append(observation)
            return np.concatenate(parts).astype(np.int32)
        if reply is not None:
            raise ValueError(f"got a reply to a {type(context).__name__}; expected a reply to a turn that the engine drew")
        return self._prompt.tokens if context is self._prompt else self._text.context(context)

    def _check_limits(self, tokens: np.ndarray, turn: DrawnTurn | None, count: int) -> None:
        if not len(tokens):
            raise ValueError("got no tokens; expected at least one")
        if turn and len(turn.conversation) >= self.settings.max_turns:
            raise EpisodeEnded(f"the conversation has {self.settings.max_turns} turns (max_rollout_turns)", turn)
        if len(tokens) >= self.settings.max_length:
            raise EpisodeEnded(f"{len(tokens)} tokens leave no room in a context of {self.settings.max_length}", turn)
        if self._numbers + count > (most := DRAWS_PER_TURN * self.settings.max_turns):
            raise EpisodeEnded(f"the episode has had {most} draws", turn)

    def _seed(self, tokens: np.ndarray, turn: DrawnTurn | None, number: int) -> int:
        """Return the seed of draw `number`, which comes after `tokens`."""
        context, settings = tokens.tobytes(), self.settings
        identity = settings.seed, settings.purpose, self._prompt.index, settings.sample
        digest = hashlib.blake2b(context, digest_size=16).digest()
        before = self._after.get(digest, 0)
        self._after[digest] = before + 1
        continues = turn.number in self._built_in if turn else np.array_equal(tokens, self._prompt.tokens)
        if before or not continues:
            return derived_seed(sampling_seed(*identity), before, context)
        self._built_in.add(number)
        return sampling_seed(*identity, len(turn.conversation) if turn else 0)

    def _draw(self, tokens: np.ndarray, turn: DrawnTurn | None, seed: int, sampling: Sampling) -> asyncio.Future[DrawnTurn]:
        number, self._numbers = self._numbers, self._numbers + 1
        draw = Draw(number, tokens, seed, sampling, turn.number if turn else None)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        self._contexts[number] = draw, turn
        self.unsent.append(draw)
        self.asked.set()
        return future


def _checked_options(options: SamplingOptions) -> dict[str, Any]:
    """Return the options of `generate` in the form of `Sampling`, and `seed`. Raises TypeError or ValueError."""
    if unknown := options.keys() - SamplingOptions.__annotations__:
        raise TypeError(f"got {min(unknown)}; expected one of: {', '.join(SamplingOptions.__annotations__)}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    chosen: dict[str, Any] = {name: _number(name, given[name], *bounds) for name, bounds in BOUNDS.items() if name in given}
    if "stop" in given:
        chosen["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
        if not all(isinstance(text, str) and text for text in chosen["stop"]):
            raise ValueError(f"stop: got {given['stop']!r}; expected texts that are not empty")
    return chosen


def _number(name: str, value: Any, kind: type, least: float, most: float = 2**62) -> Any:
    """Return an argument of `generate` as a number of a kind. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or kind(value) != value:
        raise TypeError(f"{name}: got {value!r}; expected {'a whole number' if kind is int else 'a number'}")
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value!r}; expected {least:g} to {most:g}")
    return kind(value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        other = next(item for item in value if not isinstance(item, DrawnTurn))
        return f"a {type(value).__name__} with a {type(other).__name__} in it"
    return "None" if value is None else f"a {type(value).__name__}"


def load_function(path: str) -> RolloutFunction:
    """Return the rollout function at a dotted path. Raises RecipeError."""
    try:
        function = user_code.load(path)
    except user_code.NotFound as error:
        raise RecipeError(Problem("rollout", "not-importable", f"{path}: {error}")) from error
    except Exception as error:
        message = f"{path} cannot be imported: {type(error).__name__}: {error}"
        raise RecipeError(Problem("rollout", "not-importable", message)) from error
    if wrong := problem(function):
        raise RecipeError(Problem("rollout", "wrong-type", f"{path}: {wrong}"))
    return function


def problem(function: Any) -> str | None:
    """Return why an object is not a rollout function, or None if it is. Does not call it."""
    if inspect.isclass(function):
        return f"got a class; expected a function: {SIGNATURE}"
    if not callable(function):
        return f"got a {type(function).__name__}; expected a function: {SIGNATURE}"
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        kind = "an async generator" if inspect.isasyncgenfunction(function) else "a function that is not async"
        return f"got {kind}; expected {SIGNATURE}"
    try:
        inspect.signature(function).bind(None, None, 0)
    except TypeError as error:
        return f"got parameters {inspect.signature(function)}; expected (engine, prompt, seed): {error}"
    except ValueError:  # it has no signature to check
        return None
    return None
