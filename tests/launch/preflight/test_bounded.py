"""A function in a fork: its value, what it raises, and its bounds."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from launch.preflight import bounded


def test_the_value_comes_back():
    assert bounded.call(lambda: [1, {"a": None}]) == [1, {"a": None}]


def test_a_worker_of_a_pool_may_call():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_call) == 3


def _call() -> int:
    return bounded.call(lambda: 3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: {1}, "TypeError"),
        (lambda: "x" * (2 * bounded.MEMORY), "MiB"),
        (lambda: os._exit(3), "MiB"),
        (lambda: time.sleep(60), "s of CPU time"),
    ],
)
def test_what_fails_is_named(function, said, monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.5)
    monkeypatch.setattr(bounded, "WAIT_S", 2.0)
    with pytest.raises(bounded.Unbounded, match=said):
        bounded.call(function)


def test_a_fork_holds_no_file(tmp_path):
    with open(tmp_path / "held", "w") as held:
        number = held.fileno()
        with pytest.raises(bounded.Unbounded, match="Bad file descriptor"):
            bounded.call(lambda: os.fstat(number).st_size)


class Waits:
    """Garbage of this process, whose finalizer waits in a fork."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            signal.pause()


def test_finalizers_of_the_process_do_not_run_in_the_fork():
    gc.collect()
    Waits()
    assert bounded.call(lambda: len([[] for _ in range(100_000)])) == 100_000
    gc.collect()


SERVICE = """
import os, resource, threading
from launch.preflight import bounded

bounded.SECONDS = 60.0
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
values = []
threads = [threading.Thread(target=lambda: values.append(bounded.call(lambda: 5))) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(values)
"""


def test_many_threads_and_files():
    """A service has more than 1024 descriptors, and plans in threads.

    A process of its own: at a fork, Python destroys what other threads hold. Earlier tests leave process groups in their
    thread, and a process group's destructor crashes in a fork.
    """
    done = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[5, 5, 5, 5]\n", done.stderr
