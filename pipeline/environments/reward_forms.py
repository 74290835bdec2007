"""Recognize the form of a reward function by its parameters, call it for one answer, and read what it returns.

    ours     function(prompt, answer, **fields) -> number
    TRL's    function(prompts, completions, **columns) -> list of numbers or None
    verl's   compute_score(data_source, solution_str, ground_truth, extra_info) -> number, or a mapping with `score`

A function is what a user has: a function, an object with `__call__`, a `functools.partial`; each may be async. The arguments of
TRL's and verl's forms, and their meaning, are those of TRL 1.x (trl/trainer/grpo_trainer.py, July 2026) and verl (RewardManager
`naive`, July 2026). The facts about them that differ here:

- TRL calls a function once for many answers. Here it is called for each answer, with lists of length one, so a function that
  compares answers with each other cannot work.
- `trainer_state` has `global_step` and `max_steps` alone.
- `reward_router_address` is HOST:PORT/KEY: http://ADDRESS/v1/chat/completions answers for the job's judge.
- `ground_truth` of any form is the column of this name, else `reward_model.ground_truth`, else the expected answer.

A function without `**fields` gets the columns that it has parameters for.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pipeline.data.records import GROUND_TRUTH, ground_truth
from pipeline.environments.environment import AnsweredTurn, Unjudged
from pipeline.types import LARGEST_REWARD, is_reward

if TYPE_CHECKING:
    from pipeline.types import Prompt

FormName = Literal["ours", "TRL's", "verl's"]
Parameters = Mapping[str, inspect.Parameter]

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's form that are no columns."""
PROMPT, NAMES_OF_ANSWERS = "prompt", ("answer", "completion", "response", "solution", "output")
"""Names of our form's first parameter, and names that it cannot have: it gets the prompt."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that TRL passes to no reward function."""
OF_VERL, EXTRA = ("solution_str",), "extra_info"
"""Arguments of verl's form that are no columns, and the column that may be missing."""
COLUMNS_OF_VERL = ("data_source", GROUND_TRUTH, EXTRA)
"""The columns that verl passes; it passes no others."""
ROUTER, JUDGE_TOKENIZER = OF_JUDGE = ("reward_router_address", "reward_model_tokenizer")
"""Arguments of verl's form about a generative reward model, which here is the judge of the job (`cluster.judge`)."""
EXPECTED = (
    "expected (prompt, answer, **fields) -> number; TRL's (prompts, completions, **columns) -> list; or verl's (data_source,"
    " solution_str, ground_truth, extra_info)"
)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The part of TRL's `trainer_state` that exists here."""

    global_step: int  # completed steps when the answer's prompt was sent to the engines
    max_steps: int


@dataclass
class Score:
    """Holds the result of a reward function for one answer."""

    value: float | None = None  # None: the function does not apply to the answer
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    extracted: str = ""

    def add(self, name: str, value: Any) -> None:
        """Add a finite number to the metrics, and anything else as a text to the notes."""
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            self.metrics[name] = number
        else:
            self.notes[name] = str(value)


class RewardForm:
    """How to call a function with these parameters."""

    def __init__(self, parameters: Parameters | None) -> None:
        """Recognize the form. parameters: None if the function has no signature, as some of C have none."""
        self.name: FormName = _form_name(parameters)
        self.parameters: Parameters = {} if parameters is None else parameters
        self.has_signature = parameters is not None
        kinds = {parameter.kind for parameter in self.parameters.values()}
        self.takes_any = parameters is None or inspect.Parameter.VAR_KEYWORD in kinds
        positional = [parameter for parameter in self.parameters.values() if parameter.kind in POSITIONAL]
        self.own: tuple[str, ...] = OF_TRL if self.name == "TRL's" else OF_VERL
        first: list[inspect.Parameter] = []
        if self.name == "ours":
            first = positional[:2]
            self.own = tuple(parameter.name for parameter in first if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY)
            self.own = ("prompt", "answer") if parameters is None else self.own
        named = [parameter for parameter in self.parameters.values() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
        candidates = [*positional[len(first) :], *named]
        self.named = [parameter.name for parameter in candidates if parameter.name not in self.own]
        """Parameters that columns and kwargs give."""
        needed = [name for name in self.named if self.parameters[name].default is inspect.Parameter.empty]
        given = (EXTRA, *OF_JUDGE) if self.name == "verl's" else ()
        self.required = [name for name in needed if name not in given]
        """Those of `named` that a column or kwargs must give."""
        self.asks_judge = self.name == "verl's" and any(name in needed for name in OF_JUDGE)
        self.may_ask_judge = self.name == "verl's" and (self.takes_any or any(name in self.named for name in OF_JUDGE))

    def problem(self, kwargs: Sequence[str]) -> str | None:
        """Return why a function with these parameters cannot be called with these kwargs; None if it can."""
        kinds = [parameter.kind for parameter in self.parameters.values()]
        given = f"got parameters ({', '.join(self.parameters)})"
        if "solution_strs" in self.parameters:
            return f"{given}, verl's form of many answers; expected its form of one: (data_source, solution_str, ground_truth)"
        if self.name == "ours" and self.has_signature:
            if sum(kind in POSITIONAL for kind in kinds) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
                return f"{given}; {EXPECTED}"
            first, *others = [*self.own, ""]
            if first in NAMES_OF_ANSWERS or PROMPT in others:
                return f"{given}, of which the first gets the prompt and the second the answer; {EXPECTED}"
        elif inspect.Parameter.POSITIONAL_ONLY in kinds:
            return f"{given}, of which some have no name for the caller; expected names, as {self.name} form passes them"
        if self.name == "TRL's" and "environments" in self.required:
            return f"{given}; environments are TRL's `environment_factory`. Try a class with step: env.NAME.kind"
        if self.name == "verl's" and (other := [name for name in self.required if name not in (*COLUMNS_OF_VERL, *kwargs)]):
            return f"{given}; verl's form passes {', '.join(COLUMNS_OF_VERL)} and no other column. Try kwargs with {other[0]}"
        if not self.takes_any and (unknown := [name for name in kwargs if name not in (*self.named, *self.own)]):
            return f"got {unknown[0]} in kwargs; expected parameters of the function: {', '.join(self.named) or 'none'}"
        if taken := [name for name in kwargs if name in self.own]:
            which = "the function's first two parameters" if self.name == "ours" else f"the arguments of {self.name} form"
            return f"got {taken[0]} in kwargs; expected no name of {which}. Try another name"
        return None

    def call(
        self, function: Callable[..., Any], prompt: Prompt, answer: AnsweredTurn, kwargs: dict[str, Any], score: Score
    ) -> Any:
        """Call a function for an answer. Return its result, which may be awaitable, and let it write into `score`.

        Raises Unjudged if the record lacks a column that the function needs.
        """
        columns = self._columns(prompt, kwargs)
        if self.name == "ours":
            return function(_last_user_text(prompt.task), answer.text, **columns)
        given: dict[str, Any] = {"solution_str": answer.text}
        if self.name == "TRL's":
            completion = [{"role": "assistant", "content": answer.text}] if "messages" in prompt.task else answer.text
            given = {
                "prompts": [prompt.task["messages"] if "messages" in prompt.task else prompt.task["text"]],
                "completions": [completion],
                **({} if answer.tokens is None else {"completion_ids": [list(answer.tokens)]}),
                "trainer_state": TrainerState(answer.step, answer.max_steps),
                "log_extra": lambda column, values: score.notes.update({column: str(_only(values, "log_extra got"))}),
                "log_metric": score.add,
            }
        given = {name: value for name, value in given.items() if self.takes_any or name in self.parameters}
        return function(**given, **columns)

    def _columns(self, prompt: Prompt, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the record's columns and the kwargs give; kwargs win."""
        task = prompt.task
        available = {**task.get("record", {}), **({"expected": task["answer"]} if "answer" in task else {})}
        of_verl = self.name == "verl's"
        if (of_verl or GROUND_TRUTH in self.named) and (truth := ground_truth(available)) is not None:
            available[GROUND_TRUTH] = truth
        if of_verl:
            available = {EXTRA: {}, **{name: value for name, value in available.items() if name in COLUMNS_OF_VERL}}
        if self.name == "TRL's":
            available = {name: [value] for name, value in available.items() if name not in NOT_COLUMNS}
        available |= kwargs
        if missing := [name for name in self.required if name not in available]:
            advice = f"Try a default for it, a value in kwargs, or a column {missing[0]}"
            raise Unjudged(f"the record has no '{missing[0]}', which the function needs. {advice}")
        named = available if self.takes_any else self.named
        return {name: value for name, value in available.items() if name in named and name not in self.own}

    def read(self, result: Any, score: Score) -> Score:
        """Return the score with the result of a call. Raises TypeError or ValueError for a result that is no reward."""
        if self.name == "TRL's":
            result = _only(result, "it returned")
            score.value = None if result is None else _number(result)
            return score
        if self.name == "verl's" and isinstance(result, Mapping):
            if "score" not in result:
                raise ValueError(f"it returned a mapping without 'score': {', '.join(map(str, result)) or 'empty'}")
            for name, value in result.items():
                if name != "score":
                    score.add("accuracy" if name == "acc" else str(name), value)
            result = result["score"]
        score.value = _number(result)
        return score


def _form_name(parameters: Parameters | None) -> FormName:
    if parameters is None:
        return "ours"
    kinds = [parameter.kind for parameter in parameters.values()]
    if {"completions", "prompts", "completion_ids"} & parameters.keys() or kinds == [inspect.Parameter.VAR_KEYWORD]:
        return "TRL's"
    return "verl's" if {"solution_str", "solution_strs"} & parameters.keys() else "ours"


def parameters_of(function: Callable[..., Any]) -> Parameters | None:
    """Return the parameters of a function; None if it has no signature. Of a class: those of a call of its objects."""
    try:
        if not inspect.isclass(function):
            return dict(inspect.signature(function).parameters)
        parameters = iter(inspect.signature(function.__call__).parameters.items())
        next(parameters, None)  # self
        return dict(parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function is awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _last_user_text(task: dict[str, Any]) -> str:
    if "text" in task:
        return task["text"]
    return next((message["content"] for message in reversed(task["messages"]) if message["role"] == "user"), "")


def _only(values: Any, who: str) -> Any:
    """Return the only entry of a list for one answer. who: the words before the value in an error."""
    expected = "expected a list with one entry, as each call is for one answer"
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise TypeError(f"{who} {reprlib.repr(values)}; {expected}")
    if len(values) != 1:
        raise ValueError(f"{who} a list of {len(values)}; {expected}")
    return next(iter(values))


def _number(value: Any) -> float:
    if isinstance(value, str) or not hasattr(value, "__float__") or not is_reward(float(value)):
        raise TypeError(f"it returned {reprlib.repr(value)}; expected a finite number within {LARGEST_REWARD:g} of 0")
    return float(value)
