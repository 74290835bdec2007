"""Lines of the audit log: several writers, killed writers, files that cannot be written, and where the log is."""

import itertools
import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from launch.governance import audit_log
from launch.governance.audit_log import FIRST, HEAD, LOG, Head, folder_for, hash_of, record
from pipeline.config import RecipeError
from tests.problems import refused


def lines(folder):
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def test_each_line_has_the_hash_of_the_one_before(tmp_path):
    receipts = [record("submit", tmp_path / f"run{i}", {"step": i, "why": "ü\n"}, root=tmp_path) for i in range(3)]
    found = lines(tmp_path)
    assert [each["previous"] for each in found] == [FIRST, *(each["hash"] for each in found[:-1])]
    assert [(receipt.number, receipt.hash) for receipt in receipts] == [(each["number"], each["hash"]) for each in found]
    assert all(hash_of(each) == each["hash"] for each in found)
    assert found[1]["details"] == {"step": 1, "why": "ü\n"} and found[1]["time"].endswith("+00:00")
    assert Head.parse((tmp_path / HEAD).read_text()) == Head(3, found[-1]["hash"], None)
    assert (tmp_path / LOG).stat().st_mode & 0o777 == 0o600


def _write(folder, name, count):
    for number in range(count):
        record("change", name, {"number": number}, root=folder)


def test_several_processes_append_at_once(tmp_path):
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(tmp_path, f"run{i}", 25)) for i in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = lines(tmp_path)
    assert [each["number"] for each in found] == list(range(1, 101))
    assert all(after["previous"] == before["hash"] for before, after in itertools.pairwise(found))
    for i in range(4):
        own = [each["details"]["number"] for each in found if each["subject"] == f"run{i}"]
        assert own == list(range(25))


@pytest.mark.parametrize("written", range(3))
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_killed_writer_leaves_a_log_that_goes_on(tmp_path, monkeypatch, written, part):
    """The process is killed in its write number `written` (begin, line, end), after a part of that text."""
    record("submit", "first", root=tmp_path)
    if not (child := os.fork()):
        real, calls = os.write, []

        def dying(descriptor, text):
            calls.append(text)
            if len(calls) == written + 1:
                real(descriptor, text[: int(len(text) * part)])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(descriptor, text)

        audit_log.os.write = dying
        record("submit", "second", root=tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    record("submit", "third", root=tmp_path)
    found = lines(tmp_path)
    is_there = written > 1 or (written, part) == (1, 1.0)
    assert [each["subject"] for each in found] == ["first", *["second"] * is_there, "third"]
    assert [each["number"] for each in found] == list(range(1, len(found) + 1))
    assert Head.parse((tmp_path / HEAD).read_text()) == Head(len(found), found[-1]["hash"], None)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda log, head: log.write_text(""), "tampered"),
        (lambda log, head: log.write_text(log.read_text() + "x\n"), "tampered"),
        (lambda log, head: log.write_text(log.read_text() + "x"), "tampered"),
        (lambda log, head: log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1])), "tampered"),
        (lambda log, head: log.write_text(log.read_text().replace("run1", "run7")), "tampered"),
        (lambda log, head: log.write_text(log.read_text()[:-1] + " \n"), "tampered"),
        (lambda log, head: head.unlink(), "tampered"),
        (lambda log, head: head.write_text("nonsense\n"), "tampered"),
        (lambda log, head: log.unlink(), "tampered"),
        (lambda log, head: (log.unlink(), log.symlink_to("/dev/null")), "permission-denied"),
        (lambda log, head: (head.unlink(), os.mkfifo(head)), "permission-denied"),
    ],
)
def test_nothing_is_appended_to_a_log_that_is_not_as_it_was_written(tmp_path, damage, code):
    for i in range(2):
        record("submit", f"run{i}", root=tmp_path)
    damage(tmp_path / LOG, tmp_path / HEAD)
    with refused(("cluster.audit", code)):
        record("submit", "run2", root=tmp_path)


def test_a_full_disk_is_named_and_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    record("submit", "first", root=tmp_path)
    before = (tmp_path / LOG).read_text()
    real = os.write

    def full(descriptor, text):
        if bytes(text).startswith(b"{"):
            real(descriptor, text[:7])
            raise OSError(28, "No space left on device")
        return real(descriptor, text)

    monkeypatch.setattr(os, "write", full)
    with refused(("cluster.audit", "unwritable")):
        record("submit", "second", root=tmp_path)
    monkeypatch.undo()
    assert (tmp_path / LOG).read_text() == before
    assert record("submit", "third", root=tmp_path).number == 2


def test_secrets_are_redacted(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    record("submit", "run", {"why": ["0123456789abcdef"], "address": "https://me:password@host"}, root=tmp_path)
    assert lines(tmp_path)[0]["details"] == {"why": ["***"], "address": "https://***@host"}


def test_the_user_is_the_process_owner(tmp_path, monkeypatch):
    import pwd

    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("LOGNAME", "somebody")
    record("submit", "run", root=tmp_path)
    assert lines(tmp_path)[0]["user"] == pwd.getpwuid(os.geteuid()).pw_name


@pytest.mark.parametrize(("mode", "expected"), [(0o755, 0o600), (0o770, 0o660), (0o2775, 0o660), (0o1777, 0o666)])
def test_who_may_write_the_folder_may_append(tmp_path, mode, expected):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    record("submit", "run", root=folder)
    assert {(folder / name).stat().st_mode & 0o777 for name in (LOG, HEAD)} == {expected}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_several_users_append(mode):
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are private
        folder = Path(name) / "runs"
        folder.mkdir()
        Path(name).chmod(0o755)
        folder.chmod(mode)
        for user in (0, 65534, 1, 0):
            if not (child := os.fork()):
                os.setgid(user)
                os.setuid(user)
                os._exit(0 if record("submit", folder / f"of-{user}", root=folder) else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert len({each["user"] for each in lines(folder)}) == 3
        assert [each["number"] for each in lines(folder)] == [1, 2, 3, 4]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_log_that_only_its_owner_may_write_refuses_others():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        record("submit", "run", root=folder)
        if not (child := os.fork()):
            os.setuid(65534)
            try:
                record("submit", "run", root=folder)
            except RecipeError as error:
                os._exit(3 if error.codes == ("permission-denied",) and "nobody" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert len(lines(folder)) == 1


def test_where_the_log_is(tmp_path):
    run = tmp_path / "runs/sweeps/nightly/1/runs/a-3"
    run.mkdir(parents=True)
    assert folder_for("auto", tmp_path / "runs/a") == tmp_path / "runs"
    assert folder_for("auto", run) == tmp_path / "runs"
    assert folder_for("auto", tmp_path / "mine/a") == tmp_path / "mine"
    assert folder_for("none", run) is None
    assert folder_for("/audit", run).as_posix() == "/audit"
    inner = tmp_path / "mine/a/evaluations/math/step_000010"
    inner.mkdir(parents=True)
    (tmp_path / "mine/a/recipe.yaml").write_text("name: a\n")
    assert folder_for("auto", inner) == tmp_path / "mine"
    (tmp_path / "mine/a/recipe.yaml").write_text("cluster: {audit: none}\n")
    assert audit_log.folder_of(tmp_path / "mine/a") is None
    assert record("cancel", tmp_path / "mine/a") is None
