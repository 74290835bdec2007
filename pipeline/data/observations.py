r"""Encode an environment's reply to the policy as the tokens between two turns of the policy.

With a chat template these are the template's tokens from the end of an assistant's turn to the start of the next one:

    ChatML    \n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n
    Mistral   [INST] {content}[/INST]

If the policy sampled no token that ends its turn, the template's end of the turn (<|im_end|>, </s>) comes first. The sampled
token may differ from the template's: gpt-oss samples <|return|>, but its template has <|end|> between turns.

We render a conversation with a placeholder for the policy's turn, and take the tokens after the placeholder. The policy's own
tokens are therefore never tokenized again, and a template that drops earlier reasoning does not change them. Without a chat
template the tokens are those of the plain text.

If the template has no role `tool`, such messages get the role `user`, and the log notes this once. The content may come from
any source, so its special tokens are split into ordinary ones (`pipeline/data/special_tokens.py`): it cannot end its own turn
and begin another.

Not supported: structured tool calls (for the template, the policy's turn is text), images.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from pipeline.config import TokenizerConfig
from pipeline.data.columns import Message
from pipeline.data.special_tokens import SpecialTokenEscaper
from pipeline.data.turn_ends import TurnEnds, find_turn_ends
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PLACEHOLDER_TURN, PLACEHOLDER_REPLY = "Understood7", "Answered7"  # texts that no template contains
CUT = " [cut]"  # end of a truncated observation


class Observations:
    """Encodes environments' messages to the policy. Not thread-safe.

    Raises RecipeError if the template cannot render a second turn of the user.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig, chat: bool) -> None:
        """Prepare the chat template.

        chat: whether prompts are rendered with the chat template (data.apply_chat_template).
        """
        self._tokenizer, self._chat = tokenizer, chat
        self._escaper = SpecialTokenEscaper(tokenizer, str(tokenizer.chat_template) if chat else "")
        self._template_kwargs = config.chat_template_kwargs or {}
        self._roles: dict[str, str] = {}  # role of a message -> role in the template
        if chat:
            self._role("user")
        ends = find_turn_ends(tokenizer, self._template_kwargs) if chat else TurnEnds()
        self._end_of_turn = ends.inner
        self._ends: list[Any] = [tokenizer.convert_tokens_to_ids(text) for text in ends.texts]  # typed as for a batch

    def ends_turn(self, token: int) -> bool:
        """Return whether `token` ends an assistant's turn in the chat template."""
        return token in self._ends

    def tokens(self, message: Message, ended: bool) -> np.ndarray:
        """Return the tokens, `[O]` int32, between the policy's turn and the start of its next turn.

        message: {"role", "content"}; without a chat template the role has no effect. ended: whether the policy's last token
        `ends_turn`. Raise RecipeError for a role that the template cannot render there.
        """
        content = self._escaper.escape(message["content"])
        if not self._chat:
            return np.asarray(self._escaper.tokenize(content), np.int32)
        text, begin = self._conversation({**message, "role": self._role(message["role"]), "content": content})
        if ended:
            begin += len(self._end_of_turn)
        before, all_tokens = self._escaper.tokenize(text[:begin]), self._escaper.tokenize(text)
        if all_tokens[: len(before)] != before:  # a token spans the end of the turn, which has no special token
            before, all_tokens = [], self._escaper.tokenize(text[begin:])
        return np.asarray(all_tokens[len(before) :], np.int32)

    def within(self, message: Message, ended: bool, room: int) -> np.ndarray | None:
        """Return the `tokens` of a message, at most `room` of them.

        If they do not fit, the content is truncated and ends in CUT. Return None if no part of the content fits.
        """
        tokens = self.tokens(message, ended)
        if len(tokens) <= room:
            return tokens
        content = self._escaper.tokenize(self._escaper.escape(message["content"]))
        keep = len(content) - (len(tokens) - room)
        while keep > 0:
            shorter = self.tokens({**message, "content": f"{self._tokenizer.decode(content[:keep])}{CUT}"}, ended)
            if len(shorter) <= room:
                return shorter
            keep -= len(shorter) - room
        return None

    def _role(self, role: str) -> str:
        """Return `role`, or `user` for a role `tool` that the template lacks.

        Raise RecipeError if the template cannot render the role.
        """
        if role not in self._roles:
            rendered_as, problem = role, self._problem(role)
            if problem and role == "tool":
                rendered_as, problem = "user", None
                logger.info("policy.tokenizer.chat_template has no role tool: tool messages get the role user")
            if problem:
                message = f"cannot render a message of the role {role} after an assistant's turn: {problem}"
                raise RecipeError(Problem("policy.tokenizer.chat_template", "unsupported", message))
            self._roles[role] = rendered_as
        return self._roles[role]

    def _problem(self, role: str) -> str | None:
        """Return the reason why the template cannot render a message of `role` after an assistant's turn; None if it can."""
        try:
            text, begin = self._conversation({"role": role, "content": PLACEHOLDER_REPLY})
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            return str(error)
        return None if PLACEHOLDER_REPLY in text[begin:] else "it renders no text of the message"

    def _conversation(self, *reply: Message) -> tuple[str, int]:
        """Return (a rendered conversation with a placeholder for the policy's turn, the position after the placeholder).

        With a `reply` the conversation ends where the policy's next turn begins.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER_TURN}, *reply]
        text: Any = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=bool(reply), **self._template_kwargs
        )
        if (begin := text.find(PLACEHOLDER_TURN)) < 0:
            raise ValueError("it renders no text of the assistant")
        return text, begin + len(PLACEHOLDER_TURN)
