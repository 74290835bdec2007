"""Registry of experiment trackers. Each tracker is one file in this folder, with its section of the recipe and its class.

Start in `tracker.py`, which documents the interface. Importing this package imports no tracker's library. `pipeline/tracking/`
reads the run folder and feeds the trackers.
"""

from pipeline.seams.registered_class import load
from pipeline.trackers.tracker import Tracker

CLASSES = {  # by the name of the file, which is also the section under `logger`
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}
TRACKERS: dict[str, type[Tracker]] = {name: load(__name__, name, kind) for name, kind in CLASSES.items()}
