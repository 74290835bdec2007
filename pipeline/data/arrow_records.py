"""Read the rows of the `datasets` library, which Arrow stores in columns, as records.

Arrow gives every mapping in a column the same keys, and fills the keys that a mapping lacks with null: arguments
{"city": "Oslo"} come back as {"city": "Oslo", "unit": null} if another call has a unit. We therefore remove null entries from
conversations, tools and variables of the chat template. Other columns stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.data.template_fields import VARIABLES, without_nulls

Record = dict[str, Any]


class ArrowRecords(Sequence):
    """The rows of a data set as records."""

    def __init__(self, rows: Any, name: str, tools_key: str | None = None, files: Callable[[], Sequence[str]] = tuple) -> None:
        """Wrap the rows.

        rows: a datasets.Dataset. name: the data set's name, for messages. tools_key: the column of tools. files: a function
        that returns the files of the rows, in the order of the rows.
        """
        self._rows, self._name, self._files = rows, name, files
        self._of_template = {VARIABLES, tools_key}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return {key: self._value(key, value) for key, value in self._rows[int(index)].items()}

    def place(self, index: int) -> str:
        """Return a record's location for messages: "FILE, row N" if all rows are in Parquet files, else "NAME, record N"."""
        begin = 0
        for path, rows in self._sizes:
            if index < begin + rows:
                return f"{path}, row {index - begin} (from 0)"
            begin += rows
        return f"{self._name}, record {index} (from 0)"

    def _value(self, key: str, value: Any) -> Any:
        """Return `value` without null entries where it is for the chat template. key: its column or dotted nested field."""
        if self._is_of_template(key, value):
            return without_nulls(value)
        return (
            {name: self._value(f"{key}.{name}", nested) for name, nested in value.items()} if isinstance(value, dict) else value
        )

    def _is_of_template(self, key: str, value: Any) -> bool:
        if key in self._of_template:
            return True
        return (
            isinstance(value, list)
            and bool(value)
            and all(isinstance(message, dict) and "role" in message for message in value)
        )

    @cached_property
    def _sizes(self) -> list[tuple[str, int]]:
        """(path, number of rows) of each Parquet file; empty if these files do not have exactly the rows of the data set."""
        import pyarrow.parquet  # slow; only data sets of Parquet files need it

        paths = [path for path in self._files() if path.endswith(".parquet") and Path(path).is_file()]
        sizes = [(path, int(pyarrow.parquet.read_metadata(path).num_rows)) for path in paths]
        return sizes if sum(rows for _, rows in sizes) == len(self) else []
