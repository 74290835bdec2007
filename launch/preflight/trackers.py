"""Check that the libraries of a recipe's experiment trackers are installed where rank 0 runs, if that is this Python."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from launch.executors import containers
from pipeline.config import Problem, Recipe
from pipeline.config.schema import TRACKERS
from pipeline.seams import extras


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each tracker whose library is missing.

    If rank 0 runs in another Python, such as a container's, the process of the trackers reports a missing library in the job.
    `launch/track.py` can then send the run to the tracker.
    """
    if containers.has_another_python(recipe.cluster.train):
        return
    tracking = extras.find("tracking")
    for name in tracking.enabled_trackers(recipe) if tracking else ():
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            message = f"got true, but {package} is not installed. Try pip install 'hetstep[{package}]', or false"
            yield Problem(f"logger.{name}_enabled", "not-installed", message)
