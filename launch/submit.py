"""Run a recipe with `python launch/submit.py recipe=NAME [key=value ...]`.

A recipe of NeMo-RL or verl works too: its keys are translated, and notes name those that change or have no effect.

Exit status: 0 if the run succeeded, 1 if it failed, 2 if the recipe has problems (then nothing is submitted), 130 if cancelled.
The same command again continues the run where it stopped.

Imports torch and transformers only for a plan, and for checks of models on GPUs; a login node needs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.preflight import model_readings, user_imports
from launch.recipes import foreign, reading
from launch.recipes.trust import Trust, trusting
from launch.runs import run_changes
from launch.runs.run_folder import RunFolder
from launch.submission import foreground, preview
from launch.submission.prepare import examine, prepare
from launch.terminal import command_line, troubleshooting
from launch.terminal.command_line import Key
from launch.terminal.safe_text import on_one_line
from pipeline import config
from pipeline.config import KINDS, Problem, RecipeError, reference, refuse
from pipeline.config.environments import scorers
from pipeline.recipe import secrets
from pipeline.recipe.problem_codes import CODES
from pipeline.steering import steer_files

FLAGS = ("show", "plan", "dry_run", "detach")


@dataclass(frozen=True)
class SubmitRequest:
    """The command line."""

    recipe: Annotated[str | None, Key("NAME", "a file in recipes/, without .yaml, or a path to one")] = None
    overrides: Annotated[
        list[str],
        Key(
            "key=value",
            "any key of the recipe, such as grpo.max_num_steps=20 cluster.executor=local; a foreign recipe's options too",
            others=True,
            options=foreign.takes_options,
        ),
    ] = field(default_factory=list)
    show: Annotated[
        bool,
        Key(
            "true",
            "print the resolved recipe, each value with the file and line that set it, and how the model's files are read",
        ),
    ] = False
    plan: Annotated[
        bool, Key("true", "print the plan: memory, bytes, seconds, GPU-hours; of the model it needs only config.json")
    ] = False
    plan_from: Annotated[
        Path | None, Key("RUN_DIR", "calibrate the plan with this run's phase times; default: the run folder itself")
    ] = None
    dry_run: Annotated[
        bool, Key("true", "print what would be submitted, even if problems prevent a run here; write nothing")
    ] = False
    trust: Annotated[
        bool, Key("true", "plan and dry run: also import the code that the recipe names; otherwise only its source is read")
    ] = False
    detach: Annotated[bool, Key("true", "submit, and return while the run goes on")] = False
    follow: Annotated[Path | None, Key("RUN_DIR", "show the progress of a submitted run")] = None
    help: Annotated[
        str | None,
        Key(
            "[KEY]",
            "print type, range, default and meaning of a recipe's key or section (with recipe=RECIPE also of its own"
            " algorithm's, and of env.NAME.kwargs for the kind that it uses), or cause and cure of errors' codes",
            read=str,
        ),
    ] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that is missing or contradicts another one."""
        flags = [flag for flag in FLAGS if getattr(self, flag)]
        if len(flags) > 1:
            yield Problem(flags[1], "contradiction", f"got {' and '.join(flags)}; expected one of them")
        if self.recipe is None and self.follow is None and self.help is None:
            yield Problem("recipe", "missing-value", "got no recipe; expected recipe=NAME, or follow=RUN_DIR")
        unused = flags or self.follow or self.plan_from or (not self.recipe and (self.trust or self.overrides))
        if self.help is not None and unused:
            message = "got other keys too; expected help=KEY alone, or help=KEY recipe=NAME for what the recipe uses"
            yield Problem("help", "contradiction", message)
        elif self.follow and (self.recipe or self.overrides or self.plan_from or flags):
            yield Problem(
                "follow",
                "contradiction",
                "got other keys too; expected only follow=RUN_DIR, since a submitted run cannot change",
            )


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, SubmitRequest, execute, arguments)


def execute(request: SubmitRequest) -> int:
    """Show, plan, submit or follow, as requested. Raises RecipeError."""
    if request.help is not None:
        with trusting(Trust.EVERYTHING if request.trust else None):
            print(explained(request.help, request.recipe, request.overrides))
        return 0
    foreground.handle_signals()
    if request.follow:
        return foreground.attach(request.follow)
    assert request.recipe is not None, "SubmitRequest.problems lets no such request pass"
    if request.show:
        with trusting(Trust.EVERYTHING if request.trust else None):
            return show(request.recipe, request.overrides)
    if request.plan or request.dry_run:
        with trusting(Trust.EVERYTHING if request.trust else None):
            found = examine(request.recipe, request.overrides, True, request.plan_from, wants_plan=request.plan)
        return preview.show_plan(found) if request.plan else preview.dry_run(found)
    return foreground.submit(prepare(request.recipe, request.overrides, request.plan_from), request.detach)


def explained(key: str, name: str | None, overrides: list[str]) -> str:
    """Return the help of a recipe's key, or of codes separated by commas. name: a recipe, whose algorithm or kind is meant."""
    if set(key.split(",")) <= CODES.keys():
        return troubleshooting.explain(key)
    if name is None:
        return reference.explained(key)
    loaded = reading.inspect(name, overrides)
    if not reference.names_kwargs(key):
        refuse(problem for problem in loaded.problems if problem.key == "algorithm")
        return reference.explained(key)
    recipe, environment = loaded.recipe, key.split(".")[1]
    if environment not in recipe.env:
        message = f"got {key}; expected an environment of {name}: {', '.join(recipe.env) or 'it has none'}"
        raise RecipeError(Problem("help", "not-a-choice", message))
    named = scorers(environment, recipe.env[environment])
    if all(scorer.kind in KINDS for scorer in named):
        return reference.explained(key, [scorer.kind for scorer in named])
    return user_imports.describe_kwargs(recipe, environment)


def show(name: str, overrides: list[str]) -> int:
    """Print the resolved recipe with origins, then raise RecipeError if it has problems."""
    loaded = reading.inspect(name, overrides)
    print(secrets.redact(config.format_with_origins(loaded)), end="")
    run_dir = Path(loaded.recipe.run_dir).absolute()
    for line in run_changes.lines(RunFolder.at(run_dir)) if (run_dir / steer_files.ANSWERS).exists() else ():
        print(f"# changed during the run in {run_dir}, and kept when the run continues: {line}")
    if not loaded.problems:
        print("\n".join(f"# {on_one_line(line)}" for line in model_readings.describe_models(loaded.recipe)))
    refuse(loaded.problems)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
