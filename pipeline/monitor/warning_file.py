"""The warnings of an attempt: resources/warnings.jsonl, a line for each, which `status` shows.

{"time", "step", "check", "rank", "node", "message"}     a warning; of a check and a rank the last one counts
{"time", "step", "check", "cleared": true}               the check's warnings hold no longer
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.secrets import redacted

AGAIN_STEPS = 20
"""Steps until a warning that still holds is given again."""


def warning(step: int, check: str, rank: int, node: str, message: str) -> dict[str, Any]:
    """Return the line of a warning. rank, node: where it was found."""
    return {"time": time.time(), "step": step, "check": check, "rank": rank, "node": node, "message": message}


def cleared(step: int, check: str) -> dict[str, Any]:
    """Return the line that ends the warnings of a check."""
    return {"time": time.time(), "step": step, "check": check, "cleared": True}


def append(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines to the end of the file. Raises OSError."""
    if lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as out:
            out.write(redacted("".join(json.dumps(each) + "\n" for each in lines)))
