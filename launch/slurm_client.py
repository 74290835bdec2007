"""Asks Slurm through its commands, each within a time limit: whether a controller answers here, and which cluster that is."""

from __future__ import annotations

import os
import re
import subprocess
import time

ANSWER_S = 30.0
"""How long Slurm may take to answer. Its own commands give up after a minute or more."""
PING_S = 5.0
"""How long a controller may take to answer a ping. A busy one answers too: a ping waits for none of its locks."""
REMEMBERED_S = 30.0
"""How long it is remembered that no controller answers: a command asks about many runs, and each would wait."""

NOT_INSTALLED = "Slurm is not installed here (there is no scontrol)"
NOT_CONFIGURED = "Slurm's commands are here, but no cluster is configured (`scontrol ping`: {})"
DOWN = "Slurm's controller does not answer (`scontrol ping`: {})"
LATE = "Slurm's controller does not answer (`scontrol ping`: nothing within {:g} s)"

Place = tuple[str | None, str | None]

_unreachable: dict[Place, tuple[float, str | None]] = {}
_clusters: dict[Place, str] = {}


def _here() -> Place:
    """What decides which cluster is asked."""
    return os.environ.get("PATH"), os.environ.get("SLURM_CONF")


def ask(*command: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """timeout_s: ANSWER_S if None.

    Raises FileNotFoundError where there is no such command, and subprocess.TimeoutExpired: a slurmctld that hangs must not hang
    whoever asks.
    """
    timeout = ANSWER_S if timeout_s is None else timeout_s
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # a user's own may be any
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, env=environment)


def unreachable(patience_s: float = 0.0) -> str | None:
    """Why no Slurm controller answers here; None if one does. Takes PING_S + patience_s at most.

    patience_s: how long to ask again, for a controller that is being restarted.
    """
    here, deadline = _here(), time.monotonic() + patience_s
    if here in _unreachable:
        asked_at, why = _unreachable[here]
        if why is None or (not patience_s and time.monotonic() - asked_at < REMEMBERED_S):
            return why
    why, passing = _ping()
    while passing and time.monotonic() < deadline:
        time.sleep(0.5)
        why, passing = _ping()
    _unreachable[here] = time.monotonic(), why
    return why


def _ping() -> tuple[str | None, bool]:
    """(why no controller answers, whether that may pass)."""
    try:
        answer = ask("scontrol", "ping", timeout_s=PING_S)
    except FileNotFoundError:
        return NOT_INSTALLED, False
    except subprocess.TimeoutExpired:
        return LATE.format(PING_S), True
    if re.search(r"^Slurmctld\(.*\bis UP\b", answer.stdout, re.MULTILINE):
        return None, False
    errors = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in answer.stderr.splitlines()]
    if states := re.findall(r"^Slurmctld\(.*", answer.stdout, re.MULTILINE):
        return DOWN.format("; ".join([*states, *errors[-1:]])), True
    return NOT_CONFIGURED.format(errors[-1] if errors else f"status {answer.returncode}"), False


def cluster_name(timeout_s: float | None = None) -> str | None:
    """Of the cluster that is asked here; None if Slurm does not answer, or there is none. timeout_s: as for `ask`."""
    here = _here()
    if here not in _clusters:  # asked once: whoever lists many runs wants to know it of each
        try:
            answer = ask("scontrol", "show", "config", timeout_s=timeout_s)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        if (found := re.search(r"^ClusterName\s*=\s*(\S+)", answer.stdout, re.MULTILINE)) is None:
            return None
        _clusters[here] = found[1]
    return _clusters[here]
