"""The body of every refused request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.recipe.problems import Problem


def problems_body(problems: Sequence[Problem]) -> bytes:
    """Return problems as JSON in ASCII: a message can quote any text of the request."""
    plain = [{"key": each.key, "code": each.code, "message": each.message, "origin": each.origin} for each in problems]
    return json.dumps({"problems": plain}).encode()


def malformed(errors: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield the problems of a request that does not fit its model. errors: those of FastAPI's validation."""
    for each in errors:
        place, *keys = map(str, each["loc"])
        key = ".".join(keys if keys and each["type"] != "json_invalid" else [place])
        message, given = each["msg"], json.dumps(each.get("input"), default=str)
        expected = f"{message[:1].lower()}{message[1:]}"
        if each["type"] == "extra_forbidden":
            yield Problem(key, "unknown-key", "is not a key of this request. /docs lists the keys")
        elif each["type"] == "missing":
            yield Problem(key, "missing-value", "got none; expected a value")
        elif each["type"] == "json_invalid":
            yield Problem(key, "bad-format", f"is not JSON: {each.get('ctx', {}).get('error', expected)}")
        elif each["type"] == "string_pattern_mismatch":
            yield Problem(key, "bad-format", f"got {given[:80]}; expected a name, not a path: {expected}")
        else:
            yield Problem(key, "bad-format", f"got {given[:80]}: {expected}")
