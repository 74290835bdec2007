"""Make a plan for the service: `python -m launch.serving.plan_process`, with the request as JSON on stdin.

Imports no code that a recipe names and resolves no environment variable. Writes {plan} or {problems, refused_by_slurm} as JSON
to stdout.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from launch.api import planning
from launch.executors.slurm_client import SlurmError
from launch.recipes.trust import Trust, trusting
from pipeline.config.interpolation import without_environment
from pipeline.recipe.problems import HetstepError, Problem
from pipeline.sandbox.linux import PR_SET_PDEATHSIG, prctl

MEMORY = 8 << 30
"""Maximum address space of the process, in bytes."""


def plan(recipe: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to a request for a plan: the plan, or its problems."""
    try:
        with trusting(Trust.NOTHING), without_environment():
            made = planning.plan(recipe, overrides)
    except HetstepError as error:
        return {"problems": plain(error.problems)}
    except SlurmError as error:
        return {"problems": plain([Problem("", "unreachable", f"Slurm did not answer: {error}. Try again")])}
    except OSError as error:
        why = error.strerror or error
        return {"problems": plain([Problem("recipe", "unreadable", f"got {error.filename}: {why}; expected a readable file")])}
    figures = {name: getattr(made, name) for name in ("fits", "gpus", "step_seconds", "total_seconds", "gpu_hours")}
    problems = {"problems": plain(made.problems), "site_problems": plain(made.site_problems)}
    return {"plan": {**figures, **problems, "warnings": list(made.warnings), "text": str(made)}}


def plain(problems: Any) -> list[dict[str, str]]:
    """Return problems in the form in which the service answers them."""
    return [{"key": each.key, "code": each.code, "message": each.message, "origin": each.origin} for each in problems]


def main() -> None:
    """Read the request from stdin, and write the reply to stdout."""
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the service's log
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end when the service is killed
    request = json.load(sys.stdin)
    seconds = int(request["seconds"]) + 10
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(seconds)  # for a service that was killed before the request above to the kernel
    with reply:
        reply.write(json.dumps(plan(request["recipe"], request["overrides"])))


if __name__ == "__main__":
    main()
