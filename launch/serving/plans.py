"""Make the plans of the service, each in its own process.

A process ends after a time limit, when its client disconnects, or with the service. A plan reads files that its request names,
such as a model's. If a file system hangs, its reader hangs for ever. So no thread of the service makes a plan, and few plans
run at once, in total and per user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from launch.governance import audit_log
from pipeline.config import Problem, RecipeError
from pipeline.node import python_path

AT_ONCE = 4
"""Maximum number of plans at once."""
OF_USER = 2
"""Maximum number of plans of one user at once."""
MAX_WAITING = 8
"""Maximum number of plans of one user that run or wait. Further ones are refused."""
LOOK_S = 0.5
"""Seconds between two checks whether the client is still connected."""
MAX_REPLY = 4 << 20
"""Largest reply, in bytes."""


class ClientGone(Exception):
    """Raised if the client has disconnected before its answer."""


class Plans:
    """Makes plans, each in its own process."""

    def __init__(self, seconds: float):
        """Create it without plans. seconds: time limit of a plan, from the start of its process."""
        self._seconds = seconds
        self._all = asyncio.Semaphore(AT_ONCE)
        self._of_user: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(OF_USER))
        self._open: Counter[str] = Counter()
        self._processes: set[asyncio.subprocess.Process] = set()

    async def make(
        self, user: str, recipe: str, overrides: dict[str, Any], has_gone: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """Return the reply of `plan_process.py` for a recipe.

        has_gone: a function that returns whether the client has disconnected. Raises RecipeError if the plan takes too long or
        the user has too many plans, and ClientGone if the client disconnects.
        """
        if self._open[user] >= MAX_WAITING:
            message = f"got {MAX_WAITING} plans of {user} that have not ended; expected fewer. Try again when a plan has ended"
            raise RecipeError(Problem("recipe", "in-use", message))
        self._open[user] += 1
        work = asyncio.ensure_future(self._in_turn(user, recipe, overrides))
        try:
            while not (await asyncio.wait({work}, timeout=LOOK_S))[0]:
                if await has_gone():
                    raise ClientGone
            return work.result()
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, RecipeError):
                await work
            self._open[user] -= 1

    def end(self) -> None:
        """End the processes of all plans, when the service ends."""
        for process in self._processes:
            _end(process)

    async def _in_turn(self, user: str, recipe: str, overrides: dict[str, Any]) -> dict[str, Any]:
        async with self._of_user[user], self._all:
            reply = await self._run(json.dumps({"recipe": recipe, "overrides": overrides, "seconds": self._seconds}).encode())
        return json.loads(reply)

    async def _run(self, request: bytes) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "launch.serving.plan_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**python_path.with_package(audit_log.environment()), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # so that what it starts ends with it
        )
        self._processes.add(process)
        try:
            reply, _ = await asyncio.wait_for(process.communicate(request), self._seconds)
        except TimeoutError:
            message = f"got no plan within {self._seconds:g} s (plan_s in the settings); expected one. Try plan=true in a shell"
            raise RecipeError(Problem("recipe", "timed-out", message)) from None
        finally:
            _end(process)
            await process.wait()
            self._processes.discard(process)
        if not reply or len(reply) > MAX_REPLY:
            message = (
                f"got exit status {process.returncode} and no usable reply from the plan's process; expected a plan. The"
                " service's log says more"
            )
            raise RecipeError(Problem("recipe", "timed-out", message))
        return reply


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
