"""Run a recipe with `python launch/submit.py recipe=NAME [key=value ...]`.

A NeMo-RL recipe works too: its keys are translated, and notes name those that change or have no effect.

Exit status: 0 if the run succeeded, 1 if it failed, 2 if the recipe has problems (then nothing is submitted), 130 if cancelled.
The same command again continues the run where it stopped.

Imports neither torch nor transformers, so it starts fast on a login node.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch import (
    command_line,
    console,
    first_prompt,
    model_readings,
    recipes,
    run_changes,
    run_control,
    run_setup,
    slurm_client,
    troubleshooting,
)
from launch.command_line import Key
from launch.components import components
from launch.executors import allocation, local, slurm
from launch.executors.base import RunJob
from launch.executors.record import read_record
from launch.plan import evaluation, modes, report
from launch.plan.evaluation import EvaluationPlan
from launch.prepare import RESTART_S, Examination, Prepared, examine, folder_name, prepare
from launch.run_folder import RunFolder
from launch.terminal import on_one_line
from launch.trust import Trust, trusting
from pipeline import config, secrets, steer_files
from pipeline.config import Problem, RecipeError, collected, reference, refuse
from pipeline.problem_codes import CODES

if TYPE_CHECKING:
    from launch.follow import MetricsTail

FLAGS = ("show", "plan", "dry_run", "detach")
CANCELLED = 130
"""Exit status after a cancellation."""


@dataclass(frozen=True)
class SubmitRequest:
    """The command line."""

    recipe: Annotated[str | None, Key("NAME", "a file in recipes/, without .yaml, or a path to one")] = None
    overrides: Annotated[
        list[str],
        Key("key=value", "any key of the recipe, such as grpo.max_num_steps=20 cluster.executor=local", others=True),
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
            "print type, range, default and meaning of a recipe's key or section, or cause and cure of an error's code",
            read=str,
        ),
    ] = None

    def problems(self) -> Iterator[Problem]:
        """Yield keys that are missing or contradict each other."""
        flags = [flag for flag in FLAGS if getattr(self, flag)]
        if len(flags) > 1:
            yield Problem(flags[1], "contradiction", f"got {' and '.join(flags)}; expected one of them")
        if self.recipe is None and self.follow is None and self.help is None:
            yield Problem("recipe", "missing-value", "got no recipe; expected recipe=NAME, or follow=RUN_DIR")
        if self.follow and (self.recipe or self.overrides or self.plan_from or flags):
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
        print(troubleshooting.explained(request.help) if request.help in CODES else reference.explained(request.help))
        return 0
    handle_signals()
    if request.follow:
        return attach(request.follow)
    assert request.recipe is not None, "SubmitRequest.problems lets no such request pass"
    if request.show:
        return show(request.recipe, request.overrides)
    if request.plan or request.dry_run:
        with trusting(Trust.EVERYTHING if request.trust else None):
            found = examine(request.recipe, request.overrides, dry=True, plan_from=request.plan_from)
        return show_plan(found) if request.plan else dry_run(found)
    return submit(prepare(request.recipe, request.overrides, request.plan_from), request.detach)


# ---- show, plan, dry run ------------------------------------------------------------------------------------------------


def show(name: str, overrides: list[str]) -> int:
    """Print the resolved recipe with origins, then raise RecipeError if it has problems."""
    loaded = recipes.inspect(name, overrides)
    print(secrets.redacted(config.format_with_origins(loaded)), end="")
    run_dir = Path(loaded.recipe.run_dir).absolute()
    for line in run_changes.lines(RunFolder.at(run_dir)) if (run_dir / steer_files.ANSWERS).exists() else ():
        print(f"# changed while the run in {run_dir} went on, and kept when it continues: {line}")
    if not loaded.problems:
        print("\n".join(f"# {on_one_line(line)}" for line in model_readings.described(loaded.recipe)))
    refuse(loaded.problems)
    return 0


def show_plan(found: Examination) -> int:
    """Print the plan, the first prompt, and the files, folders and services that a run lacks here.

    Raises RecipeError for the recipe's own problems, and for a chat template that cannot be used.
    """
    requested = found.prepared[-1] if found.prepared else None
    if requested is None or requested.plan is None:
        raise RecipeError(*dict.fromkeys(found.problems), *(requested.no_plan if requested else ()))
    _print_notes(requested)
    if isinstance(requested.plan, EvaluationPlan):
        print(evaluation.text(requested.plan))
    else:
        print(report.text(requested.plan, modes.compare(requested.plan)))
    if prompt := first_prompt.text(requested.recipe):
        print(f"\n{prompt}")
    unusable = [problem for problem in found.site_problems if problem.key.endswith(".tokenizer.chat_template")]
    if unmet := [problem for problem in dict.fromkeys(found.site_problems) if problem not in unusable]:
        console.print_unmet("before it can run here", unmet)
    refuse([*found.problems, *unusable])
    return 0


def dry_run(found: Examination) -> int:
    """Print what would be submitted, even if problems prevent a run here. Raises RecipeError with these problems."""
    if found.prepared:
        _print_submission(found.prepared, found.all_problems)
    refuse(found.all_problems)
    return 0


def _print_notes(prepared: Prepared) -> None:
    for note in prepared.notes:
        console.print_field("note", note, f"# {note}")


def _print_submission(prepared: list[Prepared], problems: list[Problem]) -> None:
    for needed in prepared[:-1]:
        print(f"# first, because it is needed: {needed.recipe.name}, in {needed.recipe.run_dir}")
    requested = prepared[-1]
    recipe, choice = requested.recipe, requested.choice
    run_dir = Path(recipe.run_dir).absolute()
    name = requested.executor.name
    if name == "allocation":
        print(allocation.script(run_dir, recipe.cluster, components(recipe)))
    elif name == "slurm":
        print(slurm.batch_script(run_dir, recipe.name, recipe.cluster, components(recipe)))
    else:
        with collected([]):  # too few GPUs, which `problems` reports
            print(local.commands(run_dir, components(recipe)))
    if problems:
        print("# cannot be submitted yet: the problems are below")
    if config.trains(recipe):
        print(f"# {choice or 'the train backend depends on the size of the model, which is not here'}")
    if choice and choice.recomputation:
        print(f"# recomputation: {choice.recomputation}")
    if choice and choice.warning:
        print(f"# warning: {choice.warning}")
    for note in requested.notes:
        print(f"# {note}")
    print(f"# the recipe\n{config.to_yaml(recipe)}", end="", flush=True)


# ---- submit -------------------------------------------------------------------------------------------------------------


def submit(prepared: list[Prepared], detach: bool) -> int:
    """Run the recipes one after another, and return the exit status. detach: return once they are submitted."""
    main_recipe = prepared[-1].recipe
    run_dir = Path(main_recipe.run_dir).absolute()
    if complete := run_control.completed(main_recipe, run_dir):
        console.print_field("done", complete, complete, "green")
        return 0
    run_setup.refuse_live(run_dir)
    if detach:
        return _submit_detached(prepared)
    for each in prepared:
        recipe, folder = each.recipe, Path(each.recipe.run_dir).absolute()
        metrics = _metrics_so_far(folder)
        job = run_setup.live_job(folder) if recipe is not main_recipe else None  # a needed run may already be active
        if status := follow_to_end(folder, job or start(each), run_control.max_steps(recipe), metrics):
            return status
    return 0


def _submit_detached(prepared: list[Prepared]) -> int:
    if len(prepared) > 1 and (name := prepared[-1].executor.name) != "slurm":
        names = ", ".join(each.recipe.name for each in prepared[:-1])
        why = f"the {name} executor cannot wait for the runs that are needed first ({names}). Try to run them, or detach=false"
        raise RecipeError(Problem("detach", "unsupported", why))
    job_ids: dict[str, str] = {}
    for each in prepared:
        recipe, run_dir = each.recipe, Path(each.recipe.run_dir).absolute()
        after = tuple(job_ids[need] for need in map(config.name_of, recipe.needs) if need in job_ids)
        job = run_setup.live_job(run_dir) or start(each, after)
        job_ids[folder_name(recipe)] = job.job_id
        print(f"follow it: python {Path(__file__).resolve()} follow={run_dir}", flush=True)  # never wrapped, to be copied
    return 0


def start(prepared: Prepared, after: tuple[str, ...] = (), behind: tuple[str, ...] = ()) -> RunJob:
    """Submit one recipe, and return its job.

    after: Slurm jobs that must succeed before it starts. behind: Slurm jobs that must end before it starts. Raises RecipeError
    if the run folder is in use.
    """
    recipe, choice = prepared.recipe, prepared.choice
    run_dir = Path(recipe.run_dir).absolute()
    job = run_control.start(prepared, [sys.executable, *sys.argv], print, after, behind)
    _print_notes(prepared)
    if isinstance(prepared.plan, EvaluationPlan):
        print(f"{evaluation.text(prepared.plan)}\n")
    elif prepared.plan:
        print(f"{report.text(prepared.plan)}\n")
    console.print_field(recipe.name, f"{job.name()}, in {run_dir}", f"{recipe.name}: {job.name()}, in {run_dir}")
    if choice:
        console.print_field("backend", str(choice), f"{recipe.name}: {choice}")
    if choice and (line := choice.recomputation):
        console.print_field("recomputation", line, f"{recipe.name}: {line}")
    if choice and choice.warning:
        print(f"warning: {choice.warning}", file=sys.stderr)
    if line := run_control.start_evaluations(recipe):
        console.print_field("evaluation", line, f"{recipe.name}: {line}")
    return job


def attach(run_dir: Path) -> int:
    """Follow a submitted run to its end, and return the exit status. Raises RecipeError."""
    if not run_dir.is_dir():
        raise RecipeError(Problem("follow", "file-not-found", f"{run_dir} is not a run folder: there is no such folder"))
    record = read_record(run_dir)
    if record is None:
        raise RecipeError(Problem("follow", "not-a-run", f"{run_dir} is not a run folder: it has no job.json"))
    if record.executor == "slurm" and (why := slurm_client.unreachable(RESTART_S)):
        status = f"python {Path(__file__).with_name('status.py')} {run_dir}"
        message = f"the state of Slurm job {record.job_id} is unknown: {why}. Try `{status}`, which reads the run folder"
        raise RecipeError(Problem("follow", "unreachable", message))
    return follow_to_end(
        run_dir, record.attach(run_dir), run_control.max_steps(config.read(run_dir / "recipe.yaml")), _metrics_so_far(run_dir)
    )


def _metrics_so_far(run_dir: Path) -> MetricsTail:
    from launch.follow import MetricsTail  # imported late, because it imports rich

    metrics = MetricsTail(run_dir)
    metrics.new_lines()
    return metrics


# ---- follow and cancel --------------------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. It cancels the run without a question."""


def handle_signals() -> None:
    """Let SIGTERM cancel the followed job, as Ctrl-C does, without a question."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    if allocation.batch_job() is None:  # in a batch job, the script of the steps handles it
        raise Terminated


def follow_to_end(run_dir: Path, job: RunJob, steps: int | None, metrics: MetricsTail) -> int:
    """Follow a job to its end, and return the exit status. Ctrl-C cancels it; on a terminal, after a question."""
    from launch.evaluations.progress import evaluates
    from launch.follow import Follower

    follower = Follower(run_dir, job, steps, metrics)
    while True:
        try:
            return 0 if follower.follow() else 1
        except KeyboardInterrupt as interrupt:
            if isinstance(interrupt, Terminated) or not sys.stdin.isatty() or _wants_to_cancel():
                return cancel(run_dir, job, evaluates(run_dir))


def _wants_to_cancel() -> bool:
    try:
        input("\ncancel the run? press Ctrl-C again to cancel it, Enter to go on ")
    except KeyboardInterrupt:
        return True
    except EOFError:
        return False
    return False


def cancel(run_dir: Path, job: RunJob, evaluates: bool = False) -> int:
    """Cancel a job, wait for its end for a while, and return the exit status 130.

    evaluates: the job is an evaluation, which has answers and no checkpoints
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a second signal does not interrupt the cancellation
    print(f"\ncancelling {job.name()} ...", flush=True)
    status = run_control.cancel(run_dir, job)
    how = "with the answers that are missing" if evaluates else "from the last checkpoint"
    print(f"{job.name()}: {status}; the same command continues {how}" if status.ended else f"{job.name()} is still {status}")
    return CANCELLED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
