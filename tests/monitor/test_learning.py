"""Warnings of a run that goes on and learns nothing: each sign, when it clears, and what `status` shows."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from launch.runs import resources
from launch.runs.run_folder import RunFolder
from pipeline import algorithms, config
from pipeline.algorithms.reductions import masked_share
from pipeline.config import RECIPES
from pipeline.monitor.learning import SHOWN_CHARACTERS, STEPS, LearningMonitor
from pipeline.observe.warning_file import AGAIN_STEPS, LOST_EPISODES
from pipeline.types import Completion, GlobalCounts, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from tests.end_to_end.runs import LOCAL, submit

TOKENIZER = AutoTokenizer.from_pretrained(RECIPES / "tiny")
QUESTION = np.array(TOKENIZER.encode("12+3=", add_special_tokens=False), np.int32)


def rollout(text: str, reward: float, finish: str = "stop", version: int = 0, **more) -> Rollout:
    tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Rollout((Turn(Completion("x", tokens, zeros, (VersionSpan(version, len(tokens)),), finish)),), reward, **more)


class Run:
    """A run of one recipe whose steps a test makes up."""

    def __init__(self, folder, algorithm: str = "grpo", *overrides: str):
        self.recipe = config.load(f"tiny_{algorithm}", list(overrides))
        self.algorithm = algorithms.build(self.recipe)
        self.file = folder / "resources" / "warnings.jsonl"
        self.monitor = LearningMonitor(self.recipe, TOKENIZER, lambda: "2 <|im_end|> (tokenizer)", self.file)
        self.step = 0

    def steps(self, make, count: int = STEPS, **values: float) -> list[str]:
        """Make steps, and return the signs that now hold."""
        for _ in range(count):
            prompts = [Prompt(i, QUESTION, "sums", {"answer": "15"}) for i in range(2)]
            groups = [RolloutGroup(each, tuple(make(each.index, j, self.step) for j in range(4))) for each in prompts]
            self.step += 1
            self.monitor.note_learning(self.algorithm.compute_advantages(groups), self.algorithm.needs.estimates)
            self.monitor.episodes_ended(self.step, "step", groups)
            self.monitor.step_ended(self.step, {"train/lr": 1e-3, "train/grad_norm": 1.0, **values}, groups)
        return self.holding()

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def holding(self) -> list[str]:
        holding: dict[str, None] = {}
        for line in self.lines():
            holding.pop(line["check"], None) if line.get("cleared") else holding.setdefault(line["check"])
        return [*holding]


def good(i: int, j: int, step: int) -> Rollout:
    return rollout("15", float(j % 2), version=step)


def test_a_run_that_learns_gives_no_warning(tmp_path):
    assert Run(tmp_path).steps(good, 2 * AGAIN_STEPS) == []


def lost(i: int, j: int, step: int) -> Rollout:
    """Return a rollout of which half are lost: of a group of four, one was left out, and one broke."""
    return rollout("15", 0.0, failure="no board" if j == 0 else "", broke="status 1" if j == 1 else "", version=step)


def test_episodes_that_are_left_out_or_broken_are_named_at_once_and_not_at_every_step(tmp_path):
    run = Run(tmp_path)
    assert run.steps(lambda i, j, step: lost(i, j + (j == 1), step), 1) == []  # less than half
    assert run.steps(lost, AGAIN_STEPS - 1)[0] == f"{LOST_EPISODES} of sums, step"
    first, *others = [line["message"] for line in run.lines() if line["check"].startswith(LOST_EPISODES)]
    said = "2 were left out and 2 broke and count as wrong: no board; see rollouts/step_000002.jsonl"
    assert first == f"env.sums: of 8 episodes of step 2, {said}" and not others
    run.monitor.episodes_ended(0, "val", [RolloutGroup(Prompt(0, QUESTION, "sums", {}), (lost(0, 1, 0),))])
    said = "1 broke and count as wrong: status 1; see rollouts/val_000000.jsonl"
    assert run.lines()[-1]["message"] == f"env.sums: of 1 episodes of the validation after step 0, {said}"


@pytest.mark.parametrize(
    ("sign", "make"),
    [
        ("cut_answers", lambda i, j, step: rollout("15", float(j % 2), "length", step)),
        ("empty_answers", lambda i, j, step: rollout("1", float(j % 2), version=step)),
        ("equal_rewards", lambda i, j, step: rollout("15", 0.0, version=step)),
        ("no_advantage", lambda i, j, step: rollout("15", float(i), version=step)),
        ("old_weights", lambda i, j, step: rollout("15", float(j % 2), version=0)),
    ],
)
def test_each_sign_holds_after_a_few_steps_and_clears(tmp_path, sign, make):
    run = Run(tmp_path)
    at_first = 1 if sign == "old_weights" else 0  # the first step is sampled with the weights of the start
    assert run.steps(make, at_first + STEPS - 1) == []
    assert run.steps(make, 1) == [sign]
    assert run.steps(make, AGAIN_STEPS - 1) == [sign] and len(run.lines()) == 1
    assert run.steps(make, 1) == [sign] and len(run.lines()) == 2  # given again
    assert run.steps(good, 1) == []


def test_agents_that_rewrite_their_histories(tmp_path):
    run = Run(tmp_path)
    assert run.steps(good, **{"train/unmatched_answers": 0.4}) == ["rewritten_histories"]
    assert run.steps(good, **{"train/unmatched_answers": 0.01}) == []


def test_one_good_answer_is_enough(tmp_path):
    run = Run(tmp_path)
    assert run.steps(lambda i, j, step: rollout("15", 0.0, "length" if i or j else "stop", step)) == ["equal_rewards"]
    assert run.steps(lambda i, j, step: rollout("15", float(i == j == 0), "length", step)) == ["cut_answers"]


def test_cut_answers_name_the_stop_tokens_and_the_limits(tmp_path):
    run = Run(tmp_path, "grpo", "policy.generation.max_new_tokens=7", "policy.generation.stop_strings=[END]")
    run.steps(lambda i, j, step: rollout("15", float(j % 2), "length", step))
    (message,) = (line["message"] for line in run.lines())
    for part in ("all 24 answers", "2 <|im_end|> (tokenizer)", "max_new_tokens=7", "END", "policy.generation.stop_token_ids"):
        assert part in message


def test_equal_rewards_show_three_judgements_of_bounded_length(tmp_path):
    run = Run(tmp_path)
    run.steps(lambda i, j, step: rollout("7" * 500 + "\n9", 0.0, version=step, extracted="79"))
    (message,) = (line["message"] for line in run.lines())
    assert message.count('prompt "12+3="') == message.count('expected "15"') == message.count("reward 0") == 3
    assert '79"' in message or ("\\n9" in message and "\n" not in message)
    assert len(message) < 400 + 3 * 4 * SHOWN_CHARACTERS
    easy = Run(tmp_path / "easy")
    easy.steps(lambda i, j, step: rollout("15", 1.0, version=step))
    assert "too easy" in easy.lines()[0]["message"]


def test_equal_rewards_show_both_ends_of_an_error(tmp_path):
    error = f"step raised TypeError: {'unsupported operands, ' * 20}'int' and 'str' at /home/me/my_reward.py:3"
    run = Run(tmp_path)
    run.steps(lambda i, j, step: rollout("15", 0.0, version=step, broke=error))
    lost, message = (line["message"] for line in run.lines())
    assert lost == f"env.sums: of 8 episodes of step 1, 8 broke and count as wrong: {error}; see rollouts/step_000001.jsonl"
    assert message.count('failed: "step raised TypeError: ') == message.count(' at /home/me/my_reward.py:3"') == 3
    assert len(message) < 400 + 3 * 5 * SHOWN_CHARACTERS


def test_rewards_of_failed_episodes_do_not_count_and_distillation_has_none(tmp_path):
    def failed(i: int, j: int, step: int) -> Rollout:
        return rollout("15", 0.0 if j else 5.0, version=step, failure="" if j else "no judge")

    assert Run(tmp_path).steps(failed) == ["equal_rewards"]
    distilled = Run(tmp_path / "distilled", "distillation")
    assert distilled.steps(lambda i, j, step: rollout("15", 0.0, version=step)) == []


def test_a_learning_rate_or_a_gradient_of_zero(tmp_path):
    assert Run(tmp_path / "lr").steps(good, **{"train/lr": 0.0}) == ["no_gradient"]
    run = Run(tmp_path / "gradient")
    assert run.steps(good, **{"train/grad_norm": 0.0}) == ["no_gradient"]
    assert run.steps(good, 1) == []


def test_a_data_set_of_which_nothing_is_trained(tmp_path):
    run = Run(tmp_path, "sft")
    for step in range(STEPS):
        mask = np.zeros(5, np.bool_)
        run.monitor.note_learning([SimpleNamespace(loss_mask=mask, advantages=mask)], False)
        run.monitor.step_ended(step + 1, {"train/lr": 1e-3, "train/grad_norm": 0.0}, None)
    assert run.holding() == ["no_trained_token"]


def test_an_asynchronous_run_may_sample_with_weights_of_its_age(tmp_path):
    run = Run(tmp_path, "async")
    age = config.ahead(run.recipe).max_trajectory_age_steps
    assert age and run.steps(lambda i, j, step: rollout("15", float(j % 2), version=max(0, step - age)), 9) == []
    assert run.steps(lambda i, j, step: rollout("15", float(j % 2), version=max(0, step - age - 1))) == ["old_weights"]


def test_an_error_costs_the_warnings_alone(tmp_path, caplog):
    run = Run(tmp_path)
    run.monitor._tokenizer = None
    assert run.steps(lambda i, j, step: rollout("15", 0.0, version=step)) == [] and "the run goes on" in caplog.text


def test_a_step_without_a_trained_token_has_a_loss_and_gradient_of_zero():
    """NeMo-RL and verl add an epsilon to the count; ours is at least 1."""
    values = torch.full((4,), torch.nan, requires_grad=True)  # even where the masked tokens have none
    batch = SimpleNamespace(
        loss_mask=torch.zeros(4, dtype=torch.bool), lengths=[4], cu_seqlens=torch.tensor([0, 4]), tokens=range(4)
    )
    for token_level in (True, False):
        share = masked_share(values, batch, GlobalCounts(0, 0), token_level)
        (gradient,) = torch.autograd.grad(share, values)
        assert share == 0 and (gradient == 0).all()


def test_status_shows_the_warnings_that_hold(tmp_path):
    attempt = tmp_path / "attempts/1-0"
    attempt.mkdir(parents=True)
    (attempt / "started").write_text("1.0\n")
    (tmp_path / "recipe.yaml").write_text(config.to_yaml(config.load("tiny_grpo", [])))
    run = Run(attempt)
    run.steps(lambda i, j, step: rollout("15", 0.0, "length", step))
    assert [line["check"] for line in resources.warnings(RunFolder.at(tmp_path))] == ["cut_answers", "equal_rewards"]
    run.steps(lambda i, j, step: rollout("15", float(j % 2), "length", step))
    (shown,) = resources.warnings(RunFolder.at(tmp_path))
    assert shown["check"] == "cut_answers" and shown["step"] == STEPS


@pytest.mark.full
def test_a_real_run_warns_of_equal_rewards(tmp_path):
    """No answer of the untrained model is right."""
    keys = ["grpo.max_num_steps=4", "env.digits.kind=exact_match", "policy.generation.max_new_tokens=3"]
    run = submit(tmp_path / "run", *LOCAL, *keys, "logger.monitor.period_s=null")
    assert run.status == 0, run.output
    found = {line["check"]: line["message"] for line in resources.warnings(RunFolder.at(run.folder))}
    assert found["equal_rewards"].count("expected") == 3
    (log,) = (run.folder / "attempts").glob("*/rank00000.log")
    assert "rewards of the last 3 steps are 0" in log.read_text()
