"""Resources and warnings of a run in its status, on the board and in the report."""

import io
import json
import re
import sys

import pytest
from rich.console import Console

from launch import report, status
from launch.runs.run_folder import RunFolder
from pipeline.observe.metrics import read
from tests.launch import made_runs
from tests.launch.test_status import asked, run

__all__ = ["run"]


def resources_folder(run):
    folder = RunFolder.at(run).attempts[-1].folder / "resources"
    folder.mkdir()
    return folder


def test_a_board_is_redrawn_in_place_until_the_run_ends(run, monkeypatch):
    """On a terminal, which a console of rich stands for."""
    monkeypatch.setattr(status.time, "sleep", lambda _: made_runs.ended(run, 100))
    sample = {"time": 1.0, "cpu": 10.0, "rss_gb": 3.25, "waiting": 2.0}
    folder = resources_folder(run)
    later = sample | {"time": 3.0, "cpu": 13.0, "waiting": 3.0}
    about = {"rank": 0, "component": "train", "node": "n1"}
    (folder / "rank00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (about, sample, later)))
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120, height=60)
    monkeypatch.setattr("launch.terminal.board.rich_console", lambda: console)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert status.main([str(run), "watch=true"]) == 0
    shown = terminal.getvalue()
    first, last = (text := re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)).index("running"), text.rindex("done")
    assert first < last and "\x1b[1A" in shown, "the cursor goes back up"
    assert "Ctrl-C ends" in text[:last] and re.search(r"0 +1.5 +3.25 +50%", text), "CPU and waiting are rates"


def test_resources_and_warnings_are_shown(run, capsys):
    used = {"resources/train_gpu_util_mean": 0.97, "resources/train_mfu": 0.41, "resources/generate_kv_cache_mean": 0.5}
    used |= {f"resources/train_gpu_memory_gb_{of}": gb for of, gb in (("mean", 50), ("max", 60))}
    used |= {"resources/generate_gpu_memory_gb_mean": 70}  # a component of one rank has no maximum
    told = [line | used for line in read(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    folder = resources_folder(run)
    last = told[-1]["step"]
    lines = [
        {"time": 1.0, "step": step, "check": "slow_rank", "rank": 1, "message": f"slow at {step}"} for step in (last - 40, last)
    ]
    (folder / "warnings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"time": 1, "st')
    text = asked(capsys, run)[1]
    assert "resources   train: MFU 41.0%, GPU busy 97%, 60 GB of GPU memory\n" in text
    assert "            generate: 70 GB of GPU memory, KV cache 50%\n" in text
    assert f"warnings    step {last}: slow at {last}\n" in text and f"slow at {last - 40}" not in text


@pytest.mark.parametrize("value", ["soon", "0", "-1", "false"])
def test_watch_is_true_or_seconds(capsys, value):
    assert status.main([f"watch={value}"]) == 2
    assert "true, or a number of seconds above 0" in capsys.readouterr().err


def test_the_report_has_charts_and_warnings(run, tmp_path, capsys):
    used = {f"resources/train_cpu_{name}": 1.0 for name in ("mean", "min", "max", "max_rank")}
    told = [line | used for line in read(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    line = {"time": 1.0, "step": 2, "check": "slow_rank", "rank": 1, "message": "rank 1 is <slow>"}
    (resources_folder(run) / "warnings.jsonl").write_text(json.dumps(line) + "\n")
    assert report.main([f"run={run}", f"out={tmp_path / 'page.html'}"]) == 0
    page = (tmp_path / "page.html").read_text()
    section = page[page.index('<section id="resources">') :]
    section = section[: section.index("</section>")]
    assert "rank 1 is &lt;slow&gt;" in section and "train cpu" in section and "max rank" not in page
