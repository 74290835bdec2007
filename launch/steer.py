"""Change keys of a live run: `python launch/steer.py RUN_DIR key=value [key=value ...] [wait=false] [timeout=SECONDS]`.

Learning rates, weights of a loss, periods, bounds of steps and epochs, weights of data sets and the early stop may change
between two steps; recipes/KEYS.md marks these keys with "Live". Values are checked as those of a recipe, before anything is
written. A weight of the KL divergence or the entropy that was 0 at the start must stay 0, because then the ranks do not compute
the inputs of these terms.

The run applies the change at the end of the current step, before that step's validation and checkpoint. A new schedule
continues at the current step, as if it had been in force from the start. The run keeps the change in its checkpoints and
repeats it exactly if it is restarted. Its recipe.yaml stays as submitted, and steer.jsonl in its folder records each change
with its user. If a later submission gives a changed key another value than before, that value replaces the change.

Several keys of one command change together. Concurrent changes take effect in the order of their numbers; one that contradicts
an earlier one is refused. To withdraw a request, delete its file in steer/ of the run folder.

Exit status: 0 if the change took effect, or with wait=false if it was requested; 1 if the run has not answered within the
timeout; 2 if a key or a value is refused, or the run is not live.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.runs import run_changes, steer_request
from launch.terminal import command_line
from launch.terminal.command_line import Key


@dataclass(frozen=True)
class SteerRequest:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "the run's folder", bare=True)]
    wait: Annotated[bool, Key("false", "return as soon as the change is requested")] = True
    timeout: Annotated[float, Key("SECONDS", "how long to wait for the end of the step; default: 600")] = (
        steer_request.TIMEOUT_S
    )
    overrides: Annotated[list[str], Key("key=value", "a live key of the recipe and its new value", others=True)] = field(
        default_factory=list
    )


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, SteerRequest, execute, arguments)


def execute(request: SteerRequest) -> int:
    """Ask for the change, wait for it, and print the step. Raises RecipeError."""
    asked = steer_request.ask(request.run, request.overrides)
    if not request.wait:
        print(f"change {asked.number} is requested, for the end of the step. To see it: python launch/status.py {request.run}")
        return 0
    try:
        answer = steer_request.wait(request.run, asked, request.timeout)
    except steer_request.NotAnswered as late:
        print(late, file=sys.stderr)
        return 1
    print(f"change {answer.request} took effect after step {answer.step}: from step {answer.step + 1} on")
    for change in answer.changes:
        print(f"  {run_changes.text(change)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
