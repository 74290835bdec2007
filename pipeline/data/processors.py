"""Apply a user's function to each raw record of a data set before its columns are read (`data.train.processor`).

The function takes a record and returns a record, a list of records, or None, which drops the record. It runs when the record is
read, also in a resumed run, so its result must depend on the record alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError

Record = dict[str, Any]
Processor = Callable[[Record], Record | list[Record] | None]


class ProcessedRecords(Sequence):
    """Records that a user's function makes from others: for each of them a record, or a list of any number of records."""

    def __init__(self, records: Sequence[Record], path: str) -> None:
        """Wrap the records. path: the function's dotted path. Raises RecipeError if there is no such function."""
        self._records, self._path = records, path
        try:
            self._process: Processor = user_code.load(path)
        except user_code.NotFound as error:
            raise RecipeError(Problem("data.processor", "not-importable", f"'{path}': {error}")) from error

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record | list[Record]:
        return process(self._process, self._path, self._records[index])

    def source(self, index: int) -> tuple[Sequence[Record], int]:
        """Return (the raw records, the number of the one from which `index` is made)."""
        return self._records, index


def process(function: Processor, path: str, record: Record) -> Record | list[Record]:
    """Return what a function makes of a record; [] for None. Raise ValueError, which names it, if it fails."""
    try:
        made = function(copy.deepcopy(record))  # which the function may change; a generated data set gives the same one again
    except Exception as error:  # of the user's code, which raises what it likes
        raise ValueError(f"processor {path} raised {type(error).__name__}: {error}") from error
    if made is None:
        return []
    if not all(isinstance(one, dict) for one in (made if isinstance(made, list) else [made])):
        kind = "a list with other values than records" if isinstance(made, list) else f"a {type(made).__name__}"
        raise ValueError(f"processor {path} returned {kind}; expected a dict, a list of dicts, or None")
    return made


def as_records(made: Record | list[Record]) -> list[Record]:
    """Return the records that are made from one record."""
    return made if isinstance(made, list) else [made]
