"""Read the changes of a run: new values that somebody gave its keys while it was running (launch/steer.py)."""

from __future__ import annotations

from typing import Any

from launch.runs.run_folder import RunFolder
from pipeline.config import live_keys
from pipeline.config.formatting import on_one_line
from pipeline.config.live_keys import Change
from pipeline.steering import steer_files
from pipeline.steering.steer_files import KeyChange


def rows(run: RunFolder) -> list[dict[str, Any]]:
    """Return each change of a key of a run, oldest first, as plain values."""
    return [
        {
            "step": answer.step,
            "key": change.key,
            "old": change.old,
            "new": change.new,
            "user": answer.user,
            "host": answer.host,
            "time": answer.time,
        }
        for answer in run.answers
        for change in answer.changes
    ]


def pending(run: RunFolder) -> list[dict[str, Any]]:
    """Return the requests that the run has not answered, oldest first."""
    requests = ((number, _values(run, number)) for number in steer_files.find_unanswered(run.folder, run.answers))
    return [{"request": number, "values": values} for number, values in requests if values]


def text(change: KeyChange | Change) -> str:
    """Return a text about a change, such as `grpo.max_num_steps: 100 -> 50`."""
    return f"{change.key}: {on_one_line(change.old)} -> {on_one_line(change.new)}"


def lines(run: RunFolder) -> list[str]:
    """Return a line for each change of a run, oldest first."""
    return [
        f"after step {answer.step}: {text(change)} (by {answer.user} on {answer.host})"
        for answer in run.answers
        for change in answer.changes
    ]


def _values(run: RunFolder, number: int) -> dict[str, Any]:
    """Return live key -> the requested value; {} if the request cannot be read."""
    try:
        values = steer_files.read_request(run.folder, number).values
    except (ValueError, OSError):
        return {}
    return {key: value for key, value in values.items() if live_keys.live_key(key) == key}
