"""`launch/audit.py verify` finds every way to change a log, and says where; `show` prints a part of it."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from launch import audit
from launch.governance import audit_log
from launch.governance.audit_check import verify
from launch.governance.audit_log import HEAD, LOG, as_line, as_record, record, seal
from launch.runs.run_setup import append_manifest
from launch.terminal.safe_text import on_one_line
from tests.problems import refused

RUNS = ("sft", "grpo", "dpo")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A runs root with three runs: submitted, one cancelled; the last line is a cancellation, which no manifest keeps."""
    root = tmp_path_factory.mktemp("audit") / "runs"
    for name in RUNS:
        run = root / name
        run.mkdir(parents=True)
        (run / "recipe.yaml").write_text(f"name: {name}\nalgorithm: sft\n")
        receipt = record("submit", run, {"recipe": name}, root)
        append_manifest(run, "local", "1", ["submit.py"], {"git": None, "audit": as_record(receipt)})
        record("submitted", run, {"job_id": "1"}, root)
    record("cancel", root / "dpo", {"job_id": "1"}, root)
    return root


@pytest.fixture
def root(whole, tmp_path):
    """A copy, whose log has the receipts of the original: the folder was moved."""
    copy = tmp_path / "runs"
    shutil.copytree(whole, copy)
    for path in copy.glob("*/manifest.json"):
        path.write_text(path.read_text().replace(str(whole), str(copy)))
    return copy


class Log:
    """The files of a log, to be changed by hand."""

    def __init__(self, root: Path):
        self.root, self.path, self.head = root, root / LOG, root / HEAD
        self.lines = self.path.read_text().splitlines()

    def write(self, lines=None, end="\n"):
        self.path.write_text("\n".join(self.lines if lines is None else lines) + end)

    def change(self, at, **values):
        entry = json.loads(self.lines[at - 1]) | values
        self.lines[at - 1] = as_line(entry)
        return entry

    def resealed(self, at, **values):
        """Change a line, and compute its own hash anew."""
        entry = json.loads(self.lines[at - 1]) | values
        self.lines[at - 1] = as_line(seal(entry, entry["number"], entry["previous"]))

    def rechained(self, first):
        """Compute numbers, hashes and the chain anew from a line on."""
        previous = json.loads(self.lines[first - 2])["hash"] if first > 1 else audit_log.FIRST
        for at in range(first - 1, len(self.lines)):
            entry = seal(json.loads(self.lines[at]), at + 1, previous)
            self.lines[at], previous = as_line(entry), entry["hash"]

    def new_head(self):
        places = [f"{entry['number']} {entry['hash']}" for entry in map(json.loads, self.lines)]
        self.head.write_text("".join(f"begin {place}\nend {place}\n" for place in places))


def changed(at, **values):
    """Return a change of a line's values alone."""

    def change(log):
        log.change(at, **values)
        log.write()

    return change


def resealed(at, **values):
    """Return a change of a line's values and of its own hash."""

    def change(log):
        log.resealed(at, **values)
        log.write()

    return change


def rechained(at, head=False):
    """Return a change of a line and of all hashes after it. head: and of the head."""

    def change(log):
        log.resealed(at, user="mallory")
        log.rechained(at)
        log.write()
        if head:
            log.new_head()

    return change


def lines(*order):
    """Return a change to these lines, in this order."""
    return lambda log: log.write([log.lines[at - 1] for at in order])


def replaced(at, old, new):
    """Return a change of a line's text, which must hold the old one."""

    def change(log):
        assert old in log.lines[at - 1]
        log.lines[at - 1] = log.lines[at - 1].replace(old, new, 1)
        log.write()

    return change


def appended(data: bytes):
    """Return a change that appends bytes."""
    return lambda log: log.path.write_bytes(log.path.read_bytes() + data)


def in_the_head(old, new):
    """Return a change of the head's text."""
    return lambda log: log.head.write_text(log.head.read_text().replace(old, new))


def forged_line_inserted(log):
    entry = json.loads(log.lines[2]) | {"user": "mallory"}
    log.lines.insert(3, as_line(seal(entry, 4, entry["hash"])))
    log.write()


def forged_line_with_a_new_chain(log):
    log.lines.insert(3, log.lines[2])
    log.rechained(4)
    log.write()


def forged_line_appended(log):
    entry = json.loads(log.lines[-1])
    log.lines.append(as_line(seal(entry | {"user": "mallory"}, 8, entry["hash"])))
    log.write()


def truncated_in_a_line(log):
    data = log.path.read_bytes()
    log.path.write_bytes(data[: len(data) // 2])


def both_removed(log):
    log.path.unlink()
    log.head.unlink()


def replaced_by_another_log(log):
    shutil.rmtree(log.root.parent / "other", ignore_errors=True)
    for number in range(7):
        record("submit", f"run{number}", root=log.root.parent / "other")
    for name in (LOG, HEAD):
        (log.root.parent / "other" / name).replace(log.root / name)


def hash_in_the_head_edited(log):
    own = json.loads(log.lines[3])["hash"]
    in_the_head(f"end 4 {own}", f"end 4 {'0' * 64}")(log)


def line_dropped_with_its_place_in_the_head(log):
    """The last submission and what follows it: the manifest of the run keeps the receipt."""
    log.lines = log.lines[:4]
    log.write()
    log.new_head()


def zeros_in_place_of_a_line(log):
    log.path.write_text(log.path.read_text().replace(log.lines[4], "\0" * len(log.lines[4])))


KINDS = {  # -> the change, and the line that is named; None: the message names the file
    "a user": (changed(3, user="mallory"), 3),
    "a time": (changed(3, time="2020-01-01T00:00:00.000+00:00"), 3),
    "a detail": (changed(1, details={"recipe": "other"}), 1),
    "a user, with the line's hash": (resealed(3, user="mallory"), 3),
    "a user in the last line, with its hash": (resealed(7, user="mallory"), 7),
    "the first line dropped": (lines(2, 3, 4, 5, 6, 7), 1),
    "a line dropped": (lines(1, 2, 3, 5, 6, 7), 4),
    "several lines dropped": (lines(1, 2, 6, 7), 3),
    "the last line dropped": (lines(1, 2, 3, 4, 5, 6), 7),
    "the last lines dropped": (lines(1, 2, 3, 4), 5),
    "two lines exchanged": (lines(1, 2, 4, 3, 5, 6, 7), 3),
    "a line moved to the end": (lines(1, 3, 4, 5, 6, 7, 2), 2),
    "a line twice": (lines(1, 2, 3, 4, 4, 5, 6, 7), 5),
    "a forged line inserted": (forged_line_inserted, 5),
    "a forged line with a new chain": (forged_line_with_a_new_chain, 4),
    "a forged line appended": (forged_line_appended, 8),
    "cut in a line": (truncated_in_a_line, None),
    "without the last end": (lambda log: log.write(end=""), 7),
    "emptied": (lambda log: log.path.write_text(""), 1),
    "removed": (lambda log: log.path.unlink(), None),
    "removed with its head": (both_removed, None),
    "replaced by another log": (replaced_by_another_log, 1),
    "a number in the head": (in_the_head("end 7 ", "end 9 "), None),
    "a hash in the head": (hash_in_the_head_edited, 4),
    "the head replaced": (lambda log: log.head.write_text("nothing\n"), None),
    "the head is no text": (lambda log: log.head.write_bytes(b"\xff\n"), None),
    "the head removed": (lambda log: log.head.unlink(), None),
    "a line dropped with its place in the head": (line_dropped_with_its_place_in_the_head, 5),
    "blanks": (replaced(3, '","', '", "'), 3),
    "a blank at an end": (replaced(3, "}", "} "), 3),
    "a blank line": (lambda log: log.write([*log.lines[:3], "", *log.lines[3:]]), 4),
    "line ends of Windows": (lambda log: log.path.write_bytes(log.path.read_bytes().replace(b"\n", b"\r\n")), 1),
    "Unicode of the same value": (replaced(3, '"sub', '"\\u0073ub'), 3),
    "a letter that looks alike": (replaced(3, "grpo", "grp\u043e"), 3),
    "a key given twice": (replaced(3, '{"action"', '{"action":"cancel","action"'), 3),
    "a key added": (changed(3, note="seen"), 3),
    "a number as text": (changed(3, number="3"), 3),
    "a list in place of a hash": (changed(3, hash=["x"]), 3),
    "a list in place of a subject": (resealed(3, subject=["x"]), 3),
    "a subject with a zero": (resealed(3, subject="/runs/\0"), 3),
    "garbage appended": (appended(b"\xff\xfe not a line\n"), 8),
    "brackets appended": (appended(b"[" * 100_000 + b"\n"), 8),
    "garbage without an end appended": (appended(b"{"), 8),
    "zeros in place of a line": (zeros_in_place_of_a_line, 5),
    "the chain computed anew": (rechained(2), 2),
    "chain and head computed anew": (rechained(4, head=True), 5),
    "everything computed anew": (rechained(1, head=True), 1),
}


def test_a_log_as_it_was_written(root, capsys):
    check = verify(root)
    assert (check.lines, check.receipts, check.findings, check.notes) == (7, 3, (), ())
    assert audit.main(["verify", f"root={root}"]) == 0
    assert "as it was written" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_tampering_is_found(root, kind, capsys):
    change, line = KINDS[kind]
    change(Log(root))
    found = verify(root).findings
    assert found
    if line is not None:
        assert line in [each.line for each in found], list(map(str, found))
    assert audit.main(["verify", f"root={root}"]) == 1
    assert on_one_line(str(found[0])) in capsys.readouterr().out
    if (root / LOG).exists():
        assert audit.main(["show", f"root={root}"]) == 0


def test_a_line_of_a_killed_writer_is_no_tampering(root):
    log = Log(root)
    log.head.write_text(log.head.read_text() + f"begin 8 {'a' * 64}\n")
    log.path.write_text(log.path.read_text() + '{"action":')
    check = verify(root)
    assert not check.findings and len(check.notes) == 2


def _submit(root, name, count):
    for _ in range(count):
        receipt = record("submit", root / name, {}, root)
        append_manifest(root / name, "local", "1", ["submit.py"], {"git": None, "audit": as_record(receipt)})


def test_lines_that_are_written_meanwhile_are_no_tampering(root):
    writer = multiprocessing.get_context("fork").Process(target=_submit, args=(root, "sft", 60))
    writer.start()
    while writer.is_alive():
        assert not verify(root).findings
    writer.join()
    assert writer.exitcode == 0 and verify(root).lines == 67


def test_a_log_that_was_moved_is_compared_with_the_receipts_of_its_old_place(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "old")
    for path in (tmp_path / "old").glob("*/manifest.json"):
        path.write_text(path.read_text().replace(str(whole), f"{tmp_path}/old"))
    moved = (tmp_path / "old").rename(tmp_path / "new")
    check = verify(moved)
    assert (check.receipts, check.findings, check.notes) == (3, (), ())
    KINDS["chain and head computed anew"][0](Log(moved))
    assert [each.line for each in verify(moved).findings] == [5]


def test_a_run_that_came_from_elsewhere_is_no_tampering(root, tmp_path):
    """The log of its old place is not here."""
    receipt = record("submit", tmp_path / "theirs/run", {}, tmp_path / "theirs")
    (root / "run").mkdir()
    (root / "run/recipe.yaml").write_text("name: run\nalgorithm: sft\n")
    append_manifest(root / "run", "local", "1", ["submit.py"], {"git": None, "audit": as_record(receipt)})
    shutil.rmtree(tmp_path / "theirs")
    check = verify(root)
    assert (check.receipts, check.findings) == (3, ()) and f"{root}/run/manifest.json" in check.notes[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"audit": 1}', "[1, {}]", '[{"audit": {"folder": 1, "number": 1, "hash": "x"}}]'])
def test_files_that_hold_no_receipts_are_left_out(root, text):
    (root / "registry").mkdir()
    (root / "sft/lineage").mkdir()
    for name in ("registry/x.json", "sft/lineage/exports.jsonl", "sft/manifest.json"):
        (root / name).write_text(f"{text}\n")
    check = verify(root)
    assert (check.receipts, check.findings) == (2, ())


def test_no_log_is_no_log(tmp_path):
    with refused(("root", "file-not-found")):
        verify(tmp_path)


def test_show_prints_what_is_asked_for(root, capsys):
    def shown(*arguments):
        assert audit.main(["show", f"root={root}", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    assert len(shown()) == 7
    assert [line.split("  ")[0] for line in shown("run=grpo")] == ["3", "4"]
    assert len(shown(f"run={root / 'dpo'}", "action=cancel")) == 1
    assert shown("user=nobody-of-this-name") == [f"no lines in {root} match"]
    assert audit.main(["verify", f"root={root}", "run=grpo"]) == 2
    assert "run: got a value with verify" in capsys.readouterr().err
