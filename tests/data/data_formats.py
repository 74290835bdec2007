"""Writers of one list of rows in every format of `data_path`."""

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet

Rows = Sequence[dict]


def _lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=bool(number % 2)) + "\n" for number, row in enumerate(rows)).encode()


def _zst(path: Path, content: bytes) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as packed:
        packed.write(content)


def _csv(path: Path, rows: Rows) -> None:
    texts = [
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items() if value is not None}
        for row in rows
    ]
    names = list(dict.fromkeys(name for row in texts for name in row))
    with path.open("w", newline="", encoding="utf-8-sig" if path.suffix == ".csv" else "utf-8") as file:
        writer = csv.DictWriter(file, names, delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(texts)


def _arrow(path: Path, rows: Rows, new: Callable) -> None:
    table = pyarrow.Table.from_pylist(list(rows))
    with new(str(path), table.schema) as writer:
        writer.write_table(table, 2)


def _halves(folder: Path, rows: Rows) -> None:
    folder.mkdir()
    for name, part in (("a", rows[:2]), ("b", rows[2:])):
        WRITERS["parquet"](folder / f"{name}.parquet", part)


WRITERS: dict[str, Callable[[Path, Rows], object]] = {
    "jsonl": lambda path, rows: path.write_bytes(_lines(rows)),
    "json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(_lines(rows))),
    "jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(_lines(rows))),
    "jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(_lines(rows))),
    "json.zst": lambda path, rows: _zst(path, json.dumps(rows).encode()),
    "csv": _csv,
    "tsv": _csv,
    "parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=2),
    "arrow": lambda path, rows: _arrow(path, rows, pyarrow.ipc.new_file),
    "ipc": lambda path, rows: _arrow(path, rows, pyarrow.ipc.new_stream),
    "feather": lambda path, rows: pyarrow.feather.write_feather(pyarrow.Table.from_pylist(list(rows)), path),
    "saved": lambda path, rows: datasets.Dataset.from_list(list(rows)).save_to_disk(path),
    "folder": _halves,
}
"""Format, which is the suffix of the path -> a function that writes rows into a path."""
