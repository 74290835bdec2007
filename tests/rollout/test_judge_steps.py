"""The text between two turns is right whatever token the policy ended its turn with."""

import numpy as np
import pytest

from pipeline.config import RECIPES, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments.environment import AnsweredTurn, Environment, Outcome
from pipeline.rollout.episode import Episode
from pipeline.rollout.judges.environment_steps import NOTE_CHARACTERS, EnvStepper
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.types import Completion, Prompt, Sampling, VersionSpan
from tests.data.test_chat import CHATML


class Answers(Environment):
    def step(self, prompt, text):
        return Outcome(observation={"role": "user", "content": "21"})


@pytest.mark.parametrize("last", ["<|im_end|>", "]", "</s>"])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_turn_ends_once(last, finish):
    """The engine may stop at other tokens too: the "]" of a call, a second end-of-sequence token."""
    tokenizer = load_tokenizer(TokenizerConfig(name=str(RECIPES / "tiny"), chat_template=CHATML))
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    stepper = EnvStepper(Answers(), tokenizer, Observations(tokenizer, TokenizerConfig(), chat=True))
    said = np.asarray(tokenizer("[17+4" + last, add_special_tokens=False).input_ids, np.int32)
    prompt = Prompt(0, np.asarray([1], np.int32), "told", {"answer": "21"})
    work = RolloutWork(0, [prompt], 1, "train", 42, Sampling(max_new_tokens=20), max_turns=2)
    episode = Episode(work, 0, 0)
    episode.completion = Completion("0", said, np.zeros(len(said), np.float32), (VersionSpan(0, len(said)),), finish)
    outcome = stepper.step(episode.step_request(1000), lambda part: None)
    between = tokenizer.decode(np.concatenate([said, outcome.observation])).partition("[17+4")[2]
    other = last if last != "<|im_end|>" else ""
    assert between == other + "<|im_end|>\n<|im_start|>user\n21<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ends", ["; end", "; end now", "</s>"])
def test_the_environment_gets_the_text_before_the_stop_string(ends):
    seen = []

    class Listens(Environment):
        def step_answer(self, prompt, answer):
            seen.append(answer)
            return Outcome(1.0, notes={"said": answer.text * 400})

        def step(self, prompt, text): ...

    tokenizer = load_tokenizer(TokenizerConfig(name=str(RECIPES / "tiny")))
    said = np.asarray(tokenizer("17 + 4" + ends, add_special_tokens=False).input_ids, np.int32)
    prompt = Prompt(0, np.asarray([1], np.int32), "told", {})
    episode = Episode(RolloutWork(0, [prompt], 1, "train", 42, Sampling(), step=7), 0, 0)
    spans = (VersionSpan(0, len(said)),)
    stop = "; end" if "end" in ends else ""
    episode.completion = Completion("0", said, np.zeros(len(said), np.float32), spans, "stop", stop)
    outcome = EnvStepper(Listens(), tokenizer, None, max_steps=20).step(episode.step_request(1000), lambda part: None)
    assert seen == [AnsweredTurn("17 + 4", tuple(said.tolist()), step=7, max_steps=20)]
    assert outcome.notes == {"said": ("17 + 4" * 400)[:NOTE_CHARACTERS]}
