"""Send a run to experiment trackers: `python launch/track.py run=RUN_DIR [trackers=wandb,mlflow,trackio] [logger.KEY=VALUE]`.

A run with `logger.wandb_enabled`, `mlflow_enabled` or `trackio_enabled` does this by itself while it trains. This command sends
the rest, such as evaluations and the report, or a whole run that has no tracker in its recipe. It never sends a step twice. It
runs on a login node and needs the trackers' packages, but not torch.

Exit status: 0 if the trackers have everything; 1 if a tracker failed; 2 if the command line or the run has an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.runs.run_folder import read_recipe
from launch.terminal import command_line
from launch.terminal.command_line import Key
from pipeline import config
from pipeline.config import Problem, Recipe, RecipeError
from pipeline.files import rank_log
from pipeline.trackers import TRACKERS
from pipeline.tracking.feed import Feed, brief, enabled_trackers
from pipeline.tracking.position import FOLDER
from pipeline.tracking.tracking_process import alone


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(TRACKERS):
        raise ValueError(f"one or more of {', '.join(TRACKERS)}, separated by commas")
    return names


@dataclass(frozen=True)
class TrackRequest:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "the run's folder; the run may still be active", bare=True)]
    trackers: Annotated[
        list[str] | None, Key("NAMES", "wandb, mlflow, trackio, separated by commas; default: the recipe's", read=_names)
    ] = None
    overrides: Annotated[
        list[str],
        Key("logger.KEY=VALUE", "keys of the recipe's section logger, such as logger.wandb.mode=offline", others=True),
    ] = field(default_factory=list)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that is not in the section `logger`."""
        for override in self.overrides:
            if not override.startswith("logger."):
                key = override.partition("=")[0]
                yield Problem(key, "unknown-key", "is neither a key of this command nor of the section logger")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, TrackRequest, execute, arguments)


def execute(request: TrackRequest) -> int:
    """Send the run, print what each tracker has, and return 1 if a tracker failed, else 0. Raises RecipeError."""
    rank_log.log_to_stderr()
    recipe = _changed(read_recipe(request.run), request.overrides)
    names = request.trackers or enabled_trackers(recipe)
    if not names:
        message = f"{request.run / 'recipe.yaml'} has no tracker; expected trackers=NAMES, of {', '.join(TRACKERS)}"
        raise RecipeError(Problem("trackers", "missing-value", message))
    with alone(request.run / FOLDER) as first:
        if not first:
            message = f"another process sends {request.run} to its trackers now. Try again when it has ended"
            raise RecipeError(Problem("run", "in-use", message))
        return max([_send(name, recipe, request.run) for name in names])


def _changed(recipe: Recipe, overrides: list[str]) -> Recipe:
    pairs = [override.partition("=")[::2] for override in overrides]
    return config.changed(recipe, {key: yaml.safe_load(value) for key, value in pairs}) if pairs else recipe


def _send(name: str, recipe: Recipe, run_dir: Path) -> int:
    """Send a run to one tracker, print the outcome, and return the exit status."""
    feed = Feed(name, recipe, run_dir)
    try:
        feed.look(ended=True)
        feed.close((run_dir / "done.json").exists())
    except ModuleNotFoundError as error:
        if error.name != TRACKERS[name].package:
            raise
        what = f"the package {error.name} is not installed. Try pip install '.[{error.name}]'"
        raise RecipeError(Problem("trackers", "not-installed", what)) from None
    except Exception as error:  # of a library, a server or the network, whatever its type
        print(f"{feed.title}: {brief(error)}; it has {_what(feed)}", file=sys.stderr)
        return 1
    print(f"{feed.title}: {_what(feed)}")
    return 0


def _what(feed: Feed) -> str:
    return f"all up to step {feed.last}" if feed.last >= 0 else "no step"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
