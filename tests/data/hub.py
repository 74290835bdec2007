"""Small files with the columns of the named data sets, in a hub cache in the layout of `hf download`."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets

Row = dict[str, Any]
REVISION = "0" * 40


def download(cache: Path, repository: str, files: dict[str, list[Row]], card: str = "") -> None:
    """Write a repository of `files` to the hub cache.

    files: {path: rows}; Parquet, JSONL or gzipped JSONL by their endings.

    card: the YAML of its README.md.
    """
    folder = cache / f"datasets--{repository.replace('/', '--')}"
    contents = {path: _content(path, rows) for path, rows in files.items()}
    contents["README.md"] = f"---\n{card}---\n".encode()
    for path, content in contents.items():
        blob = folder / "blobs" / path.replace("/", "_")
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = folder / "snapshots" / REVISION / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(REVISION)


def _content(path: str, rows: list[Row]) -> bytes:
    if path.endswith(".parquet"):
        file = io.BytesIO()
        datasets.Dataset.from_list(rows).to_parquet(file)
        return file.getvalue()
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return gzip.compress(lines) if path.endswith(".gz") else lines


def configs(**files: dict[str, str]) -> str:
    """Return a card's `configs`: {subset: {split: path}}."""
    lines = ["configs:\n"]
    for subset, splits in files.items():
        lines.append(f"- config_name: {subset}\n  data_files:\n")
        lines += [f"  - split: {split}\n    path: {path}\n" for split, path in splits.items()]
    return "".join(lines)
