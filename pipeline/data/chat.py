r"""Tokenize records as prompts for sampling or as conversations for supervised training.

With a chat template, a prompt is the rendered conversation up to the point where the assistant speaks (for a complete
conversation, up to its last answer). In training the loss counts the assistant's turns including their end-of-turn token.
Without a template (`data.apply_chat_template: false`) a prompt is plain text, and the loss counts the answer and the
end-of-sequence token. `pipeline.data.records` reads the columns of a record.

A token that spans the border of prompt and answer, such as the newlines of "assistant\n" + "\nHello", counts as the answer's.

Not supported: images.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.columns import Message
from pipeline.data.plain_text import PlainText, tokens_with_text
from pipeline.data.records import Continuation, Example, RecordReader, Turns, check_prompt_text
from pipeline.data.rendering import ChatTemplate
from pipeline.data.templates import check_template, check_tools, choose_template
from pipeline.data.turn_ends import find_turn_ends
from pipeline.data.turns import GENERATION_BLOCK, AssistantTurns
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.types import Prompt, Sample

Encoded = tuple[np.ndarray, np.ndarray]
"""Tokens `[L]` int32 and loss mask `[L]` bool."""


def load_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer `config.name` with the chat template that `choose_template` chooses, which may raise RecipeError."""
    from transformers import AutoTokenizer  # submission may lack it

    tokenizer = AutoTokenizer.from_pretrained(config.name, trust_remote_code=False)
    tokenizer.chat_template = choose_template(config, tokenizer.chat_template).template
    return tokenizer


class Encoder(RecordReader):
    """Reads and tokenizes the records of one data set.

    Raises RecipeError if a required chat template is missing, if it does not render `tools`, if `prompt_file` does not have
    exactly one {}, or if the recipe sets `system_prompt_file` or `messages_key` with data.apply_chat_template=false.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_config: TokenizerConfig,
        data: DataConfig,
        dataset: DatasetConfig,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Prepare the template. tools: those of the data set's environment, which prompts show.

        policy.tokenizer.chat_template_kwargs.tools takes their place.
        """
        text = _read_prompt_file(dataset.prompt_file) if dataset.prompt_file else "{}"
        system = user_files.read_text(dataset.system_prompt_file).strip() if dataset.system_prompt_file else None
        variables = tokenizer_config.chat_template_kwargs or {}
        super().__init__(data, dataset, text, system, () if "tools" in variables else tools)
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, variables)
        self._plain = PlainText(tokenizer)
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
        if data.apply_chat_template and not tokenizer.chat_template:
            message = (
                f"got null, and the tokenizer {tokenizer.name_or_path} has no chat template. Try data.apply_chat_template=false"
            )
            raise RecipeError(Problem("policy.tokenizer.chat_template", "missing-value", message))
        if data.apply_chat_template:
            check_template(tokenizer, variables)
            check_tools(tokenizer, variables, self.tools)
        if system is not None and not data.apply_chat_template:
            raise _needs_template("system_prompt_file")
        if dataset.messages_key and not data.apply_chat_template:
            raise _needs_template("messages_key")

    def prompt(self, record: dict[str, Any]) -> np.ndarray:
        """Return the prompt tokens, `[P]` int32. Raise ValueError if the record lacks the input or the prompt has no token."""
        question = self.question(record)
        if isinstance(question, str):
            tokens = self._plain.tokens(question)
        else:
            text = self.template.text(question, **self.template_options(record), add_generation_prompt=True)
            tokens = self._bare_tokens(text)
        if not tokens:
            raise ValueError("the prompt is empty: it has no tokens, and the tokenizer adds no token before a text")
        return _int32(tokens)

    def conversation(self, record: dict[str, Any]) -> Encoded:
        """Return a record's tokens and loss mask for supervised training. Raise ValueError as `example` and `encode` do."""
        return self.encode(self.example(record))

    def encode(self, example: Example) -> Encoded:
        """Return an example's tokens and loss mask. The first token has no context, so the loss never counts it.

        Raise ValueError as `encode_turns` does, or if the loss would count no token.
        """
        if isinstance(example, Turns):
            tokens, mask = self.encode_turns(example)
        else:
            tokens, mask = self._encode_text(example)
        mask[:1] = False
        if not mask.any():
            raise ValueError("no token remains to learn, because the loss never counts the first token of a text")
        return _int32(tokens), mask

    def count(self, example: Example) -> int:
        """Return the number of tokens of an example. Faster than `encode`, because it computes no loss mask."""
        if isinstance(example, Turns):
            return len(self._bare_tokens(self.template.text(example.messages, **example.options)))
        return len(self._plain.with_end(self._plain.tokens((example.prompt or "") + example.text)))

    def _encode_text(self, example: Continuation) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a plain text, which end in the end-of-sequence token, and their loss mask.

        The loss counts every token with text of `example.text`, even if it also has text of the prompt, and the
        end-of-sequence token.
        """
        prompt = example.prompt or ""
        text = prompt + example.text
        tokens, mask = tokens_with_text(self.tokenizer, text, [(len(prompt), len(text))])
        begin, ended = self._plain.begin, self._plain.with_end(tokens)
        counted = np.concatenate([np.full(len(begin), example.prompt is None), mask, np.ones(len(ended) - len(tokens), bool)])
        return [*begin, *ended], counted

    def unknown(self, parts: Sequence[Prompt | Sample]) -> str:
        """Return a message if `parts` have unknown tokens of this encoder's tokenizer, else an empty text: `unknown_text`."""
        return unknown_text(parts, self.tokenizer)

    def encode_turns(self, turns: Turns) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a conversation, and a mask of the assistant's turns from message `turns.first` on.

        Raise ValueError if the template refuses the conversation, hides where a turn begins or ends, or renders no text of the
        assistant.
        """

        def render(messages: list[Message], **options: Any) -> str:
            return self.template.text(messages, **turns.options, **options)

        assistant = AssistantTurns(render, self._added, turns.messages, turns.first, self.data.learn_prefilled, self._endless)
        if GENERATION_BLOCK.search(self.tokenizer.get_chat_template(tools=turns.options.get("tools"))):
            tokens, mask = self._masked_by_marks(turns, assistant)
        else:
            tokens, mask = tokens_with_text(self.tokenizer, assistant.text, assistant.spans())
        if not mask.any():
            roles = [message["role"] for message in turns.messages]
            raise ValueError(f"the chat template renders no text of the assistant; the roles are {roles}")
        return tokens, mask

    @functools.cached_property
    def _endless(self) -> bool:
        """True if the chat template ends no turn with a token."""
        return not find_turn_ends(self.tokenizer, self.template.variables).texts

    def _bare_tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered text. The tokenizer adds no special tokens: the template has written them."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _masked_by_marks(self, turns: Turns, assistant: AssistantTurns) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a conversation and a loss mask of the template's {% generation %} blocks.

        A block may end before or after the token that ends the turn; the mask includes that token in both cases.
        """
        rendered = self.template.apply(turns.messages, **turns.options, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = rendered["input_ids"], np.asarray(rendered["assistant_masks"], dtype=bool)
        if turns.first:
            _, learned = tokens_with_text(self.tokenizer, assistant.text, [(assistant.begin(turns.first), len(assistant.text))])
            mask &= learned
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        following = [tokens[end] if end < len(tokens) else None for _, end in runs]
        for (begin, end), follows in zip(runs, following, strict=True):
            stop = self._end_of_turn(tokens[:end], begin)
            mask[stop:end] = False
            # A token after earlier blocks alone starts the next turn.
            if tokens[stop - 1] not in self._special and follows in self._special and follows == following[-1]:
                mask[end] = True
        return tokens, mask

    def _end_of_turn(self, tokens: list[int], begin: int) -> int:
        """Return the position after the last token of the turn at tokens[begin:] that the loss counts.

        This is the turn's last special token if only white space follows it: the newline after <|im_end|> is the template's,
        and a sampler stops before it. Otherwise it is the turn's last token.
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
    """Return a message with the number of unknown tokens (`unk_token`) in `parts`; an empty text if there are none."""
    mark = unknown_token(tokenizer)
    tokens = np.concatenate([part.tokens for part in parts]) if parts else np.zeros(0, np.int32)
    if mark is None or not (count := int((tokens == mark).sum())):
        return ""
    return (
        f"{count} of {len(tokens)} tokens are {tokenizer.unk_token}, which stands for text that the tokenizer"
        f" {tokenizer.name_or_path} does not know"
    )


def unknown_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of `unk_token`, or None if the tokenizer has none or also uses it as BOS or EOS, as GPT-2 does."""
    special_ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    unknown: Any = tokenizer.unk_token_id  # typed as for a batch of ids
    return None if unknown in special_ids else unknown


def _read_prompt_file(path: str) -> str:
    try:
        return check_prompt_text(user_files.read_text(path))
    except ValueError as error:
        raise RecipeError(Problem("data", "bad-format", f"prompt_file {path}: {error}")) from None


def _int32(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
