"""Render conversations with a tokenizer's chat template, in the form that the template takes.

Published templates expect different forms of tool calls. Most take `arguments` as a mapping (`| tojson`), some as JSON text:
DeepSeek-V3 concatenates it, and would raise an error for a mapping or write it in Python's notation. A turn with tool calls but
without text has `content: null`, no `content` or an empty one. We try all of these forms once, and use the first form that the
template renders well.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jinja2

from pipeline.data.columns import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RESERVED = frozenset(
    {
        *(
            "add_generation_prompt",
            "chat_template",
            "continue_final_message",
            "conversation",
            "max_length",
            "messages",
            "padding",
        ),
        *(
            "return_assistant_tokens_mask",
            "return_dict",
            "return_tensors",
            "tokenize",
            "tokenizer_kwargs",
            "tools",
            "truncation",
        ),
    }
)
"""Names that no variable of a template may have: arguments of `apply_chat_template`."""
ABSENT = object()
PROBE_NAME, PROBE_KEY, PROBE_VALUE = "called7", "key7", "value7"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "tool8", "description": "?", "parameters": {"type": "object", "properties": {}}},
}
ANSWERED: tuple[Message, ...] = (
    {"role": "tool", "name": PROBE_NAME, "tool_call_id": "call00001", "content": "1"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "?"},
)


class TemplateRefusal(ValueError):
    """Raised if a chat template refuses a conversation, whichever exception the template raises."""


class ChatTemplate:
    """The chat template of a tokenizer, with the recipe's variables."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> None:
        """Keep the tokenizer and the variables. variables: policy.tokenizer.chat_template_kwargs."""
        self._tokenizer, self.variables = tokenizer, dict(variables or {})
        self._told_of_tools = False
        self._forms: dict[Any, tuple[bool, Any]] = {}  # content -> form of a turn with tool calls

    def text(self, messages: list[Message], **options: Any) -> str:
        """Return the rendered conversation.

        options: the record's `RecordReader.template_options`, and arguments of `apply_chat_template`. Raise TemplateRefusal if
        the template refuses the conversation.
        """
        text = self.apply(messages, tokenize=False, **options)
        if options.get("tools") and not self._told_of_tools:
            self._told_of_tools = True
            if text == self._without_tools(messages, options):
                logger.warning(
                    "the chat template of %s does not render the tools that records have", self._tokenizer.name_or_path
                )
        return text

    def _without_tools(self, messages: list[Message], options: dict[str, Any]) -> str | None:
        try:
            return self.apply(messages, tokenize=False, **{**options, "tools": None})
        except TemplateRefusal:  # it needs tools
            return None

    def apply(self, messages: list[Message], **options: Any) -> Any:
        """Return the result of the tokenizer's `apply_chat_template`. Raise TemplateRefusal instead of its exceptions."""
        if any(message.get("tool_calls") for message in messages):
            messages = [self._choose_form(message) for message in messages]
        return self._apply(messages, **options)

    def _apply(self, messages: list[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **{**self.variables, **options})
        except Exception as error:  # templates raise whatever they like, and jinja2 adds Python's own errors
            plain = isinstance(error, ValueError) or type(error) is jinja2.TemplateError  # raise_exception's
            reason = str(error) if plain else f"{type(error).__name__}: {error}"
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefusal(f"the chat template refuses messages with the roles {roles}: {reason}") from error

    def _choose_form(self, message: Message) -> Message:
        """Return a message in the form that the template renders well. Only messages with tool calls change."""
        if not message.get("tool_calls"):
            return message
        given_content = message.get("content", ABSENT)
        as_text, content = self._call_form("text" if given_content else given_content)
        shaped = {key: value for key, value in message.items() if key != "content"}
        if given_content and given_content is not ABSENT:
            shaped["content"] = given_content
        elif content is not ABSENT:
            shaped["content"] = content
        if as_text:
            shaped["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return shaped

    def _call_form(self, given_content: Any) -> tuple[bool, Any]:
        """Return the form of a turn with tool calls: (whether arguments are JSON text, the content).

        given_content: the record's content, which is tried first; "text" stands for any content that is not empty. Raise
        TemplateRefusal if the template writes the call in none of the forms.
        """
        if given_content not in self._forms:
            contents = [given_content]
            if given_content != "text":
                contents += [empty for empty in (None, ABSENT, "") if empty is not given_content]
            forms = [(as_text, content) for content in contents for as_text in (False, True)]
            rendered = [form for form in forms if self._shows(*form)]
            if not rendered:
                message = "the chat template renders no tool_calls. Try a template that does"
                raise TemplateRefusal(message)
            self._forms[given_content] = next((form for form in rendered if self._shows(*form, answered=True)), rendered[0])
        return self._forms[given_content]

    def _shows(self, as_text: bool, content: Any, answered: bool = False) -> bool:
        """Return whether the template writes the name and the arguments of a call, without None or Python's notation.

        answered: whether the tool's result, an answer and another question follow the call.
        """
        arguments = {PROBE_KEY: PROBE_VALUE}
        function = {"name": PROBE_NAME, "arguments": json.dumps(arguments) if as_text else arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        turn: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
        turn |= {} if content is ABSENT else {"content": content}
        question: Message = {"role": "user", "content": "?"}
        messages = [question, turn, *(ANSWERED if answered else ())]
        try:
            text, before = (self._apply(turns, tokenize=False, tools=[PROBE_TOOL]) for turns in (messages, [question]))
        except TemplateRefusal:
            return False
        wrong = (f"'{PROBE_KEY}'", f'\\"{PROBE_KEY}', "None")  # a system prompt of the template's own may say None
        return all(part in text for part in (PROBE_NAME, PROBE_VALUE)) and not any(
            text.count(part) > before.count(part) for part in wrong
        )


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text."""
    holder = call.get("function", call)
    arguments = holder.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    changed = {**holder, "arguments": text}
    return {**call, "function": changed} if "function" in call else changed
