"""Serve the runs of a team over HTTP, with a REST API and web pages: `python launch/serve.py settings=FILE`.

The service runs as the user who starts it, and this user owns the runs that it submits. Unless its settings have `writable:
true`, it only reads. launch/serving/README.md describes the settings, the roles and the requests. Needs `pip install
'.[serve]'`.

Ends at Ctrl-C or SIGTERM, after the current requests, which have END_S seconds. Exit status: 2 if the command line or the
settings have an error.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch.serving import settings
from launch.serving.access import new_token
from launch.terminal import command_line
from launch.terminal.command_line import Key
from pipeline.config import Problem, RecipeError

PACKAGES = ("fastapi", "uvicorn")


@dataclass(frozen=True)
class ServeRequest:
    """The command line."""

    settings: Annotated[Path | None, Key("FILE", "the settings, a YAML file", bare=True)] = None
    new_token: Annotated[bool, Key("true", "print a new token and its hash, and exit")] = False

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the command line has neither settings nor new_token=true."""
        if self.settings is None and not self.new_token:
            yield Problem("settings", "missing-value", "got no file; expected settings=FILE or new_token=true")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, ServeRequest, execute, arguments)


def execute(request: ServeRequest) -> int:
    """Serve until a signal. Raises RecipeError."""
    if request.new_token:
        token, hashed = new_token()
        print(f"token, for its user:    {token}\ntoken_sha256, for the settings: {hashed}")
        return 0
    assert request.settings is not None, "checked by `problems`"
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        message = f"the package {missing[0]} is not installed. Try pip install '.[serve]'"
        raise RecipeError(Problem("settings", "not-installed", message))
    config = settings.load(request.settings)
    settings.refuse_unusable_address(config)
    from launch.serving import http_server  # uvicorn and FastAPI take half a second to import

    http_server.serve(config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
