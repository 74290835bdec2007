"""Serve the runs of a team over HTTP, with a REST API and web pages: `python launch/serve.py settings=FILE`.

The service runs as the user who starts it, who owns what it submits. Unless its settings have `writable: true`, it only reads.
launch/serving/README.md describes the settings, the roles and the requests. Needs `pip install 'hetstep[serve]'`.

Ends at Ctrl-C or SIGTERM, after the current requests, which have END_S. Exit status: 2 if the command line or the settings
have an error.
"""

from __future__ import annotations

import importlib.util
import logging
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
IDLE_S = 10
END_S = 10
"""Seconds that current requests have after SIGTERM."""


@dataclass(frozen=True)
class ServeRequest:
    """The command line."""

    settings: Annotated[Path | None, Key("FILE", "the settings, a YAML file", bare=True)] = None
    new_token: Annotated[bool, Key("true", "print a new token and its hash, and end")] = False

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if there is nothing to do."""
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
        message = f"got no package {missing[0]}; expected it. Try pip install 'hetstep[serve]'"
        raise RecipeError(Problem("settings", "not-installed", message))
    config = settings.load(request.settings)
    settings.refuse_unusable_address(config)
    import uvicorn  # it and FastAPI take half a second to import

    from launch.serving.app import application
    from launch.serving.connections import MAX_CONNECTIONS, bounded
    from launch.serving.refusals import RefusalLog

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    uvicorn.run(
        application(config, RefusalLog(Path(config.root)).record),
        host=config.host,
        port=config.port,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        http=bounded(),
        ws="none",
        limit_concurrency=MAX_CONNECTIONS + 1,  # `bounded` keeps to it by closing silent connections
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=END_S,
        server_header=False,
        log_config=None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
