"""The process beside rank 0: `python -m pipeline.tracking.tracking_process RUN_DIR ATTEMPT PARENT`.

It has a thread for each tracker of the recipe. When its standard input is closed, or its parent has died, the run writes no
more. Then it ends as soon as all trackers have all data, FINISH_S seconds later at the latest, because Slurm kills processes
that a step leaves. It exits with 3 if a call of a tracker takes longer than HANG_S seconds; `supervision.py` then starts it
again.

Not waited for: data that W&B's own process still sends when this process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline import config
from pipeline.files import rank_log
from pipeline.tracking.feed import Feed, brief, enabled_trackers
from pipeline.tracking.position import FOLDER
from pipeline.tracking.supervision import BEHIND

logger = logging.getLogger("pipeline.tracking.tracking_process")  # __name__ is "__main__", which the log of a rank leaves out

POLL_S = 1.0
"""Seconds between two looks at the run folder, and between two of this process at its parent."""
LONGEST_PAUSE_S = 60.0
"""Longest pause after an error. The first one is POLL_S; each is twice as long as the last."""
TELL_S = 600.0
"""Seconds until the error of a tracker that keeps failing is logged again."""
HANG_S = 180.0
FINISH_S = 30.0
HUNG = 3
"""Exit status of a process with a tracker that hangs."""


class FeedThread(threading.Thread):
    """Feeds one tracker until the run has ended and all data has arrived. Errors of the tracker are logged and retried."""

    def __init__(self, feed: Feed, stop: threading.Event, done: Path):
        """Build the thread. stop: set when the run writes no more. done: path of the file that only a complete run has."""
        super().__init__(name=feed.name, daemon=True)
        self.feed = feed
        self.since = 0.0  # monotonic seconds when the look under way began; 0: none is
        self._stop_reading = stop
        self._done = done
        self._told = -TELL_S  # monotonic seconds of the last warning
        self._failing = False

    def run(self) -> None:
        """Call `Feed.look` again and again until the run has ended."""
        pause = POLL_S
        while True:
            ended = self._stop_reading.is_set()
            self.since = time.monotonic()
            try:
                self.feed.look(ended)
                if ended:
                    self.feed.close(self._done.exists())
                    return
                self._recovered()
                pause = POLL_S
            except ModuleNotFoundError as error:
                logger.warning("%s: the module %s is missing in this Python; `launch/track.py` can send the run later",
                               self.feed.title, error.name)  # fmt: skip
                return
            except Exception as error:
                self._failed(error, pause)
                self.feed.reset()
                pause = min(2 * pause, LONGEST_PAUSE_S)
            self.since = 0.0
            self._stop_reading.wait(pause) if not ended else time.sleep(POLL_S)

    def _failed(self, error: Exception, pause: float) -> None:
        self._failing = True
        if time.monotonic() - self._told >= TELL_S:
            self._told = time.monotonic()
            logger.warning("%s accepts no steps (%s); the run goes on, and the next try is in %g s or later",
                           self.feed.title, brief(error), pause)  # fmt: skip

    def _recovered(self) -> None:
        if self._failing:
            logger.info("%s accepts steps again; it has all up to step %d", self.feed.title, self.feed.last)
            self._failing, self._told = False, -TELL_S


@contextlib.contextmanager
def alone(folder: Path, wait_s: float = 0.0, ending: threading.Event | None = None) -> Iterator[bool]:
    """Hold the lock of a run's trackers during the block. Yield whether this process has the lock.

    wait_s: seconds to wait until another process releases the lock; with `ending`, counted from when it is set. If the file
    system has no locks, this process counts as the only one.
    """
    folder.mkdir(exist_ok=True)
    until = time.monotonic() + wait_s
    with open(folder / ".lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if ending and not ending.is_set():
                    until = time.monotonic() + wait_s
                if time.monotonic() >= until:
                    yield False
                    return
                time.sleep(0.1)
                continue
            except OSError as error:
                logger.info("%s cannot be locked (%s)", folder, error)
            yield True
            return


def feed_all(run_dir: Path, stop: threading.Event, attempt: str) -> int:
    """Feed all trackers of the recipe until `stop` is set and they have all data. Return the exit status."""
    recipe = config.read(run_dir / "recipe.yaml")
    threads = [FeedThread(Feed(name, recipe, run_dir), stop, run_dir / "done.json") for name in enabled_trackers(recipe)]
    for thread in threads:
        thread.start()
    until = None
    while living := [thread for thread in threads if thread.is_alive()]:
        now = time.monotonic()
        if until is None and stop.is_set():
            until = now + FINISH_S
        if until is not None and now > until:
            logger.warning("%s lack the last steps; `python launch/track.py run=%s` sends them",
                           " and ".join(thread.feed.title for thread in living), run_dir)  # fmt: skip
            return BEHIND
        if hung := [thread.feed.title for thread in living if thread.since and now - thread.since > HANG_S]:
            logger.warning("%s did not answer for %g s", " and ".join(hung), HANG_S)
            return HUNG
        if _superseded(run_dir, attempt):
            return 0
        stop.wait(POLL_S) if not stop.is_set() else time.sleep(0.1)
    return 0


def _superseded(run_dir: Path, attempt: str) -> bool:
    """Return whether a later attempt has claimed the run, so that its process feeds the trackers."""
    try:
        return (run_dir / "attempts/current").read_text().strip() != attempt
    except OSError:
        return False


def main(run_dir: Path, attempt: str, parent: int) -> int:
    """Run this process and return its exit status. parent: process id of rank 0."""
    stop = threading.Event()
    for wait in (lambda: sys.stdin.read(), lambda: _outlive(parent)):
        threading.Thread(target=_set_after, args=(wait, stop), daemon=True).start()
    os.nice(10)
    rank_log.set_up()
    with alone(run_dir / FOLDER, FINISH_S, stop) as first:
        return feed_all(run_dir, stop, attempt) if first else BEHIND


def _set_after(wait: Callable[[], object], event: threading.Event) -> None:
    wait()
    event.set()


def _outlive(parent: int) -> None:
    """Wait until the parent has died. Standard input does not show that: a fork of the parent may keep its other end open."""
    while os.getppid() == parent:
        time.sleep(POLL_S)


if __name__ == "__main__":
    status = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    sys.stderr.flush()
    os._exit(status)  # a library's thread may hang
