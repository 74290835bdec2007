"""Episodes in which the policy calls tools until it answers; another environment judges the final answer.

Prompts show the tools through the chat template, and the policy calls them in its model's own format
(`pipeline/data/call_parsers.py`). A turn with calls gets their results as its observation, one message of the role `tool` for
each; a turn without calls is the final answer. Errors of the policy (a malformed call, an unknown tool, a division by zero) and
tools that do not end in time are reported to it as `error: ...`. A tool that raises anything else fails the step.

Leaves out: calls that run at the same time.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from typing_extensions import override

from pipeline.config import schema_validation
from pipeline.data.tool_messages import ParsedTurn, ToolCall
from pipeline.environments.calculator import Calculator
from pipeline.environments.environment import (
    AnsweredTurn,
    BuiltinEnvironment,
    EnvironmentContext,
    JudgeLimits,
    Outcome,
    ProcessStuck,
    requires_placeholder,
)
from pipeline.environments.python_tool import PythonTool
from pipeline.environments.search_tool import SearchTool
from pipeline.environments.shell_tool import ShellTool
from pipeline.environments.tool import MalformedCall, Tool, ToolError, ToolSession, check_arguments, function_schema
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING, Bool, Check, Positive, Text, not_a_kind

if TYPE_CHECKING:
    from pipeline.types import Prompt

TOOLS: dict[str, type[Calculator] | type[PythonTool] | type[SearchTool] | type[ShellTool]] = {
    "calculator": Calculator,
    "python": PythonTool,
    "search": SearchTool,
    "shell": ShellTool,
}
"""Name -> class of each built-in tool. Users' tools are named by dotted paths instead."""
WORKERS = 16
CALL_SHARE = 0.9  # share of the remaining time that a call may take; its thread is abandoned when all of that time is over
MAX_ABANDONED = 64  # threads of unfinished calls in a judge; when there are as many, no call begins


@dataclass
class ToolEpisode:
    """The state of one episode."""

    judge_episode: Any
    schemas: list[dict[str, Any]]  # of the tools that the prompt shows
    thinks: bool = False  # the prompt ends with the mark that begins reasoning
    sessions: dict[str, ToolSession] = field(default_factory=dict)  # of the tools called so far
    calls: int = 0
    errors: int = 0


@dataclass
class ToolConfig:
    """An entry of the kwarg `tools`."""

    kind: Text | None = None
    """calculator, python, search, shell, or the dotted path of a class. null: the tool's name."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the tool."""


@dataclass
class ToolsArguments:
    """The kwargs of `kind: tools`."""

    judge: Text = MISSING
    """Environment that judges the final answer."""
    tools: Any = MISSING
    """A list of names of tools, or {name: {kind, kwargs}}."""
    limit: Annotated[Positive, Field(le=1 << 20)] = 4096
    """Maximum characters of a result. A longer result is cut, and a note says so."""
    max_calls: Annotated[Positive, Field(le=1000)] = 8
    """Maximum number of calls in a turn. Further calls get an error."""
    in_prompts: Bool = False
    """true: prompts describe the tools themselves, so the chat template gets none, and may be one without tools."""


class Tools(BuiltinEnvironment):
    """Runs tools for the policy and hands its final answer to the judge.

    Metrics: those of the judge; `calls`; `call_errors`, the number of calls answered with an error. An episode that ends before
    the final answer has reward 0 and `accuracy` 0. `timeout_s` covers all calls of one turn. This environment never has more
    workers than its judge, so that no final answer spends its step's time waiting for the judge.
    """

    Arguments = ToolsArguments
    is_final = False
    reads_calls = True

    @classmethod
    @override
    def tool_schemas(cls, arguments: Any, own_code: bool) -> list[dict[str, Any]]:
        tools = {} if arguments.in_prompts else read_tools("tools", arguments.tools)[0]
        shown = {name: tool for name, tool in tools.items() if own_code or tool.kind in TOOLS}
        return [function_schema(name, TOOLS.get(str(tool.kind)) or _described(tool)) for name, tool in shown.items()]

    @classmethod
    @override
    def check(cls, key: str, arguments: Any) -> Iterator[Problem]:
        tools, problems = read_tools(f"{key}.tools", arguments.tools)
        yield from problems
        for name, tool in tools.items():
            yield from read_tool_kwargs(f"{key}.tools.{name}.kwargs", tool)[1] if tool.kind in TOOLS else ()

    def __init__(self, arguments: ToolsArguments, context: EnvironmentContext) -> None:
        """Build the tools and the judge. Raises ValueError for more workers than the judge has."""
        tools = {name: build_tool(tool) for name, tool in read_tools("tools", arguments.tools)[0].items()}
        self._parser = context.call_parser
        self._prepare(tools, arguments.max_calls, arguments, context)

    def _prepare(
        self,
        tools: dict[str, Tool],
        max_calls: int,
        arguments: ToolsArguments | CalculatorArguments,
        context: EnvironmentContext,
    ) -> None:
        judge = context.build(arguments.judge)
        if context.workers is not None and context.workers > judge.workers:
            raise ValueError(f"workers: got {context.workers}; expected at most {judge.workers}, the workers of the judge")
        self.workers = context.workers or min(WORKERS, judge.workers)
        self._tools, self._judge = tools, judge
        self._schemas = {name: function_schema(name, tool) for name, tool in tools.items()}
        limits: JudgeLimits = getattr(judge, "limits", JudgeLimits())
        self.limits = replace(limits, call_s=None, variables=None)  # tools may need more time, and variables
        self._timeout_s, self._limit, self._max_calls = context.timeout_s, arguments.limit, max_calls
        self._abandoned: list[threading.Thread] = []
        self._abandoned_lock = threading.Lock()

    @override
    def reset(self, prompt: Prompt) -> ToolEpisode:
        shown = prompt.task.get("template_options", {}).get("tools") or [*self._schemas.values()]
        thinks = self._parser is not None and self._parser.opens_thought(prompt.tokens.tolist())
        return ToolEpisode(self._judge.reset(prompt), shown, thinks)

    @override
    def step(self, episode: ToolEpisode, text: str) -> Outcome:
        return self.step_answer(episode, AnsweredTurn(text))

    @override
    def step_answer(self, episode: ToolEpisode, answer: AnsweredTurn) -> Outcome:
        turn = self._read(episode, answer)
        if not turn.calls and not turn.malformed:
            for session in episode.sessions.values():
                session.close()
            if hasattr(self._judge, "step_answer"):  # a user's class may have `step` alone
                outcome = self._judge.step_answer(episode.judge_episode, answer)
            else:
                outcome = self._judge.step(episode.judge_episode, answer.text)
            return replace(outcome, metrics={**outcome.metrics, **_metrics(episode)})
        deadline = time.monotonic() + self._timeout_s
        calls = [*turn.calls, *([ToolCall(error=turn.malformed)] if turn.malformed else [])]
        results, malformed = [], False
        for number, call in enumerate(calls):
            episode.calls += 1
            try:
                if number >= self._max_calls:
                    raise ToolError(f"more than {self._max_calls} calls in one turn")
                results.append(_cut(self._result(episode, call, deadline), self._limit))
            except (ToolError, TimeoutError) as error:
                episode.errors += 1
                malformed |= isinstance(error, MalformedCall)
                results.append(_cut(f"error: {error}", self._limit))
        most = self._max_calls + 1
        return replace(self._reply(episode, replace(turn, calls=turn.calls[:most]), results[:most]), malformed=malformed)

    def _read(self, episode: ToolEpisode, answer: AnsweredTurn) -> ParsedTurn:
        if self._parser is None:
            raise RuntimeError("no parser of tool calls was given")
        said = answer.text if answer.tokens is None else answer.tokens
        return self._parser.parse(said, episode.schemas, episode.thinks and not answer.thought, episode.calls)

    def _reply(self, episode: ToolEpisode, turn: ParsedTurn, results: list[str]) -> Outcome:
        """Return the outcome of a turn with calls. The last result may be of a malformed call."""
        ids = [call.id for call in turn.calls] + [f"call{episode.calls:05d}"]
        names = [{"name": call.name} for call in turn.calls] + [{}]
        messages = [
            {"role": "tool", "tool_call_id": id, **name, "content": result}
            for id, name, result in zip(ids, names, results, strict=False)
        ]
        return Outcome(0.0, {"accuracy": 0.0, **_metrics(episode)}, messages, turn=turn.message if turn.calls else None)

    @override
    def close(self) -> None:
        self._judge.close()

    def _result(self, episode: ToolEpisode, call: ToolCall, deadline: float) -> str:
        if call.error:
            raise MalformedCall(call.error)
        if call.name not in self._tools:
            raise MalformedCall(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
        tool = self._tools[call.name]
        check_arguments(self._schemas[call.name], call.arguments)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(self._too_slow())
        self._check_abandoned()
        if call.name not in episode.sessions:
            episode.sessions[call.name] = tool.open()
        answer: Future[str] = Future()
        arguments = (episode.sessions[call.name], call, CALL_SHARE * remaining_s, answer)
        thread = threading.Thread(target=_run_call, args=arguments, name=f"tool {call.name}", daemon=True)
        thread.start()
        try:
            return answer.result(remaining_s)
        except TimeoutError as error:
            if not answer.done():
                del episode.sessions[call.name]  # the call may still use it; the next call gets a new session
                with self._abandoned_lock:
                    self._abandoned.append(thread)
            raise TimeoutError(str(error) or self._too_slow()) from None

    def _check_abandoned(self) -> None:
        """Raise ProcessStuck if too many calls hang, because nothing can end their threads."""
        with self._abandoned_lock:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= MAX_ABANDONED:
                last_name = self._abandoned[-1].name
                raise ProcessStuck(f"{len(self._abandoned)} tool calls have not ended; the last is a call of {last_name}")

    def _too_slow(self) -> str:
        return f"the tool did not answer within {self._timeout_s:g} s"


def _empty_error(text: str) -> str | None:
    return None if text else "got an empty text; expected at least one character"


@dataclass
class CalculatorArguments:
    """The kwargs of `kind: calculator`."""

    judge: Text = MISSING
    """Environment that judges the final answer."""
    open: Annotated[Text, Check(_empty_error, "too-small")] = "<calculator>"
    """Text that begins a calculation."""
    close: Annotated[Text, Check(_empty_error, "too-small")] = "</calculator>"
    """Text that ends a calculation."""
    reply: Annotated[Text, requires_placeholder("{}")] = "{}"
    """Reply to the policy, with {} for the result."""
    limit: Annotated[Positive, Field(le=1 << 20)] = 4096
    """Maximum characters of a result."""


class CalculatorEnvironment(Tools):
    """A calculator as the only tool, called at most once per turn with an expression between two marks."""

    Arguments = CalculatorArguments
    reads_calls = False

    @classmethod
    @override
    def tool_schemas(cls, arguments: Any, own_code: bool) -> list[dict[str, Any]]:
        return []

    @classmethod
    @override
    def check(cls, key: str, arguments: Any) -> Iterator[Problem]:
        yield from ()

    def __init__(self, arguments: CalculatorArguments, context: EnvironmentContext) -> None:
        self._parser, self._marks = None, arguments
        self._prepare({"calculator": Calculator()}, 1, arguments, context)

    @override
    def _read(self, episode: ToolEpisode, answer: AnsweredTurn) -> ParsedTurn:
        """Return the expression between the first two marks. Text after them is not read; a turn should end there."""
        expression, close, _ = answer.text.partition(self._marks.open)[2].partition(self._marks.close)
        return ParsedTurn(calls=(ToolCall("calculator", {"expression": expression}),) if close else ())

    @override
    def _reply(self, episode: ToolEpisode, turn: ParsedTurn, results: list[str]) -> Outcome:
        message = {"role": "tool", "content": self._marks.reply.replace("{}", results[0])}
        return Outcome(0.0, {"accuracy": 0.0, **_metrics(episode)}, message)


def read_tools(key: str, entries: Any) -> tuple[dict[str, ToolConfig], list[Problem]]:
    """Return (name that the policy calls -> tool, problems) of the kwarg `tools` at `key`."""
    if isinstance(entries, list) and all(isinstance(name, str) for name in entries):
        entries = {name: {} for name in entries}
    if not isinstance(entries, dict) or not entries:
        text = f"expected at least one tool: a list of names ({', '.join(TOOLS)}), or {{name: {{kind, kwargs}}}}"
        return {}, [Problem(key, "wrong-type", text)]
    configs, problems = {}, []
    for name, entry in entries.items():
        mapping = entry if isinstance(entry, dict) else {"kind": entry}
        tool, entry_problems = schema_validation.validate_mapping(ToolConfig, f"{key}.{name}", mapping)
        problems += entry_problems
        if tool is not None:
            configs[name] = tool = dataclasses.replace(tool, kind=tool.kind or name)
            if message := not_a_kind(tool.kind, TOOLS):
                problems.append(Problem(f"{key}.{name}", "not-a-choice", message))
    return configs, problems


def build_tool(tool: ToolConfig) -> Tool:
    """Build a tool. Raises ValueError if it cannot be built, and SandboxError if no sandbox works on this node."""
    if tool.kind in TOOLS:
        arguments, problems = read_tool_kwargs("kwargs", tool)
        if problems:
            raise ValueError("; ".join(map(str, problems)))
        return TOOLS[str(tool.kind)](arguments)
    if tool.kind is None or "." not in tool.kind:
        raise ValueError(f"got tool {tool.kind}; expected one of: {', '.join(TOOLS)}, or the dotted path of a class")
    instance = user_code.load(tool.kind)(**tool.kwargs)
    given = {name for name in ("open", "parameters") if hasattr(instance, name)}
    given |= {"parameters"} if getattr(instance, "schema", None) else set()
    if lacking := [name for name in ("open", "parameters") if name not in given]:
        raise ValueError(
            f"tool {tool.kind} has no {' and no '.join(lacking)}; expected a Tool of pipeline/environments/tool.py"
        )
    return instance


def _described(tool: ToolConfig) -> Any:
    """Return the class of a user's tool if it has the tool's description, else an object."""
    loaded = user_code.load(str(tool.kind))
    known = [vars(kind).get(name) for kind in getattr(loaded, "__mro__", ()) for name in ("parameters", "schema")]
    return loaded if any(isinstance(value, dict) and value for value in known) else build_tool(tool)


def read_tool_kwargs(key: str, tool: ToolConfig) -> tuple[Any, list[Problem]]:
    """Return (arguments, problems) of the kwargs of a tool in TOOLS. key: the recipe's key of the kwargs."""
    kind = TOOLS[str(tool.kind)]
    arguments, problems = schema_validation.validate_mapping(kind.Arguments, key, tool.kwargs)
    return arguments, problems or list(kind.check(key, arguments))


def _run_call(session: ToolSession, call: ToolCall, timeout_s: float, answer: Future[str]) -> None:
    try:
        answer.set_result(session.call(call.arguments, timeout_s))
    except BaseException as error:
        answer.set_exception(error)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n... ({len(text) - limit} characters cut)"


def _metrics(episode: ToolEpisode) -> dict[str, float]:
    return {"calls": float(episode.calls), "call_errors": float(episode.errors)}
