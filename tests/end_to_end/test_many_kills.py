"""A hundred kills at random moments, of random ranks and now and then of the controller, over one run on this machine.

The controller starts the ranks again by itself as long as there was progress; else, and if it was killed itself, the run is
submitted anew, as its user would. After each kill nothing of that attempt is left alive, and the next one goes on from the
newest complete checkpoint there was. In the end the metrics are those of a run that was never killed, to the last bit.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from launch.runs.attempts import AttemptFolder, all_attempts
from tests.end_to_end.runs import LOCAL, Run, launch, printed, submit

KILLS = 100
STARTING = 0.3  # this share of the kills comes before an attempt's first step
STEPPING_S = 6.0  # the others at most so long after it
CONTROLLER = "controller"
VICTIMS = (0, 1, 2, 3) * 3 + (CONTROLLER,)
KEYS = (
    *LOCAL,
    "checkpointing.save_period=3",
    "checkpointing.keep_top_k=2",
    "cluster.requeue.max_restarts=1000",
    "cluster.timeouts.silence=300",  # nothing but the kills is to end an attempt
)
ENDLESS = "grpo.max_num_steps=1000000"
WAIT_S = 600


class Killed:
    """The run, and its state from outside: its files and the machine's processes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.submission: subprocess.Popen | None = None
        self.submissions = 0

    def submit(self) -> None:
        self.submission = launch(self.folder, *KEYS, ENDLESS)
        self.submissions += 1

    def next_attempt(self, before: set[str]) -> AttemptFolder:
        """Return a start of all ranks that is not in `before`; submit the run again if needed."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if new := [attempt for attempt in all_attempts(self.folder) if attempt.name not in before]:
                if len(self.ranks(new[-1].name)) == 4:
                    return new[-1]
                if self.submission.poll() is not None:
                    before = before | {new[-1].name}
            if self.submission.poll() is not None:
                assert self.submission.returncode == 1, printed(self.folder)
                assert self.processes() == {}, "orphans of an ended job"
                self.submit()
            time.sleep(0.2)
        raise AssertionError(f"no new start of the ranks within {WAIT_S} s")

    def wait_for_a_step(self, attempt: AttemptFolder) -> float:
        """Return seconds from its start to its first step."""
        deadline = time.monotonic() + WAIT_S
        while "\nstep " not in attempt.logs[0].read_text():
            assert time.monotonic() < deadline and self.ranks(attempt.name), attempt.logs[0].read_text()
            time.sleep(0.2)
        return time.time() - attempt.started

    def controller(self) -> int:
        return int(json.loads((self.folder / "job.json").read_text())["job_id"])

    def processes(self) -> dict[int, tuple[str, str]]:
        """Return process id -> (attempt, rank) of all that write to a rank's log: the rank and its children."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                logs = {Path(os.readlink(path / "fd" / number)) for number in "12"}
                zombie = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            for log in logs:
                if not zombie and log.parent.parent == self.folder / "attempts":
                    found[int(path.name)] = log.parent.name, log.stem.removeprefix("rank")
        return found

    def ranks(self, attempt: str) -> dict[int, int]:
        """Return rank -> process id of the ranks themselves: their groups' leaders."""
        found = self.processes().items()
        return {int(rank): pid for pid, (name, rank) in found if name == attempt and _leads_group(pid)}

    def gone(self, attempt: str) -> bool:
        return attempt not in {name for name, _ in self.processes().values()}

    def complete(self) -> list[int]:
        """Return the steps of checkpoints with every file in its full size."""
        steps = []
        for path in sorted((self.folder / "checkpoints").glob("step_*/complete.json")):
            try:
                record = json.loads(path.read_text())
                if all((path.parent / name).stat().st_size == size for name, size in record["files"].items()):
                    steps.append(record["step"])
            except FileNotFoundError:
                continue  # just removed as superfluous
        return steps

    def newest(self) -> int:
        return max(self.complete(), default=0)


def _leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def restored(attempt: AttemptFolder) -> int | None:
    """Return the step that an attempt resumed from; None if it did not get that far."""
    text = attempt.logs[0].read_text()
    if "resumed from" in text:
        return int(text.partition("resumed from")[2].partition("\n")[0].rpartition("step_")[2])
    return 0 if "step 1:" in text else None


@pytest.fixture
def run(tmp_path):
    run = Killed(tmp_path / "run")
    run.submit()
    yield run
    run.submission.terminate()  # which cancels the run, if it goes on


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_kills_at_random_moments_lose_nothing_beyond_the_last_checkpoint(run, tmp_path):
    draw = random.Random(0)
    struck: Counter = Counter()
    halves, newest = 0, [0]  # newest[k]: when kill k had taken effect
    start_s = 8.0  # what the last start took
    killed: list[str] = []
    for _ in range(KILLS):
        attempt = run.next_attempt(set(killed))
        if draw.random() < STARTING:
            time.sleep(draw.uniform(0, start_s))
        else:
            start_s = run.wait_for_a_step(attempt)
            time.sleep(draw.uniform(0, STEPPING_S))
        victim, before = draw.choice(VICTIMS), run.newest()
        os.kill(run.controller() if victim == CONTROLLER else run.ranks(attempt.name)[victim], signal.SIGKILL)
        struck[victim] += 1
        killed.append(attempt.name)
        deadline = time.monotonic() + WAIT_S
        while not run.gone(attempt.name):
            assert time.monotonic() < deadline, f"left alive: {run.processes()}"
            time.sleep(0.1)
        newest.append(run.newest())
        halves += any((run.folder / "checkpoints").glob(f".step_*.{attempt.name}.partial"))
        assert newest[-1] >= before >= newest[-2], "a complete checkpoint was lost"
        print(f"kill {len(killed)}: {victim}, checkpoint {newest[-1]}, {halves} half ones so far", flush=True)
    run.next_attempt(set(killed))
    run.submission.terminate()
    assert run.submission.wait(WAIT_S) == 130

    attempts = {attempt.name: attempt for attempt in all_attempts(run.folder)}
    went_on = {name: restored(attempts[name]) for name in killed}
    for k, name in enumerate(killed):  # the state before it is what kill k - 1 left
        assert went_on[name] in (None, newest[k]), f"{name} went on from {went_on[name]}, not {newest[k]}"
    assert len(set(killed)) == KILLS and len(attempts) == KILLS + 1  # none ended in any other way
    by_itself = sum((attempts[name].verdict or "").startswith("requeue") for name in killed)
    resumed = sum(bool(step) for step in went_on.values())
    print(
        f"{KILLS} kills ({dict(struck)}): {by_itself} restarts by itself, {run.submissions} submissions, {resumed} resumed,"
        f" {halves} left half a checkpoint, {newest[-1]} steps kept"
    )
    assert resumed > KILLS // 5 and by_itself > KILLS // 5 and run.submissions > 1 and halves > 0

    steps = f"grpo.max_num_steps={newest[-1] + 10}"
    last = submit(run.folder, *KEYS, steps, timeout=3600)
    assert last.status == 0, last.output
    assert run.processes() == {}
    whole = submit(tmp_path / "whole", *KEYS, steps, timeout=3600)
    assert whole.status == 0, whole.output
    assert Run(run.folder, 0, "", 0).metrics() == whole.metrics()
