"""The `kwargs` of each kind of `env`: names, types, defaults and ranges, checked before anything is loaded.

A kind's keys are the fields of a dataclass here; what they mean stands at its class in `pipeline/environments/`. Those of a
dotted path are checked where its module is imported: `pipeline/environments/own.py`.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config import typed
from pipeline.config.layers import of
from pipeline.config.schema import ENVIRONMENT_KINDS, EnvironmentConfig, Recipe
from pipeline.sandbox.limits import ASKED, Limits
from pipeline.values import MISSING, Bool, Float, Int, Positive, Text

MATH_VERIFIERS = ("hf_math_verify", "dapo_math_verify")
"""What math_verify_impl of an environment of kind math may be."""
MULTICHOICE_VERIFIERS = ("english_multichoice", "multilingual_multichoice")
"""What verifier_type of an environment of kind multiple_choice may be."""
TOOLS = ("calculator", "python")
"""Tools that an environment of kind tools may have by name; others by dotted path."""
NO_JUDGES = ("calculator", "code_interpreter", "tools", "sliding_puzzle", "reward_model", "verifiers")
"""Kinds that cannot judge the final answer of another environment."""
JUDGE_PROMPT = """Judge whether the response answers the question as the reference does.

Question: {question}

Reference: {answer}

Response: {response}

Reply with one line, "Score: N", where N is from 0 (wrong) to 10 (right)."""


@dataclass
class NoArguments:
    pass


@dataclass
class ExactMatchArguments:
    pattern: Annotated[
        Text | None, Field(description="Regular expression of the answer; its group, if it has one. null: the whole response.")
    ] = None


@dataclass
class MathArguments:
    math_verify_impl: Annotated[Literal[MATH_VERIFIERS], Field(description="How answers are compared.")] = MATH_VERIFIERS[0]


@dataclass
class MultipleChoiceArguments:
    verifier_type: Annotated[Literal[MULTICHOICE_VERIFIERS], Field(description="How the choice is found in a response.")] = (
        MULTICHOICE_VERIFIERS[0]
    )
    choices: Annotated[Int, Field(ge=2, le=26, description="Number of choices, from A on.")] = 26


@dataclass
class CalculatorArguments:
    judge: Annotated[Text, Field(description="Environment that judges the final answer.")] = MISSING
    open: Annotated[Text, Field(description="What begins a calculation.")] = "<calculator>"
    close: Annotated[Text, Field(description="What ends a calculation.")] = "</calculator>"
    reply: Annotated[Text, Field(description="What the policy gets; {} is the result.")] = "{}"
    limit: Annotated[Positive, Field(le=1 << 20, description="Most characters of a reply.")] = 4096


LIMITS = {limit.name: limit.default for limit in dataclasses.fields(Limits)}


@dataclass
class SandboxArguments:
    """Limits are for all processes of one program together, unless they say otherwise."""

    sandbox: Annotated[Literal[ASKED], Field(description="How programs are contained.")] = ASKED[0]
    readable: Annotated[list[Text], Field(description="More folders that a program may read; absolute paths.")] = field(
        default_factory=list
    )
    wall_s: Annotated[Float, Field(gt=0, description="Seconds of wall time.")] = LIMITS["wall_s"]
    cpu_s: Annotated[Float, Field(gt=0, description="Seconds of CPU time.")] = LIMITS["cpu_s"]
    memory_bytes: Annotated[Positive, Field(description="Bytes of memory.")] = LIMITS["memory_bytes"]
    processes: Annotated[Positive, Field(description="Processes, with their threads.")] = LIMITS["processes"]
    output_bytes: Annotated[Positive, Field(description="Bytes of stdout and stderr.")] = LIMITS["output_bytes"]
    scratch_bytes: Annotated[Positive, Field(description="Bytes of all files.")] = LIMITS["scratch_bytes"]
    scratch_files: Annotated[Positive, Field(description="Number of files.")] = LIMITS["scratch_files"]
    open_files: Annotated[Positive, Field(description="Open files of each process.")] = LIMITS["open_files"]


@dataclass
class CodeArguments(SandboxArguments):
    reward: Annotated[
        Literal["all", "share"], Field(description="all: 1 if all tests pass. share: the share of tests that pass.")
    ] = "all"


@dataclass
class PythonArguments(SandboxArguments):
    output_bytes: Annotated[Positive, Field(description="Bytes of stdout and stderr of each call.")] = 1 << 16
    session_s: Annotated[
        Float, Field(ge=1, le=1e6, description="Seconds that an interpreter lives, with the time between its calls.")
    ] = 3600.0


@dataclass
class CodeInterpreterArguments(PythonArguments):
    terminate_on_evaluation: Annotated[Bool, Field(description="End the episode with the first evaluation.")] = True
    role: Annotated[Text, Field(description="Role of the message with the output.")] = "user"


@dataclass
class ToolArguments:
    kind: Annotated[Text | None, Field(description="A tool of ours, or a dotted path. null: the tool's name.")] = None
    kwargs: Annotated[dict[str, Any], Field(description="Its arguments.")] = field(default_factory=dict)


@dataclass
class ToolsArguments:
    judge: Annotated[Text, Field(description="Environment that judges the final answer.")] = MISSING
    tools: Annotated[Any, Field(description="Names, or {name: {kind, kwargs}}.")] = MISSING
    limit: Annotated[Positive, Field(le=1 << 20, description="Most characters of a result.")] = 4096
    max_calls: Annotated[Positive, Field(le=1000, description="Most calls of an episode.")] = 8


@dataclass
class SlidingPuzzleArguments:
    max_moves: Annotated[Positive, Field(le=1 << 20, description="Most moves of an episode.")] = 50
    action_pattern: Annotated[Text, Field(description="Regular expression of a move.")] = r"<action>([^<]*)</action>"
    tells: Annotated[Literal["words", "board"], Field(description="What the policy is told after a move.")] = "words"
    observation: Annotated[Text, Field(description="What is around that; its place is {}.")] = (
        "<environment>\n{}\n</environment>\n"
    )
    role: Annotated[Text, Field(description="Role of the message.")] = "user"


@dataclass
class LLMJudgeArguments:
    url: Annotated[Text, Field(description="Address of an OpenAI-compatible server, as http://host:port/v1.")] = MISSING
    model: Annotated[Text, Field(description="The model that the server is asked for.")] = MISSING
    prompt: Annotated[Text, Field(description="What it is asked, with {question}, {answer} and {response}.")] = JUDGE_PROMPT
    second_prompt: Annotated[Text | None, Field(description="A second question about the response. null: none.")] = None
    marks: Annotated[Bool, Field(description="Whether the response is enclosed in marks that it cannot contain.")] = True
    score_pattern: Annotated[Text, Field(description="Regular expression of the score in a reply.")] = (
        r"Score:\s*(-?\d+(?:\.\d+)?)"
    )
    scale: Annotated[list[Float], Field(description="The scores of reward 0 and of reward 1.")] = field(
        default_factory=lambda: [0.0, 10.0]
    )
    tries: Annotated[Positive, Field(le=100, description="Most requests for one answer.")] = 4
    api_key_env: Annotated[Text | None, Field(description="Environment variable that holds the key. null: none.")] = None
    request: Annotated[dict[str, Any], Field(description="More keys of the request, such as temperature.")] = field(
        default_factory=dict
    )


@dataclass
class VerifiersArguments:
    taskset: Annotated[Text, Field(description="Name of the taskset.")] = MISSING
    config: Annotated[dict[str, Any], Field(description="Its arguments.")] = field(default_factory=dict)


ARGUMENTS: dict[str, type] = {
    "calculator": CalculatorArguments,
    "code": CodeArguments,
    "code_interpreter": CodeInterpreterArguments,
    "exact_match": ExactMatchArguments,
    "llm_judge": LLMJudgeArguments,
    "math": MathArguments,
    "multiple_choice": MultipleChoiceArguments,
    "reward_model": NoArguments,
    "sliding_puzzle": SlidingPuzzleArguments,
    "tools": ToolsArguments,
    "verifiers": VerifiersArguments,
}
"""By kind."""

TOOL_ARGUMENTS: dict[str, type] = {"calculator": NoArguments, "python": PythonArguments}

PATTERNS = {("exact_match", "pattern"), ("sliding_puzzle", "action_pattern"), ("llm_judge", "score_pattern")}
HAVE_PLACES = {
    ("calculator", "reply"): "{}",
    ("sliding_puzzle", "observation"): "{}",
    ("llm_judge", "prompt"): "{response}",
    ("llm_judge", "second_prompt"): "{response}",
}


def arguments_of(environment: EnvironmentConfig) -> dict[str, Any]:
    """All of a kind of ours, those that are not given too. Raises ValueError, saying what is wrong with them."""
    return _sound(*_checked(ARGUMENTS, "kwargs", environment))


def arguments_of_tool(tool: ToolArguments) -> dict[str, Any]:
    """Likewise, of one of TOOLS."""
    return _sound(*_checked(TOOL_ARGUMENTS, "kwargs", tool))


def _sound(arguments: Any, problems: list[str]) -> dict[str, Any]:
    if problems:
        raise ValueError("; ".join(problems))
    return dict(vars(arguments))


def own_kind(environments: dict[str, EnvironmentConfig], name: str | None) -> bool:
    """Whether code of the user's own judges the answers of an environment: its own, or that of the judge that it asks."""
    if name not in environments:
        return False
    asked = environments.get(environments[name].kwargs.get("judge"), environments[name])
    return asked.kind not in ENVIRONMENT_KINDS


def unusable_kinds(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(key, problem) of kinds that there are not."""
    for name, environment in recipe.env.items():
        if environment.kind not in ENVIRONMENT_KINDS:
            for problem in _check_path(f"env.{name}.kind", environment.kind, ENVIRONMENT_KINDS):
                yield f"env.{name}.kind", problem


def check_environments(recipe: Recipe) -> Iterator[str]:
    """What `env` says against itself, where all kinds are known, or a user's own."""
    for name, environment in recipe.env.items():
        if environment.kind in ARGUMENTS:
            yield from _check_arguments(recipe, f"env.{name}", environment)


def _check_path(key: str, kind: str, kinds: tuple[str, ...]) -> Iterator[str]:
    parts = kind.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        near = difflib.get_close_matches(kind.lower(), kinds, 1, typed.SIMILAR)
        meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(kinds)}"
        if ".py" in kind:
            meant = "for `right` in my_reward.py beside the recipe, my_reward.right"
        yield f"{key}: '{kind}' is neither a kind nor the dotted path of a class or a function; {meant}"


def _check_arguments(recipe: Recipe, key: str, environment: EnvironmentConfig) -> Iterator[str]:
    kind = environment.kind
    arguments, problems = _checked(ARGUMENTS, f"{key}.kwargs", environment)
    if kind == "llm_judge" and any("key" in name and name != "api_key_env" for name in environment.kwargs):
        yield f"{key}.kwargs: a key does not belong in a recipe; api_key_env names the environment variable that has it"
    yield from problems
    if arguments is None:
        return
    if kind in ("calculator", "tools"):
        yield from _check_judge(recipe, f"{key}.kwargs.judge", arguments.judge)
        yield from _check_workers(recipe, key, environment.workers, arguments.judge)
    if kind == "tools":
        yield from _check_tools(f"{key}.kwargs.tools", arguments.tools)


def _checked(sections: dict[str, type], key: str, given: EnvironmentConfig | ToolArguments) -> tuple[Any, list[str]]:
    """As `_read`, its values checked too; the arguments are None only if they cannot be read."""
    arguments, problems = _read(sections[given.kind], key, given.kwargs)
    return arguments, problems or list(_check_values(key, given.kind, arguments))


def _read(section: type, key: str, given: dict[str, Any]) -> tuple[Any, list[str]]:
    """The arguments, None if they are no good; and what is wrong with them."""
    known = sorted(typed.fields(section))
    problems = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name.lower(), known, 1, typed.SIMILAR)
            there = f"there are: {', '.join(known)}" if known else "there are none"
            problems.append(f"{key}.{name}: is not a key; {f'did you mean {near[0]}?' if near else there}")
    tree = typed.filled(section, of({name: value for name, value in given.items() if name in known}, None))
    arguments, faults = typed.validated(section, tree)
    problems += [f"{key}.{fault.key}: {fault.message}" for fault in faults]
    return (None if problems else arguments), problems


def _check_values(key: str, kind: str, arguments: Any) -> Iterator[str]:
    for name, value in vars(arguments).items():
        yield from _check_value(f"{key}.{name}", kind, name, value)
    if isinstance(arguments, SandboxArguments):
        yield from _check_sandbox(key, arguments)
    if isinstance(arguments, CalculatorArguments) and not (arguments.open and arguments.close):
        yield f"{key}: open and close must be texts of at least one character"
    if isinstance(arguments, LLMJudgeArguments):
        yield from _check_endpoint(key, arguments)


def _check_value(key: str, kind: str, name: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    where = (kind, name)
    if where in PATTERNS:
        yield from _check_pattern(key, value)
    if where in HAVE_PLACES and HAVE_PLACES[where] not in value:
        yield f"{key}: has no {HAVE_PLACES[where]}"


def _check_sandbox(key: str, arguments: SandboxArguments) -> Iterator[str]:
    if relative := [path for path in arguments.readable if not path.startswith("/")]:
        yield f"{key}.readable: '{relative[0]}' is not an absolute path"


def _check_pattern(key: str, pattern: str) -> Iterator[str]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"{key}: '{pattern}' is no regular expression: {error}"
        return
    if groups > 1:
        yield f"{key}: '{pattern}' has {groups} groups; one at most, which says what counts"


def _check_judge(recipe: Recipe, key: str, judge: str) -> Iterator[str]:
    fit = [name for name, environment in recipe.env.items() if environment.kind not in NO_JUDGES]
    if judge not in fit:
        why = f"env.{judge} is of kind {recipe.env[judge].kind}" if judge in recipe.env else f"there is no env.{judge}"
        yield f"{key}: '{judge}' cannot judge the final answer ({why}); one of: {', '.join(fit) or 'none yet'}"


def _check_workers(recipe: Recipe, key: str, workers: int | None, judge: str) -> Iterator[str]:
    most = recipe.env[judge].workers if judge in recipe.env else None
    if workers is not None and most is not None and workers > most:
        yield f"{key}.workers: {workers} are more than its judge has (env.{judge}.workers: {most})"


def tools_of(given: Any) -> dict[str, ToolArguments]:
    """What `tools` of an environment of kind tools describes, by the name that the policy calls. Raises ValueError, saying why,
    where it describes nothing."""
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        given = {name: {} for name in given}
    if not isinstance(given, dict) or not given:
        raise ValueError(f"a list of names ({', '.join(TOOLS)}), or a mapping {{name: {{kind, kwargs}}}} of at least one")
    found = {}
    for name, described in given.items():
        arguments, problems = _read(ToolArguments, name, described if isinstance(described, dict) else {"kind": described})
        if problems:
            raise ValueError("; ".join(problems))
        found[name] = dataclasses.replace(arguments, kind=arguments.kind or name)
    return found


def _check_tools(key: str, given: Any) -> Iterator[str]:
    try:
        tools = tools_of(given)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    for name, tool in tools.items():
        if tool.kind not in TOOLS:
            yield from _check_path(f"{key}.{name}", tool.kind, TOOLS)
            continue
        yield from _checked(TOOL_ARGUMENTS, f"{key}.{name}.kwargs", tool)[1]


def _check_endpoint(key: str, judge: LLMJudgeArguments) -> Iterator[str]:
    if "@" in judge.url:  # which is not repeated here
        yield f"{key}.url: has a user or a password in it; a key goes where api_key_env says"
    elif not re.fullmatch(r"https?://[^/\s]+(/\S*)?", judge.url):
        yield f"{key}.url: '{judge.url}' is no http(s) address; http://host:port/v1"
    elif judge.url.rstrip("/").endswith("/chat/completions"):
        yield f"{key}.url: '{judge.url}' says the route too; only {judge.url.rstrip('/').removesuffix('/chat/completions')}"
    if len(judge.scale) != 2 or judge.scale[0] == judge.scale[1]:
        yield f"{key}.scale: {judge.scale} is not two scores, that of reward 0 and that of reward 1"
    if judge.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", judge.api_key_env):
        yield f"{key}.api_key_env: no name of an environment variable; it names the one that has the key, and is not the key"
    elif judge.api_key_env is not None and not os.environ.get(judge.api_key_env, "").strip():
        yield f"{key}.api_key_env: the environment variable {judge.api_key_env} is not set; export it, or null if none is asked"
