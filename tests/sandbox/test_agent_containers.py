"""Limits of an agent whose commands run in a container."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import Problem
from pipeline.environments.agent import Agent, AgentArguments
from pipeline.environments.shell_tool import ShellArguments
from pipeline.recipe.problems import RecipeError
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.environments.scripted_policy import play

PROMPT = Prompt(0, np.zeros(1, np.int32), "told", {"messages": []})
PRINTS = "import sys; print('x' * 100_000, file=sys.stderr); print(1.0)"  # more than a call of a shell may print


def agent(image: Path, **kwargs: Any) -> Agent:
    return made("agent", command=["python3", "-c", PRINTS], sandbox={"image": str(image)}, **kwargs)


def test_an_episodes_limits_are_the_agents(image_root: Path):
    outcome, _ = play(agent(image_root), PROMPT, [])
    assert outcome.reward == 1.0
    environment = agent(image_root, episode_s=700.0, output_bytes=50_000)
    assert environment._sandbox is not None and environment._sandbox.limits.wall_s == 700.0
    with pytest.raises(RuntimeError, match="exceeded a limit of its container: output"):
        play(environment, PROMPT, [])


def test_what_is_refused(image_root: Path, tmp_path: Path):
    sandbox = ShellArguments(image=str(image_root), wall_s=90.0, output_bytes=1)
    problems: list[Problem] = list(Agent.check("k", AgentArguments(command=["x"], sandbox=sandbox)))
    assert [(problem.key, problem.code) for problem in problems] == [
        ("k.sandbox.wall_s", "has-no-effect"),
        ("k.sandbox.output_bytes", "has-no-effect"),
    ]
    with pytest.raises(RecipeError, match="which does not exist"):
        agent(tmp_path / "none.sqsh")
