"""Check that prompts can show an environment's tools, and that the parsers of the policy's calls exist.

The names are those in vLLM's source, where it is installed; importing it takes seconds. The job itself checks that the parser
reads the calls that the chat template writes.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from launch.preflight import bounded, signatures
from launch.preflight.model_readings import ModelReading
from pipeline.config import Problem, Recipe, collected, generates, keyed_sets, prompt_tools
from pipeline.data.call_parsers import FORMATS, REASONING_PARSER, TOOL_PARSER, parser_for
from pipeline.data.templates import KEY, check_tools

TABLES = {TOOL_PARSER: "vllm.tool_parsers", REASONING_PARSER: "vllm.reasoning"}
"""A key -> the package of vLLM whose first table names the parsers."""
NEAR = 3  # names that a message shows


def problems(recipe: Recipe, reading: ModelReading | None) -> Iterator[Problem]:
    """Yield problems of the keys of parsers, and of the chat template. reading: of the policy; None if it cannot be read."""
    if not generates(recipe):
        return
    generation = recipe.policy.generation
    for key, name in ((TOOL_PARSER, generation.tool_parser), (REASONING_PARSER, generation.reasoning_parser)):
        yield from _unknown(key, name)
    if reading is None or not reading.tokenizer.chat_template or not recipe.data.apply_chat_template:
        return
    if not (shown := _shown(recipe)):
        return
    dropped = [*_dropped(recipe, reading, shown)]
    yield from dropped
    template = reading.tokenizer.get_chat_template(tools=shown)
    if not dropped and generation.tool_parser is None and parser_for(template) is None:
        message = "got null, and the chat template's format of calls is not known; expected a parser of vLLM"
        yield Problem(TOOL_PARSER, "missing-value", f"{message}. Try one of: {', '.join(dict.fromkeys(FORMATS.values()))}")


def _shown(recipe: Recipe) -> list[dict]:
    """Return the tools that prompts show, without the user's own."""
    if "tools" in (recipe.policy.tokenizer.chat_template_kwargs or {}):  # which take their place
        return []
    names = dict.fromkeys(dataset.env_name for dataset in keyed_sets(recipe.data).values())
    return [tool for name in names for tool in prompt_tools(recipe.env, name)]


def _dropped(recipe: Recipe, reading: ModelReading, tools: list[dict]) -> Iterator[Problem]:
    def work() -> list[tuple[str, str, str]]:
        found: list[Problem] = []
        with collected(found):
            check_tools(reading.tokenizer, recipe.policy.tokenizer.chat_template_kwargs, tools)  # type: ignore[arg-type]
        return [(problem.key, problem.code, problem.message) for problem in found]

    try:
        yield from (Problem(*fields) for fields in bounded.call(work))
    except bounded.Unbounded as error:
        yield Problem(KEY, "unsupported", f"{reading.tokenizer.chosen.source}: cannot be rendered with tools: {error}")


def _unknown(key: str, name: str | None) -> Iterator[Problem]:
    names = _names(key)
    if name is None or not names or name in names:
        return
    near = difflib.get_close_matches(name.lower(), names, NEAR, 0.4) or names
    yield Problem(key, "not-a-choice", f"got {name!r}; expected a parser of vLLM, or null. Try one of: {', '.join(near)}")


def _names(key: str) -> list[str]:
    """Return the names of vLLM's parsers; [] if it is not installed here."""
    tree = signatures.module(TABLES[key])
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [key.value for key in node.value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return []
