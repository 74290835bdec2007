"""Write a trace of what every rank did with `python launch/timeline.py run=RUN_DIR [step=N] [steps=A-B] [gz=true]`.

Writes a trace for https://ui.perfetto.dev or chrome://tracing, and an SVG of one step.
Exit status: 0; 2 if the run, the step or a timeline of it does not exist.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.drawing import merged_trace, step_picture
from launch.drawing.rank_traces import attempt_traces, idle_share, trace_with_step
from launch.runs.run_folder import RunFolder
from launch.terminal import command_line
from launch.terminal.command_line import Key
from launch.terminal.units import is_count, plural, size
from pipeline.config import Problem, RecipeError

ALL_TIME = (float("-inf"), float("inf"))
PIXELS = 1600
"""Approximate width of a picture's time axis."""


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not is_count(first) or (dash and not is_count(last)) or (dash and int(last) < int(first)):
        raise ValueError("steps such as 10-12")
    return int(first), int(last if dash else first)


@dataclass(frozen=True)
class TimelineRequest:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "a run folder, which a job may be writing into", bare=True)]
    step: Annotated[int | None, Key("N", "the step to draw; default: the last completed step")] = None
    steps: Annotated[
        tuple[int, int] | None,
        Key("A-B", "trace only these steps, since a browser may not load all ranks and steps", read=_steps),
    ] = None
    attempts: Annotated[Literal["all", "latest"], Key("all", "trace all attempts; default: the latest one")] = "latest"
    gz: Annotated[bool, Key("true", "compress the trace; Perfetto reads it compressed")] = False
    out: Annotated[
        Path | None, Key("FILE", "the trace; default: RUN_DIR/timeline.json or timeline.json.gz; the picture goes beside it")
    ] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that contradicts another one."""
        if self.steps and self.attempts == "all":
            yield Problem(
                "steps", "contradiction", "got attempts=all too; expected one of them, since `steps` belong to one attempt"
            )

    @property
    def trace(self) -> Path:
        """Path of the trace."""
        return self.out or self.run / ("timeline.json.gz" if self.gz else "timeline.json")

    def picture(self, step: str) -> Path:
        """Return the path of a step's picture, beside the trace."""
        name = self.trace.name.removesuffix(".gz").removesuffix(".json")
        return self.trace.with_name(f"{name}_{step}.svg")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, TimelineRequest, execute, arguments)


def execute(request: TimelineRequest) -> int:
    """Write the trace and the picture, and print their paths. Raises RecipeError."""
    run = RunFolder.at(request.run)
    recorded = attempt_traces(run.attempts)
    if not recorded:
        why = "it has not started, or an older version wrote it"
        raise RecipeError(Problem("run", "no-records", f"{run.folder} has no timeline: {why}"))
    number = request.step if request.step is not None or request.steps is None else request.steps[1]
    drawn = trace_with_step(recorded, number)
    step = drawn.step(number, PIXELS)
    chosen, window = recorded if request.attempts == "all" else recorded[-1:], ALL_TIME
    if request.steps:
        chosen = [trace_with_step(recorded, request.steps[0])]
        window = chosen[0].window(*request.steps)
    events = merged_trace.write(request.trace, run, chosen, window)
    of = f"{plural(len(chosen[-1].ranks), 'rank')}{f' in {len(chosen)} attempts' if len(chosen) > 1 else ''}"
    print(f"trace: {request.trace} ({size(request.trace.stat().st_size)}, {events:,} events of {of})")
    print(f"clocks: {drawn.precision}")
    for realm, rows in step.realms().items():
        print(f"idle: {realm} {idle_share(rows):.1%} of {step.title}")
    path = request.picture("start" if step.number is None else f"step_{step.number}")
    path.write_text(step_picture.svg_file(step, f"{run.name}: {step.title}, {step.end - step.begin:.3g} s"), encoding="utf-8")
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
