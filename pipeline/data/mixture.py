"""Several data sets as one stream, mixed by weight.

From which of them the item at position p comes is drawn with the probability weight / (sum of weights) from (seed, p) alone;
within each the order is its own, with epochs of its own. One that has gone through `max_num_epochs` has no more part in it, and
the others share what was its weight, until the last has ended. So the state is p and the streams' own, and a resumed run sees
exactly the records that it would have seen.

Drawn, not dealt out in turn: prompts go to engines in turn, and an engine should not get all of one data set's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic

import numpy as np

from pipeline.data.stream import Item, Stream
from pipeline.types import Prompt


class Mixture(Generic[Item]):
    """Takes items as a Stream does. The index of a prompt is its position here, and so unique in a run."""

    def __init__(self, streams: Mapping[str, Stream[Item]], weights: Mapping[str, float], seed: int) -> None:
        """streams: by the names of their data sets. weights: of each, above 0."""
        self._streams, self._weights, self._seed = dict(streams), {name: weights[name] for name in streams}, seed
        self._position = 0

    def take(self, n: int) -> list[Item]:
        """The next n items. Fewer, and at last none, only when every data set has ended."""
        items: list[Item] = []
        while len(items) < n and (taken := self._next()):
            items += taken
        return items

    def _next(self) -> list[Item]:
        """One item; none if every data set has ended."""
        names = list(self._streams)
        while names:
            name = self._drawn(names)
            if taken := self._streams[name].take(1):
                self._position += 1
                return [_at(self._position - 1, taken[0])]
            names.remove(name)
        return []

    def _drawn(self, names: list[str]) -> str:
        """One of these, by weight; the same at the same position."""
        ends = np.cumsum([self._weights[name] for name in names])
        drawn = np.random.default_rng([self._seed, self._position, len(names)]).random() * ends[-1]
        return names[min(int(np.searchsorted(ends, drawn, side="right")), len(names) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        streams = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"position": self._position, "seed": self._seed, "weights": self._weights, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError if other data sets were mixed, or they were mixed otherwise."""
        if "streams" not in state:
            raise ValueError(f"data: the checkpoint has one data set, this run has {', '.join(self._streams)}")
        for what, theirs, ours in (("weights", state["weights"], self._weights), ("seed", state["seed"], self._seed)):
            if theirs != ours:
                raise ValueError(f"data: the checkpoint's data sets had {what} {theirs}, these have {ours}: it cannot go on")
        for name, stream in self._streams.items():
            try:
                stream.load_state_dict(state["streams"][name])
            except ValueError as error:
                raise ValueError(f"data set {name}: {error}") from error
        self._position = state["position"]


def _at(position: int, item: Item) -> Item:
    return dataclasses.replace(item, index=position) if isinstance(item, Prompt) else item
