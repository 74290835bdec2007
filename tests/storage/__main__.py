"""Print, for every writer on every kind of failing file system, what the user sees and what is kept: python -m tests.storage

A Markdown table. As root, or the full and the read-only disk cannot be real ones.
"""

import sys
import tempfile
from pathlib import Path

from tests.storage.disks import small_disk
from tests.storage.test_writers import cells


def said(cell: dict) -> str:
    """Return the error that ends the run, or else its log messages."""
    text = cell["error"] or cell["told"] or "nothing"
    return text.replace(cell["folder"], "RUN").replace("\n", "<br>")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "disk") as disk:
        print("| writer | fault | the run | what the user sees | what is kept |\n|---|---|---|---|---|")
        for cell in cells(Path(folder), disk):
            run = "ends" if cell["error"] else "goes on"
            fault = cell["fault"] + ("" if cell["real"] else "*")
            print(f"| {cell['writer']} | {fault} | {run} | {said(cell)} | {cell['kept']} |", flush=True)
    print("\n\\* the calls to the file system were made to fail or to take long; else it really was so")


if __name__ == "__main__":
    sys.exit(main())
