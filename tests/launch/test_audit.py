"""`launch/audit.py verify` finds every way to change a log, and says where; `show` prints a part of it."""

import json
import shutil
from pathlib import Path

import pytest

from launch import audit, audit_log
from launch.audit_check import verify
from launch.audit_log import HEAD, LOG, as_line, as_record, record, sealed
from launch.run_setup import append_manifest
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
        self.lines[at - 1] = as_line(sealed(entry, entry["number"], entry["previous"]))

    def rechained(self, first):
        """Compute numbers, hashes and the chain anew from a line on."""
        previous = json.loads(self.lines[first - 2])["hash"] if first > 1 else audit_log.FIRST
        for at in range(first - 1, len(self.lines)):
            entry = sealed(json.loads(self.lines[at]), at + 1, previous)
            self.lines[at], previous = as_line(entry), entry["hash"]

    def new_head(self):
        places = [f"{entry['number']} {entry['hash']}" for entry in map(json.loads, self.lines)]
        self.head.write_text("".join(f"begin {place}\nend {place}\n" for place in places))


def field(log):
    log.change(3, user="mallory")
    log.write()


def time(log):
    log.change(3, time="2020-01-01T00:00:00.000+00:00")
    log.write()


def detail(log):
    log.change(1, details={"recipe": "other"})
    log.write()


def field_with_its_hash(log):
    log.resealed(3, user="mallory")
    log.write()


def last_field_with_its_hash(log):
    log.resealed(7, user="mallory")
    log.write()


def first_line_dropped(log):
    log.write(log.lines[1:])


def middle_line_dropped(log):
    log.write([*log.lines[:3], *log.lines[4:]])


def several_lines_dropped(log):
    log.write([*log.lines[:2], *log.lines[5:]])


def last_line_dropped(log):
    log.write(log.lines[:-1])


def last_lines_dropped(log):
    log.write(log.lines[:-3])


def reordered(log):
    log.lines[2], log.lines[3] = log.lines[3], log.lines[2]
    log.write()


def moved_to_the_end(log):
    log.write([*log.lines[:1], *log.lines[2:], log.lines[1]])


def duplicated(log):
    log.write([*log.lines[:4], log.lines[3], *log.lines[4:]])


def forged_line_inserted(log):
    entry = json.loads(log.lines[2]) | {"user": "mallory"}
    log.lines.insert(3, as_line(sealed(entry, 4, entry["hash"])))
    log.write()


def forged_line_with_a_new_chain(log):
    log.lines.insert(3, log.lines[2])
    log.rechained(4)
    log.write()


def forged_line_appended(log):
    entry = json.loads(log.lines[-1])
    log.lines.append(as_line(sealed(entry | {"user": "mallory"}, 8, entry["hash"])))
    log.write()


def truncated_in_a_line(log):
    data = log.path.read_bytes()
    log.path.write_bytes(data[: len(data) // 2])


def without_the_last_end(log):
    log.write(end="")


def emptied(log):
    log.path.write_text("")


def removed(log):
    log.path.unlink()


def both_removed(log):
    log.path.unlink()
    log.head.unlink()


def replaced_by_another_log(log):
    shutil.rmtree(log.root.parent / "other", ignore_errors=True)
    for number in range(7):
        record("submit", f"run{number}", root=log.root.parent / "other")
    for name in (LOG, HEAD):
        (log.root.parent / "other" / name).replace(log.root / name)


def head_edited(log):
    log.head.write_text(log.head.read_text().replace("end 7 ", "end 9 "))


def hash_in_the_head_edited(log):
    own = json.loads(log.lines[3])["hash"]
    log.head.write_text(log.head.read_text().replace(f"end 4 {own}", f"end 4 {'0' * 64}"))


def head_replaced(log):
    log.head.write_text("nothing\n")


def head_removed(log):
    log.head.unlink()


def line_dropped_with_its_place_in_the_head(log):
    """The last submission and what follows it: the manifest of the run keeps the receipt."""
    log.lines = log.lines[:4]
    log.write()
    log.new_head()


def blanks(log):
    log.lines[2] = log.lines[2].replace('","', '", "', 1)
    log.write()


def blank_at_an_end(log):
    log.lines[2] += " "
    log.write()


def blank_line(log):
    log.write([*log.lines[:3], "", *log.lines[3:]])


def windows_line_ends(log):
    log.path.write_bytes(log.path.read_bytes().replace(b"\n", b"\r\n"))


def unicode_of_the_same_value(log):
    log.lines[2] = log.lines[2].replace('"sub', '"\\u0073ub', 1)
    log.write()


def look_alike_letter(log):
    log.lines[2] = log.lines[2].replace("grpo", "grp\u043e", 1)
    log.write()


def key_given_twice(log):
    log.lines[2] = log.lines[2].replace('{"action"', '{"action":"cancel","action"', 1)
    log.write()


def key_added(log):
    log.change(3, note="seen")
    log.write()


def number_as_text(log):
    log.change(3, number="3")
    log.write()


def garbage_appended(log):
    log.path.write_bytes(log.path.read_bytes() + b"\xff\xfe not a line\n")


def garbage_without_end_appended(log):
    log.path.write_bytes(log.path.read_bytes() + b"{")


def zeros_in_place_of_a_line(log):
    log.path.write_text(log.path.read_text().replace(log.lines[4], "\0" * len(log.lines[4])))


def chain_computed_anew(log):
    log.resealed(2, user="mallory")
    log.rechained(2)
    log.write()


def chain_and_head_computed_anew(log):
    log.resealed(4, user="mallory")
    log.rechained(4)
    log.write()
    log.new_head()


def everything_computed_anew_from_the_first_line(log):
    log.resealed(1, user="mallory")
    log.rechained(1)
    log.write()
    log.new_head()


KINDS = {  # -> the line that is named; None: the message names the file
    field: 3,
    time: 3,
    detail: 1,
    field_with_its_hash: 3,
    last_field_with_its_hash: 7,
    first_line_dropped: 1,
    middle_line_dropped: 4,
    several_lines_dropped: 3,
    last_line_dropped: 7,
    last_lines_dropped: 5,
    reordered: 3,
    moved_to_the_end: 2,
    duplicated: 5,
    forged_line_inserted: 5,
    forged_line_with_a_new_chain: 4,
    forged_line_appended: 8,
    truncated_in_a_line: None,
    without_the_last_end: 7,
    emptied: 1,
    removed: None,
    both_removed: None,
    replaced_by_another_log: 1,
    head_edited: None,
    hash_in_the_head_edited: 4,
    head_replaced: None,
    head_removed: None,
    line_dropped_with_its_place_in_the_head: 5,
    blanks: 3,
    blank_at_an_end: 3,
    blank_line: 4,
    windows_line_ends: 1,
    unicode_of_the_same_value: 3,
    look_alike_letter: 3,
    key_given_twice: 3,
    key_added: 3,
    number_as_text: 3,
    garbage_appended: 8,
    garbage_without_end_appended: 8,
    zeros_in_place_of_a_line: 5,
    chain_computed_anew: 2,
    chain_and_head_computed_anew: 5,
    everything_computed_anew_from_the_first_line: 1,
}


def test_a_log_as_it_was_written(root, capsys):
    check = verify(root)
    assert (check.lines, check.receipts, check.findings, check.notes) == (7, 3, (), ())
    assert audit.main(["verify", f"root={root}"]) == 0
    assert "as it was written" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tampering_is_found(root, kind, capsys):
    kind(Log(root))
    found = verify(root).findings
    assert found
    if KINDS[kind] is not None:
        assert KINDS[kind] in [each.line for each in found], list(map(str, found))
    assert audit.main(["verify", f"root={root}"]) == 1
    assert str(found[0]) in capsys.readouterr().out


def test_a_line_of_a_killed_writer_is_no_tampering(root):
    log = Log(root)
    log.head.write_text(log.head.read_text() + f"begin 8 {'a' * 64}\n")
    log.path.write_text(log.path.read_text() + '{"action":')
    check = verify(root)
    assert not check.findings and len(check.notes) == 2


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
    assert "run: got it with verify" in capsys.readouterr().err
