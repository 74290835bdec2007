"""Read a turn of the policy in its model's own format: reasoning, text, and tool calls.

    Qwen3     <think>Add.</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>    hermes
    Qwen3.5   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>          qwen3_coder
    Mistral   [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]                               mistral
    gpt-oss   <|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>                   openai

vLLM's parsers read the calls. `policy.generation.tool_parser` names one; null chooses it by marks in the chat template, since
vLLM has no such choice. What the template writes for a call must come back from the parser, else the constructor refuses it.

vLLM's parsers read what servers can use of a turn. We are stricter, because the policy learns from the result:

- A call inside the reasoning is none. Reasoning ends with the first mark of its end.
- A call that the text begins and does not end, or that no parser reads, is malformed: the policy's mistake.

gpt-oss's format is read here: vLLM reads it with a package that downloads a vocabulary. Nothing is tokenized again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.config import TokenizerConfig
from pipeline.data.columns import Message
from pipeline.data.rendering import PROBE_KEY, PROBE_NAME, PROBE_VALUE, ChatTemplate, TemplateRefusal
from pipeline.data.tool_messages import ParsedTurn, ToolCall, as_function
from pipeline.data.turn_ends import find_turn_ends
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOOL_PARSER, REASONING_PARSER = "policy.generation.tool_parser", "policy.generation.reasoning_parser"
HARMONY, HERMES = "openai", "hermes"
FORMATS = {
    r"<\|channel\|>.*<\|message\|>": HARMONY,
    r"\[TOOL_CALLS\]": "mistral",
    r"<.tool.calls.begin.>(?=.*```json)": "deepseek_v3",
    r"<.tool.calls.begin.>": "deepseek_v31",
    r"<.DSML.function_calls>": "deepseek_v32",
    r"<\|tool_calls_section_begin\|>": "kimi_k2",
    r"<minimax:tool_call>": "minimax_m2",
    r"<seed:tool_call>": "seed_oss",
    r"<\|tool_call_start\|>": "lfm2",
    r"<start_function_call>": "functiongemma",
    r"<\|tool_call>": "gemma4",
    r"<arg_key>": "glm45",
    r"<tool_call>.*<function=": "qwen3_coder",
    r"<tool_call>": HERMES,
    r"<\|python_tag\|>|\"parameters\": dictionary of argument name": "llama3_json",
    r"functools\[": "phi4_mini_json",
}
"""A pattern in chat templates -> the parser of its calls, the first that applies."""
REASONING = {"[THINK]": "[/THINK]", "<seed:think>": "</seed:think>", "<|channel>thought": "<channel|>", "<think>": "</think>"}
"""The marks that begin and end reasoning, the first whose end the chat template has; else the last."""
TAG = re.compile(r"<[^<>\s\"'{}]{2,60}>|\[[A-Z_]+\]")
HARMONY_END = re.compile(r"(<\|(?:end|call|return)\|>)")
HARMONY_CALL = re.compile(r"to=functions\.([^\s<]+)")
OPENING = 32  # tokens at the end of a prompt that may have the mark that begins reasoning
NO_CALL = "no call in the model's format can be read"


def parser_for(template: str) -> str | None:
    """Return the name of the parser of a chat template's calls; None if no format is known."""
    return next((name for pattern, name in FORMATS.items() if re.search(pattern, template, re.S)), None)


class CallParser:
    """Reads turns of one model. Not thread-safe."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: TokenizerConfig,
        chat: bool,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """Choose and load the parsers. Importing vLLM takes seconds, on the first use in a process.

        chat: whether prompts are rendered with the chat template. Raises RecipeError if vLLM lacks a parser, or if the parser
        does not read the calls that the template writes.
        """
        template = tokenizer.get_chat_template(tools=[]) if chat and tokenizer.chat_template else ""
        self._tokenizer, self._name = tokenizer, tool_parser or parser_for(template) or HERMES
        origin = "the recipe" if tool_parser else "the chat template" if parser_for(template) else "default"
        logger.info("tool calls are read in the format %s (of %s)", self._name, origin)
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._class = None if self._name == HARMONY else _load("tool", self._name, TOOL_PARSER, tokenizer)
        self._reasoner: Any = None
        if reasoning_parser:
            self._reasoner = _load("reasoning", reasoning_parser, REASONING_PARSER, tokenizer)(tokenizer)
        end = getattr(self._reasoner, "reasoning_end_str", None)
        self._marks = (getattr(self._reasoner, "reasoning_start_str", None) or "", end) if end else _marks(template)
        self._open, self._close = ("<tool_call>", "</tool_call>") if self._name == HERMES else ("", "")  # marks around a call
        self._begin = self._open  # the mark before a turn's first call
        if chat and template:
            self._compare(ChatTemplate(tokenizer, config.chat_template_kwargs))

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the mark that begins reasoning."""
        begin = self._marks[0].rstrip()
        return bool(begin) and self._decode(prompt[-OPENING:]).rstrip().endswith(begin)

    def parse(
        self,
        tokens: Sequence[int] | str,
        tools: Sequence[dict[str, Any]] | None = None,
        thinks: bool = False,
        first: int = 0,
    ) -> ParsedTurn:
        """Return the parts of a turn.

        tokens: the sampled tokens with their stop token, or a text. tools: JSON schemas, by which some formats tell numbers
        from texts. thinks: whether the prompt `opens_thought`. first: the number of the first call in the episode, for its id.
        """
        if not isinstance(tokens, str):
            ended = bool(len(tokens)) and int(tokens[-1]) in self._special and self._name != HARMONY
            tokens = self._decode(tokens[:-1] if ended else tokens)
        reasoning, content, found, malformed = self._read(tokens, tools, thinks)
        calls = tuple(_checked(name, arguments, f"call{first + i:05d}") for i, (name, arguments) in enumerate(found))
        return ParsedTurn(content.strip(), reasoning.strip(), calls, malformed)

    def _read(self, text: str, tools: Any, thinks: bool) -> tuple[str, str, list[tuple[str, str]], str]:
        """Return (reasoning, content, [(name, arguments as JSON)], why a call is malformed)."""
        if self._name == HARMONY:
            return _read_harmony(text)
        reasoning, content = self._split(text, thinks)
        calls, rest, why = self._calls(content, tools)
        begun = (content.count(self._open) or content.count(self._begin)) if self._open else 0
        if calls and self._close and self._close not in content[content.rfind(self._open) :]:
            if len(calls) >= begun:
                calls.pop()  # a parser completes what the policy did not write
            return reasoning, rest, calls, f"a {self._open} without {self._close}"
        quoted = sum(arguments.count(self._open) for _, arguments in calls) if self._open else 0
        return reasoning, rest, calls, (why or NO_CALL) if begun - quoted > len(calls) else ""

    def _split(self, text: str, thinks: bool) -> tuple[str, str]:
        """Return (reasoning, content)."""
        begin, end = self._marks
        if self._reasoner is not None and not end:
            reasoning, content = self._reasoner.extract_reasoning(text, _request(None))
            return reasoning or "", content or ""
        before, mark, after = text.partition(end)
        starts = bool(begin) and before.lstrip().startswith(begin)
        if not mark and not thinks and not starts:
            return "", text
        return (before.lstrip().removeprefix(begin) if starts else before), after

    def _calls(self, content: str, tools: Any) -> tuple[list[tuple[str, str]], str, str]:
        """Return (the calls as (name, arguments), the text outside them, why none could be read)."""
        with _noted_errors() as errors:
            for schemas in [_parameters(tools), None] if tools else [None]:
                parser: Any = self._class(self._tokenizer, schemas)  # type: ignore[misc] - it is a class but for gpt-oss
                if hasattr(parser, "skip_reasoning_parsing"):
                    parser.skip_reasoning_parsing = True
                try:
                    found = parser.extract_tool_calls(content, _request(schemas))
                except Exception as error:  # a parser raises what it likes for a text that it does not expect
                    errors.append(error)
                    continue
                if found.tools_called:  # with schemas, some parsers drop calls of tools that do not exist
                    functions = [call.function for call in found.tool_calls]
                    return [(function.name, function.arguments) for function in functions], found.content or "", ""
        return [], content, _reason(errors[-1]) if errors else ""

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))

    def _compare(self, template: ChatTemplate) -> None:
        """Learn the marks around a call from what the template writes, and check that the parser reads it.

        A template that writes no calls leaves this to the recipe: its prompts say how to call tools.
        """
        question: Message = {"role": "user", "content": "?"}
        call = ToolCall(PROBE_NAME, {PROBE_KEY: PROBE_VALUE}, "", "call00000")
        parameters = {"type": "object", "properties": {PROBE_KEY: {"type": "string"}}}
        tools = [as_function({"name": PROBE_NAME, "description": "?", "inputSchema": parameters})]
        try:
            prompt = template.text([question], tools=tools, add_generation_prompt=True)
            whole = template.text([question, ParsedTurn(calls=(call,)).message], tools=tools)
        except TemplateRefusal:
            return
        written = whole[len(prompt) :] if whole.startswith(prompt) else whole[whole.rindex("?") + 1 :]
        before, name, after = written.rpartition(PROBE_NAME)
        closing = after.rpartition(PROBE_VALUE)[2].rstrip()
        for end in find_turn_ends(self._tokenizer, template.variables).texts:
            closing = closing.removesuffix(end)
        opening = [tag for tag in TAG.findall(before) if tag not in self._marks] or [before.strip()]
        self._begin, self._open = opening[0] if whole.startswith(prompt) else opening[-1], opening[-1]
        self._close = (TAG.findall(closing) or [""])[-1] if TAG.fullmatch(self._open) else ""
        written = (before + name + after).strip()
        if self.parse(written, tools).calls != (call,):
            message = f"got {self._name}, which does not read the calls that the chat template writes, such as {written!r}"
            raise RecipeError(Problem(TOOL_PARSER, "contradiction", f"{message}. Try another of vLLM's parsers"))


def _marks(template: str) -> tuple[str, str]:
    return next(((begin, end) for begin, end in REASONING.items() if end in template), ("<think>", "</think>"))


def _load(kind: str, name: str, key: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a class of vLLM's parsers, which can read texts of the tokenizer. kind: tool or reasoning. Raises RecipeError."""
    try:
        if kind == "tool":
            from vllm.tool_parsers import ToolParserManager

            found: Any = ToolParserManager.get_tool_parser(name)
        else:
            from vllm.reasoning import ReasoningParserManager

            found = ReasoningParserManager.get_reasoning_parser(name)
    except ImportError as error:
        raise RecipeError(Problem(key, "not-installed", f"{name} needs vLLM: {error}")) from error
    except KeyError:
        raise RecipeError(Problem(key, "not-a-choice", f"got {name}; expected a parser of vLLM")) from None
    try:
        found(tokenizer)
    except Exception as error:  # a parser raises what it likes for a tokenizer without its tokens
        message = f"got {name}; expected a parser of this model's format: {error}"
        raise RecipeError(Problem(key, "contradiction", message)) from error
    return found


def _parameters(tools: Any) -> list[Any] | None:
    """Return JSON schemas of tools in vLLM's form; None if vLLM refuses them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    try:
        return [ChatCompletionToolsParam(**tool) for tool in tools]
    except (TypeError, ValueError):
        return None


def _request(tools: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate({"messages": [], "model": "", "tools": tools})


@contextlib.contextmanager
def _noted_errors() -> Iterator[list[BaseException]]:
    """Yield a list that receives the exceptions that vLLM's parsers log, and keep these out of the log."""
    errors: list[BaseException] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1]:
                errors.append(record.exc_info[1])

    logger = logging.getLogger("vllm")
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [Notes()], False
    try:
        yield errors
    finally:
        logger.handlers, logger.propagate = handlers, propagates


def _reason(error: BaseException) -> str:
    """Return what is wrong with a call for which a parser raised an error."""
    while error.__context__ is not None:  # what it tries after an error fails for other reasons
        error = error.__context__
    if isinstance(error, KeyError):
        return f"a call without {error}"
    return f"not JSON: {error}" if isinstance(error, ValueError | RecursionError) else NO_CALL


def _read_harmony(text: str) -> tuple[str, str, list[tuple[str, str]], str]:
    """Read gpt-oss's format: messages of channels, of which those to `functions.NAME` are calls.

    A message is HEADER<|message|>TEXT and a token that ends it. The prompt has the beginning of the first header.
    """
    reasoning, content, calls, malformed = [], [], [], ""
    pieces = [*HARMONY_END.split(text), ""]
    for message, end in zip(pieces[::2], pieces[1::2], strict=True):
        header, mark, body = message.partition("<|message|>")
        call = HARMONY_CALL.search(header)
        if call and mark and end == "<|call|>":
            calls.append((call[1], body))
        elif call:
            malformed = f"a call without {'<|call|>' if mark else '<|message|>'}"
        else:
            (reasoning if "<|channel|>analysis" in header else content).append(body if mark else header)
    return "\n".join(reasoning), "\n".join(content), calls, malformed


def _checked(name: str, arguments: str, id: str) -> ToolCall:
    """Return a call, whose arguments are a JSON object. A parser passes texts that are not JSON."""
    try:
        value = json.loads(arguments or "{}")
        json.dumps([name, value], ensure_ascii=False).encode()  # half of a surrogate pair ("\ud800") cannot be encoded
    except (ValueError, RecursionError) as error:
        return ToolCall(name, {}, f"the arguments are not JSON: {error}", id)
    if not isinstance(value, dict):
        return ToolCall(name, {}, "arguments are a JSON object", id)
    return ToolCall(name, value, "", id)
