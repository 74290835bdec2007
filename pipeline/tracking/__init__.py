"""Feed experiment trackers from a run folder, in one process beside rank 0 or after the run.

    supervision.py       on rank 0: a thread that starts the process, and starts it again if it ends
    tracking_process.py  the process, with a thread for each tracker
    feed.py              sends one tracker the steps and files that it lacks
    position.py          tracking/NAME.json: the steps and files that a tracker has; survives any kill
    attachments.py       finds samples, recipe, report, evaluations and the exported model in a run folder

The run writes its files as it would without trackers. The process only reads them, so a failure of the process or of a tracker
cannot delay a step.
"""
