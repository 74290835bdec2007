"""The report: its content, that it is complete and loads nothing, and that only its own scripts run."""

import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launch import report
from launch.pages import report_page, rollouts
from launch.pages.chart import Chart, Mark, Series, figure
from launch.pages.document import SCRIPTS
from launch.pages.report_page import differences
from launch.runs.run_folder import RunFolder
from tests.launch import made_runs
from tests.launch.made_runs import Texts

HOSTILE = (
    '</script><script>document.title="taken"</script><img src=x onerror="document.title=\'taken\'">'
    "<!--<script>\u2028'\"&amp;\\u003c\ud800{{}}"
)
VOID = {"meta", "input"}


class Page(HTMLParser):
    """Fails on a tag that is not closed in order; collects elements and texts."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}  # by tag and class
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def charts(self) -> dict[str, list[dict]]:
        """Return the traces of each chart by its title."""
        return {each["title"]: each["data"] for each in self.data("chart-data")}

    def data(self, class_: str) -> list[dict]:
        """Return the data packed for the scripts, in order."""
        scripts = [attrs for tag, attrs in self.tags if tag == "script" and "src" not in attrs]
        return [
            json.loads(text) for attrs, text in zip(scripts, self.texts["script"], strict=True) if attrs.get("class") == class_
        ]

    def headings(self) -> list[str]:
        return self.texts["h2"]


@pytest.fixture
def run(tmp_path) -> Path:
    """Write seven steps in two attempts; the second one resumed from step 4."""
    made = made_runs.folder(tmp_path / "one")
    made_runs.attempt(made, "7-0", made_runs.ago(500), "requeue: crashed with status 9, after checkpoint 4; restart 1 of 3")
    made_runs.steps(made, 1, 4, Texts("2+5=", "7", "<b>", HOSTILE), loss=0.5)
    lines = [json.loads(line) | {"time": made_runs.ago(400)} for line in (made / "metrics.jsonl").read_text().splitlines()]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made_runs.attempt(made, "7-1", made_runs.ago(300), "done")
    made_runs.steps(made, 5, 7, Texts("2+5=", "7", "<b>", HOSTILE), restored=4, loss=0.5)
    made_runs.ended(made, 7)
    return made


def written(*arguments: object) -> str:
    out = next(Path(str(each).removeprefix("out=")) for each in arguments if str(each).startswith("out="))
    assert report.main([str(each) for each in arguments]) == 0
    return out.read_text()


def layers(traces: list[dict]) -> list[dict]:
    return [trace for trace in traces if trace.get("type") == "bar"]


def test_the_page_shows_all_of_a_run(run, tmp_path, capsys):
    text = written(f"run={run}", f"out={tmp_path / 'r.html'}")
    page = Page(text)

    assert page.headings() == ["Overview", "Curves", "Time", "Refit", "Lengths and rewards", "Samples", "Recipe"]
    charts = page.charts()
    *reward, mark = charts["reward"]
    assert [(trace["name"], trace["mode"], trace["x"]) for trace in reward] == [
        ("training", "lines", [1, 2, 3, 4, 5, 6, 7]),
        ("validation", "lines+markers", [2, 4, 6]),
    ]
    assert reward[0]["y"][:2] == [0.666667, 0.333333]
    assert mark["x"][0] == 4 and "crashed with status 9" in mark["text"][0]
    assert charts["ratio"][0]["customdata"][0] == [0.9, 1.1]
    assert charts["grad norm"][0]["y"][2] is None
    phases = {layer["name"]: layer["y"][:2] for layer in layers(charts["seconds per step"])}
    parts = {"rollout": 0.2, "train": 0.3, "refit": 0.1, "rest": 0.05}
    assert phases == {**{name: [seconds] * 2 for name, seconds in parts.items()}, "validation": [0, 0.4]}
    bands = {each["name"]: each for each in charts["completion tokens, training"]}
    assert (bands["median"]["y"][0], bands["5% to 95%"]["customdata"][0]) == (2, [1, 3])
    shares = layers(charts["share of each reward, training"])
    assert [(layer["name"], layer["y"][0]) for layer in shares] == [("0", 0.333333), ("1", 0.666667)]
    assert charts["truncated"][0]["y"][0] == 0.333333

    assert "<dt>steps</dt><dd>7 of 100</dd>" in text
    assert "<dt>restarts</dt><dd>1</dd>" in text
    (samples,) = page.data("samples-data")
    last = samples["files"][6]
    assert (last["step"], last["kind"], last["of"], len(last["samples"])) == (7, "training", 12, 12)
    assert samples["prompts"][last["samples"][0]["prompt"]] == "2+5="
    assert dict(last["samples"][2]["facts"])["finish"] == "length"
    out = capsys.readouterr().out
    assert "train/reward: 0.667 at step 1, 0.667 at step 7" in out and "'2+5=' -> '7'  reward 0" in out


def test_a_models_output_is_escaped_and_nothing_is_loaded(run, tmp_path):
    model = "policy.model_name=<script>alert(1)</script>"
    hostile = made_runs.folder(tmp_path / "<img src=x onerror=alert(1)>", "tiny_grpo", model)
    made_runs.steps(hostile, 1, 2, Texts(HOSTILE, HOSTILE, "b", "c"))
    with open(hostile / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "time": 1.0, "train/</script><b>": 1.0}) + "\n")
    text = written(run, hostile, f"out={tmp_path / 'r.html'}")

    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert "img" not in names and "b" not in names
    plotly, *own = [attrs for tag, attrs in page.tags if tag == "script" and attrs.get("type") != "application/json"]
    assert plotly["src"] == "plotly.min.js" and (tmp_path / "plotly.min.js").exists()
    assert own == [{}] * len(SCRIPTS)  # what is of another type does not run
    for _, attrs in page.tags:
        assert "src" not in attrs or attrs is plotly
        assert not {"style", "background"} & set(attrs)
        assert not any(name.startswith("on") for name in attrs)
        assert attrs.get("href", "#").startswith("#")
    assert not re.search(r"url\(|@import|fetch\(|innerHTML|XMLHttpRequest", text)
    texts = [text for traces in page.charts().values() for trace in traces for text in (trace["name"], *trace.get("text", ()))]
    assert "&lt;img src=x onerror=alert(1)&gt;" in "".join(texts)
    assert not any("<" in text.replace("<br>", "") for text in texts)  # Plotly takes <a href=...> for markup
    (samples,) = page.data("samples-data")
    assert HOSTILE.replace("\ud800", "\ufffd") in samples["prompts"]  # there is no UTF-8 for half a character


def test_plotly_gets_no_markup():
    """Plotly would render <b> and <a href=...> in a name."""
    chart = Chart("c", [Series(HOSTILE, [1, 2], [1.0, 2.0])], marks=[Mark(1, HOSTILE)], levels=[(1.5, HOSTILE)])
    (packed,) = Page(figure(chart, ["<b>one", "two"])).data("chart-data")
    series, mark = packed["data"]
    for text in (series["name"], mark["text"][0], packed["layout"]["shapes"][0]["label"]["text"]):
        assert "&lt;" in text and "<" not in text.replace("<br>", "")


def test_several_runs_share_charts(run, tmp_path):
    other = made_runs.folder(tmp_path / "two", "tiny_grpo", "grpo.seed=3")
    made_runs.steps(other, 1, 3, Texts("2+5=", "7", "8", "9"), loss=0.25)
    page = Page(written(f"run={run}", f"run={other}", f"out={tmp_path / 'r.html'}"))

    assert page.data("runs-data") == [["one", "two"]]
    found = [
        (trace["meta"]["run"], trace["name"], trace["y"][0]) for trace in page.charts()["loss"] if "mark" not in trace["meta"]
    ]
    assert found == [(0, "one", 0.5), (1, "two", 0.25)]
    assert "seconds per step of two" in page.charts()
    found = dict(differences([RunFolder.at(run).recipe, RunFolder.at(other).recipe]))
    assert found == {"grpo.seed": ["42", "3"]}
    assert "grpo.seed" in page.texts["code"]


def test_an_async_run_shows_the_age_of_its_tokens(tmp_path):
    run = made_runs.folder(tmp_path / "async")
    line = {"time": 1.0, "async/age_mean": 0.5, "async/age_max": 2.0, "async/groups_live": 8.0}
    ages = [{"async/tokens_age_0": 30.0, "async/tokens_age_1": 10.0}, {"async/tokens_age_0": 10.0, "async/tokens_age_10": 10.0}]
    text = "".join(json.dumps(line | {"step": step} | of) + "\n" for step, of in enumerate(ages, 1))
    (run / "metrics.jsonl").write_text(text)
    page = Page(written(run, f"out={tmp_path / 'r.html'}"))
    assert page.headings() == ["Overview", "Staleness", "Recipe"]
    charts = page.charts()
    shares = {layer["name"]: layer["y"] for layer in layers(charts["share of tokens by age"])}
    assert shares == {"age 0": [0.75, 0.5], "age 1": [0.25, 0], "age 10": [0, 0.5]}
    assert {series["name"]: series["y"] for series in charts["age"]} == {"mean": [0.5, 0.5], "max": [2, 2]}
    assert "groups live" in charts


def test_several_turns_are_listed_and_many_without_the_middle_ones(tmp_path):
    run = made_runs.folder(tmp_path / "turns")
    record = {"prompt": "p", "completion": "ab", "completion_tokens": [1, 2], "reward": 1.0, "finish": "stop"}
    turns = [{"said": f"say {i} {HOSTILE}", "told": f"told {i}" if i < 39 else ""} for i in range(40)]
    records = [
        record,
        record | {"turns": [turn | {"reward": 0.5} for turn in turns[:2]]},
        record | {"turns": turns, "failure": "it hung", "dataset": "tools"},
        record | {"reward": 0.0, "broke": "the command exited with status 1: KeyError: 'nothere'"},
    ]
    (run / "rollouts").mkdir()
    (run / "rollouts/step_000001.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (samples,) = Page(written(run, f"out={tmp_path / 'r.html'}")).data("samples-data")
    single, few, many, broken = samples["files"][0]["samples"]
    assert single["completion"] == "ab" and "turns" not in single
    assert [told for _, told in few["turns"]] == ["told 0", "told 1"] and "completion" not in few
    assert dict(few["facts"])["rewards of turns"] == "0.5 0.5"
    assert len(many["turns"]) == 21 and many["turns"][10][0] == "… 20 turns are left out here …"
    assert many["turns"][9][1] == "told 9" and many["turns"][-1][0].startswith("say 39 ")
    assert dict(many["facts"]) == {"finish": "stop", "tokens": 2, "turns": 40, "dataset": "tools", "failure": "it hung"}
    assert dict(broken["facts"])["broke"].endswith("status 1: KeyError: 'nothere'")


@pytest.mark.parametrize(("shared", "gpus"), [(True, 16), (False, 24)])
def test_gpus_that_ranks_share_are_counted_once(shared, gpus, tmp_path):
    asked = ["cluster.train.nodes=2", "cluster.train.gpus_per_node=8", f"policy.generation.colocated.enabled={shared}"]
    asked += [] if shared else ["cluster.generate.gpus_per_node=8"]
    batch = ["policy.train_global_batch_size=16", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"]
    assert RunFolder.at(made_runs.folder(tmp_path / "run", "tiny_grpo", *asked, *batch)).gpus == gpus


def test_labels_distinguish_folders_of_one_name():
    assert report_page.labels([Path("/a/x"), Path("/b/x"), Path("/b/y")]) == ["a/x", "b/x", "b/y"]
    assert report_page.labels([Path("/a/x"), Path("/a/y")]) == ["x", "y"]


def test_an_offline_run_has_no_empty_sections(tmp_path):
    run = made_runs.folder(tmp_path / "sft", "tiny_sft")
    lines = [{"step": step, "time": 1.0, "train/loss": 1 / step, "time/train": 0.1, "time/step": 0.1} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "ti')
    page = Page(written(run, f"out={tmp_path / 'r.html'}"))
    assert page.headings() == ["Overview", "Curves", "Time", "Recipe"]
    assert page.charts()["loss"][0]["x"] == [1, 2, 3]


def test_a_run_without_a_step_is_reported(tmp_path, capsys):
    run = made_runs.folder(tmp_path / "new")
    page = Page(written(run, f"out={tmp_path / 'r.html'}"))
    assert page.headings() == ["Overview", "Recipe"]
    assert "no step yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda folder: None, "file-not-found"),
        (lambda folder: folder.mkdir(), "not-a-run"),
        (lambda folder: (folder.mkdir(), (folder / "recipe.yaml").write_text("a: [")), "unreadable"),
        (lambda folder: (folder.mkdir(), (folder / "recipe.yaml").write_text("a: 1")), "not-a-run"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, capsys, make, code):
    make(tmp_path / "no")
    assert report.main([f"run={tmp_path / 'no'}"]) == 2
    assert capsys.readouterr().err.endswith(f"[{code}]\n")


# ---- limits ---------------------------------------------------------------------------------------------------------------


def test_a_long_series_keeps_its_peaks_and_a_stack_its_means():
    x, y = list(range(100_000)), [1.0] * 100_000
    y[54_321], y[77_777], y[99_999] = 9.0, -9.0, math.nan

    def drawn(**options) -> tuple[dict, list[str]]:
        kind = options.pop("kind", "line")
        page = Page(figure(Chart("c", [Series("", x, y, kind=kind)], **options)))
        return page.data("chart-data")[0]["data"][0], page.texts["p"]

    line, notes = drawn()
    assert len(line["x"]) == 333 and line["x"][-1] == 99_999
    lows, highs = zip(*line["customdata"], strict=True)
    assert (max(highs), min(lows)) == (9, -9)
    peak = highs.index(9)
    assert line["x"][peak - 1] < 54_321 <= line["x"][peak]
    assert line["y"][peak] == pytest.approx(1 + 8 / 300, abs=1e-3)
    assert notes == ["means and extremes of up to 301 steps"]
    assert set(drawn(stacked=True)[0]["y"]) > {1}

    points, _ = drawn(kind="points")
    assert len(points["x"]) <= 1000 and points["x"] == sorted(points["x"])
    assert {0, 54_321, 77_777, 99_999} <= set(points["x"])
    assert points["y"][-1] is None


@pytest.mark.full
def test_a_long_run_is_sampled_evenly_and_texts_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "FILES", 50)
    monkeypatch.setattr(rollouts, "PAGE_CHARACTERS", 100_000)
    run = made_runs.folder(tmp_path / "long")
    record = {"prompt": "p" * 9_000, "completion": "c" * 9_000, "completion_tokens": [1, 2], "reward": 1.0, "finish": "stop"}
    (run / "rollouts").mkdir()
    for step in range(1, 2001):
        (run / f"rollouts/step_{step:06d}.jsonl").write_text((json.dumps(record) + "\n") * 2)
    found = rollouts.read([run])

    assert len(found.steps[0, "step"]) == 50
    steps = [file["step"] for file in found.files]
    assert (len(steps), steps[0], steps[-1]) == (24, 1, 2000)
    assert max(b - a for a, b in itertools.pairwise(steps)) < 130
    assert found.notes == ["training: samples of 24 of 2000 steps"]
    assert len(rollouts.samples(found)) < 200_000
    assert "3,000 characters are left out here" in next(iter(found.prompts))


# ---- in a browser ---------------------------------------------------------------------------------------------------------


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVE = """
<script>window.addEventListener("load", () => setTimeout(() => {
  const click = (selector) => document.querySelector(selector).dispatchEvent(new MouseEvent("click", {bubbles: true}));
  click("button.run[data-run='1']");
  document.getElementById("log").click();
  const slider = document.getElementById("smoothing");
  slider.value = 0.5;
  slider.dispatchEvent(new Event("input"));
  document.querySelector("figure.chart details").open = true;
  const search = document.querySelector("input[type=search]");
  search.value = "nothing says this";
  search.dispatchEvent(new Event("input"));
  const key = (key) => document.querySelector(".plot").dispatchEvent(new KeyboardEvent("keydown", {key}));
  setTimeout(() => { key("ArrowRight"); key("ArrowRight"); }, 800);
}, 0));</script>
"""


def browse(path: Path) -> tuple[str, str]:
    """Return (the page's elements after its scripts ran, the console's output)."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}"]
    command += [
        "--enable-logging=stderr",
        "--window-size=1400,12000",
        "--virtual-time-budget=6000",
        "--dump-dom",
        f"file://{path}",
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout, "\n".join(line for line in answer.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="NO BROWSER HERE (chromium): the page's JavaScript is not run")
def test_the_scripts_draw_and_hostile_text_does_not_run(run, tmp_path):
    other = made_runs.folder(tmp_path / "two")
    made_runs.steps(other, 1, 3, Texts(HOSTILE, HOSTILE, "8", "9"), loss=0.25)
    path = tmp_path / "r.html"
    text = written(run, other, f"out={path}")

    dom, console = browse(path)
    assert console == ""
    figures = re.findall(r'<figure class="chart">.*?</figure>', dom, re.DOTALL)
    assert len(figures) == len(Page(text).charts())
    for each in figures:
        assert re.search(r'<path class="js-(line|fill)"|<g class="point"><path', each), each[:300]
        assert "NaN" not in each.split("</script>")[1] and "Infinity" not in each
    assert dom.count("<article>") == 10
    assert "<title>one · two</title>" in dom  # HOSTILE sets another one, if it runs
    assert "&lt;/script&gt;&lt;script&gt;document.title=" in dom

    # The same with everything used once: the policy forbids any script but the page's own, so it is taken away for this.
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(text)
    path.write_text(policy.sub("", text).replace("</body>", f"{DRIVE}</body>"))
    dom, console = browse(path)
    assert console == ""
    assert 'aria-pressed="false"' in dom
    loss = next(each for each in re.findall(r'<figure class="chart">.*?</figure>', dom, re.DOTALL) if "<h3>loss</h3>" in each)
    assert loss.count('class="js-line"') == 3  # of the one run that is left: smoothed, and faintly as it was; its restart
    assert '<span class="value" title="step 2">' in loss  # the cursor that the first chart has moved there
    assert "spikeline" in loss
    assert '<div class="data"' in dom and "<article>" not in dom and "none found" in dom

    # And the policy holds: a script that is put in does not run.
    path.write_text(text.replace("</body>", "<script>document.title = 'taken'</script></body>"))
    dom, console = browse(path)
    assert "<title>one · two</title>" in dom and "Content Security Policy" in console
