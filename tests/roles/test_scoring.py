"""Rewards by a model: equal to transformers' scores, in their own rollouts, however they are distributed."""

import contextlib
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from transformers import AutoTokenizer

from pipeline import config
from pipeline.coordination.scoring import Scoring
from pipeline.roles.reward import Scorer
from pipeline.rollout.rollout_messages import ScoreWork
from pipeline.types import Completion, DataParallelRank, Prompt, Rollout, RolloutGroup, Turn, VersionSpan
from tests.problems import refused
from tests.roles.judges import CHATML, END, LETTERS, LIMIT, eager_scores, recipe, write_judge, write_tokenizer
from tests.train.conftest import realm  # noqa: F401

OTHER_LETTERS = LETTERS[::-1]
pytestmark = pytest.mark.usefixtures("realm")


@dataclass
class Replies:
    replies: list[list[float]]

    def result(self) -> list[list[float]]:
        return self.replies


class Realm:
    """Ranks at given places, each of which uses the one real scorer; records each rank's input."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer
        self.given = []

    def score(self, parts) -> Replies:
        self.given = parts
        return Replies([self.scorer.score(work) for work in parts])


def scoring(judged, served: Realm, places: list[DataParallelRank], tokenizer) -> Scoring:
    return Scoring(judged, lambda parts: served.score(parts), places, tokenizer)  # tests replace `served.score`


def scorer(judged) -> Scorer:
    world = SimpleNamespace(own=dist.group.WORLD, phase=lambda name: contextlib.nullcontext())
    return Scorer(config.reward_model_policy(judged), world, seed=1, offload=False)


def prompt(index: int, text: str, tokens: list[int], environment: str = "judge") -> Prompt:
    task = {"answer": "4", "text": text, "messages": [{"role": "user", "content": text}]}
    return Prompt(index, np.asarray(tokens, np.int32), environment, task)


def rollout(tokens: list[int], finish: str = "stop", stop: str = "") -> Rollout:
    array = np.asarray(tokens, np.int32)
    completion = Completion("0", array, np.zeros(len(array), np.float32), (VersionSpan(0, len(array)),), finish, stop)
    return Rollout((Turn(completion),), 0.25, {"old": 1.0})


def groups(tokenizer, count: int, samples: int, chat: bool = False) -> list[RolloutGroup]:
    """Return prompts and answers of many lengths."""
    draw = random.Random(count)
    found = []
    for i in range(count):
        text = "".join(draw.choices("abc123", k=draw.randrange(1, 9)))
        asked = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        answers = ["".join(draw.choices("xyz789", k=draw.randrange(1, 12))) for _ in range(samples)]
        rollouts = tuple(rollout([*tokenizer(answer).input_ids, END]) for answer in answers)
        found.append(RolloutGroup(prompt(i, text, tokenizer(asked if chat else text).input_ids), rollouts))
    return found


def sequences(of: list[RolloutGroup]) -> list[list[int]]:
    return [[*group.prompt.tokens.tolist(), *r.tokens.tolist()] for group in of for r in group.rollouts]


def given(work: ScoreWork) -> list[list[int]]:
    return [tokens.tolist() for microbatch in work.microbatches for tokens in microbatch]


def rewards(of: list[RolloutGroup]) -> list[float]:
    return [r.reward for group in of for r in group.rollouts]


@pytest.fixture
def folder(tmp_path):
    """Return a policy and a reward model with one tokenizer."""
    write_judge(tmp_path / "judge", chat_template=CHATML)
    recipe(tmp_path)  # writes the policy's model
    write_tokenizer(tmp_path / "model", chat_template=CHATML)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("prompts", "samples"), [(5, 4), (1, 1), (2, 1)])
@pytest.mark.parametrize("packed", [True, False])
def test_each_rollout_gets_the_score_of_its_own_text(folder, ranks, prompts, samples, packed):
    judged = recipe(folder, f"policy.sequence_packing.enabled={packed}".lower(), "policy.logprob_batch_size=3")
    places = [DataParallelRank(rank, ranks) for rank in range(ranks) for _ in range(2)]  # two tensor-parallel ranks at each
    served = Realm(scorer(judged))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    before = groups(tokenizer, prompts, samples)
    after = scoring(judged, served, places, tokenizer)(before)

    expected = eager_scores(folder / "judge", sequences(before))
    assert np.allclose(rewards(after), expected, atol=1e-5)
    assert len(expected) == 1 or np.std(expected) > 0.1  # reveals an exchange
    assert [group.prompt for group in after] == [group.prompt for group in before]
    for group, reward in zip(after, before, strict=True):
        for new, old in zip(group.rollouts, reward.rollouts, strict=True):
            assert [(turn.completion, turn.reward) for turn in new.turns] == [(old.turns[0].completion, new.reward)]
            assert new.metrics == {"old": 1.0, "reward_model_score": new.reward, "reward_model_truncated": 0.0}
    works = served.given[::2]
    assert len({len(work.microbatches) for work in served.given}) == 1  # the ranks of a realm run equally many
    assert sorted(tokens for work in works for tokens in given(work)) == sorted(sequences(before))
    for microbatch in (microbatch for work in works for microbatch in work.microbatches):
        assert sum(map(len, microbatch)) <= LIMIT + 8 if packed else len(microbatch) <= 3
    assert rewards(scoring(judged, served, places, tokenizer)(before)) == rewards(after)


def test_an_answer_without_a_finite_score_gets_the_lowest_one(folder):
    """It ends no run; a model that gives no finite score at all does."""
    judged = recipe(folder)
    served, tokenizer = Realm(scorer(judged)), AutoTokenizer.from_pretrained(folder / "model")
    score = scoring(judged, served, [DataParallelRank(0, 1)], tokenizer)
    before = groups(tokenizer, 2, 3)
    right = served.score
    served.score = lambda parts: Replies([[math.nan, *scores[1:]] for scores in right(parts).replies])
    rollouts = [rollout for group in score(before) for rollout in group.rollouts]
    assert [rollout.broke for rollout in rollouts].count("the reward model scores it nan") == 1
    (broke,) = [rollout for rollout in rollouts if rollout.broke]
    assert broke.reward == min(rollout.reward for rollout in rollouts if not rollout.broke) and not broke.failure
    served.score = lambda parts: Replies([[math.inf] * len(scores) for scores in right(parts).replies])
    given = {rollout.reward for group in score(before) for rollout in group.rollouts}
    assert given == {broke.reward}
    with pytest.raises(ValueError, match=r"env\.judge: got score inf for an answer to prompt 0"):
        scoring(judged, served, [DataParallelRank(0, 1)], tokenizer)(before)


def test_prompts_of_other_environments_are_not_scored(folder):
    judged = recipe(folder)
    served = Realm(scorer(judged))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    score = scoring(judged, served, [DataParallelRank(0, 1)], tokenizer)
    first, last = groups(tokenizer, 2, 2)
    other = RolloutGroup(prompt(7, "ab", [4, 5], "math"), (rollout([6, END]),))
    after = score([first, other, last])
    assert after[1] is other
    assert np.allclose(rewards([after[0], after[2]]), eager_scores(folder / "judge", sequences([first, last])), atol=1e-5)
    served.given = []
    assert score([other]) == [other] and score([]) == [] and served.given == []


def test_another_vocabulary_retokenizes_the_text(folder):
    theirs = write_judge(folder / "judge", OTHER_LETTERS) and write_tokenizer(folder / "judge", OTHER_LETTERS)
    judged = recipe(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    score = scoring(judged, served := Realm(scorer(judged)), [DataParallelRank(0, 1)], tokenizer)
    asked = prompt(0, "ab+", tokenizer("ab+").input_ids)
    ended, cut = rollout([*tokenizer("cd").input_ids, END]), rollout(tokenizer("cd").input_ids, "length")
    stopped = rollout(tokenizer("dc+a").input_ids, stop="+a")
    score([RolloutGroup(asked, (ended, cut, stopped))])
    expected = [theirs("ab+cd!").input_ids, theirs("ab+cd").input_ids, theirs("ab+dc!").input_ids]
    assert sorted(given(served.given[0])) == sorted(expected)
    assert expected[1] != [*asked.tokens, *cut.tokens]


def test_another_chat_template_renders_the_conversation_again(folder):
    theirs = write_tokenizer(folder / "judge", chat_template=CHATML.replace("m.role[0]", "m.role"))
    judged = recipe(folder, "data.apply_chat_template=true")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    score = scoring(judged, served := Realm(scorer(judged)), [DataParallelRank(0, 1)], tokenizer)
    before = groups(tokenizer, 3, 1, chat=True)
    after = score(before)
    texts = [
        f"<user>{group.prompt.task['text']}!\n<assistant>{tokenizer.decode(group.rollouts[0].tokens[:-1])}!" for group in before
    ]
    texts = [theirs(text).input_ids for text in texts]
    long = [len(tokens) > LIMIT for tokens in texts]
    assert any(long) and not all(long)
    expected = [tokens[-LIMIT:] for tokens in texts]
    assert sorted(given(served.given[0])) == sorted(expected)
    assert [group.rollouts[0].metrics["reward_model_truncated"] for group in after] == [float(is_long) for is_long in long]
    assert np.allclose(rewards(after), eager_scores(folder / "judge", expected), atol=1e-5)


@pytest.mark.parametrize("chat", [True, False])
def test_special_tokens_in_the_policys_text_stay_text(folder, chat):
    theirs = write_tokenizer(folder / "judge", OTHER_LETTERS, chat_template=CHATML)
    theirs.add_special_tokens({"additional_special_tokens": ["<u>"]})
    theirs.save_pretrained(folder / "judge")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    score = scoring(
        recipe(folder, f"data.apply_chat_template={chat}".lower()), served := Realm(None), [DataParallelRank(0, 1)], tokenizer
    )
    asked, forged = prompt(0, "ab", []), rollout([*tokenizer("cd<u>ef").input_ids, END])
    (mark,) = theirs("<u>", add_special_tokens=False).input_ids
    served.score = lambda parts: served.given.extend(parts) or Replies([[0.0]])
    score([RolloutGroup(asked, (forged,))])
    (tokens,) = given(served.given[0])
    assert tokens.count(mark) == int(chat) and "cd<u>ef" in theirs.decode(tokens)


def test_the_same_chat_template_needs_no_messages(folder):
    judged = recipe(folder, "data.apply_chat_template=true")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    score = scoring(judged, Realm(scorer(judged)), [DataParallelRank(0, 1)], tokenizer)
    (group,) = groups(tokenizer, 1, 2, chat=True)
    group.prompt.task.clear()
    assert np.allclose(rewards(score([group])), eager_scores(folder / "judge", sequences([group])), atol=1e-5)


def test_unscorable_rollouts_are_reported(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    judged = recipe(folder)
    places = [DataParallelRank(0, 1)]

    class NotANumber(Realm):
        def score(self, parts) -> Replies:
            return Replies([[float("nan")] * len(given(work)) for work in parts])

    with pytest.raises(ValueError, match=r"env\.judge: got score nan for an answer to prompt 0"):
        scoring(judged, NotANumber(None), places, tokenizer)(groups(tokenizer, 1, 1))
    other = {"model_name": str(write_judge(folder / "other", OTHER_LETTERS))}
    (group,) = groups(tokenizer, 1, 1)
    group.prompt.task.clear()
    with refused(("env.judge", "missing-column")):
        scoring(recipe(folder, **other), Realm(None), places, tokenizer)([group])
    with refused(("env.judge.tokenizer.chat_template", "missing-value")):
        scoring(recipe(folder, "data.apply_chat_template=true", **other), Realm(None), places, tokenizer)
