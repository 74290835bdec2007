"""Read the rows of Parquet and Arrow files, and those of the `datasets` library, as records.

Arrow gives every mapping in a column the same keys, and fills the keys that a mapping lacks with null: arguments
{"city": "Oslo"} come back as {"city": "Oslo", "unit": null} if another call has a unit. We therefore remove null entries from
conversations, tools and variables of the chat template. Other columns stay as they are. Columns of JSON (`arrow.json`, the
feature Json of `datasets`) are decoded.

Rows are read from memory-mapped Arrow files. Parquet has no access to single rows: a file of up to IN_MEMORY bytes is decoded
in memory, a larger one in spans of SPAN bytes, each into the cache (`row_cache.py`) when one of its rows is first read.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.data import row_cache
from pipeline.data.file_formats import FileFormat
from pipeline.data.records import parse_json
from pipeline.data.template_fields import VARIABLES, without_nulls
from pipeline.recipe import user_files

Record = dict[str, Any]
IN_MEMORY = 64 << 20  # bytes of a Parquet file's decoded columns
SPAN = 256 << 20  # bytes of decoded columns that are converted together
BATCH_ROWS = 1024  # rows of Parquet decoded at a time
FIRST_ROWS = 64  # the same, before submission


class TemplateColumns:
    """Removes the nulls that Arrow fills in from what the chat template reads."""

    def __init__(self, tools_key: str | None = None) -> None:
        self._of_template = {VARIABLES, tools_key}

    def record(self, row: Record) -> Record:
        """Return a row as a record."""
        return {key: self._value(key, value) for key, value in row.items()}

    def _value(self, key: str, value: Any) -> Any:
        """Return `value` without null entries where it is for the chat template. key: its column or dotted nested field."""
        if key in self._of_template or _is_conversation(value):
            return without_nulls(value)
        return (
            {name: self._value(f"{key}.{name}", nested) for name, nested in value.items()} if isinstance(value, dict) else value
        )


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) and "role" in message for message in value)


class ArrowRecords(Sequence):
    """The rows of a data set of the `datasets` library as records."""

    def __init__(self, rows: Any, name: str, tools_key: str | None = None, files: Callable[[], Sequence[str]] = tuple) -> None:
        """Wrap the rows.

        rows: a datasets.Dataset. name: the data set's name, for messages. tools_key: the column of tools. files: a function
        that returns the files of the rows, in the order of the rows.
        """
        self._rows, self._name, self._files = rows.with_format("arrow"), name, files  # without decoding images
        self._columns, self._decode = TemplateColumns(tools_key), decoder(rows.features.arrow_schema)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self._decode(self._columns.record(self._rows[int(index)].to_pylist()[0]))

    def place(self, index: int) -> str:
        """Return a record's location for messages: "FILE, row N" if all rows are in Parquet files, else "NAME, record N"."""
        begin = 0
        for path, rows in self._sizes:
            if index < begin + rows:
                return f"{path}, row {index - begin} (from 0)"
            begin += rows
        return f"{self._name}, record {index} (from 0)"

    @cached_property
    def _sizes(self) -> list[tuple[str, int]]:
        """(path, number of rows) of each Parquet file; empty if these files do not have exactly the rows of the data set."""
        import pyarrow.parquet  # slow; only data sets of Parquet files need it

        paths = [path for path in self._files() if path.endswith(".parquet") and Path(path).is_file()]
        sizes = [(path, int(pyarrow.parquet.read_metadata(path).num_rows)) for path in paths]
        return sizes if sum(rows for _, rows in sizes) == len(self) else []


# ---- files ------------------------------------------------------------------------------------------------------------------


class TableRecords(Sequence):
    """The rows of one Parquet or Arrow file as records. Raises OSError for a file that is damaged or cannot be read."""

    def __init__(self, path: Path, form: FileFormat, tools_key: str | None = None) -> None:
        self._path, self._form = path, form
        self._columns = TemplateColumns(tools_key)
        self._open: dict[int, _Batches] = {}  # span -> its rows
        with _opened(path):
            if form.name == "parquet":
                self._spans = _spans(path)
            else:
                self._spans, self._open = [], {0: _Batches(_arrow_batches(path))}
        self._ends = list(itertools.accumulate(rows for _, rows in self._spans)) or [len(self._open[0])]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Record:
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(index)
        span = bisect.bisect_right(self._ends, index)
        begin = self._ends[span - 1] if span else 0
        with _faults(self._path):
            if span not in self._open:
                self._open[span] = _Batches(self._decoded(span))
            return self._open[span].record(index - begin, self._columns)

    def place(self, index: int) -> str:
        """Return a record's location for messages."""
        return self._form.place(self._path, index)

    def _decoded(self, span: int) -> list[Any]:
        """Return the batches of rows of a span of a Parquet file: in memory if there is only one, else memory-mapped."""
        groups, _ = self._spans[span]
        if len(self._spans) == 1 and decoded_bytes(self._path) <= IN_MEMORY:
            return list(_parquet_batches(self._path, groups))
        part = f"row groups {groups[0]} to {groups[-1]}"
        converted = row_cache.cached(self._path, part, lambda new: _write(_parquet_batches(self._path, groups), new))
        return _mapped_batches(converted)


class _Batches:
    """Rows in batches of Arrow."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = list(itertools.accumulate(batch.num_rows for batch in self._batches))
        self._decode = decoder(batches[0].schema) if batches else dict

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def record(self, index: int, columns: TemplateColumns) -> Record:
        number = bisect.bisect_right(self._ends, index)
        begin = self._ends[number - 1] if number else 0
        return self._decode(columns.record(self._batches[number].slice(index - begin, 1).to_pylist()[0]))


@contextlib.contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Turn the errors of pyarrow in the block into OSError, with the cause and the file's path."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:  # not of pyarrow
            raise
        raise OSError(errno.EIO, _fault(str(error)), str(path)) from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Refuse what is no regular file, and turn the errors of pyarrow in the block into OSError."""
    user_files.open_file(path).close()
    with _faults(path):
        yield


def _fault(error: str) -> str:
    text = " ".join(error.split())
    if "magic bytes not found in footer" in text or "Not an Arrow file" in text:
        return "got a file without its end; expected a whole file: it is cut or still being written. Try to copy it again"
    return f"it is cut or damaged: {text[:200].rstrip('.')}. Try to copy it again"


def first_rows(path: Path, form: FileFormat, most: int, tools_key: str | None) -> Iterator[tuple[int, Record]]:
    """Yield (number, record) of the rows in about the first `most` bytes of a file. Raises as `TableRecords` does."""
    columns, number, read = TemplateColumns(tools_key), 0, 0
    with _opened(path):
        batches = _parquet_batches(path, None, FIRST_ROWS) if form.name == "parquet" else _arrow_batches(path, checked=False)
        for batch in batches:
            for begin in range(0, batch.num_rows, FIRST_ROWS):
                part = batch.slice(begin, FIRST_ROWS)
                decode = decoder(part.schema)
                for row in part.to_pylist():
                    yield number, decode(columns.record(row))
                    number += 1
                read += part.nbytes
                if read > most:
                    return


def schema_of(path: Path, form: FileFormat) -> Any:
    """Return the schema (pyarrow.Schema) of a Parquet or Arrow file. Raises as `TableRecords` does."""
    import pyarrow.parquet

    with _opened(path):
        if form.name == "parquet":
            return pyarrow.parquet.read_schema(path)
        return _arrow_reader(path).schema


def count_rows(path: Path) -> int:
    """Return the number of rows of a Parquet file. Raises as `TableRecords` does."""
    import pyarrow.parquet

    with _opened(path):
        return int(pyarrow.parquet.read_metadata(path).num_rows)


def decoded_bytes(path: Path) -> int:
    """Return the size of a Parquet file's decoded columns in bytes, as its footer has it."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _spans(path: Path) -> list[tuple[range, int]]:
    """Return (row groups, number of rows) of parts of a Parquet file that have about SPAN decoded bytes."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path)
    spans, begin, size, rows = [], 0, 0, 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size, rows = size + group.total_byte_size, rows + group.num_rows
        if size >= SPAN or number == metadata.num_row_groups - 1:
            spans.append((range(begin, number + 1), rows))
            begin, size, rows = number + 1, 0, 0
    return spans or [(range(0), 0)]


def _parquet_batches(path: Path, groups: Sequence[int] | None, rows: int = BATCH_ROWS) -> Iterator[Any]:
    """Yield the batches of rows of a Parquet file. groups: the row groups; None: all."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        chosen = range(file.num_row_groups) if groups is None else groups
        for group in chosen:
            yield from file.iter_batches(rows, row_groups=[group])


def _arrow_reader(path: Path) -> Any:
    import pyarrow

    source = pyarrow.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


def _reader_batches(path: Path) -> Iterator[Any]:
    reader = _arrow_reader(path)
    if hasattr(reader, "num_record_batches"):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _mapped_batches(path: Path) -> list[Any]:
    return list(_reader_batches(path))


def _arrow_batches(path: Path, checked: bool = True) -> Any:
    """Return the batches of rows of an Arrow file or stream, memory-mapped; a compressed one is first converted.

    checked: False for an iterator of the batches as they are.
    """
    import pyarrow

    if not checked:
        return _reader_batches(path)
    before = pyarrow.total_allocated_bytes()
    first = next(_reader_batches(path), None)
    is_mapped = first is None or pyarrow.total_allocated_bytes() - before < first.nbytes / 2
    del first
    if not is_mapped:  # every access would decompress a whole batch
        path = row_cache.cached(path, "all rows", lambda new: _write(_reader_batches(path), new))
    return _mapped_batches(path)


def _write(batches: Iterator[Any], path: Path) -> None:
    """Write batches of rows into an uncompressed Arrow file."""
    import pyarrow

    first = next(batches)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, first.schema) as writer:
        for batch in itertools.chain([first], batches):
            writer.write_batch(batch)


# ---- columns ----------------------------------------------------------------------------------------------------------------


def decoder(schema: Any) -> Callable[[Record], Record]:
    """Return a function that decodes the JSON columns of a row. schema: a pyarrow.Schema."""
    decoders = {field.name: decode for field in schema if (decode := _json_decoder(field.type))}
    if not decoders:
        return lambda row: row
    return lambda row: {name: decoders[name](value) if name in decoders else value for name, value in row.items()}


def _json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Return a function that decodes the JSON texts in values of an Arrow type; None if it has none."""
    import pyarrow.types as types

    if str(kind) == "extension<arrow.json>":
        return lambda value: None if value is None else parse_json(value)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _json_decoder(kind.value_type)
        return inner and (lambda value: None if value is None else [inner(item) for item in value])
    if types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _json_decoder(field.type))}
        if fields:
            return lambda value: (
                value and {name: fields[name](item) if name in fields else item for name, item in value.items()}
            )
    return None
