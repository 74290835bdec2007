"""Tokenize records: prompts for sampling, conversations for supervised training.

With a chat template, a prompt is the rendered conversation up to the point where the assistant speaks (for a complete
conversation, up to its last answer). In training the loss counts the assistant's turns including their end-of-turn token.
Without a template (`data.apply_chat_template: false`) a prompt is plain text, and the loss counts the answer and the
end-of-sequence token. `pipeline.data.records` reads the columns of a record.

Not supported: tool calls, images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import user_files
from pipeline.config import DataConfig, DatasetConfig, Message, TokenizerConfig
from pipeline.data.records import Example, RecordReader, Turns, check_prompt_text
from pipeline.data.templates import check_template, choose_template
from pipeline.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.types import Prompt, Sample

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens `[L]` int32 and loss mask `[L]` bool."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer `config.name`, with the chat template that the recipe gives or names, if any. Raises RecipeError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.name)
    tokenizer.chat_template = choose_template(config, tokenizer.chat_template).template
    return tokenizer


class Encoder(RecordReader):
    """Reads and tokenizes the records of one data set.

    Raises RecipeError if a required chat template is missing, if `prompt_file` does not have exactly one {}, or if a key needs
    a chat template and none is applied.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tokenizer_config: TokenizerConfig, data: DataConfig, dataset: DatasetConfig
    ) -> None:
        text = _read_prompt_file(dataset.prompt_file) if dataset.prompt_file else "{}"
        system = user_files.read_text(dataset.system_prompt_file).strip() if dataset.system_prompt_file else None
        super().__init__(data, dataset, text, system)
        self.tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._template_kwargs = tokenizer_config.chat_template_kwargs or {}
        if data.apply_chat_template and not tokenizer.chat_template:
            message = (
                f"got null, and the tokenizer {tokenizer.name_or_path} has no chat template. Try data.apply_chat_template=false"
            )
            raise RecipeError(Problem("policy.tokenizer.chat_template", "missing-value", message))
        if data.apply_chat_template:
            check_template(tokenizer, self._template_kwargs)
        if system is not None and not data.apply_chat_template:
            raise _needs_template("system_prompt_file")
        if dataset.messages_key and not data.apply_chat_template:
            raise _needs_template("messages_key")

    def prompt(self, record: dict[str, Any]) -> np.ndarray:
        """Return the prompt tokens, `[P]` int32. Raise ValueError if the record lacks the input."""
        question = self.question(record)
        if isinstance(question, str):
            return _int32(self.tokenizer(question).input_ids)
        return _int32(self._render(question, add_generation_prompt=True))

    def conversation(self, record: dict[str, Any]) -> Encoded:
        """Return a record as tokens and loss mask for supervised training. Raise ValueError as `example` and `encode` do."""
        return self.encode(self.example(record))

    def encode(self, example: Example) -> Encoded:
        """Return an example as tokens and loss mask. Raise ValueError as `encode_turns` does."""
        if isinstance(example, Turns):
            return self.encode_turns(example.messages, example.first)
        if example.prompt is None:
            return self.encode_text(example.text)
        return self.encode_answer(_int32(self.tokenizer(example.prompt).input_ids), example.text)

    def encode_answer(self, prompt: np.ndarray, answer: str) -> Encoded:
        """Return a prompt and a plain-text answer, ended by the end-of-sequence token. The loss counts the answer."""
        tokens = self._ended(self.tokenizer(answer, add_special_tokens=False).input_ids)
        tokens = np.concatenate([prompt, _int32(tokens)])
        return tokens, np.arange(len(tokens)) >= len(prompt)

    def encode_text(self, text: str) -> Encoded:
        """Return a plain text, ended by the end-of-sequence token, for language modelling: TRL's format `text`.

        The loss counts every token except the first, which has no context.
        """
        tokens = _int32(self._ended(self.tokenizer(text).input_ids))
        return tokens, np.arange(len(tokens)) >= 1

    def unknown(self, parts: Sequence[Prompt | Sample]) -> str:
        """Return a message if tokens stand for text that the tokenizer does not know, else an empty text."""
        return unknown_text(parts, self.tokenizer)

    def _ended(self, tokens: list[int]) -> list[int]:
        end: Any = self.tokenizer.eos_token_id  # typed as for a batch of ids
        return tokens if tokens and tokens[-1] == end else [*tokens, end]

    def encode_turns(self, messages: list[Message], first: int = 0) -> Encoded:
        """Return the tokens of a conversation. The loss counts the assistant's turns from message `first` on.

        Raise ValueError if the template renders an earlier turn differently once later ones follow, since no mask can then
        identify the assistant's tokens, or if no token remains to count.
        """
        if GENERATION_BLOCK.search(self.tokenizer.get_chat_template()):
            tokens, mask = self._masked_by_marks(messages, first)
        else:
            tokens, mask = self._masked_by_prefixes(messages, first)
        if not mask.any():
            roles = [message["role"] for message in messages]
            raise ValueError(f"the chat template renders no text of the assistant, in turns {roles}")
        return tokens, mask

    def _render(self, messages: list[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, **{"return_dict": False, **self._template_kwargs, **options})

    def _masked_by_marks(self, messages: list[Message], first: int) -> Encoded:
        """Mask by the template's own {% generation %} blocks.

        A block may end before or after the token that ends the turn; the mask includes that token in both cases.
        """
        rendered = self._render(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = rendered["input_ids"], np.asarray(rendered["assistant_masks"], dtype=bool)
        if first:
            before = self._render(messages[:first], add_generation_prompt=True)
            if tokens[: len(before)] != before:
                raise ValueError(_rendered_differently(first))
            mask[: len(before)] = False
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        following = [tokens[end] if end < len(tokens) else None for _, end in runs]
        for (begin, end), follows in zip(runs, following, strict=True):
            stop = self._end_of_turn(tokens[:end], begin)
            mask[stop:end] = False
            # A token after earlier blocks alone starts the next turn.
            if tokens[stop - 1] not in self._special and follows in self._special and follows == following[-1]:
                mask[end] = True
        return _int32(tokens), mask

    def _masked_by_prefixes(self, messages: list[Message], first: int) -> Encoded:
        """Mask the tokens that rendering an assistant's turn adds to the conversation before it.

        Each rendering must start with the previous one, so that the spans are also those of the whole conversation.
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
        """Return the end of the loss on the turn that starts at `begin`: after its last special token.

        Only white space may follow that token. The newline after <|im_end|> is the template's; a sampler stops before it.
        """
        for end in range(len(tokens), begin, -1):
            if tokens[end - 1] in self._special:
                return end
            if str(self.tokenizer.decode(tokens[end - 1])).strip():
                break
        return len(tokens)


def _needs_template(key: str) -> RecipeError:
    message = f"{key} needs a chat template; expected data.apply_chat_template=true"
    return RecipeError(Problem("data", "contradiction", message))


def unknown_text(parts: Sequence[Prompt | Sample], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a message if tokens stand for text that a tokenizer does not know, else an empty text."""
    mark = _unknown_token(tokenizer)
    tokens = np.concatenate([one.tokens for one in parts]) if parts else np.zeros(0, np.int32)
    if mark is None or not (count := int((tokens == mark).sum())):
        return ""
    return (
        f"{count} of {len(tokens)} tokens are {tokenizer.unk_token}, which stands for text that the tokenizer"
        f" {tokenizer.name_or_path} does not know"
    )


def _unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token for unknown text, or None.

    None also if that token has another meaning, like GPT-2's <|endoftext|>.
    """
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    unknown: Any = tokenizer.unk_token_id  # typed as for a batch of ids
    return None if unknown in others else unknown


def _read_prompt_file(path: str) -> str:
    try:
        return check_prompt_text(user_files.read_text(path))
    except ValueError as error:
        raise RecipeError(Problem("data", "bad-format", f"prompt_file {path}: {error}")) from None


def _rendered_differently(message: int) -> str:
    return (
        f"the chat template renders the conversation up to message {message} differently when more follows, so the assistant's"
        " tokens cannot be identified. Try {% generation %} around them in policy.tokenizer.chat_template, or single turns"
    )


def _int32(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
