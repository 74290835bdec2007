"""Import and describe a user's code in a process of its own: `python -m launch.preflight.user_code_probe REPLY`.

Reads {folders, asked: {key: [path, role, kwargs]}} as JSON from stdin. Writes key -> reply as JSON into the file REPLY. A reply
is one of {ok, fields, required}, for a function with a signature also {named}, {wrong, code}, {absent, importer} and {raised,
foreign}. The caller discards the output of the code.
"""

from __future__ import annotations

import inspect
import json
import resource
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.environments import custom
from pipeline.recipe import user_code

MEMORY = 32 << 30
"""Limit of the process's address space, of which torch for CUDA takes 10 GB."""


def describe(path: str, role: str, kwargs: Sequence[str]) -> dict[str, Any]:
    """Import the user's object at a dotted path, and return the reply about it. role: environment, tool, dataset or format."""
    try:
        loaded_object = user_code.load(path)
    except user_code.NotFound as error:
        return {"wrong": str(error), "code": "not-importable"}
    except ModuleNotFoundError as error:
        return {"absent": error.name, "importer": _innermost(error)[0]}
    except SyntaxError as error:
        return {"raised": f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})", "foreign": False}
    except BaseException as error:  # SystemExit too
        file, line = _innermost(error)
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({file}:{line})"
        return {"raised": message, "foreign": isinstance(error, ImportError | OSError | RuntimeError | AssertionError)}
    return reply_about(loaded_object, role, kwargs)


def reply_about(loaded_object: Any, role: str, kwargs: Sequence[str]) -> dict[str, Any]:
    """Return the reply about an object or its stand-in."""
    if role == "environment":
        if wrong := custom.problem(loaded_object, kwargs):
            return {"wrong": wrong, "code": "wrong-type" if custom.problem(loaded_object, ()) else "unknown-key"}
        if not inspect.isclass(loaded_object):
            reply = {"ok": True, "fields": custom.fields(loaded_object), "required": custom.required_fields(loaded_object)}
            named = custom.named_parameters(loaded_object)
            return reply if named is None else {**reply, "named": named}
    elif not callable(loaded_object):
        return {"wrong": f"it is a {type(loaded_object).__name__}, which cannot be called", "code": "wrong-type"}
    return {"ok": True, "fields": None, "required": []}


def _innermost(error: BaseException) -> tuple[str, int | None]:
    """Return (file, line) of the code that raised an error, without the import system's frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return frames[-1].filename, frames[-1].lineno


def main(reply: str) -> None:
    """Describe every object of the request on stdin, and write the reply."""
    request = json.load(sys.stdin)
    if not 0 <= resource.getrlimit(resource.RLIMIT_AS)[1] < MEMORY:  # -1: no limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    user_code.search_in(request["folders"])
    Path(reply).write_text(json.dumps({key: describe(*source) for key, source in request["asked"].items()}))


if __name__ == "__main__":
    main(sys.argv[1])
