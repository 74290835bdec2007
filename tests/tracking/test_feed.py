"""What a tracker receives: each step once, with the values of metrics.jsonl, over faults, kills and resumed runs."""

import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from pipeline import config
from pipeline.trackers import TRACKERS
from pipeline.tracking import attachments
from pipeline.tracking.feed import Feed
from pipeline.tracking.position import run_id
from tests.launch import made_runs
from tests.storage.disks import small_disk
from tests.tracking.endpoint import EndpointConfig, EndpointTracker, serving
from tests.tracking.runs import Writer, evaluated, expected, made, sampled


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setitem(TRACKERS, "endpoint", EndpointTracker)
    with serving() as served:
        yield served


def feed_of(folder, endpoint):
    recipe = config.read(folder / "recipe.yaml")
    recipe.logger.endpoint = EndpointConfig(endpoint.address)
    return Feed("endpoint", recipe, folder)


def received(endpoint, run):
    """Return step -> values, after a check that no step came twice and all came in order."""
    steps = [step for step, *_ in endpoint.steps[run]]
    assert steps == sorted(set(steps))
    return {step: values for step, _, values in endpoint.steps[run]}


def test_steps_arrive_as_they_are_written(tmp_path, endpoint):
    folder = made(tmp_path / "run")
    feed, writer = feed_of(folder, endpoint), Writer(folder)
    feed.look(False)
    for last in (1, 2, 5):
        writer.steps(last)
        feed.look(False)
        assert received(endpoint, run_id(folder)) == expected(folder) and feed.last == last
    assert "train/none" not in received(endpoint, run_id(folder))[5]  # null in the file


def test_a_resumed_run_sends_no_step_again(tmp_path, endpoint):
    """Its replayed steps are skipped, by the same process and by another one, and none is late."""
    folder = made(tmp_path / "run")
    feed = feed_of(folder, endpoint)
    Writer(folder).steps(7)
    feed.look(False)
    resumed = Writer(folder, after=4, times=2)
    feed.look(False)
    for last in (6, 9):
        resumed.steps(last)
        feed.look(False)
    assert received(endpoint, run_id(folder)) == expected(folder, replayed=range(5, 8))
    another = feed_of(folder, endpoint)
    resumed = Writer(folder, after=4, times=3)
    another.look(False)
    resumed.steps(11)
    another.look(True)
    found = received(endpoint, run_id(folder))
    assert found == expected(folder, range(5, 8)) | {step: expected(folder, (8, 9), 2)[step] for step in (8, 9)}
    assert list(endpoint.steps) == [run_id(folder)]


def test_a_replay_with_other_values_begins_another_record(tmp_path, endpoint, caplog):
    folder = made(tmp_path / "run")
    feed = feed_of(folder, endpoint)
    Writer(folder).steps(7)
    feed.look(False)
    first = received(endpoint, run_id(folder))
    Writer(folder, after=4, times=2, changed=1e-12).steps(6)
    feed.look(False)
    assert received(endpoint, run_id(folder)) == first
    assert received(endpoint, f"{run_id(folder)}-2") == expected(folder)
    assert "step 5 was run again, and its values differ" in caplog.text
    Writer(folder, after=6, times=3).steps(9)
    feed_of(folder, endpoint).look(True)
    assert received(endpoint, f"{run_id(folder)}-2") == expected(folder) and len(endpoint.steps) == 2


def test_a_step_whose_arrival_was_not_confirmed_is_not_sent_twice(tmp_path, endpoint):
    folder = made(tmp_path / "run")
    feed, writer = feed_of(folder, endpoint), Writer(folder)
    writer.steps(3)
    feed.look(False)
    writer.steps(5)
    endpoint.fault = "500 after"
    with pytest.raises(urllib.error.HTTPError):
        feed.look(False)
    killed = feed_of(folder, endpoint)  # as a process that was killed then
    writer.steps(6)
    killed.look(True)
    assert received(endpoint, run_id(folder)) == expected(folder)
    Writer(folder, after=3, times=2, changed=1.0).steps(4)  # its digest was written before it was sent
    killed.look(True)
    assert set(endpoint.steps) == {run_id(folder), f"{run_id(folder)}-2"}


def test_all_is_caught_up_after_an_outage(tmp_path, endpoint):
    folder = made(tmp_path / "run")
    feed, writer = feed_of(folder, endpoint), Writer(folder)
    endpoint.fault = "500"
    for last in (2, 4):
        writer.steps(last)
        with pytest.raises(urllib.error.HTTPError):
            feed.look(False)
        feed.reset()
    endpoint.fault = ""
    feed.look(False)
    assert received(endpoint, run_id(folder)) == expected(folder)


def test_nothing_is_sent_that_cannot_be_noted(tmp_path, endpoint):
    """On a full disk: otherwise a kill would leave steps that nobody knows."""
    with small_disk(tmp_path / "disk", "200k") as disk:
        folder = made(disk.path / "run")
        feed, writer = feed_of(folder, endpoint), Writer(folder)
        writer.steps(2)
        feed.look(False)
        writer.steps(4)
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            feed.look(False)
        feed.reset()
        assert set(received(endpoint, run_id(folder))) == {1, 2}
        disk.free()
        feed.look(False)
        assert received(endpoint, run_id(folder)) == expected(folder)


def test_samples_scores_recipe_and_model_are_sent_once(tmp_path, endpoint):
    folder = made(tmp_path / "run", "checkpointing.save_period=2")
    feed, writer = feed_of(folder, endpoint), Writer(folder)
    writer.steps(3)
    for kind, step in (("step", 1), ("step", 2), ("step", 3), ("val", 1), ("val", 3)):
        sampled(folder, kind, step, count=40)
    evaluated(folder, 2, 0.25)
    feed.look(False)
    sent = {name for name, _ in endpoint.attached[run_id(folder)]}
    assert sent == {"recipe.yaml", "step 2", "val 1", "math 2"}  # step 3 may still be written
    assert ["val 1", attachments.SAMPLES] in endpoint.attached[run_id(folder)]
    (folder / "report.html").write_text("report")
    (folder / "checkpoints/step_000002/hf").mkdir(parents=True)
    (folder / "hf").symlink_to("checkpoints/step_000002/hf")
    made_runs.ended(folder, 3)
    for _ in range(2):
        again = feed_of(folder, endpoint)
        again.look(True)
        again.close(True)
    names = [name for name, _ in endpoint.attached[run_id(folder)]]
    assert sorted(names) == sorted([*sent, "val 3", "report.html", "model", "ended"])
    evaluated(folder, 2, 0.5)  # judged anew
    again.look(True)
    assert endpoint.attached[run_id(folder)][-1] == ["math 2", {"gsm8k/accuracy": 0.5}]


def test_a_recipe_that_holds_a_secret_stays_here(tmp_path, endpoint):
    folder, secret = made(tmp_path / "run"), "hf_" + "aB3dE6gH" * 4
    with open(folder / "recipe.yaml", "a") as file:
        file.write(f"# {secret}\n")
    feed_of(folder, endpoint).look(True)
    assert secret not in json.dumps(endpoint.attached)


def test_another_server_gets_everything_and_the_first_one_nothing_twice(tmp_path, endpoint):
    folder = made(tmp_path / "run")
    Writer(folder).steps(3)
    sampled(folder, "val", 1)
    with serving() as other:
        for server in (endpoint, other, endpoint):
            feed = feed_of(folder, server)
            feed.look(True)
            feed.close(True)
        assert received(other, run_id(folder)) == received(endpoint, run_id(folder)) == expected(folder)
        sent = {name for name, _ in endpoint.attached[run_id(folder)]}
        assert {name for name, _ in other.attached[run_id(folder)]} == sent >= {"val 1", "recipe.yaml"}


def test_a_run_made_anew_in_the_same_folder_is_another_run(tmp_path):
    first = run_id(made(tmp_path / "run"))
    assert run_id(tmp_path / "run") == first
    (tmp_path / "run").rename(tmp_path / "old")
    assert run_id(made(tmp_path / "run")) != first


def test_trackers_that_start_together_have_one_id(tmp_path):
    """Each has a thread."""
    for run in range(4):
        folder, together = made(tmp_path / f"run{run}"), Barrier(6)

        def chosen(_, folder=folder, together=together):
            together.wait()
            return run_id(folder)

        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(chosen, range(6))) == {run_id(folder)}
