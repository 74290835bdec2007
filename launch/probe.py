"""Import code of the user's own and describe it: `python -m launch.probe REPLY`, in a process of its own.

Reads {folders, asked: [{key, path, role, kwargs}]} as JSON from its standard input, and writes into the file REPLY, by key, one
of these: {ok, fields, required}, {wrong}, {absent, importer}, {raised, foreign}. What the code prints goes nowhere.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from pipeline import user_code
from pipeline.environments import custom


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the description of one thing. asked: path, role (environment, tool, dataset) and kwargs."""
    try:
        thing = user_code.load(asked["path"])
    except user_code.NotFound as error:
        return {"wrong": str(error)}
    except ModuleNotFoundError as error:
        return {"absent": error.name, "importer": _innermost(error)[0]}
    except SyntaxError as error:
        return {"raised": f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})", "foreign": False}
    except BaseException as error:  # an exit, too
        file, line = _innermost(error)
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({file}:{line})"
        return {"raised": what, "foreign": isinstance(error, ImportError | OSError | RuntimeError | AssertionError)}
    if asked["role"] == "environment":
        if wrong := custom.problem(thing, asked["kwargs"]):
            return {"wrong": wrong}
        if not inspect.isclass(thing):
            return {"ok": True, "fields": custom.fields(thing), "required": custom.required(thing)}
    elif not callable(thing):
        return {"wrong": f"it is a {type(thing).__name__}, which cannot be called"}
    return {"ok": True, "fields": None, "required": []}


def _innermost(error: BaseException) -> tuple[str, int | None]:
    """Return file and line of what raised, without the import system's frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return frames[-1].filename, frames[-1].lineno


def main(reply: str) -> None:
    request = json.load(sys.stdin)
    user_code.search_in(request["folders"])
    Path(reply).write_text(json.dumps({asked["key"]: look(asked) for asked in request["asked"]}))


if __name__ == "__main__":
    main(sys.argv[1])
