"""metrics.jsonl, TensorBoard and rollouts, and how a restart continues them."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.config import LoggerConfig
from pipeline.observe.metrics import Metrics, Reader, read, read_rollouts
from pipeline.observe.rollout_metrics import is_right, mean_metrics, pass_at_k, rollout_metrics, validation_metrics
from pipeline.types import NOTHING_SAID, Completion, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from tests.problems import refused


class Words:
    """Stands in for a tokenizer: a token's text is its number."""

    def decode(self, tokens):
        return " ".join(str(int(token)) for token in tokens)


def group(*rewards):
    prompt = Prompt(7, np.array([1, 2], np.int32), "math", {"answer": "3"})
    lengths = range(1, len(rewards) + 1)
    return RolloutGroup(
        prompt,
        tuple(
            Rollout(
                (
                    Turn(
                        Completion(
                            f"0/{i}", np.arange(n, dtype=np.int32), np.zeros(n, np.float32), (VersionSpan(5, n),), "length"
                        )
                    ),
                ),
                r,
                {"accuracy": r},
            )
            for i, (n, r) in enumerate(zip(lengths, rewards, strict=True))
        ),
    )


def test_a_restart_leaves_no_step_twice(tmp_path):
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


def test_a_reader_returns_each_step_once_while_a_run_writes_and_restarts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = Reader(path)

    def new() -> list[int]:
        return [line["step"] for line in reader.lines()]

    def text(*steps: tuple[int, float]) -> str:
        return "".join(json.dumps({"step": step, "time": time}) + "\n" for step, time in steps)

    assert new() == []
    path.write_text(text((1, 1.0), (2, 2.0)) + '{"step": 3, "ti')
    assert new() == [1, 2] and new() == []
    with open(path, "a") as file:
        file.write('me": 3.0}\n')
    assert new() == [3]
    (tmp_path / "anew").write_text(text((1, 1.0), (2, 9.0)))  # continued from step 1
    (tmp_path / "anew").replace(path)
    assert new() == [2]
    assert [line["step"] for line in Reader(path).lines()] == [1, 2]


@pytest.mark.parametrize("width", [0, 5000], ids=["short", "longer than the first"])
@pytest.mark.parametrize("steps", [20, 3000, 9000])
def test_a_reader_starts_at_one_of_the_last_steps(tmp_path, steps, width):
    """Resources make later lines longer than the first ones."""
    path = tmp_path / "metrics.jsonl"
    of = [{"step": step, "time": float(step), "x" * (width if step > 4 else 1): None} for step in range(4000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in of) + '{"step": 4000, "ti')
    assert [line["step"] for line in Reader(path, steps).lines()] == list(range(4000))[-steps:]


STEP = '{"step": 1, "time": 1.0, "val/accuracy": %s}'


@pytest.mark.parametrize(
    "line",
    ["not JSON", "[]", '{"step": 1}', "\x00\x00", *(STEP % value for value in ("[1]", '"high"', "true", "1" + "0" * 400))],
)
def test_a_line_that_is_not_a_step_is_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with refused(("run", "unreadable")):
        read(tmp_path / "metrics.jsonl")


def test_a_restart_without_a_checkpoint_starts_over(tmp_path):
    for _ in range(2):
        metrics = Metrics(tmp_path, LoggerConfig(tensorboard_enabled=False), after_step=None)
        metrics.log(0, {"val/accuracy": 0.5})
        metrics.log_rollouts(0, [group(1.0)], Words(), kind="val")
        metrics.close()
    assert len(read(tmp_path / "metrics.jsonl")) == 1


def test_non_finite_numbers_become_null(tmp_path):
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


def test_rollout_metrics_equal_hand_computed_ones():
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
    (record,) = read_rollouts(tmp_path / "rollouts" / "step_000001.jsonl")
    assert (record["prompt"], record["completion"], record["reward"], record["spans"]) == ("1 2", "0", 1.0, [[5, 1]])


# ---- episodes and validation -----------------------------------------------------------------------------------------------


def told(said, observation):
    completion = Completion(
        "0/0", np.array(said, np.int32), np.zeros(len(said), np.float32), (VersionSpan(5, len(said)),), "stop"
    )
    return Turn(completion, np.array(observation, np.int32))


def test_episode_metrics_equal_hand_computed_ones():
    """The means are over the two judged episodes; values of the other two are ignored."""
    flawed = replace(told([1, 2, 3], [9] * 50), malformed=True)
    episode = Rollout((flawed, told([4], [])), 1.0, {"accuracy": 1.0})
    single = Rollout((told([1, 2], []),), 0.0, {"accuracy": 0.0})
    failed = Rollout((told([1] * 9, [9]), told([1], [9]), told([1], [])), 7.0, {"accuracy": 7.0}, failure="it hung")
    values = rollout_metrics(
        "train", [RolloutGroup(group(0.0).prompt, (episode, single, failed, replace(failed, failure=NOTHING_SAID)))]
    )
    assert values == {
        "train/reward": 0.5,
        "train/broke_judge": 0.0,
        "train/accuracy": 0.5,
        "train/completion_tokens": 3.0,
        "train/completion_tokens_max": 4.0,
        "train/truncated": 0.0,
        "train/turns": 1.5,
        "train/turns_max": 2.0,
        "train/malformed_turns": 1 / 3,
        "train/truncated_turns": 0.0,
        "train/env_failures": 1.0,
    }
    broke = Rollout((told([1], []),), 0.0, broke="step raised KeyError")
    values = rollout_metrics("train", [RolloutGroup(group(0.0).prompt, (episode, broke, single, broke, failed))])
    told_of = (values["train/reward"], values["train/accuracy"], values["train/broke_judge"], values["train/env_failures"])
    assert told_of == (0.25, 0.25, 0.5, 1.0)
    nothing = rollout_metrics("train", [RolloutGroup(group(0.0).prompt, (failed,))])
    assert nothing["train/env_failures"] == 1.0 and math.isnan(nothing["train/reward"])


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    """Compare with all ways to choose k of n answers, and with a hand-computed case of 10 answers, 3 of them right."""
    for n in range(1, 8):
        for right, k in itertools.product(range(n + 1), range(1, n + 1)):
            chosen = list(itertools.combinations([True] * right + [False] * (n - right), k))
            assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-15)
    assert pass_at_k(10, 3, 4) == pytest.approx(1 - (7 * 6 * 5 * 4) / (10 * 9 * 8 * 7))


def test_validation_of_one_data_set():
    values = validation_metrics([group(1.0, 0.0, 0.0, 0.0, 1.0, 0.0), group(*[0.0] * 6)])
    shares = {k: value for k, value in values.items() if "pass@" in k}
    assert shares == pytest.approx({"val/pass@1": 1 / 6, "val/pass@2": 0.3, "val/pass@4": (14 / 15) / 2, "val/pass@6": 0.5})
    assert values["val/reward"] == pytest.approx(1 / 6) and not [key for key in values if key.count("/") > 1]


def test_validation_of_several_data_sets():
    easy, hard = (
        [replace(one, prompt=replace(one.prompt, dataset=name)) for one in groups]
        for name, groups in (
            ("easy", [group(1.0, 1.0), group(1.0, 0.0)]),
            ("hard", [group(0.0, 0.0)]),
        )
    )
    values = validation_metrics([*easy, *hard])
    assert [values[f"val/{name}pass@1"] for name in ("", "easy/", "hard/")] == pytest.approx([0.5, 0.75, 0.0])
    assert [values[f"val/{name}pass@2"] for name in ("", "easy/", "hard/")] == pytest.approx([2 / 3, 1.0, 0.0])
    assert (values["val/easy/accuracy"], values["val/hard/accuracy"]) == (0.75, 0.0)


def test_unjudged_answers_are_not_drawn():
    """One of four answers failed: pass@k is over the other three, and pass@4 is undefined."""
    rollouts = list(group(1.0, 0.0, 0.0, 1.0).rollouts)
    rollouts[3] = replace(rollouts[3], failure="it hung")
    values = validation_metrics([replace(group(0.0), rollouts=tuple(rollouts))])
    assert values["val/pass@1"] == pytest.approx(1 / 3) and values["val/pass@2"] == pytest.approx(2 / 3)
    assert math.isnan(values["val/pass@4"]) and values["val/env_failures"] == 1


@pytest.mark.parametrize(
    ("reward", "metrics", "right"),
    [
        (1.0, {}, True),
        (0.1, {}, False),  # a judge's second lowest score
        (0.0, {}, False),
        (0.5, {"accuracy": 0.0}, False),
        (0.0, {"accuracy": 1.0}, True),
        (1.0, {"accuracy": 0.5}, False),
    ],
)
def test_right_answers_have_the_highest_reward(reward, metrics, right):
    assert is_right(Rollout((told([1], []),), reward, metrics)) is right


def test_a_reward_models_scores_do_not_make_answers_right():
    scored, told_right = group(3.0, -2.0), group(1.0, 0.0)
    rollouts = tuple(replace(rollout, metrics={"reward_model_score": rollout.reward}) for rollout in scored.rollouts)
    scored = replace(scored, rollouts=rollouts)
    assert not [key for key in validation_metrics([scored]) if "pass@" in key]
    values = validation_metrics([scored, told_right])
    assert (values["val/pass@1"], values["val/pass@2"], values["val/reward"]) == (0.5, 1.0, 0.5)


def test_the_record_of_an_episode(tmp_path):
    metrics = Metrics(tmp_path, LoggerConfig(), after_step=None)
    first = replace(told([1, 2], [9, 9]), reward=0.25, malformed=True)
    episode = Rollout((first, told([4], [])), 0.0, failure="it hung")
    ended = Rollout((Turn(replace(told([6, 7, 8], []).completion, stop=" 7 8")),), 1.0)
    prompt = replace(group(0.0).prompt, dataset="puzzles")
    metrics.log_rollouts(1, [RolloutGroup(prompt, (episode,)), group(1.0), RolloutGroup(prompt, (ended,))], Words())
    metrics.log(1, validation_metrics([group(1.0, 0.0)]))
    metrics.close()
    record, single, stopped = read_rollouts(tmp_path / "rollouts" / "step_000001.jsonl")
    assert record["turns"] == [
        {"said": "1 2", "told": "9 9", "said_tokens": 2, "told_tokens": 2, "reward": 0.25, "malformed": True},
        {"said": "4", "told": "", "said_tokens": 1, "told_tokens": 0, "reward": 0.0},
    ]
    assert (record["dataset"], record["failure"], record["completion"]) == ("puzzles", "it hung", "1 2 9 9 4")
    assert record["spans"] == [[5, 2], [5, 1]]
    assert not {"turns", "dataset", "failure"} & single.keys()
    assert (stopped["completion"], stopped["completion_tokens"]) == ("6", [6, 7, 8])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("val/pass@2")] == [1.0]
