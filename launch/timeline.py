"""Show what every rank did when: python launch/timeline.py run=RUN_DIR [step=N] [steps=A-B] [gz=true] ...

Writes a trace for https://ui.perfetto.dev or chrome://tracing, and an SVG of one step, which browsers show. Ends with status 0;
with 2 if there is no such run or step, or no timeline.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch import command_line
from launch.command_line import Key
from launch.run_folder import RunFolder
from launch.timelines import picture, trace
from launch.timelines.reading import idle_share, recording_with, recordings
from launch.units import is_count, plural, size
from pipeline.config import Problem, RecipeError

EVER = (float("-inf"), float("inf"))
PIXELS = 1600
"""Width of a picture's time axis, about."""


def _steps(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not is_count(first) or (dash and not is_count(last)) or (dash and int(last) < int(first)):
        raise ValueError("steps such as 10-12")
    return int(first), int(last if dash else first)


@dataclass(frozen=True)
class TimelineRequest:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "a run folder, which a job may be writing into", bare=True)]
    step: Annotated[int | None, Key("N", "the step that is drawn; default: the last one that ended")] = None
    steps: Annotated[
        tuple[int, int] | None,
        Key("A-B", "trace these steps alone: more ranks and steps may be too much for a browser", read=_steps),
    ] = None
    attempts: Annotated[Literal["all", "latest"], Key("all", "trace all starts of the ranks; default: the latest one")] = (
        "latest"
    )
    gz: Annotated[bool, Key("true", "write the trace compressed, which Perfetto reads as it is")] = False
    out: Annotated[
        Path | None, Key("FILE", "the trace; default: RUN_DIR/timeline.json or timeline.json.gz; the picture goes beside it")
    ] = None

    def problems(self) -> Iterator[Problem]:
        if self.steps and self.attempts == "all":
            yield Problem("steps", "contradiction", "got attempts=all too; expected one: the steps of one attempt are traced")

    @property
    def trace(self) -> Path:
        return self.out or self.run / ("timeline.json.gz" if self.gz else "timeline.json")

    def picture(self, step: str) -> Path:
        name = self.trace.name.removesuffix(".gz").removesuffix(".json")
        return self.trace.with_name(f"{name}_{step}.svg")


def main(arguments: list[str]) -> int:
    return command_line.run(__doc__, TimelineRequest, execute, arguments)


def execute(request: TimelineRequest) -> int:
    """Raises RecipeError."""
    run = RunFolder.at(request.run)
    recorded = recordings(run.attempts)
    if not recorded:
        switched = run.value("logger.timeline_enabled", True)
        why = "it has not begun, or is an older version's" if switched else "logger.timeline_enabled is false in its recipe"
        raise RecipeError(Problem("run", "no-records", f"{run.folder} has no timeline: {why}"))
    number = request.step if request.step is not None or request.steps is None else request.steps[1]
    drawn = recording_with(recorded, number)
    step = drawn.step(number, PIXELS)
    chosen, window = recorded if request.attempts == "all" else recorded[-1:], EVER
    if request.steps:
        chosen = [recording_with(recorded, request.steps[0])]
        window = chosen[0].window(*request.steps)
    events = trace.write(request.trace, run, chosen, window)
    of = f"{plural(len(chosen[-1].ranks), 'rank')}{f' in {len(chosen)} attempts' if len(chosen) > 1 else ''}"
    print(f"trace: {request.trace} ({size(request.trace.stat().st_size)}, {events:,} events of {of})")
    print(f"clocks: {drawn.precision}")
    for realm, rows in step.realms().items():
        print(f"idle: {realm} {idle_share(rows):.1%} of {step.title}")
    path = request.picture("start" if step.number is None else f"step_{step.number}")
    path.write_text(picture.alone(step, f"{run.name}: {step.title}, {step.end - step.begin:.3g} s"), encoding="utf-8")
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
