"""Evaluate with `python launch/evaluate.py suite=NAME (run=RUN_DIR [step=N|all|follow] | model=PATH_OR_NAME) [key=value ...]`.

The scores are printed with 95% intervals, and are in scores.json of the evaluation's folder, RUN_DIR/evaluations/SUITE/step_N,
or runs/evaluations/SUITE/MODEL. The same command continues an interrupted evaluation. For a run, TensorBoard shows the scores
by step, from tensorboard/evaluations/SUITE; the names of an interval's ends have _low and _high at the end.

Exit status: 0 if every evaluation succeeded, 1 if one failed, 2 if the command or a recipe has problems, 130 if cancelled.

Imports neither torch nor transformers, so it starts fast on a login node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.evaluations import evaluation_job, follower
from launch.evaluations.evaluation_job import Evaluation
from launch.recipes.trust import Trust, trusting
from launch.runs import evaluation_sources, follower_process, suites
from launch.runs.follower_process import FollowRequest
from launch.submission import foreground, preview
from launch.terminal import command_line, troubleshooting
from launch.terminal.command_line import Key
from launch.terminal.units import is_count
from pipeline import config
from pipeline.config import Problem, RecipeError, reference, refuse
from pipeline.recipe import secrets
from pipeline.recipe.problem_codes import CODES

FLAGS = ("show", "plan", "dry_run", "detach")


def _step(text: str) -> str:
    if text not in ("all", "follow") and not is_count(text):
        raise ValueError("a step, all or follow")
    return text


@dataclass(frozen=True)
class EvaluateRequest:
    """The command line."""

    suite: Annotated[
        str | None,
        Key(
            "NAME",
            "a file in recipes/suites/, without .yaml; lm_eval:TASK,...; or a path; default: the suite of the run's"
            " section `evaluation`, with its keys",
        ),
    ] = None
    run: Annotated[Path | None, Key("RUN_DIR", "the folder of the run whose checkpoints to evaluate")] = None
    step: Annotated[
        str | None,
        Key("N", "a checkpoint's step; all; or follow: each as the run completes it; default: the latest", read=_step),
    ] = None
    model: Annotated[str | None, Key("PATH_OR_NAME", "a model in place of a run")] = None
    compare: Annotated[Path | None, Key("EVALUATION_DIR", "a complete evaluation to compare with, question by question")] = None
    overrides: Annotated[
        list[str],
        Key("key=value", "any key of the recipe, such as cluster.generate.nodes=2 evaluate.seed=1", others=True),
    ] = field(default_factory=list)
    period: Annotated[int | None, Key("N", "step=follow: evaluate every Nth checkpoint, and the last; default: 1")] = None
    show: Annotated[bool, Key("true", "print the resolved recipe, each value with the file and line that set it")] = False
    plan: Annotated[bool, Key("true", "print the plan: questions, tokens, memory, seconds, GPU-hours")] = False
    dry_run: Annotated[bool, Key("true", "print what would be submitted; write nothing")] = False
    trust: Annotated[bool, Key("true", "plan and dry run: also import the code that the suite names")] = False
    detach: Annotated[bool, Key("true", "submit, and return while the evaluation goes on")] = False
    help: Annotated[str | None, Key("[KEY]", "explain a key or section of the recipe, or an error's code", read=str)] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that is missing or contradicts another one."""
        if self.help is not None:
            return
        flags = [flag for flag in FLAGS if getattr(self, flag)]
        if len(flags) > 1:
            yield Problem(flags[1], "contradiction", f"got {' and '.join(flags)}; expected one of them")
        if self.run is None and self.model is None:
            yield Problem("run", "missing-value", "got neither run nor model; expected run=RUN_DIR or model=PATH_OR_NAME")
        if self.run and self.model:
            yield Problem("model", "contradiction", "got run and model; expected one of them")
        if self.suite is None and self.run is None:
            yield Problem("suite", "missing-value", "got no suite; expected suite=NAME, a file in recipes/suites/")
        if self.step is not None and self.run is None:
            yield Problem("step", "has-no-effect", "got a step without a run. Try run=RUN_DIR")
        if self.compare is not None and (flags or self.step in ("all", "follow")):
            other = f"{flags[0]}=true" if flags else f"step={self.step}"
            yield Problem(
                "compare",
                "contradiction",
                f"got {other} too; expected the evaluation of one step, run to its end, because compare reads its scores",
            )
        if self.step == "all" and self.detach:
            yield Problem("detach", "unsupported", "got true with step=all, which waits for each evaluation. Try step=follow")
        if self.step == "follow" and (self.show or self.plan or self.dry_run):
            yield Problem("step", "contradiction", f"got follow with {flags[0]}=true. Try step=N")
        if self.period is not None and (self.step != "follow" or self.period < 1):
            yield Problem("period", "has-no-effect", f"got {self.period}; expected 1 or more, with step=follow")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, EvaluateRequest, execute, arguments)


def execute(request: EvaluateRequest) -> int:
    """Show, plan or evaluate, as requested. Raises RecipeError."""
    if request.help is not None:
        print(troubleshooting.explain(request.help) if request.help in CODES else reference.explained(request.help))
        return 0
    foreground.handle_signals()
    if request.step == "follow":
        assert request.run is not None, "checked by EvaluateRequest.problems"
        return _follow(request, request.run)
    status = 0
    for evaluation in evaluations(request):
        status = _one(request, evaluation) or status
        if status == foreground.CANCELLED:
            break
    return status


def _one(request: EvaluateRequest, evaluation: Evaluation) -> int:
    if request.show:
        print(secrets.redact(config.format_with_origins(evaluation.loaded)), end="")
        refuse(evaluation.loaded.problems)
        return 0
    if request.plan or request.dry_run:
        with trusting(Trust.EVERYTHING if request.trust else None):
            found = evaluation_job.examine(evaluation, dry=True, wants_plan=request.plan)
        return preview.show_plan(found) if request.plan else preview.dry_run(found)
    other = evaluation_job.read_complete(request.compare) if request.compare else None
    status = evaluation_job.run(evaluation, request.detach)
    if other and status == 0:
        evaluation_job.print_comparison(other, evaluation.run_dir)
    return status


def evaluations(request: EvaluateRequest) -> Iterator[Evaluation]:
    """Yield the evaluations that the command line requests, oldest checkpoint first. Raises RecipeError."""
    if request.run is None:
        assert request.model is not None and request.suite is not None, "checked by EvaluateRequest.problems"
        source = evaluation_sources.of_model(request.model, suites.find(request.suite)[0])
        yield evaluation_job.read(request.suite, source, request.overrides)
        return
    recipe = evaluation_sources.read_run(request.run)
    suite, more = _suite(request, recipe)
    name = suites.find(suite)[0]
    if request.step == "all":
        found = list(evaluation_sources.available(request.run, name).values()) or [
            evaluation_sources.select(request.run, name, None)
        ]
    else:
        found = [evaluation_sources.select(request.run, name, None if request.step is None else int(request.step))]
    for each in found:
        yield evaluation_job.read(
            suite, evaluation_sources.of_checkpoint(request.run, recipe, each, name), request.overrides, more
        )


def _suite(request: EvaluateRequest, recipe: config.Recipe) -> tuple[str, dict[str, Any]]:
    """Return (the suite, the keys of the run's section `evaluation`). The keys are {} if the command line names a suite."""
    if request.suite is not None:
        return request.suite, {}
    if recipe.evaluation.suite is None:
        message = "got no suite, and the run's recipe has no evaluation.suite; expected suite=NAME, a file in recipes/suites/"
        raise RecipeError(Problem("suite", "missing-value", message))
    return recipe.evaluation.suite, follower_process.keys_of(recipe.evaluation)


def _follow(request: EvaluateRequest, run_dir: Path) -> int:
    recipe = evaluation_sources.read_run(run_dir)
    suite, more = _suite(request, recipe)
    period = request.period or (recipe.evaluation.period if request.suite is None else 1)
    if request.detach:
        work = FollowRequest(run_dir, request.suite, request.period, tuple(request.overrides))
        print(follower_process.start(work, suites.find(suite)[0]))
        return 0
    work = FollowRequest(run_dir, request.suite, period, tuple(request.overrides), more)
    return follower.CheckpointFollower(work, suite).follow()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
