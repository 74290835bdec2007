"""Count the records of a data file without parsing them."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.data import arrow_records, file_formats
from pipeline.data.text_records import TextRecords


def count_records(path: Path, most_bytes: float = math.inf) -> int | None:
    """Return the number of records of a Parquet file or a text.

    None for Arrow and compressed files, for texts of more than `most_bytes`, and for a file that cannot be read.
    """
    try:
        form = file_formats.recognize(path)
        if form.name == "parquet":
            return arrow_records.count_rows(path)
        if form.compression or not form.is_text or path.stat().st_size > most_bytes:
            return None
        return len(TextRecords(path, form, drops=True))
    except (OSError, ValueError, ImportError):
        return None
