"""Every kind of gate passes what it should and fails what it should, and says which number it did not like."""

import pytest

from launch.sweeps.baseline import Baseline, Provenance, Stored, StoredRun, read, stored_curve, write
from launch.sweeps.expressions import Curve, NoValue
from launch.sweeps.gates import Case, NotJudged, Outcome, Sweep, judge
from launch.sweeps.measured import Measured, described
from launch.sweeps.suite import BandConfig, GateConfig, RunConfig, SameConfig, SpeedConfig, Suite
from tests.problems import refused

PASSED, FAILED, NOT_JUDGED = Outcome.PASSED, Outcome.FAILED, Outcome.NOT_JUDGED


def run(hardware="1 x abacus", **metrics):
    """One value per step and metric; `__` stands for `/`."""
    curves = {name.replace("__", "/"): Curve(range(1, len(values) + 1), values) for name, values in metrics.items()}
    return Measured(curves, hardware)


def sweep(gate, runs, stored=None, hardware="1 x abacus", **suite):
    """A suite of one gate `g` of the run `a`; runs: name -> what it measured, by seed from 1 on."""
    found = {name: dict(enumerate(measured, 1)) for name, measured in runs.items()}
    seeds = [*range(1, len(runs["a"]) + 1)]
    configs = {name: RunConfig(gates={"g": gate} if name == "a" else {}) for name in runs}
    before = stored and Baseline(Provenance("s", "2026-01-01"), {"a": StoredRun(hardware, gates={"g": stored})})
    return Sweep(Suite("s", seeds, runs=configs, **suite), found, before)


def verdict(*arguments, **keywords):
    (found,) = judge(sweep(*arguments, **keywords))
    return found


def losses(*values):
    return {"a": [run(loss=[9.0, value]) for value in values]}


def stored(*values, value="last(loss)", relative_to=None):
    return Stored(value, relative_to, {str(seed): number for seed, number in enumerate(values, 1)})


# ---- bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "values", "outcome"),
    [
        ({"at_least": 1}, (1.0, 2.0), PASSED),
        ({"at_least": 1}, (1.0, 0.999), FAILED),
        ({"at_most": 1}, (1.0, 0.5), PASSED),
        ({"at_most": 1}, (1.001, 0.5), FAILED),
        ({"at_least": 1, "at_most": 2}, (1.0, 2.0), PASSED),
        ({"at_least": 1, "at_most": 2}, (1.0, 2.1), FAILED),
        ({"at_least": 1, "at_most": 2}, (0.9, 2.0), FAILED),
        ({"equals": 0}, (0.0, 0.0), PASSED),
        ({"equals": 0}, (0.0, 1e-30), FAILED),
        ({"at_least": 1, "over": "mean"}, (0.5, 1.5), PASSED),
        ({"at_least": 1, "over": "mean"}, (0.5, 1.4), FAILED),
        ({"at_least": 1, "over": "median"}, (0.0, 1.0, 1.0), PASSED),
        ({"at_least": 1, "over": "median"}, (0.0, 0.0, 9.0), FAILED),
        ({"at_most": 1, "over": "min"}, (1.0, 9.0), PASSED),
        ({"at_most": 1, "over": "max"}, (1.0, 9.0), FAILED),
    ],
)
def test_bounds(bounds, values, outcome):
    assert verdict(GateConfig("last(loss)", **bounds), losses(*values)).outcome is outcome


def test_the_seed_that_fails_is_told_with_what_was_wanted():
    found = verdict(GateConfig("last(loss)", at_most=1), losses(0.5, 3.25))
    assert found.said == "seed 2: 3.25; wanted: at most 1"
    assert found.values == {1: 0.5, 2: 3.25}


# ---- bands ----------------------------------------------------------------------------------------------------------------

BASE = stored(1.0, 2.0, 3.0)  # mean 2, standard deviation 1


@pytest.mark.parametrize(
    ("better", "mean", "outcome"),
    [
        ("higher", 2.0, PASSED),
        ("higher", -0.99, PASSED),
        ("higher", -1.01, FAILED),
        ("higher", 99.0, PASSED),
        ("lower", 4.99, PASSED),
        ("lower", 5.01, FAILED),
        ("lower", -99.0, PASSED),
        ("neither", 4.99, PASSED),
        ("neither", 5.01, FAILED),
        ("neither", -1.01, FAILED),
    ],
)
def test_a_band_over_the_mean_of_the_seeds(better, mean, outcome):
    gate = GateConfig("last(loss)", band=BandConfig(spreads=3, better=better))
    assert verdict(gate, losses(mean - 5, mean, mean + 5), BASE).outcome is outcome


def test_a_band_has_a_least_width():
    same = stored(2.0, 2.0, 2.0)
    narrow, wide = (GateConfig("last(loss)", band=BandConfig(spreads=2, floor=floor)) for floor in (0.0, 0.1))
    for value, outcome in ((2.19, PASSED), (2.21, FAILED), (1.79, FAILED)):
        assert verdict(wide, losses(value, value), same).outcome is outcome
    assert verdict(narrow, losses(2.0, 2.0), same).outcome is PASSED
    assert verdict(narrow, losses(2.0, 2.0000001), same).outcome is FAILED


def test_a_band_for_each_seed():
    gate = GateConfig("last(loss)", over="each", band=BandConfig(spreads=3, better="lower"))
    assert verdict(gate, losses(4.9, 4.9), BASE).outcome is PASSED
    found = verdict(gate, losses(0.0, 5.1), BASE)
    assert found.outcome is FAILED and found.said == "seed 2: 5.1; wanted: at most 5 (baseline 2, band 3)"


def test_what_is_better_than_the_whole_band_is_told():
    gate = GateConfig("last(loss)", band=BandConfig(spreads=1, better="lower"))
    assert "update_baseline=true?" in verdict(gate, losses(0.9, 0.9), BASE).said
    assert "update_baseline" not in verdict(gate, losses(1.1, 1.1), BASE).said


# ---- speeds ---------------------------------------------------------------------------------------------------------------

AT_MOST = GateConfig("last(loss)", speed=SpeedConfig(at_most=1.25))
AT_LEAST = GateConfig("last(loss)", speed=SpeedConfig(at_least=0.8))


@pytest.mark.parametrize(
    ("gate", "values", "outcome"),
    [
        (AT_MOST, (2.5, 0.1, 9.0), PASSED),  # the median of the seeds
        (AT_MOST, (2.51, 0.1, 9.0), FAILED),
        (AT_LEAST, (1.6, 0.1, 9.0), PASSED),
        (AT_LEAST, (1.59, 0.1, 9.0), FAILED),
    ],
)
def test_a_speed_is_a_ratio_to_the_baseline(gate, values, outcome):
    assert verdict(gate, losses(*values), BASE).outcome is outcome


def test_a_speed_says_the_ratio():
    found = verdict(AT_MOST, losses(3.0, 3.0, 3.0), BASE)
    assert found.outcome is FAILED
    assert found.said == "3, median of the seeds; 1.5 times the baseline's 2; wanted: at most 1.25 times"


@pytest.mark.parametrize("hardware", ["2 x abacus", None])
@pytest.mark.parametrize("value", [0.1, 99.0])
def test_a_speed_on_other_hardware_is_not_judged_and_says_so(hardware, value):
    found = verdict(AT_MOST, losses(value, value, value), BASE, hardware=hardware)
    assert found.outcome is NOT_JUDGED
    assert found.said.startswith("other hardware than the baseline's: 1 x abacus, and then ")


def test_a_speed_is_not_judged_where_the_runs_do_not_agree_on_the_hardware():
    mixed = {"a": [run("1 x abacus", loss=[2.0]), run("1 x slide rule", loss=[2.0])]}
    assert "different hardware: 1 x abacus | 1 x slide rule" in verdict(AT_MOST, mixed, BASE).said
    silent = {"a": [run("1 x abacus", loss=[2.0]), run(None, loss=[2.0])]}
    found = verdict(AT_MOST, silent, BASE)
    assert found.outcome is NOT_JUDGED and "not every run says which hardware" in found.said


@pytest.mark.parametrize(("slower", "outcome"), [(1.2, PASSED), (1.5, FAILED)])
def test_a_speed_relative_to_another_run_is_judged_on_any_hardware(slower, outcome):
    gate = GateConfig("last(loss)", speed=SpeedConfig(at_most=1.25, relative_to="b"))
    of_a = [run("other", loss=[3.0 * slower * machine]) for machine in (1.0, 7.0)]
    runs = {"a": of_a, "b": [run("other", loss=[1.0 * machine]) for machine in (1.0, 7.0)]}
    found = verdict(gate, runs, stored(3.0, 3.0, relative_to="b"))
    assert found.outcome is outcome
    assert found.values == pytest.approx({1: 3.0 * slower, 2: 3.0 * slower})
    assert f"{slower:.3g} times the baseline's 3, both relative to b" in found.said


def test_a_speed_has_no_ratio_to_nothing():
    assert "is 0, of which there is no ratio" in verdict(AT_MOST, losses(1.0), stored(0.0)).said
    gate = GateConfig("last(loss)", speed=SpeedConfig(at_most=1.25, relative_to="b"))
    found = verdict(gate, {"a": [run(loss=[1.0])], "b": [run(loss=[0.0])]}, stored(1.0, relative_to="b"))
    assert found.outcome is FAILED and "last(loss) of b is 0" in found.said


# ---- to the last bit ------------------------------------------------------------------------------------------------------

SAME = GateConfig(same_as=SameConfig("b"))


def test_two_runs_to_the_last_bit():
    one = run(train__loss=[1.0, 0.1 + 0.2], time__step=[1.0, 2.0], throughput__x=[1.0, 1.0])
    two = run(train__loss=[1.0, 0.1 + 0.2], time__step=[3.0, 4.0], throughput__x=[2.0, 2.0])
    found = verdict(SAME, {"a": [one], "b": [two]})
    assert found.outcome is PASSED and found.said == "2 values are the same as in b, to the last bit"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"train__loss": [1.0, 0.3]}, "seed 1: train/loss is 0.30000000000000004 at step 2, and 0.3 in b"),
        ({"train__loss": [1.0]}, "seed 1: train/loss is 0.30000000000000004 at step 2, and not there in b"),
        ({"train__loss": [1.0, None]}, "seed 1: train/loss is 0.30000000000000004 at step 2, and None in b"),
        ({"train__los": [1.0, 0.3]}, "seed 1: train/los is in one of a and b only"),
    ],
)
def test_the_first_bit_that_differs_is_told(other, said):
    found = verdict(SAME, {"a": [run(train__loss=[1.0, 0.1 + 0.2])], "b": [run(**other)]})
    assert (found.outcome, found.said) == (FAILED, said)


def test_only_some_metrics_to_the_last_bit():
    runs = {"a": [run(train__loss=[1.0], refit__bytes=[1.0])], "b": [run(train__loss=[1.0], refit__bytes=[2.0])]}
    assert verdict(SAME, runs).outcome is FAILED
    assert verdict(GateConfig(same_as=SameConfig("b", ["train/*", "val/*"])), runs).outcome is PASSED
    found = verdict(GateConfig(same_as=SameConfig("b", ["vla/*"])), runs)
    assert (found.outcome, found.said) == (FAILED, "seed 1 has no metric like vla/*")


# ---- nothing passes for want of something -----------------------------------------------------------------------------------

KINDS = [
    GateConfig("last(los)", at_most=1e9),
    GateConfig("last(los)", equals=0),
    GateConfig("last(los)", band=BandConfig(spreads=1e9)),
    GateConfig("last(los)", speed=SpeedConfig(at_most=1e9)),
]


@pytest.mark.parametrize("gate", KINDS, ids=["bound", "equals", "band", "speed"])
def test_a_metric_that_is_not_there_fails_the_gate_by_name(gate):
    found = verdict(gate, losses(1.0), stored(1.0, value="last(los)"))
    assert found.outcome is FAILED
    assert found.said == "last(los) of a has no value with seed 1: there is no los in metrics.jsonl; the nearest is loss"


@pytest.mark.parametrize("gate", KINDS, ids=["bound", "equals", "band", "speed"])
def test_a_nan_fails_the_gate_by_name(gate):
    found = verdict(gate, {"a": [run(los=[1.0, None])]}, stored(1.0, value="last(los)"))
    assert found.outcome is FAILED and "los is not a finite number at step 2" in found.said


@pytest.mark.parametrize("gate", [GateConfig("last(loss)", band=BandConfig()), AT_MOST], ids=["band", "speed"])
@pytest.mark.parametrize(
    ("before", "said"),
    [
        (None, "there is no baseline yet; update_baseline=true writes it"),
        (Stored("last(loss)"), "the baseline does not have this gate"),
        (stored(1.0, value="mean(loss)"), "the baseline is of mean(loss), and the gate of last(loss)"),
        (stored(1.0, relative_to="b"), "the baseline is relative to b, and the gate absolute"),
    ],
)
def test_what_the_baseline_lacks_fails_the_gate(gate, before, said):
    found = verdict(gate, losses(1.0), before)
    assert found.outcome is FAILED and said in found.said


@pytest.mark.parametrize("gate", [GateConfig("last(loss)", at_most=9), SAME], ids=["bound", "same_as"])
def test_a_seed_that_did_not_come_to_its_end_leaves_the_gate_unjudged(gate):
    whole = sweep(gate, {**losses(1.0, 1.0), "b": losses(1.0, 1.0)["a"]})
    del whole.runs["a"][2]
    (found,) = judge(whole)
    assert (found.outcome, found.said) == (NOT_JUDGED, "a did not come to its end with seed 2")


# ---- the baseline ---------------------------------------------------------------------------------------------------------


def test_a_baseline_is_read_as_it_was_written(tmp_path):
    curve = stored_curve([Curve([1, 2], [1.0, 2.0]), Curve([1, 2, 3], [3.0, None, 5.0])])
    assert (curve.steps, curve.mean) == ([1, 2, 3], [2.0, 2.0, 5.0])
    assert curve.spread == pytest.approx([2**0.5, 0, 0], rel=1e-3)
    runs = {name: StoredRun("1 x abacus", ["a.b=1"], {"g g": stored(0.1 + 0.2, 1e-9)}, {"x/y": curve}) for name in ("b", "a")}
    baseline = Baseline(Provenance("s 1", "2026-01-01", "abc", True), runs)
    write(baseline, path := tmp_path / "new/base.yaml")
    assert read(path) == baseline
    text = path.read_text()
    assert text.startswith("# Written by") and text.index("  a:") < text.index("  b:")
    write(read(path), path)
    assert path.read_text() == text
    assert read(tmp_path / "none.yaml") is None


def test_a_file_that_is_no_baseline_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("runs: {a: {gatez: {}, hardware: 3}}\nprovenance: {sweep: s}\n")
    with refused(("runs.a.gatez", "unknown-key"), ("provenance.date", "missing-value")):
        read(tmp_path / "x.yaml")


def test_a_stored_curve_is_thinned_and_keeps_both_ends():
    curve = stored_curve([Curve(range(1000), [float(i) for i in range(1000)])])
    assert len(curve.steps) == 40 and curve.steps[0] == 0 and curve.steps[-1] == 999


def test_what_a_gate_stores_is_what_it_judges():
    gate = GateConfig("last(loss)", speed=SpeedConfig(at_most=1.25, relative_to="b"))
    found = sweep(gate, {**losses(3.0, 6.0), "b": losses(1.0, 4.0)["a"]})
    assert Case(found, "a", "g", gate).to_store() == Stored("last(loss)", "b", {"1": 3.0, "2": 1.5})
    with pytest.raises(NoValue):
        Case(found, "a", "g", GateConfig("last(x)", band=BandConfig())).to_store()
    with pytest.raises(NotJudged):
        Case(sweep(gate, {**losses(3.0), "b": []}), "a", "g", gate).to_store()


def test_hardware_is_told_by_kind_and_count():
    h100 = [{"name": "NVIDIA H100 80GB HBM3"}] * 8
    assert described([{"gpus": h100}, {"gpus": h100}]) == "2 x (8 x NVIDIA H100 80GB HBM3)"
    assert described([{"gpus": h100}, {"gpus": [], "cpu": "4 x abacus"}]) == "4 x abacus; 8 x NVIDIA H100 80GB HBM3"
    assert described([{"gpus": h100}, {"gpus": []}]) is None
    assert described([]) is None


def test_a_band_that_fails_says_since_when():
    gate = GateConfig("last(loss)", band=BandConfig(spreads=2, floor=0.1, better="lower"))
    found = sweep(gate, {"a": [run(loss=[9.0, 1.0, 2.1, 3.1]), run(loss=[9.0, 1.0, 2.3, 3.3])]}, stored(1.0, 1.0))
    curve = stored_curve([Curve([1, 2, 3, 4], [4.0, 1.0, 1.0, 1.0])] * 2)
    found.baseline.runs["a"].curves["loss"] = curve
    (told,) = judge(found)
    assert told.said.endswith("wanted: at most 1.2 (baseline 1, band 0.2); out of the baseline's curve from step 3 on")
    found.baseline.runs["a"].curves.clear()
    assert judge(found)[0].said.endswith("(baseline 1, band 0.2)")
