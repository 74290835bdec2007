"""An export outlives the service that started it."""

import fcntl
import subprocess

from launch.serving.exports import Exports
from tests.launch.waiting import wait_until


def test_another_service_finds_an_export_that_goes_on_and_one_that_failed(tmp_path):
    with open(tmp_path / ".hf_step_4.log", "wb") as output:
        fcntl.flock(output, fcntl.LOCK_EX)
        process = subprocess.Popen(["sh", "-c", "echo the dog ate it; exec sleep 600"], stdout=output)
    try:
        wait_until(lambda: (tmp_path / ".hf_step_4.log").read_text(), "the first line of the log")
        (found,) = Exports().of(tmp_path)
        assert (found.folder, found.state) == (str(tmp_path / "hf_step_4"), "running")
        assert Exports().start(tmp_path, 4, adapter=False) == found  # and no second one
    finally:
        process.kill()
        process.wait()
    (found,) = Exports().of(tmp_path)
    assert (found.state, found.why) == ("failed", "the dog ate it")
    (tmp_path / "hf_step_4").mkdir()
    assert [each.state for each in Exports().of(tmp_path)] == ["done"]
