"""metrics.jsonl, TensorBoard and rollouts, and how a rerun continues them."""

import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.config import LoggerConfig
from pipeline.metrics import Metrics, mean_metrics, read, rollout_metrics
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Span, Turn


class Words:
    """Stands for a tokenizer: a token's text is its number."""

    def decode(self, tokens):
        return " ".join(str(int(token)) for token in tokens)


def group(*rewards):
    prompt = Prompt(7, np.array([1, 2], np.int32), "math", {"answer": "3"})
    lengths = range(1, len(rewards) + 1)
    return RolloutGroup(
        prompt,
        tuple(
            Rollout(
                (Turn(Completion(f"0/{i}", np.arange(n, dtype=np.int32), np.zeros(n, np.float32), (Span(5, n),), "length")),),
                r,
                {"accuracy": r},
            )
            for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
        ),
    )


def test_a_rerun_leaves_no_step_twice(tmp_path):
    metrics = Metrics(tmp_path, LoggerConfig(), after_step=None)
    for step in (1, 2, 3):
        metrics.log_rollouts(step, [group(1.0, 0.0)], Words())
        metrics.log(step, {"train/loss": float(step)})
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "train/lo')  # killed while writing
    metrics = Metrics(tmp_path, LoggerConfig(), after_step=1)
    assert [p.name for p in sorted((tmp_path / "rollouts").iterdir())] == ["step_000001.jsonl"]
    metrics.log(2, {"train/loss": 20.0})
    metrics.close()
    assert [(line["step"], line["train/loss"]) for line in read(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 20.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]


def test_a_rerun_without_a_checkpoint_begins_anew(tmp_path):
    for _ in range(2):
        metrics = Metrics(tmp_path, LoggerConfig(tensorboard_enabled=False), after_step=None)
        metrics.log(0, {"val/accuracy": 0.5})
        metrics.log_rollouts(0, [group(1.0)], Words(), kind="val")
        metrics.close()
    assert len(read(tmp_path / "metrics.jsonl")) == 1


def test_numbers_that_json_lacks_become_null(tmp_path):
    metrics = Metrics(tmp_path, LoggerConfig(tensorboard_enabled=False), after_step=None)
    metrics.log(1, {"a": math.nan, "b": -math.inf, "c": 1.5})
    metrics.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["a"], line["b"], line["c"]) == (None, None, 1.5)
    assert not (tmp_path / "tensorboard").exists()


def test_clocks_add_up_within_a_step(tmp_path):
    metrics = Metrics(tmp_path, LoggerConfig(tensorboard_enabled=False), after_step=None)
    for _ in range(2):
        with metrics.clock("refit"):
            pass
    assert list(metrics.take_clocks()) == ["time/refit"]
    assert metrics.take_clocks() == {}


def test_rollout_metrics_by_hand():
    values = rollout_metrics("train", [group(1.0, 0.0), group(0.0, 0.0, 1.0, 1.0)])
    assert values["train/reward"] == values["train/accuracy"] == pytest.approx(0.5)
    assert values["train/completion_tokens"] == pytest.approx(13 / 6)
    assert values["train/completion_tokens_max"] == 4
    assert values["train/truncated"] == 1.0


def test_updates_of_a_step_are_combined_by_name():
    values = mean_metrics(
        "train", [{"loss": 1.0, "ratio_max": 1.0, "ratio_min": 0.5}, {"loss": 3.0, "ratio_max": 2.0, "ratio_min": 0.7}]
    )
    assert values == {"train/loss": 2.0, "train/ratio_max": 2.0, "train/ratio_min": 0.5}


def test_num_rollouts_to_log(tmp_path):
    metrics = Metrics(tmp_path, LoggerConfig(tensorboard_enabled=False, num_rollouts_to_log=1), after_step=None)
    metrics.log_rollouts(1, [group(1.0, 0.0)], Words())
    metrics.close()
    (record,) = read(tmp_path / "rollouts" / "step_000001.jsonl")
    assert (record["prompt"], record["completion"], record["reward"], record["spans"]) == ("1 2", "0", 1.0, [[5, 1]])
