"""An answer that breaks its judge is wrong, and gets no more than another wrong answer."""

from pipeline.environments.environment import Environment, Outcome, Unjudged
from pipeline.environments.tool import ToolError
from pipeline.sandbox.limits import SandboxError
from tests.rollout.engine import Bench, prompts


def test_failures_that_are_not_the_answers_fault_are_excluded(checkpoint):
    """Check that `Unjudged` or a sandbox error of `step` leaves the episode out; other errors make the answer wrong."""

    class Unlucky(Environment):
        def step(self, prompt, text):
            raise [Unjudged("no connection"), SandboxError("sandbox: its guard said nothing"), ToolError("odd")][prompt.index]

    _, rollouts = Bench(checkpoint, {"unlucky": Unlucky()}).run(0, prompts(3, "unlucky"), samples=1)
    assert [bool(rollout.failure) for rollout in rollouts] == [True, True, False] and rollouts[2].broke
    assert "no connection" in rollouts[0].failure and rollouts[2].reward == 0.0


def test_an_episode_that_breaks_its_judge_late_loses_its_rewards(checkpoint):
    class Late(Environment):
        def step(self, prompt, text):
            told.append(text)
            return Outcome(1.0, {"accuracy": 1.0}, {"role": "user", "content": "w21"}) if len(told) < 3 else 1 / 0

    told = []
    _, (rollout,) = Bench(checkpoint, {"breaking": Late()}).run(0, prompts(1, "breaking"), samples=1, max_turns=5)
    assert (rollout.reward, rollout.metrics) == (0.0, {}) and "ZeroDivisionError" in rollout.broke
    assert [turn.reward for turn in rollout.turns] == [0.0, 0.0, 0.0]


def test_breaking_a_judge_gets_no_more_than_a_wrong_answer(checkpoint):
    class Strict(Environment):
        def step(self, prompt, text):
            return {0: lambda: Outcome(-1.0), 1: lambda: 1 / 0}[prompt.index]()

    bench = Bench(checkpoint, {"strict": Strict()}, broken_rewards={"strict": -1.0})
    _, (wrong, broke) = bench.run(0, prompts(2, "strict"), samples=1)
    assert wrong.reward == broke.reward == -1.0 and broke.broke and not wrong.broke
