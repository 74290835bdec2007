"""Turn records into a shuffled, resumable stream of the items that a step takes.

Position p of the stream is record `permutation(seed, p // N)[p % N]` of N. Each epoch has a new order that depends only on seed
and epoch, so the position is the stream's whole state. A resumed run sees exactly the prompts that it would have seen without
the interruption, even if its steps take another number of prompts. torchdata's StatefulDataLoader stores the position. It runs
in this process (`num_workers=0`): encoding a step's prompts takes milliseconds, and forking a rank that holds a process group
is not safe.

A processor (`processors.py`) may make several items of one record. The state then also has how many of them remain, and the
index of a prompt counts items, not positions.

Not supported: sharding (only rank 0 reads the data).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from pipeline.config import AnswerCheck
from pipeline.data.chat import Encoder
from pipeline.data.columns import column
from pipeline.data.datasets import record_location
from pipeline.data.preferences import Pair, encode_labeled, encode_pair
from pipeline.data.processors import as_records
from pipeline.data.records import plain_columns
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Prompt, RolloutGroup, Sample

CHECKED_AT_START = 20_000  # records to check before the run, which takes seconds, so that a bad one ends it early
TRIED_AFTER_BAD = 1000  # records after a bad one to search for a good one

SHOWN_DROPS = 100  # skipped records that the log shows, and then every so many

logger = logging.getLogger(__name__)

Record = dict[str, Any]
Item = TypeVar("Item", Prompt, Sample, Pair)


def encode_prompt(
    encoder: Encoder, position: int, record: Record, answered: bool = True, dataset: str = "", whole: bool = False
) -> Prompt:
    """Return the prompt of a record.

    `Prompt.index` is the position in the stream over all epochs; `Mixture` replaces it. `Prompt.task` is a mapping for the
    environment:

        answer              the expected answer
        messages, or text   the prompt with or without a chat template, for a model with another tokenizer
        template_options    tools and variables of the chat template, if the record has any
        record              if `whole`: the record's columns of texts, numbers, lists and mappings
        location            if `whole`, added by the stream: the record's file and line, for messages

    answered: whether a record must have an answer. whole: whether user code scores the answers.
    """
    question = encoder.question(record)
    task: dict[str, Any] = {"text" if isinstance(question, str) else "messages": question}
    if "messages" in task and (options := encoder.template_options(record)):
        task["template_options"] = options
    if whole and not answered:
        with contextlib.suppress(ValueError):  # there is none, or it is not a text
            task["answer"] = encoder.answer(record)
    elif answered or column(record, encoder.dataset.output_key) is not None:
        task["answer"] = encoder.answer(record)
    if whole:
        task["record"] = plain_columns(record)
    return Prompt(position, encoder.prompt(record), encoder.dataset.env_name or "", task, dataset)


def encode_example(encoder: Encoder, position: int, record: Record) -> Sample:
    """Return the sample of a record for supervised training. Log-probs and advantages are 0."""
    tokens, mask = encoder.conversation(record)
    zeros = np.zeros(len(tokens), dtype=np.float32)
    return Sample(tokens, mask, logprobs=zeros, advantages=zeros)


class Stream(Generic[Item]):
    """Yields items in order. Its position can be saved and restored.

    Raises RecipeError, which names the record, if a record cannot be encoded, exceeds `data.max_input_seq_length`, leaves no
    room in `max_length`, or has unknown tokens that `data.unknown_tokens` does not keep. If `data.bad_records`,
    `data.overlong_prompts` or `data.unknown_tokens` is "drop", the stream instead skips the records with this problem and their
    positions. The constructor checks the first CHECKED_AT_START records; the stream skips `dropped_at_start` of them.
    """

    encode: Callable[..., Item]

    def __init__(
        self,
        records: Sequence[Record],
        encoder: Encoder,
        *,
        seed: int,
        shuffle: bool = True,
        max_num_epochs: int = 1,
        max_length: int | None = None,
        check: AnswerCheck | None = None,
        **options: Any,
    ) -> None:
        """Check the first records and start at position 0.

        max_length: the maximum tokens of an item and its answer together; None if no answer follows. check: the check of
        expected answers. options: keyword arguments of `encode`.
        """
        self._identity = {"records": len(records), "seed": seed, "shuffle": shuffle}
        self._order = _Order(len(records), seed, shuffle, max_num_epochs)
        items = _Items(records, encoder, functools.partial(self.encode, **options), max_length, check)
        # The loader draws a number when it starts. Its own generator leaves the run's random state unchanged.
        self._loader = StatefulDataLoader(
            items, batch_size=None, sampler=self._order, collate_fn=_as_it_is, generator=torch.Generator()
        )
        self._iterator = iter(self._loader)
        checked = min(len(records), CHECKED_AT_START)
        self.dropped_at_start = items.check(checked)
        self._items = items
        self._rest: deque[Item] = deque()  # the items of the last position that are still to come
        self._taken = 0 if encoder.dataset.processor else None  # items so far, where a record may have several

    def take(self, n: int) -> list[Item]:
        """Return the next n items, fewer only after `max_num_epochs` epochs."""
        items: list[Item] = []
        while len(items) < n:
            if not self._rest:
                try:
                    self._rest.extend(next(self._iterator))
                except StopIteration:
                    break
                continue
            item = self._rest.popleft()
            if self._taken is not None:
                item = dataclasses.replace(item, index=self._taken) if isinstance(item, Prompt) else item
                self._taken += 1
            items.append(item)
        return items

    @property
    def dropped(self) -> int:
        """The number of records that the stream has skipped up to its position, in all epochs."""
        return self._items.dropped

    def observe(self, groups: Iterable[RolloutGroup]) -> None:
        """Learn from judged answers how hard records are: only a `Curriculum` does."""

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a `Curriculum`; none."""
        return {}

    def of_record(self, number: int) -> list[Item]:
        """Return the items of a record, wherever the stream is. Their position in the stream is 0."""
        return self._items[0, number]

    @property
    def position(self) -> int:
        """The number of records before the next one, over all epochs."""
        return self._order.position

    @property
    def records(self) -> int:
        """The number of records of an epoch."""
        return self._identity["records"]

    @property
    def usable(self) -> int:
        """The number of items in an epoch, without the records that the check at the start dropped.

        A record that this check did not reach counts as one item.
        """
        return self.records - self.dropped_at_start + self._items.extra

    def end_after(self, max_num_epochs: int) -> None:
        """Change the number of epochs, as if the stream were resumed at its current position with `max_num_epochs`."""
        if max_num_epochs != self._order.epochs:
            state = self.state_dict()
            self._order.epochs = max_num_epochs
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which JSON can represent."""
        state = {**self._identity, "loader": self._loader.state_dict(), "dropped": self.dropped}
        return state if self._taken is None else {**state, "taken": self._taken, "rest": len(self._rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`. Raise RecipeError if it is from another data set, seed or order."""
        if "streams" in state:
            message = f"got one data set; expected the data sets {', '.join(state['streams'])}, as in the checkpoint"
            raise RecipeError(Problem("data", "run-exists", message))
        if "curriculum" in state:
            message = "got false; expected true, as in the checkpoint, whose prompts were chosen by it"
            raise RecipeError(Problem("data.curriculum.enabled", "run-exists", message))
        if self._taken is not None and "taken" not in state and state["loader"]:
            message = "got a processor; expected none, as in the checkpoint, whose prompts are numbered by records"
            raise RecipeError(Problem("data.processor", "run-exists", message))
        for key, value in self._identity.items():
            if state[key] != value:
                message = f"got {key} {value}; expected {state[key]}, as in the checkpoint"
                raise RecipeError(Problem("data", "run-exists", message))
        self._loader.load_state_dict(state["loader"])
        self._iterator = iter(self._loader)
        self._rest.clear()
        if self._taken is not None:
            self._taken = state.get("taken", 0)
            if rest := state.get("rest", 0):
                self._rest.extend(self._items[self._order.last()][-rest:])
        self._items.dropped = state.get("dropped", 0)


class PromptStream(Stream[Prompt]):
    """Prompts to sample from. They leave room for at least one token in max_length. `options` are those of `encode_prompt`."""

    encode = staticmethod(encode_prompt)


class ExampleStream(Stream[Sample]):
    """Conversations for supervised training."""

    encode = staticmethod(encode_example)


class PairStream(Stream[Pair]):
    """Pairs of a chosen and a rejected answer. A pair is as long as its longer sequence."""

    encode = staticmethod(encode_pair)


class LabeledStream(Stream[Sample]):
    """Answers that are labeled good or bad."""

    encode = staticmethod(encode_labeled)


class _Order(Sampler):
    """Yields (position, record number) pairs. It is its own iterator, so that it continues at a loaded position."""

    def __init__(self, size: int, seed: int, shuffle: bool, epochs: int) -> None:
        self._size, self._seed, self._shuffle, self.epochs = size, seed, shuffle, epochs
        self._permutation: tuple[int, np.ndarray] | None = None  # (epoch, [N])
        self.position = 0

    def __iter__(self) -> _Order:
        return self

    def __next__(self) -> tuple[int, int]:
        if self.position // self._size >= self.epochs:
            raise StopIteration
        self.position += 1
        return self.last()

    def last(self) -> tuple[int, int]:
        """Return the pair before the current position."""
        epoch, index = divmod(self.position - 1, self._size)
        if not self._shuffle:
            return self.position - 1, index
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._size)
        return self.position - 1, int(self._permutation[1][index])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


PROCESSOR = "processor"


class BadRecord(ValueError):
    """The error of a record. key: the key of `data` whose value "drop" skips such records, or PROCESSOR."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


class _Items(Dataset):
    """Maps (position, record number) to the items of the record; to none if the record is dropped."""

    def __init__(
        self,
        records: Sequence[Record],
        encoder: Encoder,
        encode: Callable[[Encoder, int, Record], Any],
        max_length: int | None,
        check: AnswerCheck | None,
    ) -> None:
        self._records, self._encoder, self._encode, self._max_length = records, encoder, encode, max_length
        self._check = check
        self.dropped = 0  # while the stream yields items
        self.extra = 0  # items beyond one a record, of the records checked

    def __getitem__(self, location: tuple[int, int]) -> list[Any]:
        items = []
        for item, wrong in self._of_record(*location):
            if wrong is None:
                items.append(item)
                continue
            if not self._drops(wrong):
                raise self._refusal(wrong)
            self.dropped += 1
            if self.dropped <= SHOWN_DROPS or self.dropped % SHOWN_DROPS == 0:
                cause = PROCESSOR if wrong.key == PROCESSOR else f"data.{wrong.key}=drop"
                logger.warning("%s: records skipped so far: %d, the last one: %s", cause, self.dropped, wrong)
        return items

    def _drops(self, wrong: BadRecord) -> bool:
        return wrong.key == PROCESSOR or getattr(self._encoder.data, wrong.key) == "drop"

    def check(self, count: int) -> int:
        """Return how many of the first `count` records are dropped.

        Raise RecipeError for a bad record that the recipe does not drop, or if all are dropped.
        """
        dropped, first, valid = 0, None, 0
        for number in range(count):
            judged = self._check is not None and number < self._check.at_start
            faults = [wrong for _, wrong in self._of_record(0, number, judged)]
            first = first or next(filter(None, faults), None)
            if refused := next((wrong for wrong in faults if wrong and not self._drops(wrong)), None):
                if valid or any(
                    not wrong
                    for later in range(number + 1, min(count, number + TRIED_AFTER_BAD))
                    for _, wrong in self._of_record(0, later)
                ):
                    raise self._refusal(refused)
                raise self._refusal(refused, tried=min(count, number + TRIED_AFTER_BAD))
            kept = faults.count(None)
            dropped, valid, self.extra = dropped + (not kept), valid + (kept > 0), self.extra + max(0, kept - 1)
        if dropped == count:
            message = f"the first {count} records are all too long or invalid. The first: {first}"
            raise RecipeError(Problem("data", "bad-record", message)) from first
        return dropped

    def _refusal(self, wrong: BadRecord, tried: int | None = None) -> RecipeError:
        """Return the error of a record that is not dropped. tried: the number of records if none of the first ones is valid."""
        choices = ["another policy.tokenizer.name", "data.unknown_tokens=keep"] if wrong.key == "unknown_tokens" else []
        choices += [f"data.{wrong.key}=drop, which skips such records"] if tried is None else []
        sentences = [str(wrong), *([f"None of the first {tried} records is valid"] if tried is not None else [])]
        sentences += [f"Try {' or '.join(choices)}"] if choices else []
        return RecipeError(Problem("data", "bad-record", ". ".join(sentences)))

    def _of_record(self, position: int, number: int, judged: bool = True) -> Iterator[tuple[Any, BadRecord | None]]:
        """Yield (item, None), or (None, error), of each record that the processor makes of one: mostly of this one alone."""
        try:
            made = as_records(self._records[number])
        except (OSError, MemoryError):  # of the disk or the machine, not of the record
            raise
        except Exception as error:  # of a decoder, or a user's data set or processor: each raises what it likes
            yield None, BadRecord("bad_records", f"{record_location(self._records, number)}: {_reason(error)}")
            return
        for record in made:
            yield self._item(position, number, record, judged)
        if not made:
            yield None, BadRecord(PROCESSOR, f"{record_location(self._records, number)}: the processor drops it")

    def _item(self, position: int, number: int, record: Record, judged: bool) -> tuple[Any, BadRecord | None]:
        """Return (the item, None) or (None, the record's error). judged: whether to check the expected answer too."""
        data = self._encoder.data
        location = record_location(self._records, number)
        try:
            item = self._encode(self._encoder, position, record)
            if isinstance(item, Prompt):
                item = dataclasses.replace(item, record=number)
                if "record" in item.task:
                    item.task["location"] = location
        except (OSError, MemoryError):  # of the disk or the machine, not of the record
            raise
        except Exception as error:  # of a template or a tokenizer: each raises what it likes
            return None, BadRecord("bad_records", f"{location}: {_reason(error)}")
        if judged and self._check is not None and isinstance(item, Prompt) and "answer" in item.task:
            try:
                self._check.check(item.task["answer"])
            except ValueError as error:
                return None, BadRecord("bad_records", f"{location}: {error}")
        parts = item if isinstance(item, tuple) else (item,)
        tokens = max(len(part.tokens) for part in parts)
        if tokens > data.max_input_seq_length:
            reason = f"are more than data.max_input_seq_length {data.max_input_seq_length}"
        elif self._max_length is not None and tokens >= self._max_length:  # an engine refuses it, since no token fits
            reason = f"leave no room for an answer in policy.max_total_sequence_length {self._max_length}"
        elif data.unknown_tokens != "keep" and (unknown := self._encoder.unknown(parts)):
            return None, BadRecord("unknown_tokens", f"{location}: {unknown}")
        else:
            return item, None
        return None, BadRecord("overlong_prompts", f"{location}: {tokens} tokens {reason}")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _as_it_is(item: Any) -> Any:
    """Return an item unchanged. The loader would otherwise convert numpy arrays to tensors."""
    return item
