"""Build the recipe's data sets as one stream; several are mixed by weight.

The item at position p comes from a data set that is drawn with probability weight / (sum of weights). After `max_num_epochs` a
data set ends; if it is drawn then, the draw is repeated among the others. Each data set has its own order and epochs. A draw
depends only on the seed, p, the weights and the number of data sets. The state is therefore p and the states of the streams,
and a resumed run sees exactly the records that it would have seen without the interruption.

Data sets are drawn at random rather than in turn: prompts go to engines in turn, and no engine should get all prompts of one
data set.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from pipeline.config import (
    LABELED,
    NAMED_DATASETS,
    OFFLINE,
    PAIRED,
    DatasetConfig,
    Recipe,
    answer_check,
    generates,
    held_out_sets,
    keyed_sets,
    prompt_tools,
    reads_columns,
    section,
    training_sets,
    validation_sets,
)
from pipeline.data.chat import Encoder
from pipeline.data.columns import judged_by_answer, learns_pairs, recognize_columns
from pipeline.data.curriculum import Curriculum
from pipeline.data.datasets import load_split, readable, with_key
from pipeline.data.named import columns
from pipeline.data.preferences import Pair, SplitPairs
from pipeline.data.stream import ExampleStream, Item, LabeledStream, PairStream, PromptStream, Stream
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Prompt, RolloutGroup, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


class Mixture(Generic[Item]):
    """A stream that mixes the items of several streams.

    The index of a prompt is its position in the mixture, so it is unique in a run.
    """

    def __init__(self, streams: Mapping[str, Stream[Item]], weights: Mapping[str, float], seed: int) -> None:
        """Mix streams by weight.

        streams: data set's name -> its stream. weights: data set's name -> its weight, above 0.
        """
        self._streams, self._weights, self._seed = dict(streams), {name: weights[name] for name in streams}, seed
        self._position = 0

    @property
    def usable(self) -> int:
        """The number of records of all data sets in one epoch, minus the records that the check at the start dropped."""
        return sum(stream.usable for stream in self._streams.values())

    def follow(self, weights: Mapping[str, float | None], max_num_epochs: int) -> None:
        """Change the weights and every data set's number of epochs from the current position on.

        weights: data set's name -> weight. None stands for the number of its records.
        """
        for name, stream in self._streams.items():
            stream.end_after(max_num_epochs)
            weight = weights[name]
            self._weights[name] = float(stream.records) if weight is None else weight

    def take(self, n: int) -> list[Item]:
        """Return the next n items, fewer only if every data set has ended."""
        items: list[Item] = []
        while len(items) < n and (batch := self._next()):
            items += batch
        return items

    def observe(self, groups: Iterable[RolloutGroup]) -> None:
        """Tell each data set's stream of the judged answers to its prompts."""
        by_name: dict[str, list[RolloutGroup]] = {}
        for group in groups:
            by_name.setdefault(group.prompt.dataset, []).append(group)
        for name, of_stream in by_name.items():
            self._streams[name].observe(of_stream)

    @property
    def metrics(self) -> dict[str, float]:
        """The data sets' metrics, summed."""
        total: dict[str, float] = {}
        for stream in self._streams.values():
            for name, value in stream.metrics.items():
                total[name] = total.get(name, 0.0) + value
        return total

    @property
    def dropped(self) -> int:
        """The number of records that the data sets' streams have skipped so far."""
        return sum(stream.dropped for stream in self._streams.values())

    def _next(self) -> list[Item]:
        """Return a list of the next item; an empty list if every data set has ended."""
        names = list(self._streams)
        while names:
            name = self._draw_name(names)
            if items := self._streams[name].take(1):
                self._position += 1
                return [_at(self._position - 1, items[0])]
            names.remove(name)
        return []

    def _draw_name(self, names: list[str]) -> str:
        """Draw one of `names` by weight. The draw depends on the seed, the position, the number of names and their weights."""
        ends = np.cumsum([self._weights[name] for name in names])
        drawn = np.random.default_rng([self._seed, self._position, len(names)]).random() * ends[-1]
        return names[min(int(np.searchsorted(ends, drawn, side="right")), len(names) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which JSON can represent."""
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"position": self._position, "seed": self._seed, "weights": dict(self._weights), "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state`. Raise RecipeError if it is from other data sets, weights or seeds."""
        if "streams" not in state:
            message = f"got the data sets {', '.join(self._streams)}; expected one data set, as in the checkpoint"
            raise RecipeError(Problem("data", "run-exists", message))
        for field, saved, current in (("weights", state["weights"], self._weights), ("seed", state["seed"], self._seed)):
            if saved != current:
                message = f"got {field} {current}; expected {saved}, as in the checkpoint"
                raise RecipeError(Problem("data", "run-exists", message))
        for name, stream in self._streams.items():
            try:
                stream.load_state_dict(state["streams"][name])
            except RecipeError as error:
                raise RecipeError(*(problem.within(f"data set {name}") for problem in error.problems)) from error
        self._position = state["position"]


def _at(position: int, item: Item) -> Item:
    return dataclasses.replace(item, index=position) if isinstance(item, Prompt) else item


Streams = tuple[Stream | Mixture, list[Prompt] | list[Sample] | list[Pair]]


def build_streams(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Streams:
    """Return the training stream and the validation items.

    The validation items are the first `max_val_samples` items, in order, of each validation data set. The first of these data
    sets are the records that training data sets hold out (`split_validation_size`); data.validation or data.validations
    follow. Items are prompts for algorithms that sample, pairs for those that learn from pairs, else examples.
    `Prompt.dataset` is set for training if `data.datasets` is, and for validation if there are several data sets.
    """
    config, data = section(recipe), recipe.data
    drops = data.bad_records == "drop"
    loaded = []
    for key, dataset in keyed_sets(data).items():
        with with_key(key):
            loaded.append(load_split(dataset, config.seed, drops))
    parts = dict(zip(training_sets(data), loaded, strict=False))  # which come first
    held_out = [split for _, split in parts.values() if len(split)]
    streams, weights = {}, {}
    for name, dataset in training_sets(data).items():
        records, _ = parts[name]
        label = name if data.datasets else ""
        stream = _stream(recipe, tokenizer, label, dataset, records, data.shuffle, config.max_num_epochs)
        if isinstance(stream, PromptStream) and data.curriculum.enabled:
            stream = Curriculum(stream, data.curriculum, config.seed)
        streams[name] = stream
        weights[name] = float(len(records)) if dataset.weight is None else dataset.weight
    train = Mixture(streams, weights, config.seed) if len(streams) > 1 else next(iter(streams.values()))
    validated = [(name, dataset, split) for (name, dataset), split in zip(held_out_sets(data).items(), held_out, strict=True)]
    validations = zip(validation_sets(data).items(), loaded[len(parts) :], strict=True)
    validated += [(name, dataset, records) for (name, dataset), (records, _) in validations]
    validation: list[Any] = []
    for name, dataset, records in validated:
        label = name if len(validated) > 1 else ""
        for item in _stream(recipe, tokenizer, label, dataset, records, False, 1).take(config.max_val_samples):
            validation.append(dataclasses.replace(item, index=len(validation)) if isinstance(item, Prompt) else item)
    return train, validation


def follow(stream: Stream | Mixture, recipe: Recipe) -> None:
    """Give a training stream the epochs and weights of a changed recipe, from its current position on."""
    epochs = section(recipe).max_num_epochs
    if isinstance(stream, Mixture):
        stream.follow({name: dataset.weight for name, dataset in training_sets(recipe.data).items()}, epochs)
    else:
        stream.end_after(epochs)


def _stream(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    dataset: DatasetConfig,
    records: Sequence[dict[str, Any]],
    shuffle: bool,
    epochs: int,
) -> Stream:
    """Return the stream of one data set. name: `Prompt.dataset` of its prompts, which may be empty."""
    paired, labeled = recipe.algorithm in PAIRED, recipe.algorithm in LABELED
    key = next(key for key, configured in keyed_sets(recipe.data).items() if configured is dataset)
    if paired:
        kind = PairStream
    elif labeled:
        kind = LabeledStream
    elif recipe.algorithm in OFFLINE:
        kind = ExampleStream
    else:
        kind = functools.partial(
            PromptStream,
            max_length=recipe.policy.max_total_sequence_length,
            answered=judged_by_answer(recipe, dataset),
            whole=reads_columns(recipe.env, dataset.env_name),
            dataset=name,
            check=answer_check(recipe.env, dataset.env_name) if judged_by_answer(recipe, dataset) else None,
        )
    dataset = columns(dataset, paired or labeled)
    if dataset.dataset_name not in NAMED_DATASETS:
        recognized = recognize_columns(recipe, key, dataset, (record for _, record in readable(records)))
        dataset = recognized.dataset
        if recognized.description:
            logger.info("%s: %s", key, recognized.description)
    tools = prompt_tools(recipe.env, dataset.env_name, own_code=True) if generates(recipe) else ()
    encoder = Encoder(tokenizer, recipe.policy.tokenizer, recipe.data, dataset, tools)
    if labeled and learns_pairs(recipe, dataset):
        records = SplitPairs(records)
    stream = kind(records, encoder, seed=section(recipe).seed, shuffle=shuffle, max_num_epochs=epochs)
    if stream.dropped_at_start:
        of = f" of {name}" if name else ""
        causes = "too long, invalid or dropped by the processor" if dataset.processor else "too long or invalid"
        logger.warning("data: skipped %d of %d records%s: %s", stream.dropped_at_start, len(records), of, causes)
    return stream
