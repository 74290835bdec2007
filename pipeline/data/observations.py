r"""Encode messages to the policy as the tokens between two turns of the policy.

With a chat template these are the template's tokens from the end of an assistant's turn to the start of the next one:

    ChatML    \n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n
    Mistral   [INST] {content}[/INST]

If the policy sampled no token that ends its turn, the template's end of the turn (<|im_end|>, </s>) comes first. The sampled
token may differ from the template's: gpt-oss samples <|return|>, but its template has <|end|> between turns. GLM has no token
that ends a turn: the policy samples <|user|> or <|observation|>, which begins the next turn, and we leave out this token.

We render a conversation with a placeholder for the policy's turn, and take the tokens after the placeholder. The policy's own
tokens are therefore never tokenized again, and a template that drops earlier reasoning does not change them. A turn with tool
calls has placeholders for their arguments; it keeps their names and ids, which templates check and repeat. Without a chat
template the tokens are those of the plain text.

If the template refuses several calls in a turn (Llama 3.1), we render the last of them. If it has no tool calls or no role
`tool`, such messages become one message of the role `user`, and the log notes this once. The content may come from any source,
so its special tokens are split into ordinary ones (`pipeline/data/special_tokens.py`): it cannot end its own turn and begin
another.

Not supported: images.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import TokenizerConfig
from pipeline.data.columns import Message
from pipeline.data.rendering import ChatTemplate, TemplateRefusal
from pipeline.data.special_tokens import SpecialTokenEscaper
from pipeline.data.turn_ends import TurnEnds, find_turn_ends
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PLACEHOLDER_TURN, PLACEHOLDER_REPLY = "Understood7", "Answered7"  # texts that no template contains
QUESTION: Message = {"role": "user", "content": "?"}
TEXT_TURN: Message = {"role": "assistant", "content": PLACEHOLDER_TURN}
CUT = " [cut]"  # end of a truncated observation


class Observations:
    """Encodes messages to the policy. Not thread-safe.

    Raises RecipeError if the template cannot render a second turn of the user.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig, chat: bool) -> None:
        """Prepare the chat template.

        chat: whether prompts are rendered with the chat template (data.apply_chat_template).
        """
        self._tokenizer = tokenizer
        self._escaper = SpecialTokenEscaper(tokenizer, str(tokenizer.chat_template) if chat else "")
        self._template = ChatTemplate(tokenizer, config.chat_template_kwargs) if chat else None
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        ends = find_turn_ends(tokenizer, config.chat_template_kwargs) if chat else TurnEnds()
        self._end_of_turn = ends.inner
        self._ends_text = re.compile("|".join(map(re.escape, ends.texts)) or r"(?!)")
        self._ends: list[Any] = [tokenizer.convert_tokens_to_ids(text) for text in ends.texts]  # typed as for a batch
        self._forms: dict[Any, int] = {}  # roles of messages and number of calls -> the first form that the template renders
        if chat:
            self._form([{"role": "user", "content": ""}], TEXT_TURN, {})

    def tokens(
        self,
        messages: Message | Sequence[Message],
        after: int | None,
        turn: Message | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Return the tokens, `[O]` int32, between the policy's turn and the start of its next turn.

        messages: {"role", "content"}, one or several, such as the results of tool calls; without a chat template the role has
        no effect. after: the policy's last token; None if it has none. turn: the policy's turn if it has `tool_calls`, in the
        form of `template_fields.read_messages`. tools, variables: the record's, for the template. Raise RecipeError for roles
        that the template cannot render there.
        """
        replies = [self._escaped(message) for message in ([messages] if isinstance(messages, dict) else messages)]
        if self._template is None:
            return np.asarray(self._escaper.tokenize("\n".join(reply["content"] for reply in replies)), np.int32)
        said = TEXT_TURN if turn is None or not turn.get("tool_calls") else self._placeholder_turn(turn)
        options = dict(variables or {}) | ({"tools": list(tools)} if tools else {})
        said, replies = self._form(replies, said, options)
        text, (end, ended) = self._conversation(said, replies, options)
        begin = ended if after in self._ends else end
        before, all_tokens = self._escaper.tokenize(text[:begin]), self._escaper.tokenize(text)
        if all_tokens[: len(before)] != before:  # a token spans the end of the turn, which has no special token
            before, all_tokens = [], self._escaper.tokenize(text[begin:])
        tokens = all_tokens[len(before) :]
        if tokens[:1] == [after] and after in self._special:  # the policy has begun the next turn
            del tokens[0]
        return np.asarray(tokens, np.int32)

    def within(
        self,
        messages: Message | Sequence[Message],
        after: int | None,
        room: int,
        turn: Message | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> np.ndarray | None:
        """Return the `tokens` of messages, at most `room` of them.

        If they do not fit, the longest contents are truncated to one length and end in CUT. Return None if no part of a content
        fits.
        """
        tokens = self.tokens(messages, after, turn, tools, variables)
        messages = [messages] if isinstance(messages, dict) else messages
        contents = [self._escaper.tokenize(self._escaper.escape(message["content"])) for message in messages]
        keep = max(map(len, contents), default=0)
        while (excess := len(tokens) - room) > 0:
            keep -= math.ceil(excess / max(1, sum(len(content) >= keep for content in contents)))
            if keep <= 0:
                return None
            shorter = [
                {**message, "content": f"{self._tokenizer.decode(content[:keep])}{CUT}"} if len(content) > keep else message
                for message, content in zip(messages, contents, strict=True)
            ]
            tokens = self.tokens(shorter, after, turn, tools, variables)
        return tokens

    def _escaped(self, message: Message) -> Message:
        return message | {key: self._escaper.escape(message[key]) for key in ("content", "name") if message.get(key)}

    def _placeholder_turn(self, turn: Message) -> Message:
        """Return a turn with tool calls that has placeholders for its texts."""
        calls = [
            {**call, "function": {"name": self._escaper.escape(call["function"]["name"]), "arguments": {"x": PLACEHOLDER_TURN}}}
            for call in turn["tool_calls"]
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _form(self, replies: list[Message], turn: Message, options: dict[str, Any]) -> tuple[Message, list[Message]]:
        """Return the turn and the replies in the first form that the template renders completely.

        Raise RecipeError if it renders none.
        """
        key = (*(reply["role"] for reply in replies), len(turn.get("tool_calls") or ()))
        if key not in self._forms:
            self._forms[key] = self._first_rendered(replies, turn, options)
        return list(_forms(turn, replies))[self._forms[key]]

    def _first_rendered(self, replies: list[Message], turn: Message, options: dict[str, Any]) -> int:
        probes = [{**reply, "content": f"{PLACEHOLDER_REPLY}x{i}x"} for i, reply in enumerate(replies)]
        problems: list[str] = []
        for said, told in _forms(turn, probes):
            try:
                text, (begin, _) = self._conversation(said, told, options)
                if all(probe["content"] in text[begin:] for probe in probes):
                    if told[0]["role"] != replies[0]["role"]:
                        logger.info(
                            "policy.tokenizer.chat_template has no role tool: tool messages get the role user (%s)",
                            problems[-1],
                        )
                    return len(problems)
                problems.append("it renders no text of the message")
            except TemplateRefusal as error:
                problems.append(str(error))
        roles = ", ".join(dict.fromkeys(reply["role"] for reply in replies))
        message = f"cannot render a message of the role {roles} after an assistant's turn: {problems[-1]}"
        raise RecipeError(Problem("policy.tokenizer.chat_template", "unsupported", message))

    def _conversation(self, turn: Message, replies: list[Message], options: dict[str, Any]) -> tuple[str, tuple[int, int]]:
        """Return a rendered conversation, which ends where the policy's next turn begins, and (end, ended).

        end: the position where the policy's text ends. ended: the position after the token that ends the turn, if there is one.
        """
        assert self._template is not None
        text = self._template.text([QUESTION, turn, *replies], **{**options, "add_generation_prompt": True})
        if not turn.get("tool_calls"):
            if (begin := text.find(PLACEHOLDER_TURN)) < 0:
                raise TemplateRefusal("it renders no text of the assistant")
            begin += len(PLACEHOLDER_TURN)
            return text, (begin, begin + len(self._end_of_turn))
        alone = self._template.text([QUESTION, turn], **options)
        if not (shown := alone.count(PLACEHOLDER_TURN)):
            raise TemplateRefusal("it renders no call of the assistant")
        begin = [match.end() for match in re.finditer(PLACEHOLDER_TURN, text)][shown - 1]
        closing, tail = alone.rpartition(PLACEHOLDER_TURN)[2].rstrip(), text[begin:]
        spans = [match.span() for match in self._ends_text.finditer(closing)] or [(len(closing),) * 2]
        for end, ended in reversed(spans):
            if tail.startswith(closing[:ended]):
                return text, (begin + end, begin + ended)
        raise TemplateRefusal("it hides where a call of the assistant ends")


def _forms(turn: Message, replies: list[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Yield the forms (turn, replies) in which a template may render a turn and the replies to it, first the complete form."""
    calls = turn.get("tool_calls") or ()
    yield turn, replies
    if len(calls) > 1:
        yield {**turn, "tool_calls": calls[-1:]}, replies
    if calls:
        yield TEXT_TURN, replies
    if all(reply["role"] == "tool" for reply in replies):
        yield TEXT_TURN, [{"role": "user", "content": "\n".join(reply["content"] for reply in replies)}]
