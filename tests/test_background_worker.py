"""Check that a background worker runs one piece of work at a time and loses no error."""

import threading

import pytest

from pipeline.checkpoints.background_worker import BackgroundWorker


def test_work_runs_in_the_background_one_at_a_time():
    background, gates, order = BackgroundWorker(), [threading.Event(), threading.Event()], []
    assert background.done() and background.wait(0)

    def work(number: int) -> None:
        assert gates[number].wait(10)
        order.append(number)

    background.start(lambda: work(0))
    assert not background.done()
    second = threading.Thread(target=background.start, args=(lambda: work(1),))
    second.start()
    gates[1].set()
    second.join(0.2)
    assert order == [] and second.is_alive()  # it waits for the first
    assert not background.wait(0.05)
    gates[0].set()
    second.join(10)
    assert background.wait(10)
    assert order == [0, 1] and background.done()


def test_an_error_is_raised_by_every_later_call():
    def fail() -> None:
        raise OSError("no space left")

    for ask in (BackgroundWorker.wait, BackgroundWorker.done, lambda background: background.start(lambda: None)):
        background = BackgroundWorker()
        background.start(fail)
        with pytest.raises(OSError, match="no space left"):
            background.wait()
        with pytest.raises(OSError, match="no space left"):
            ask(background)
