"""Tokenize a prompt and its answer for a teacher with another tokenizer, and align its tokens with the policy's.

The prompt is the record's messages in the teacher's chat template, or its text without one. The answer follows as the text
that the policy's tokens spell, special tokens included; what the teacher would read as its own special tokens stays text. The
space that a template writes between a prompt and an answer (Llama 2: `[/INST] Hello`) belongs to the prompt on both sides. If
the policy ended its turn with a stop token, the teacher's text ends with the token that ends a turn in its template, or without
a template with its end-of-sequence token, and the two ends are a chunk.

Not learned from, each for its own tokens: text that the policy did not draw, such as the end of a cut thought; bytes that form
no character; characters that the teacher's tokenizer does not know or drops. Not learned from as a whole: episodes of several
turns, prompts that the teacher's template refuses, texts above the teacher's max_total_sequence_length.

Not handled: text that only one of two templates writes for the assistant, such as a <think> at the beginning.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import PolicyConfig
from pipeline.data.plain_text import PlainText
from pipeline.data.rendering import ChatTemplate
from pipeline.data.special_tokens import CUT_HERE, SpecialTokenEscaper
from pipeline.data.stop_tokens import stop_tokens
from pipeline.data.token_alignment import NO_CHUNK, TokenBytes, chunk_numbers, places_of_offsets, spell
from pipeline.data.turn_ends import ANSWER, RENDER_ERRORS, find_turn_ends
from pipeline.types import NO_TOKEN, Prompt, Rollout, Sample, TeacherTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 32  # last characters of a prompt that are tokenized with an answer
ASKED: Any = [{"role": "user", "content": "?"}]


class NotAligned(ValueError):
    """Raised if a teacher cannot score an answer."""


class TeacherText:
    """Writes samples in the tokens of a teacher."""

    def __init__(
        self,
        policy: PolicyConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: PolicyConfig,
        of_teacher: PreTrainedTokenizerBase,
        chat: bool,
    ) -> None:
        """Prepare both tokenizers. model, of_teacher: the teacher's. chat: whether prompts are rendered with a template.

        Raises ValueError if a tokenizer's tokens have no bytes of their own.
        """
        self._tokenizer = tokenizer
        self._teacher, self._chat, self._limit = of_teacher, chat, model.max_total_sequence_length
        self._bytes, self._teacher_bytes = (_token_bytes(one) for one in (tokenizer, self._teacher))
        self._stops = set(stop_tokens(policy).ids)
        self._escaper, self._plain = SpecialTokenEscaper(self._teacher), PlainText(self._teacher)
        self._template = ChatTemplate(self._teacher, model.tokenizer.chat_template_kwargs)
        of_policy = ChatTemplate(tokenizer, policy.tokenizer.chat_template_kwargs)
        self._space = _space_before_answer(of_policy) if chat else ""  # that the policy draws with an answer
        self._teacher_space = _space_before_answer(self._template) if chat else ""
        self._end = self._end_of_turn(model.tokenizer.chat_template_kwargs or {})
        self._prompts: dict[int, tuple[str, list[int]]] = {}  # by index, of the last prompt

    def _end_of_turn(self, template_kwargs: dict[str, Any]) -> list[int]:
        last = find_turn_ends(self._teacher, template_kwargs).last if self._chat else ""
        end: Any = self._teacher.convert_tokens_to_ids(last) if last else self._teacher.eos_token_id
        return [] if end is None else [end]

    def matched(self) -> np.ndarray:
        """Return the policy's id of each of the teacher's tokens with the same bytes, [V] int32; NO_TOKEN for the others.

        Special and other added tokens have the same text only if both tokenizers add them. Of several ids, the lowest counts.
        """
        added, of_policy = self._teacher.added_tokens_decoder, self._tokenizer.added_tokens_decoder
        known: dict[tuple[bytes, bool], int] = {}
        ours, theirs = (sorted(one.get_vocab().values()) for one in (self._tokenizer, self._teacher))
        for id, text in zip(ours, self._bytes.of(ours), strict=True):
            known.setdefault((text, id in of_policy), id)
        matched = np.full(theirs[-1] + 1, NO_TOKEN, np.int32)
        matched[theirs] = [
            known.get((text, id in added), NO_TOKEN) for id, text in zip(theirs, self._teacher_bytes.of(theirs), strict=True)
        ]
        return matched

    def write(self, prompt: Prompt, rollout: Rollout, sample: Sample) -> Sample:
        """Return the sample with the teacher's tokens. The loss counts only tokens of chunks that both models score.

        Raises NotAligned if the teacher cannot score the answer.
        """
        if any(len(turn.observation) and not turn.thinking for turn in rollout.turns):
            raise NotAligned("the episode has several turns")
        text, before = self._prompt(prompt)
        tokens = rollout.tokens.tolist()
        ended = rollout.finish == "stop" and not rollout.stop and tokens[-1] in self._stops
        spelled = spell(self._bytes.of(tokens[:-1] if ended else tokens))
        skip = self._space if self._space and spelled.text.startswith(self._space) else ""
        answer, shift = spelled.text[len(skip) :], 2 * len(skip.encode())
        ours = np.maximum(spelled.ends - shift, 0)
        broken = [(begin - shift, end - shift) for begin, end in spelled.broken]
        answered, theirs, exact = self._answer(text, answer)
        end = 2 * len(answer.encode()) + 2
        if ended:
            ours = np.append(ours, end if self._end else end + 1)
            answered, theirs = [*answered, *self._end], np.append(theirs, [end] * len(self._end))
        if len(before) + len(answered) > self._limit:
            raise NotAligned(f"it has {len(before) + len(answered)} tokens of the teacher; expected at most {self._limit}")
        chunks, chunks_of_teacher = chunk_numbers(ours, theirs, broken)
        altered = set() if exact else self._altered(answered, theirs, chunks_of_teacher, answer)
        return _with_chunks(sample, len(prompt.tokens), chunks, np.asarray([*before, *answered]), chunks_of_teacher, altered)

    def _altered(self, tokens: Sequence[int], ends: np.ndarray, chunks: np.ndarray, answer: str) -> set[int]:
        """Return the chunks whose tokens have another text than the answer there, apart from spaces, case and NFKC.

        ends: the place where each token ends. Such chunks have unknown tokens, or characters that the tokenizer drops.
        """
        pieces, text, altered = self._teacher_bytes.of(tokens), answer.encode(), set()
        for number in np.unique(chunks[(chunks != NO_CHUNK) & (ends <= 2 * len(text))]).tolist():
            places = np.flatnonzero(chunks == number)
            begin = int(ends[places[0] - 1]) // 2 if places[0] else 0
            spelled = b"".join(pieces[place] for place in places)
            if _folded(spelled) != _folded(text[begin : int(ends[places[-1]]) // 2]):
                altered.add(number)
        return altered

    def _prompt(self, prompt: Prompt) -> tuple[str, list[int]]:
        """Return a prompt's text, and its tokens of the teacher. Consecutive samples of a prompt share them."""
        if prompt.index not in self._prompts:
            task = prompt.task
            if self._chat:
                options = task.get("template_options", {})
                text = self._template.text(task["messages"], **options, add_generation_prompt=True)
                tokens = list(self._teacher(text, add_special_tokens=False).input_ids)
            else:
                text = task["text"]
                tokens = self._plain.tokens(text)
            if not tokens:
                raise NotAligned("the prompt has no tokens of the teacher")
            self._prompts = {prompt.index: (text, tokens)}
        return self._prompts[prompt.index]

    def _answer(self, before: str, answer: str) -> tuple[list[int], np.ndarray, bool]:
        """Return an answer's tokens of the teacher, the places where they end, and whether they spell exactly the answer.

        The answer is tokenized after the end of the prompt's text, so that no tokenizer takes it for the beginning of a text.
        If a token would span the border, as no sampled token does, it is tokenized alone.
        """
        lead = "" if not answer or answer[0].isspace() else self._teacher_space
        window, text = before[-WINDOW:], lead + self._escaper.escape(answer)
        tokens, places = self._tokens(window + text)
        border = 2 * len(window.encode())
        if not window or border in places:
            first = int(np.searchsorted(places, border, side="right")) if window else 0
            tokens, places = tokens[first:], places[first:] - border
        else:
            tokens, places = self._tokens(text)
        places = np.maximum(places - 2 * len(lead.encode()), 0)
        exact = self._exact_places(tokens, lead, answer)
        return tokens, places if exact is None else exact, exact is not None

    def _tokens(self, text: str) -> tuple[list[int], np.ndarray]:
        """Return the tokens of an escaped text, and the place where each ends by the tokenizer's offsets."""
        tokens: list[int] = []
        places, at = [np.zeros(0, np.int64)], 0
        for piece in text.split(CUT_HERE):
            encoded = self._teacher(piece, add_special_tokens=False, return_offsets_mapping=True)
            tokens += encoded["input_ids"]
            places.append(at + places_of_offsets(piece, encoded["offset_mapping"]))
            at += 2 * len(piece.encode())
        return tokens, np.concatenate(places)

    def _exact_places(self, tokens: Sequence[int], lead: str, answer: str) -> np.ndarray | None:
        """Return the place where each token ends by its bytes, also within characters; None if the bytes are another text.

        They are if the tokenizer normalizes the text, or does not know a part of it. A space that the tokenizer puts before a
        text belongs to the prompt.
        """
        pieces = self._teacher_bytes.of(tokens)
        ends = 2 * np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        whole = b"".join(pieces)
        for before in (lead, f" {lead}"):
            if whole == f"{before}{answer}".encode():
                return np.maximum(ends - 2 * len(before.encode()), 0)
        return None


def _token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not tokenizer.is_fast or backend is None:
        raise ValueError(f"got the tokenizer {tokenizer.name_or_path}; expected one with a tokenizer.json")
    return TokenBytes(backend)


def _space_before_answer(template: ChatTemplate) -> str:
    """Return the white space that a template writes between a prompt and an answer; "" if it writes none or other text."""
    try:
        said = template.text([*ASKED, {"role": "assistant", "content": ANSWER}])
        asked = template.text(ASKED, add_generation_prompt=True)
    except RENDER_ERRORS:
        return ""
    before, found, _ = said.partition(ANSWER)
    space = before.removeprefix(asked)
    return space if found and before.startswith(asked) and space.isspace() else ""


def _folded(text: bytes) -> str:
    return unicodedata.normalize("NFKC", text.decode(errors="replace")).replace(" ", "").casefold()


def unscored(sample: Sample) -> Sample:
    """Return a sample from which nothing is learned. Its teacher reads one token."""
    none = np.full(len(sample.tokens), NO_CHUNK, np.int32)
    in_teacher = TeacherTokens(np.zeros(1, np.int32), none[:1], none)
    return _masked(dataclasses.replace(sample, in_teacher=in_teacher))


def at_chunk_ends(sample: Sample) -> Sample:
    """Return a sample whose loss counts only the last token of each chunk."""
    assert sample.in_teacher is not None
    chunks = sample.in_teacher.chunks_of_sample
    return dataclasses.replace(sample, loss_mask=sample.loss_mask & (chunks != np.append(chunks[1:], NO_CHUNK)))


def _with_chunks(
    sample: Sample,
    prompt: int,
    chunks: np.ndarray,
    tokens: np.ndarray,
    chunks_of_teacher: np.ndarray,
    altered: set[int],
) -> Sample:
    """Return the sample with its teacher's tokens. prompt: tokens of the sample's prompt. chunks: of the tokens after them.

    tokens: the teacher's. chunks_of_teacher: of the last of them. altered: chunks that do not count. Others count if the loss
    counts all their tokens.
    """
    before = np.full(prompt, NO_CHUNK)
    of_sample = np.concatenate([before, chunks])
    left_out = altered | {*of_sample[~sample.loss_mask].tolist()}
    of_teacher = np.concatenate([np.full(len(tokens) - len(chunks_of_teacher), NO_CHUNK), chunks_of_teacher])
    parts = [
        np.where(np.isin(of_side, list(left_out)), NO_CHUNK, of_side).astype(np.int32) for of_side in (of_teacher, of_sample)
    ]
    return _masked(dataclasses.replace(sample, in_teacher=TeacherTokens(tokens.astype(np.int32), *parts)))


def _masked(sample: Sample) -> Sample:
    """Return a sample whose loss counts no token outside the chunks that are compared."""
    assert sample.in_teacher is not None
    mask = sample.loss_mask & (sample.in_teacher.chunks_of_sample != NO_CHUNK)
    logprobs, advantages = (np.where(mask, values, 0).astype(np.float32) for values in (sample.logprobs, sample.advantages))
    return dataclasses.replace(sample, loss_mask=mask, logprobs=logprobs, advantages=advantages)
