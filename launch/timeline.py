"""What every rank did when: python launch/timeline.py run=RUN_DIR [step=N] [steps=A-B] [gz=true] ...

    run=RUN_DIR      a run folder, which a job may be writing into; `run=` may be left out
    step=N           the step that is drawn (default: the last one that ended)
    steps=A-B        the trace of these steps alone: of a long run of many ranks more would be too much for a browser
    attempts=all     the trace of all starts of the ranks, one after another (default: of the latest one)
    gz=true          write the trace compressed, which Perfetto reads as it is
    out=FILE         the trace (default: RUN_DIR/timeline.json or timeline.json.gz); the picture goes beside it

Writes a trace for https://ui.perfetto.dev or chrome://tracing, and a PNG of one step. Ends with status 0; with 1 if the trace
was written but the picture could not be drawn (it needs matplotlib); with 2 if there is no such run or step, or no timeline.
"""

from __future__ import annotations

import gzip
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch import starting
from launch.past_run import NoRun, PastRun
from launch.timelines import reading, trace
from launch.timelines.reading import Rank
from launch.units import is_count, plural, size

KEYS = ("run", "step", "steps", "attempts", "gz", "out")
EVER = (float("-inf"), float("inf"))
PIXELS = 1600
"""Of a picture's time axis, about."""


@dataclass(frozen=True)
class Request:
    """The command line."""

    run: Path
    step: int | None
    steps: tuple[int, int] | None
    all_attempts: bool
    gz: bool
    out: Path | None

    @property
    def trace(self) -> Path:
        return self.out or self.run / ("timeline.json.gz" if self.gz else "timeline.json")

    def picture(self, step: str) -> Path:
        name = self.trace.name.removesuffix(".gz").removesuffix(".json")
        return self.trace.with_name(f"{name}_{step}.png")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(__doc__.strip())
        return 0 if arguments else 2
    try:
        request = parse(arguments)
        run = PastRun.at(request.run)
        attempts = _recorded(run)
        chosen = attempts if request.all_attempts else attempts[-1:]
        number = request.step if request.step is not None or request.steps is None else request.steps[1]
        drawn = reading.attempt_with(attempts, number)
        step = reading.step_of(drawn, number, PIXELS)
        window = EVER
        if request.steps:
            chosen = [reading.attempt_with(attempts, request.steps[0])]
            window = reading.window(chosen[0], *request.steps)
        events = write(request.trace, run, chosen, window)
        print(f"trace: {request.trace} ({size(request.trace.stat().st_size)}, {events:,} events of {_of(chosen)})")
        print(f"clocks: {reading.precision(drawn)}")
        for realm, rows in step.realms().items():
            print(f"idle: {realm} {reading.idle_share(rows):.1%} of {step.title}")
        return _draw(run, step, request.picture("start" if step.number is None else f"step_{step.number}"))
    except NoRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def parse(arguments: list[str]) -> Request:
    """Raises NoRun."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or (key not in KEYS and Path(argument).exists()):
            key, value = "run", argument
        if key not in KEYS:
            raise NoRun(f"'{argument}' on the command line is none of {'=, '.join(KEYS)}=")
        if key in given:
            raise NoRun(f"{key}= is given twice on the command line")
        given[key] = value
    if not given.get("run"):
        raise NoRun("the command line needs run=RUN_DIR")
    for key, values in {"attempts": ("all", "latest"), "gz": ("true", "false")}.items():
        if given.get(key, values[1]) not in values:
            raise NoRun(f"{key}: '{given[key]}' is neither {values[0]} nor {values[1]}")
    if "step" in given and not is_count(given["step"]):
        raise NoRun(f"step: '{given['step']}' is no step's number")
    if "steps" in given and "attempts" in given:
        raise NoRun("steps= and attempts= cannot both be given: the steps of one attempt are traced")
    out = Path(given["out"]) if given.get("out") else None
    gz = given.get("gz") == "true" or (out is not None and out.suffix == ".gz")
    step = int(given["step"]) if "step" in given else None
    return Request(Path(given["run"]).absolute(), step, _steps(given.get("steps")), given.get("attempts") == "all", gz, out)


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not is_count(first) or (dash and not is_count(last)) or (dash and int(last) < int(first)):
        raise NoRun(f"steps: '{text}' is not like 10-12")
    return int(first), int(last if dash else first)


def _recorded(run: PastRun) -> list[list[Rank]]:
    """Of each attempt that has a timeline, oldest first. Raises NoRun if none has."""
    found = [of for attempt in run.attempts if (of := reading.ranks(attempt))]
    if not found:
        switched = run.of("logger.timeline_enabled", True)
        why = "it has not begun, or is an older version's" if switched else "logger.timeline_enabled is false in its recipe"
        raise NoRun(f"{run.folder} has no timeline: {why}")
    return found


def _of(attempts: list[list[Rank]]) -> str:
    return f"{plural(len(attempts[-1]), 'rank')}{f' in {len(attempts)} attempts' if len(attempts) > 1 else ''}"


def write(path: Path, run: PastRun, attempts: list[list[Rank]], window: tuple[float, float] = EVER) -> int:
    """The trace, of what was between two times; how many events it has."""
    with ExitStack() as stack:
        if path.suffix == ".gz":
            file: TextIO = stack.enter_context(gzip.open(path, "wt", encoding="utf-8"))
        else:
            file = stack.enter_context(open(path, "w", encoding="utf-8"))
        into = trace.Trace(file, attempts[0][0].began)
        into.begin()
        metrics = run.metrics()
        for of in attempts:
            trace.add(into, of, window)
            attempt = next(each for each in run.attempts if each.folder == of[0].path.parents[1])
            trace.add_startup(into, starting.of_attempt(attempt), window)
            within = {step: times for step, times in of[0].steps().items() if window[0] <= times[0] and times[1] <= window[1]}
            trace.add_steps(into, within, metrics)
        into.end(run=run.folder.name, clocks=reading.precision(attempts[-1]))
        return into.events


def _draw(run: PastRun, step: reading.Step, path: Path) -> int:
    try:
        from launch.timelines import picture
    except ImportError as error:
        print(f"error: no picture: {error.name} is not installed here (the job's environment has it)", file=sys.stderr)
        return 1
    picture.draw(step, f"{run.name}: {step.title}, {step.end - step.begin:.3g} s", path)
    print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
