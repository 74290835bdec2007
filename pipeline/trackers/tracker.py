"""The interface of an experiment tracker: a service or a store that shows the metrics of many runs.

A tracker is used by one thread of a process beside the run (`pipeline/tracking/`). Its methods may be slow, hang, or raise. The
process then logs the error, opens the tracker anew later, and repeats all calls whose data may not have arrived. So every
method must be safe to repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """The properties of a run that trackers get."""

    id: str  # the same over all restarts of the run: hexadecimal digits, and `-2` for its second record
    first: str  # the id of the first record
    name: str
    folder: Path
    recipe: Mapping[str, Any]  # nested plain values

    def files(self, tracker: str) -> Path:
        """Return the folder for a tracker's own files, which exists."""
        folder = self.folder / "tracking" / tracker
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@dataclass(frozen=True)
class LoggedStep:
    """A line of metrics.jsonl without its nulls, which stand for NaN and infinity."""

    step: int
    time: float  # unix seconds
    values: dict[str, float]


class Tracker(Protocol):
    """The interface of a tracker. An instance is one record of a run in the tracker."""

    Section: ClassVar[type[Any]]  # the recipe's section under `logger`
    title: ClassVar[str]
    place: ClassVar[tuple[str, ...]]  # keys of the section that name the server and the project
    package: ClassVar[str]  # its library, and the extra of the package hetstep that installs it

    def __init__(self, section: Any, run: TrackedRun, state: dict[str, Any]):
        """Bind the tracker to a run. state: plain values that the tracker may read and set, and that survive restarts."""
        ...

    def open(self) -> int | None:
        """Begin or continue the run's record, and return the last step that it holds; -1 if it holds none.

        Return None if the tracker recognizes steps that are sent again, so that the last step need not be known.
        """
        ...

    def log(self, steps: Sequence[LoggedStep]) -> None:
        """Record steps, in order. When this returns, they have arrived as far as the tracker's library can tell."""
        ...

    def log_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record rollouts of a step. samples: lines of a rollouts file. kind: "step" or "val"."""
        ...

    def log_scores(self, suite: str, scored: LoggedStep) -> None:
        """Record the scores of an evaluation of a step's checkpoint. scored.values: TASK/METRIC -> score."""
        ...

    def log_file(self, path: Path) -> None:
        """Record a copy of a file, such as the recipe, under its name. A later copy replaces it."""
        ...

    def log_model(self, folder: Path) -> None:
        """Record where the exported model is. Its weights are not copied."""
        ...

    def close(self, ended: bool) -> None:
        """Deliver all data that is left, and close the record. ended: whether the run is complete."""
        ...


def messages(sample: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a line of a rollouts file as the messages of a conversation."""
    conversation = [{"role": "user", "content": str(sample.get("prompt", ""))}]
    if turns := sample.get("turns"):
        for turn in turns:
            conversation.append({"role": "assistant", "content": turn["said"]})
            if turn["told"]:
                conversation.append({"role": "user", "content": turn["told"]})
        return conversation
    return [*conversation, {"role": "assistant", "content": str(sample.get("completion", ""))}]


COLUMNS = ("prompt", "completion", "reward", "finish", "sample", "prompt_index")
"""Keys of a line of a rollouts file that tables of samples show."""
