"""The archive for bug reports: its members, what it leaves out, and that it has no secret."""

import tarfile

import pytest

from launch import bundle
from launch.runs.run_folder import RunFolder
from tests.launch import made_runs
from tests.launch.made_runs import Texts
from tests.problems import refused

HF = "hf_" + "aB3dE6gH" * 4
LOG = f"""loading
HF_TOKEN={HF}
{{'WANDB_API_KEY': '0123456789abcdef', "MY_PASSWORD": "hunter2hunter2"}}
DB_PASSWORD=short cloning https://me:pass@example.org/model
"""


@pytest.fixture
def run(tmp_path):
    """A run that failed in its second attempt, with everything that a run leaves."""
    folder = made_runs.folder(tmp_path / "run")
    made_runs.attempt(folder, "1-0", 100.0, "requeue: crashed", log=LOG)
    failure = {"rank": 1, "realm": "train", "message": f"RuntimeError: {HF}", "traceback": "MY_SECRET=abcdefgh12"}
    made_runs.attempt(folder, "1-1", 200.0, "stop: crashed", failure)
    made_runs.steps(folder, 1, 2, Texts("the prompt", *["a secret answer"] * 4))
    (folder / ".secret").write_text("f00d" * 16 + "\n")
    (folder / "checkpoints/step_000001").mkdir(parents=True)
    (folder / "checkpoints/step_000001/model.safetensors").write_bytes(b"bytes of weights")
    (folder / "notes.txt").write_text("my own notes")
    return folder


def _members(path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        assert all(member.isfile() and member.mode == 0o600 for member in archive)
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def test_a_bundle_has_logs_recipe_metrics_versions_and_failures(run, tmp_path, capsys):
    assert bundle.main([f"run={run}", f"out={tmp_path}/b.tar.gz"]) == 0
    members = _members(tmp_path / "b.tar.gz")
    expected = {"recipe.yaml", "manifest.json", "job.json", "metrics.jsonl", "files.txt", "machine.txt"}
    expected |= {f"attempts/1-{i}/{name}" for i in (0, 1) for name in ("started", "verdict", "rank00000.log")}
    assert set(members) == {f"b/{name}" for name in expected | {"attempts/1-1/failure.json"}}
    assert members["b/metrics.jsonl"] == (run / "metrics.jsonl").read_text()
    assert "torch==" in members["b/machine.txt"]
    assert "checkpoints/step_000001/model.safetensors" in members["b/files.txt"]  # its name and size alone
    printed = capsys.readouterr().out
    assert all(name.removeprefix("b/") in printed for name in members)
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600


def test_a_bundle_has_no_secret_and_no_data(run, tmp_path, monkeypatch):
    monkeypatch.setenv("SITE_TOKEN", "in-the-environment")
    (run / "attempts/1-0/rank00000.log").write_text(LOG + "in-the-environment\n" + "f00d" * 16)
    text = "\n".join(dict(bundle.contents(RunFolder.at(run))).values())
    for secret in (HF, "hunter2", "0123456789abcdef", "=short", "me:pass", "abcdefgh12", "in-the-environment", "f00d" * 16):
        assert secret not in text
    assert "HF_TOKEN=***" in text and "https://***@example.org/model" in text  # what was there can still be read
    for data in ("the prompt", "a secret answer", "my own notes", "bytes of weights"):
        assert data not in text


def test_the_middle_of_a_long_log_is_left_out(run):
    lines = [f"line {i}" for i in range(300_000)]
    (run / "attempts/1-1/rank00000.log").write_text("\n".join(lines))
    text = dict(bundle.contents(RunFolder.at(run)))["attempts/1-1/rank00000.log"]
    assert len(text) < bundle.LONGEST + 100
    assert text.startswith("line 0\nline 1\n") and text.endswith("line 299999")
    head, tail = text.split("\n[... ")
    missing = int(tail.split(" bytes")[0].replace(",", ""))
    assert len(head) + missing + len(tail.partition("...]\n")[2]) == len("\n".join(lines))


def test_an_archive_is_not_overwritten_and_a_wrong_folder_is_refused(run, tmp_path):
    (tmp_path / "b.tar.gz").write_text("mine")
    with refused(("out", "already-exists")):
        bundle.execute(bundle.BundleRequest(run, tmp_path / "b.tar.gz"))
    assert (tmp_path / "b.tar.gz").read_text() == "mine"
    with refused(("run", "file-not-found")):
        bundle.execute(bundle.BundleRequest(tmp_path / "none"))


@pytest.mark.parametrize("damaged", ["job.json", "metrics.jsonl", "manifest.json"])
def test_a_bundle_holds_damaged_files_as_they_are(run, damaged):
    (run / damaged).write_text("{")
    members = dict(bundle.contents(RunFolder.at(run)))
    assert members[damaged] == "{" and "packages of this Python" in members["machine.txt"]
