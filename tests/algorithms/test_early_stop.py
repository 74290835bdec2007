"""The early stop of a run: when it stops, what its state keeps, and which keys are refused."""

import json
import math

import pytest

from pipeline.algorithms.early_stop import EarlyStop, EarlyStopConfig, check_early_stop
from tests.problems import named, refused

METRIC, LOSS = "val/accuracy", "val/loss"


def stopped_after(values: list[float], restart: bool = False, **keys) -> int | None:
    """Return the number of validations before the stop; None if there is none. restart: save and load after each."""
    config = EarlyStopConfig(**{"stop_at_validation_metric": METRIC, **keys})
    stop = EarlyStop("grpo", config)
    for count, value in enumerate(values, 1):
        stop.record_validation({METRIC: value, LOSS: value, "val/reward": 0.0})
        if restart:
            state = json.loads(json.dumps(stop.state_dict()))
            stop = EarlyStop("grpo", config)
            stop.load_state_dict(state)
        if stop.reason:
            return count
    return None


CASES = [
    ([0.1, 0.3, 0.2, 0.3, 0.3, 0.9], {"stop_patience": 3}, 5),  # an equal value is no improvement
    ([0.1, 0.3, 0.2, 0.31, 0.2, 0.2, 0.2], {"stop_patience": 3}, 7),
    ([0.1, 0.14, 0.18, 0.2, 0.2], {"stop_patience": 3, "stop_min_delta": 0.09}, None),  # small gains add up from the best
    ([0.1, 0.14, 0.18, 0.2], {"stop_patience": 2, "stop_min_delta": 0.2}, 3),
    ([2.0, 1.0, 1.5, 1.2], {"stop_patience": 2, "stop_at_validation_metric": LOSS}, 4),
    ([math.nan, 0.5, math.nan, math.nan], {"stop_patience": 2}, 4),  # nan never improves
    ([math.nan, math.nan], {"stop_patience": 2}, 2),
    ([0.5, 0.4, 0.1], {"stop_patience": 2, "stop_at_validation_threshold": 0.6}, 3),
]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("values, keys, expected", CASES)
def test_stops_without_an_improvement(values, keys, expected, restart):
    assert stopped_after(values, restart, **keys) == expected


@pytest.mark.parametrize("restart", [False, True])
def test_stops_at_a_threshold(restart):
    assert stopped_after([0.1, 0.49, 0.5], restart, stop_at_validation_threshold=0.5) == 3
    assert stopped_after([math.nan, 0.4], restart, stop_at_validation_threshold=0.5) is None
    down = {"stop_at_validation_threshold": 1.0, "stop_at_validation_metric": LOSS}
    assert stopped_after([1.5, 1.01, 1.0, 0.1], restart, **down) == 3


def test_a_resumed_run_follows_the_recipe_that_it_has_now():
    old = EarlyStop("grpo", EarlyStopConfig(stop_at_validation_metric=METRIC, stop_patience=1))
    for value in (0.5, 0.4):
        old.record_validation({METRIC: value})
    assert old.reason
    for metric, patience, goes_on in (
        (METRIC, 2, True),
        ("val:accuracy", 1, False),
        ("val/reward", 1, True),
        (None, None, True),
    ):
        new = EarlyStop("grpo", EarlyStopConfig(stop_at_validation_metric=metric, stop_patience=patience))
        new.load_state_dict(old.state_dict())
        assert (new.reason is None) == goes_on


def test_a_state_of_the_other_direction_is_ignored():
    """An older version could save one."""
    stop = EarlyStop("grpo", EarlyStopConfig(METRIC, stop_patience=1))
    stop.load_state_dict({"metric": METRIC, "higher": False, "best": 0.1, "last": 0.2, "since": 1})
    assert stop.reason is None


def test_a_metric_that_validations_lack_is_named():
    stop = EarlyStop("sft", EarlyStopConfig(stop_at_validation_metric="val/accurcy", stop_patience=1))
    with refused(("sft.stop_at_validation_metric", "not-a-choice")):
        stop.record_validation({"val/loss": 1.0})


@pytest.mark.parametrize(
    "keys, validates, expected",
    [
        ({}, False, []),
        ({"stop_at_validation_metric": "val:loss", "stop_patience": 2}, True, []),
        ({"stop_patience": 2}, True, [("grpo.stop_patience", "has-no-effect")]),
        ({"stop_at_validation_metric": METRIC}, True, [("grpo.stop_at_validation_metric", "missing-value")]),
        (
            {"stop_at_validation_metric": METRIC, "stop_patience": 2},
            False,
            [("grpo.stop_at_validation_metric", "has-no-effect")],
        ),
        (
            {"stop_at_validation_metric": "train/loss", "stop_at_validation_threshold": 1.0, "stop_min_delta": 0.1},
            True,
            [("grpo.stop_at_validation_metric", "bad-format"), ("grpo.stop_min_delta", "has-no-effect")],
        ),
    ],
)
def test_keys_are_checked_before_submission(keys, validates, expected):
    assert named(check_early_stop("grpo", EarlyStopConfig(**keys), validates)) == set(expected)


def test_another_metric_begins_anew():
    """Keys of the early stop may change while the run goes on."""
    config = EarlyStopConfig(stop_at_validation_metric="val/loss", stop_patience=2)
    stop = EarlyStop("sft", config)
    for loss in (1.0, 2.0):
        stop.record_validation({"val/loss": loss, "val/accuracy": 0.5})
    config.stop_patience = 1
    assert stop.reason and "in 1 validations" in stop.reason
    config.stop_at_validation_metric = "val:accuracy"
    assert stop.reason is None and stop.state_dict()["best"] is None
    config.stop_at_validation_metric = None
    assert stop.metric == "" and stop.reason is None
