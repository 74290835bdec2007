"""Feed experiment trackers from a run folder, in one process beside rank 0 or after the run.

    supervision.py       on rank 0: a thread that starts the process, and starts it again if it ends
    tracking_process.py      the process: a thread for each tracker
    feed.py         one tracker: which steps and files it lacks, sent to it
    position.py     tracking/NAME.json: what a tracker has; survives any kill
    step_lines.py   the lines of metrics.jsonl as they appear, also after a resumed run has cut it
    attachments.py  samples, recipe, report, evaluations and the exported model of a run folder

The run writes its files as it would without trackers. The process only reads them, so nothing that happens to it, or to a
tracker, can delay a step.
"""
