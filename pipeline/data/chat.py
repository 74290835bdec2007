"""From a record to tokens: prompts for sampling, conversations for supervised training.

With a chat template, a prompt is the rendered conversation up to where the assistant speaks (of a whole conversation, up to its
last answer), and in training the loss counts what the assistant says, its end-of-turn token included. Without one
(`data.apply_chat_template: false`) a prompt is bare text, and what is learned is the answer and the end-of-sequence token.
What a record holds is read in `pipeline.data.records`.

Leaves out: tool calls, images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import DataConfig, DatasetConfig, Message, TokenizerConfig
from pipeline.data.records import Example, RecordReader, Turns, check_prompt_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.types import Prompt, Sample

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens `[L]` int32 and loss mask `[L]` bool."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer `config.name`, with the recipe's chat template if it gives one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.name)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


class Encoder(RecordReader):
    """Reads and encodes the records of one data set.

    Raises ValueError if the tokenizer has no chat template and the recipe asks for one, if `prompt_file` has no single {}, or
    if there is a system prompt and nowhere to put it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokenizer_config: TokenizerConfig, data: DataConfig, dataset: DatasetConfig
    ) -> None:
        text = _read_prompt_file(dataset.prompt_file) if dataset.prompt_file else "{}"
        system = Path(dataset.system_prompt_file).read_text().strip() if dataset.system_prompt_file else None
        super().__init__(data, dataset, text, system)
        self.tokenizer = tokenizer
        self._unknown = _unknown_token(tokenizer)
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._template_kwargs = tokenizer_config.chat_template_kwargs or {}
        if data.apply_chat_template and not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} has no chat template; give one in policy.tokenizer.chat_template,"
                " or set data.apply_chat_template=false for bare text"
            )
        if system is not None and not data.apply_chat_template:
            raise ValueError("data: system_prompt_file needs a chat template, and data.apply_chat_template is false")
        if dataset.messages_key and not data.apply_chat_template:
            raise ValueError("data: messages_key needs a chat template, and data.apply_chat_template is false")

    def prompt(self, record: dict[str, Any]) -> np.ndarray:
        """Return the tokens, `[P]` int32, after which the policy answers. Raises ValueError if the record lacks the input."""
        question = self.question(record)
        if isinstance(question, str):
            return _int32(self.tokenizer(question).input_ids)
        return _int32(self._render(question, add_generation_prompt=True))

    def conversation(self, record: dict[str, Any]) -> Encoded:
        """Return what supervised training learns from. Raises ValueError as `example` and `encode` do."""
        return self.encode(self.example(record))

    def encode(self, learned: Example) -> Encoded:
        """Return what is learned from a record as tokens. Raises ValueError as `encode_turns` does."""
        if isinstance(learned, Turns):
            return self.encode_turns(learned.messages, learned.first)
        if learned.prompt is None:
            return self.encode_text(learned.text)
        return self.encode_answer(_int32(self.tokenizer(learned.prompt).input_ids), learned.text)

    def encode_answer(self, prompt: np.ndarray, answer: str) -> Encoded:
        """Return a bare text after the tokens of its prompt, with the end-of-sequence token, unless it ends in that."""
        tokens = self._ended(self.tokenizer(answer, add_special_tokens=False).input_ids)
        tokens = np.concatenate([prompt, _int32(tokens)])
        return tokens, np.arange(len(tokens)) >= len(prompt)

    def encode_text(self, text: str) -> Encoded:
        """Return a bare text and the end-of-sequence token, unless it ends in that: language modelling, in which every token is
        learned but the first, which nothing comes before. TRL's format of a `text`.
        """
        tokens = _int32(self._ended(self.tokenizer(text).input_ids))
        return tokens, np.arange(len(tokens)) >= 1

    def unknown(self, parts: Sequence[Prompt | Sample]) -> str:
        """Return a message about tokens that stand for text which the tokenizer does not know; "" if there are none."""
        marks = self._unknown
        tokens = np.concatenate([one.tokens for one in parts])
        if marks is None or not (count := int((tokens == marks).sum())):
            return ""
        return (
            f"{count} of {len(tokens)} tokens are {self.tokenizer.unk_token}, which stands for text that the tokenizer"
            f" {self.tokenizer.name_or_path} does not know; another policy.tokenizer.name, or data.unknown_tokens=keep"
        )

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return tokens if tokens and tokens[-1] == end else [*tokens, end]

    def encode_turns(self, messages: list[Message], first: int = 0) -> Encoded:
        """Return the tokens of a conversation, of which the loss counts the assistant's turns from message `first` on.

        Raises ValueError if the template renders an earlier turn differently once later ones follow, so that no mask can say
        which tokens are the assistant's, or if nothing is left to count.
        """
        if GENERATION_BLOCK.search(self.tokenizer.get_chat_template()):
            tokens, mask = self._masked_by_marks(messages, first)
        else:
            tokens, mask = self._masked_by_prefixes(messages, first)
        if not mask.any():
            roles = [message["role"] for message in messages]
            raise ValueError(f"the chat template renders nothing of what the assistant says, in turns {roles}")
        return tokens, mask

    def _render(self, messages: list[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, **{"return_dict": False, **self._template_kwargs, **options})

    def _masked_by_marks(self, messages: list[Message], first: int) -> Encoded:
        """Mask by the template's own {% generation %}, wherever it ends: before the token that ends the turn, or behind it."""
        rendered = self._render(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = rendered["input_ids"], np.asarray(rendered["assistant_masks"], dtype=bool)
        if first:
            before = self._render(messages[:first], add_generation_prompt=True)
            if tokens[: len(before)] != before:
                raise ValueError(_rendered_differently(first))
            mask[: len(before)] = False
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        behind = [tokens[end] if end < len(tokens) else None for _, end in runs]
        for (begin, end), follows in zip(runs, behind, strict=True):
            stop = self._end_of_turn(tokens[:end], begin)
            mask[stop:end] = False
            # What only earlier runs have behind them begins the next turn.
            if tokens[stop - 1] not in self._special and follows in self._special and follows == behind[-1]:
                mask[end] = True
        return _int32(tokens), mask

    def _masked_by_prefixes(self, messages: list[Message], first: int) -> Encoded:
        """Mask what rendering an assistant's turn adds to the conversation before it. Each rendering must begin with the one
        before; then the spans are those of the whole.
        """
        whole = self._render(messages)
        mask = np.zeros(len(whole), dtype=bool)
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < first:
                continue
            before = self._render(messages[:i], add_generation_prompt=True)
            after = self._render(messages[: i + 1])
            if after[: len(before)] != before or whole[: len(after)] != after:
                raise ValueError(_rendered_differently(i))
            mask[len(before) : self._end_of_turn(after, len(before))] = True
        return _int32(whole), mask

    def _end_of_turn(self, tokens: list[int], begin: int) -> int:
        """Return where the loss on the turn that starts at `begin` stops: behind its last special token, if only white space
        follows (the newline after <|im_end|> is the template's: a sampler stops before it).
        """
        for end in range(len(tokens), begin, -1):
            if tokens[end - 1] in self._special:
                return end
            if self.tokenizer.decode(tokens[end - 1]).strip():
                break
        return len(tokens)


def _unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token for unknown text; None where there is none, or it means something else besides, as GPT-2's <|endoftext|>
    does.
    """
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def _read_prompt_file(path: str) -> str:
    try:
        return check_prompt_text(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"data: prompt_file {path}: {error}") from None


def _rendered_differently(message: int) -> str:
    return (
        f"the chat template renders the conversation up to message {message} differently when more follows, so the assistant's"
        " tokens cannot be told from the rest; mark them with {% generation %} in policy.tokenizer.chat_template, or train on"
        " single turns"
    )


def _int32(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
