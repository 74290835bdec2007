"""The body of every refused request."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.problems import Problem


def problems_body(problems: Sequence[Problem]) -> bytes:
    """Return problems as JSON in ASCII: a message can quote any text of the request."""
    plain = [{"key": each.key, "code": each.code, "message": each.message, "origin": each.origin} for each in problems]
    return json.dumps({"problems": plain}).encode()
