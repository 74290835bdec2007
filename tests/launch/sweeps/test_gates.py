"""Every kind of gate passes and fails when it should, and names the number that failed."""

import pytest

from launch.sweeps.expressions import Curve, NoValue, RunMeasurements, by_kind
from launch.sweeps.gates import (
    Baseline,
    GateCase,
    GateResult,
    GateSkipped,
    Provenance,
    StoredGate,
    StoredRun,
    Sweep,
    judge,
    read_baseline,
    stored_curve,
    write_baseline,
)
from launch.sweeps.suite import BandConfig, GateConfig, RunConfig, SameConfig, SpeedConfig, Suite
from tests.problems import refused

PASSED, FAILED, NOT_JUDGED = GateResult.PASSED, GateResult.FAILED, GateResult.NOT_JUDGED


def run(hardware="1 x abacus", **metrics):
    """Return metrics with one value per step; `__` stands for `/`."""
    curves = {name.replace("__", "/"): Curve(range(1, len(values) + 1), values) for name, values in metrics.items()}
    return RunMeasurements(curves, hardware)


def sweep(gate, runs, stored=None, hardware="1 x abacus", **suite):
    """Return a suite with one gate `g` of the run `a`. runs: name -> its metrics, by seed from 1 on."""
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
    return StoredGate(value, relative_to, {str(seed): number for seed, number in enumerate(values, 1)})


# ---- bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "values", "outcome"),
    [
        ({"at_least": 1}, (1.0, 2.0), PASSED),
        ({"at_least": 1}, (1.0, 0.999), FAILED),
        ({"at_most": 1}, (1.0, 0.5), PASSED),
        ({"at_most": 1}, (1.001, 0.5), FAILED),
        ({"at_least": 1, "at_most": 2}, (1.0, 2.1), FAILED),
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
    found = verdict(GateConfig("last(loss)", **bounds), losses(*values))
    assert found.outcome is outcome and found.values == dict(enumerate(values, 1))
    assert outcome is PASSED or "over" in bounds or found.message.startswith("seed ")


# ---- bands ----------------------------------------------------------------------------------------------------------------

BASE = stored(1.0, 2.0, 3.0)  # mean 2, standard deviation 1


def band(over=None, **keys):
    return GateConfig("last(loss)", over, band=BandConfig(**keys))


@pytest.mark.parametrize(
    ("gate", "mean", "outcome"),
    [
        (band(better="higher"), -0.99, PASSED),
        (band(better="higher"), -1.01, FAILED),
        (band(better="higher"), 99.0, PASSED),
        (band(better="lower"), 4.99, PASSED),
        (band(better="lower"), 5.01, FAILED),
        (band(), 4.99, PASSED),
        (band(), 5.01, FAILED),
        (band(), -1.01, FAILED),
    ],
)
def test_a_band_over_the_mean_of_the_seeds(gate, mean, outcome):
    assert verdict(gate, losses(mean - 5, mean, mean + 5), BASE).outcome is outcome


@pytest.mark.parametrize(
    ("floor", "value", "outcome"),
    [(0.1, 2.19, PASSED), (0.1, 2.21, FAILED), (0.1, 1.79, FAILED), (0.0, 2.0, PASSED), (0.0, 2.0000001, FAILED)],
)
def test_a_band_has_a_minimum_width(floor, value, outcome):
    assert verdict(band(spreads=2, floor=floor), losses(value, value), stored(2.0, 2.0, 2.0)).outcome is outcome


@pytest.mark.parametrize(
    ("gate", "values", "outcome", "said"),
    [
        (band("each", better="lower"), (4.9, 4.9), PASSED, ""),
        (band("each", better="lower"), (0.0, 5.1), FAILED, "seed 2: 5.1; expected at most 5 (baseline 2, band 3)"),
        (band(spreads=1, better="lower"), (0.9, 0.9), PASSED, "better than the whole band: try update_baseline=true"),
        (band(spreads=1, better="lower"), (1.1, 1.1), PASSED, "(baseline 2, band 1)"),
    ],
)
def test_a_bands_message_names_its_bounds(gate, values, outcome, said):
    found = verdict(gate, losses(*values), BASE)
    assert found.outcome is outcome and said in found.message


# ---- speeds ---------------------------------------------------------------------------------------------------------------


def speed(**keys):
    return GateConfig("last(loss)", speed=SpeedConfig(**keys))


AT_MOST = speed(at_most=1.25)


@pytest.mark.parametrize(
    ("gate", "values", "outcome", "said"),
    [
        (AT_MOST, (2.5, 0.1, 9.0), PASSED, ""),  # the median of the seeds
        (AT_MOST, (2.51, 0.1, 9.0), FAILED, ""),
        (AT_MOST, (3, 3, 3), FAILED, "3, median of the seeds; 1.5 times the baseline's 2; expected at most 1.25 times"),
        (speed(at_least=0.8), (1.6, 0.1, 9.0), PASSED, ""),
        (speed(at_least=0.8), (1.59, 0.1, 9.0), FAILED, ""),
    ],
)
def test_a_speed_is_a_ratio_to_the_baseline(gate, values, outcome, said):
    found = verdict(gate, losses(*values), BASE)
    assert found.outcome is outcome and said in found.message


@pytest.mark.parametrize(
    ("of_seeds", "of_baseline", "said"),
    [
        (("1 x abacus",) * 3, "2 x abacus", "ran on 1 x abacus; expected the baseline's hardware: 2 x abacus"),
        (("1 x abacus",) * 3, None, "ran on 1 x abacus; expected the baseline's hardware: unknown"),
        (("1 x abacus", "1 x slide rule"), "1 x abacus", "the seeds ran on different hardware: 1 x abacus | 1 x slide rule"),
        (("1 x abacus", None), "1 x abacus", "a run did not record its hardware"),
    ],
)
@pytest.mark.parametrize("value", [0.1, 99.0])
def test_a_speed_is_not_judged_on_other_or_unknown_hardware(of_seeds, of_baseline, said, value):
    found = verdict(AT_MOST, {"a": [run(kind, loss=[value]) for kind in of_seeds]}, BASE, hardware=of_baseline)
    assert found.outcome is NOT_JUDGED and found.message.startswith(said)


@pytest.mark.parametrize(("slower", "outcome"), [(1.2, PASSED), (1.5, FAILED)])
def test_a_speed_relative_to_another_run_is_judged_on_any_hardware(slower, outcome):
    of_a = [run("other", loss=[3.0 * slower * machine]) for machine in (1.0, 7.0)]
    runs = {"a": of_a, "b": [run("other", loss=[1.0 * machine]) for machine in (1.0, 7.0)]}
    found = verdict(speed(at_most=1.25, relative_to="b"), runs, stored(3.0, 3.0, relative_to="b"))
    assert found.outcome is outcome
    assert found.values == pytest.approx({1: 3.0 * slower, 2: 3.0 * slower})
    assert f"{slower:.3g} times the baseline's 3, both relative to b" in found.message


def test_a_speed_has_no_ratio_to_nothing():
    assert "is 0; expected a positive number" in verdict(AT_MOST, losses(1.0), stored(0.0)).message
    gate = speed(at_most=1.25, relative_to="b")
    found = verdict(gate, {"a": [run(loss=[1.0])], "b": [run(loss=[0.0])]}, stored(1.0, relative_to="b"))
    assert found.outcome is FAILED and "last(loss) of b is 0" in found.message


# ---- bitwise --------------------------------------------------------------------------------------------------------------

SAME = GateConfig(same_as=SameConfig("b"))


def test_two_runs_are_compared_bit_for_bit():
    one = run(train__loss=[1.0, 0.1 + 0.2], time__step=[1.0, 2.0], throughput__x=[1.0, 1.0])
    two = run(train__loss=[1.0, 0.1 + 0.2], time__step=[3.0, 4.0], throughput__x=[2.0, 2.0])
    found = verdict(SAME, {"a": [one], "b": [two]})
    assert found.outcome is PASSED and found.message == "2 values are bitwise equal to the values of b"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"train__loss": [1.0, 0.3]}, "seed 1: train/loss is 0.30000000000000004 at step 2, and 0.3 in b"),
        ({"train__loss": [1.0]}, "seed 1: train/loss is 0.30000000000000004 at step 2, and missing in b"),
        ({"train__loss": [1.0, None]}, "seed 1: train/loss is 0.30000000000000004 at step 2, and None in b"),
        ({"train__los": [1.0, 0.3]}, "seed 1: only one of a and b has train/los"),
    ],
)
def test_the_first_difference_is_named(other, said):
    found = verdict(SAME, {"a": [run(train__loss=[1.0, 0.1 + 0.2])], "b": [run(**other)]})
    assert (found.outcome, found.message) == (FAILED, said)


def test_selected_metrics_are_compared_bit_for_bit():
    runs = {"a": [run(train__loss=[1.0], refit__bytes=[1.0])], "b": [run(train__loss=[1.0], refit__bytes=[2.0])]}
    assert verdict(SAME, runs).outcome is FAILED
    assert verdict(GateConfig(same_as=SameConfig("b", ["train/*", "val/*"])), runs).outcome is PASSED
    found = verdict(GateConfig(same_as=SameConfig("b", ["vla/*"])), runs)
    assert (found.outcome, found.message) == (FAILED, "seed 1 has no metric that matches vla/*")


# ---- missing metrics and baselines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"loss": [9.0, 1.0]}, "metrics.jsonl has no los; did you mean loss?"),
        ({"los": [1.0, None]}, "los is not a finite number at step 2"),
    ],
    ids=["absent", "NaN"],
)
@pytest.mark.parametrize(
    "wanted",
    [{"at_most": 1e9}, {"equals": 0}, {"band": BandConfig(spreads=1e9)}, {"speed": SpeedConfig(at_most=1e9)}],
    ids=["bound", "equals", "band", "speed"],
)
def test_a_missing_metric_fails_the_gate_by_name(wanted, measured, said):
    found = verdict(GateConfig("last(los)", **wanted), {"a": [run(**measured)]}, stored(1.0, value="last(los)"))
    assert (found.outcome, found.message) == (FAILED, f"last(los) of a has no value with seed 1: {said}")


@pytest.mark.parametrize("gate", [band(), AT_MOST], ids=["band", "speed"])
@pytest.mark.parametrize(
    ("before", "said"),
    [
        (None, "there is no baseline yet; update_baseline=true writes it"),
        (StoredGate("last(loss)"), "the baseline does not have this gate"),
        (stored(1.0, value="mean(loss)"), "the baseline stores mean(loss); expected last(loss)"),
        (stored(1.0, relative_to="b"), "the baseline is relative to b; expected absolute"),
    ],
)
def test_a_metric_missing_from_the_baseline_fails_the_gate(gate, before, said):
    found = verdict(gate, losses(1.0), before)
    assert found.outcome is FAILED and said in found.message


@pytest.mark.parametrize("gate", [GateConfig("last(loss)", at_most=9), SAME], ids=["bound", "same_as"])
def test_an_unfinished_seed_leaves_the_gate_unjudged(gate):
    whole = sweep(gate, {**losses(1.0, 1.0), "b": losses(1.0, 1.0)["a"]})
    del whole.runs["a"][2]
    (found,) = judge(whole)
    assert (found.outcome, found.message) == (NOT_JUDGED, "a did not complete with seed 2")


# ---- the baseline ---------------------------------------------------------------------------------------------------------


def test_a_baseline_survives_a_round_trip(tmp_path):
    curve = stored_curve([Curve([1, 2], [1.0, 2.0]), Curve([1, 2, 3], [3.0, None, 5.0])])
    assert (curve.steps, curve.mean) == ([1, 2, 3], [2.0, 2.0, 5.0])
    assert curve.spread == pytest.approx([2**0.5, 0, 0], rel=1e-3)
    runs = {name: StoredRun("1 x abacus", ["a.b=1"], {"g g": stored(0.1 + 0.2, 1e-9)}, {"x/y": curve}) for name in ("b", "a")}
    baseline = Baseline(Provenance("s 1", "2026-01-01", "abc", True), runs)
    write_baseline(baseline, path := tmp_path / "new/base.yaml")
    assert read_baseline(path) == baseline
    text = path.read_text()
    assert text.startswith("# Written by") and text.index("  a:") < text.index("  b:")
    write_baseline(read_baseline(path), path)
    assert path.read_text() == text
    assert read_baseline(tmp_path / "none.yaml") is None


def test_a_file_that_is_not_a_baseline_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("runs: {a: {gatez: {}, hardware: 3}}\nprovenance: {sweep: s}\n")
    with refused(("runs.a.gatez", "unknown-key"), ("provenance.date", "missing-value")):
        read_baseline(tmp_path / "x.yaml")


def test_a_stored_curve_is_thinned_and_keeps_both_ends():
    curve = stored_curve([Curve(range(1000), [float(i) for i in range(1000)])])
    assert len(curve.steps) == 40 and curve.steps[0] == 0 and curve.steps[-1] == 999


def test_a_gate_stores_the_metrics_that_it_judges():
    gate = speed(at_most=1.25, relative_to="b")
    found = sweep(gate, {**losses(3.0, 6.0), "b": losses(1.0, 4.0)["a"]})
    assert GateCase(found, "a", "g", gate).to_store() == StoredGate("last(loss)", "b", {"1": 3.0, "2": 1.5})
    with pytest.raises(NoValue):
        GateCase(found, "a", "g", GateConfig("last(x)", band=BandConfig())).to_store()
    with pytest.raises(GateSkipped):
        GateCase(sweep(gate, {**losses(3.0), "b": []}), "a", "g", gate).to_store()


def test_hardware_is_named_by_kind_and_count():
    h100 = [{"name": "NVIDIA H100 80GB HBM3"}] * 8
    assert by_kind([{"gpus": h100}, {"gpus": h100}]) == "2 x (8 x NVIDIA H100 80GB HBM3)"
    assert by_kind([{"gpus": h100}, {"gpus": [], "cpu": "4 x abacus"}]) == "4 x abacus; 8 x NVIDIA H100 80GB HBM3"
    assert by_kind([{"gpus": h100}, {"gpus": []}]) is None
    assert by_kind([]) is None


def test_a_failed_band_names_its_first_failing_step():
    gate = band(spreads=2, floor=0.1, better="lower")
    found = sweep(gate, {"a": [run(loss=[9.0, 1.0, 2.1, 3.1]), run(loss=[9.0, 1.0, 2.3, 3.3])]}, stored(1.0, 1.0))
    curve = stored_curve([Curve([1, 2, 3, 4], [4.0, 1.0, 1.0, 1.0])] * 2)
    found.baseline.runs["a"].curves["loss"] = curve
    (told,) = judge(found)
    assert told.message.endswith("expected at most 1.2 (baseline 1, band 0.2); outside the baseline's curve from step 3 on")
    found.baseline.runs["a"].curves.clear()
    assert judge(found)[0].message.endswith("(baseline 1, band 0.2)")
