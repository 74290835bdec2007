"""A sampler's thread and file."""

import json
import threading

import msgspec
import pytest
import torch.distributed as dist

from pipeline.monitor.sampler import SampleFile, Sampler
from pipeline.monitor.stacks import StackWatch
from tests.launch.waiting import wait_until


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_thread_samples_until_it_is_stopped(tmp_path):
    path = tmp_path / "resources/rank00000.jsonl"
    values = iter(range(1000))
    sampler = Sampler([lambda: {"running": float(next(values)), "cpu": 5.0}], 0.01, SampleFile(path, {"rank": 0}, 0.0))
    sampler.start()
    wait_until(lambda: sampler.latest.get("count", 0) >= 3, "samples", 10)
    sampler.stop()
    latest = sampler.latest
    assert latest["sum:running"] == sum(range(int(latest["count"]))), "rank 0 takes the mean over a step from it"
    assert msgspec.msgpack.decode(sampler.encoded) == latest
    first, *samples = lines(path)
    assert first == {"rank": 0} and len(samples) == latest["count"]
    assert [each["running"] for each in samples] == list(range(len(samples))) and set(samples[0]) == {"time", "running", "cpu"}


def test_what_cannot_be_read_is_left_out_and_told_once(caplog):
    def broken():
        raise OSError("gone")

    sampler = Sampler([broken, lambda: {"cpu": 1.0}], 1.0)
    sampler.sample()
    sampler.sample()
    assert sampler.latest["cpu"] == 1.0
    assert caplog.text.count("gone") == 1


@pytest.mark.parametrize("error", [OSError("the disk"), KeyError("a defect of a check")])
def test_a_failing_check_of_the_samples_costs_its_warnings_alone(caplog, error):
    sampler = Sampler([lambda: {"cpu": 1.0}], 0.01)
    sampler.on_sample = lambda: (_ for _ in ()).throw(error)
    sampler.start()
    wait_until(lambda: sampler.latest.get("count", 0) >= 3, "samples", 10)
    sampler.stop()
    assert caplog.text.count("warnings about resources are lost") == 1


def test_a_file_is_bounded_and_keeps_the_newest(tmp_path):
    path = tmp_path / "resources/rank00000.jsonl"
    file = SampleFile(path, {"rank": 7}, 0.0, most_bytes=1000)
    for i in range(200):
        file.add({"cpu": float(i)})
    before = path.with_suffix(".before.jsonl")
    assert path.stat().st_size <= 1100 and before.stat().st_size <= 1100
    kept = [each["cpu"] for each in lines(before)[1:] + lines(path)[1:]]
    assert kept == list(range(200 - len(kept), 200)) and lines(path)[0] == {"rank": 7}


def test_a_file_that_cannot_be_written_costs_its_samples_alone(tmp_path, caplog):
    (tmp_path / "resources").write_text("not a folder")
    file = SampleFile(tmp_path / "resources/rank00000.jsonl", {}, 0.0)
    sampler = Sampler([lambda: {"cpu": 1.0}], 1.0, file)
    sampler.sample()
    sampler.sample()
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "resources").unlink()
    sampler.sample()
    assert len(lines(tmp_path / "resources/rank00000.jsonl")) == 2


def test_a_thread_that_waits_in_a_collective_is_seen():
    """A barrier of two ranks, of which one has not come yet."""
    store = dist.HashStore()
    watch, ready = {}, threading.Event()

    def first():
        group = dist.ProcessGroupGloo(store, 0, 2)
        watch[0] = StackWatch(threading.get_ident())
        ready.set()
        collective(group)

    def collective(group):
        exec(compile("group.barrier().wait()", "/x/torch/distributed/distributed_c10d.py", "exec"), {"group": group})

    thread = threading.Thread(target=first)
    thread.start()
    second = dist.ProcessGroupGloo(store, 1, 2)
    ready.wait(30)
    wait_until(lambda: watch[0].look(1.0) or watch[0].seconds > 0, "the first rank to wait", 30)
    second.barrier().wait()
    thread.join(30)
    seen = watch[0].seconds
    watch[0].look(1.0)
    assert watch[0].seconds == seen, "its thread has ended"
    busy = StackWatch(threading.get_ident())
    busy.look(1.0)
    assert busy.seconds == 0
