"""The course of a check: what is refused, the time, what is written when, signals."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu_check import check
from tests.gpu_check.__main__ import main
from tests.gpu_check.check import Check
from tests.gpu_check.parts import MACHINE, Part
from tests.gpu_check.samples import called, place, program, written
from tests.gpu_check.table import CUT, FAILED, LEFT_OUT, PASSED, Result
from tests.launch.waiting import alive

ROOT = Path(__file__).parents[2]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Return a function that runs these parts after a machine without GPUs, and returns (status, results by part)."""
    machine = called("machine", name=MACHINE)

    def run(*others: Part, wanted: tuple[str, ...] = ("",), **options: str) -> tuple[int, dict[str, dict]]:
        monkeypatch.setattr(check, "every", lambda _: [machine, *others])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        options = {"total": "600", "out": str(tmp_path / "out.json"), "after": "", **options}
        status = Check(place(tmp_path), options).run(wanted)
        return status, written(Path(options["out"]))

    return run


def test_without_a_gpu_the_check_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main([f"out={tmp_path}/out.json"]) == 2
    assert "there is no GPU that torch can use" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


def test_without_torch_the_check_says_so(monkeypatch, capsys):
    monkeypatch.setattr("tests.gpu_check.__main__.TORCH", ("numpy", "no_such_package"))
    assert main(["device=cpu"]) == 2
    assert "has no no_such_package. Try make setup" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("size=huge", "size: got huge; expected full or tiny"),
        ("device=tpu", "device: got tpu; expected cuda or cpu"),
        ("total=abc", "total: got abc; expected a number of seconds"),
        ("total=-5", "total: got -5; expected"),
        ("after=/etc/passwd", "after: got /etc/passwd; expected the file of an earlier check (JSONDecodeError"),
        ("after=no/file", "after: got no/file; expected"),
        ("out=/no/folder/x.json", "out: got /no/folder/x.json; its folder does not exist"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_runs(option, said, capsys):
    assert main(["device=cpu", option]) == 2
    assert f"gpu_check: {said}" in capsys.readouterr().out


def test_an_unknown_option_or_part_is_refused_with_the_known_ones(capsys, tmp_path):
    assert main(["devise=cpu"]) == 2
    assert "got devise=cpu; expected one of total=..., parts=..." in capsys.readouterr().out
    assert main(["device=cpu", "parts=train,foo", f"out={tmp_path / 'out.json'}"]) == 2
    assert "parts: got foo; expected beginnings of machine, attention, world, " in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


# ---- the course ---------------------------------------------------------------------------------------------------------


def test_the_results_are_written_after_each_part(course, tmp_path):
    """Each part sees in the file those before it, and no half of a file."""
    seen = f"import json; print([one['part'] for one in json.load(open('{tmp_path}/out.json'))['results']])"
    status, found = course(program(seen, "one"), program(seen, "two"))
    assert status == 0
    assert [found[name]["note"] for name in ("one", "two")] == ["['machine']", "['machine', 'one']"]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_part_that_does_not_fit_is_left_out(course):
    long, short = (dataclasses.replace(program("pass", name), seconds=(s, s)) for name, s in (("long", 1e4), ("short", 1)))
    status, found = course(long, short)
    assert status == 0 and found["short"]["outcome"] == PASSED
    assert found["long"]["outcome"] == LEFT_OUT
    assert re.fullmatch(r"no time \(needs about 10000 s, \d+ s are left\)", found["long"]["note"])


def test_no_part_takes_longer_than_what_is_left(course):
    """The machine's part always runs."""
    status, found = course(program("import time; time.sleep(600)", "slow"), program("pass", "late"), total="3")
    assert status == 1
    assert (found[MACHINE]["outcome"], found["slow"]["outcome"], found["late"]["outcome"]) == (PASSED, CUT, LEFT_OUT)


def test_a_part_that_hangs_fails_and_the_others_run(course, monkeypatch):
    for limit_s in (0.5, 4, 32):  # until it is enough for Python to start
        monkeypatch.setattr(check, "_limit", lambda part, _, limit_s=limit_s: limit_s if part.name == "hangs" else 60)
        hangs = program("print('far', flush=True); import time; time.sleep(600)", "hangs")
        status, found = course(hangs, program("pass", "other"))
        if found["hangs"]["log"]:
            break
    assert status == 1 and found["other"]["outcome"] == PASSED
    assert (found["hangs"]["outcome"], found["hangs"]["log"].strip()) == (FAILED, "far")


def test_an_error_in_reading_a_part_s_output_fails_that_part_alone(course):
    def judge(*_):
        return {}["time/step"]

    status, found = course(dataclasses.replace(program("pass", "unread"), judge=judge), program("pass", "other"))
    assert status == 1 and found["other"]["outcome"] == PASSED
    assert (found["unread"]["outcome"], found["unread"]["note"]) == (FAILED, "KeyError: 'time/step'")


def test_what_a_part_lacks_is_named(course):
    lacking = dataclasses.replace(program("raise SystemExit(1)", "lacking"), needs=("numpy", "no_such_package"))
    status, found = course(lacking)
    assert (status, found["lacking"]["note"]) == (0, "not installed: no_such_package")


def test_a_second_call_takes_the_first_ones_results(course, tmp_path):
    """Parts that had no time, or were cut, run again."""
    kept, again, cut = (program("print('again')", name) for name in ("kept", "again", "cut"))
    earlier = [Result("kept", FAILED, "first"), Result("again", LEFT_OUT, "no time (needs about 9 s, 1 s are left)")]
    earlier.append(Result("cut", CUT, "ended by SIGTERM"))
    first = tmp_path / "first.json"
    record = {"machine": {}, "results": [dataclasses.asdict(result) for result in earlier]}
    first.write_text(json.dumps(check._heading(place(tmp_path)) | record))
    status, found = course(kept, again, cut, after=str(first))
    assert status == 1
    assert {name: found[name]["note"] for name in ("kept", "again", "cut")} == {
        "kept": "first",
        "again": "again",
        "cut": "again",
    }


def test_a_second_call_runs_named_parts_again(course, tmp_path):
    """Their results replace the first ones, unless they do not fit in the time."""
    failed, passed, other = (program("print('again')", name) for name in ("train: a", "train: b", "other"))
    long = dataclasses.replace(program("print('again')", "train: long"), seconds=(1e4, 1e4))
    first = tmp_path / "first.json"
    outcomes = {"train: a": FAILED, "train: b": PASSED, "train: long": PASSED, "other": FAILED}
    earlier = [dataclasses.asdict(Result(name, outcome, "first")) for name, outcome in outcomes.items()]
    first.write_text(json.dumps(check._heading(place(tmp_path)) | {"machine": {}, "results": earlier}))
    _, found = course(failed, passed, long, other, wanted=("train",), after=str(first), out=str(first))
    assert {name: (found[name]["outcome"], found[name]["note"]) for name in outcomes} == {
        "train: a": (PASSED, "again"),
        "train: b": (PASSED, "again"),
        "train: long": (PASSED, "first"),
        "other": (FAILED, "first"),
    }


@pytest.mark.parametrize("changed", [{"device": "cuda"}, {"size": "full"}, {"format": 0}])
def test_results_of_another_device_or_size_are_not_taken(tmp_path, changed):
    first = tmp_path / "first.json"
    first.write_text(json.dumps(check._heading(place(tmp_path)) | {"machine": {}, "results": []} | changed))
    with pytest.raises(SystemExit, match=rf"got {next(iter(changed))} "):
        check._earlier(str(first), place(tmp_path))


SIGNALLED = """
import sys
from pathlib import Path
from tests.gpu_check import check, samples
from tests.gpu_check.parts import MACHINE

folder, kind = sys.argv[1:]
slow = samples.called("sleep", folder, name="slow")
if kind == "program":
    slow = samples.program(f"from tests.gpu_check import samples; samples.sleep(None, {folder!r})", "slow")
machine = samples.called("machine", name=MACHINE)
check.every = lambda _: [machine, slow, samples.called("process", name="next")]
options = {"total": "600", "out": folder + "/out.json", "after": ""}
sys.exit(check.Check(samples.place(Path(folder)), options).run(("",)))
"""


@pytest.mark.parametrize(("kind", "number"), [("called", signal.SIGTERM), ("program", signal.SIGINT)])
def test_a_signal_ends_the_running_part_and_writes(kind, number, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED, tmp_path, kind], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (tmp_path / "child").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    found = written(tmp_path / "out.json")
    assert process.returncode == 1 and "1 passed, 1 cut" in said
    assert [(name, one["outcome"]) for name, one in found.items()] == [(MACHINE, PASSED), ("slow", CUT)]
    assert found["slow"]["note"] == f"ended by {number.name}"
    while alive(int((tmp_path / "child").read_text())):  # it has its signal, and ends on its own
        assert time.monotonic() < deadline
        time.sleep(0.05)
