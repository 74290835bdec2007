"""Play one episode with an environment's agent: open its endpoint, run the agent, and return all conversations."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.environments.environment import AgentEnvironment, EpisodeFailed, Outcome
from pipeline.rollout.engine_client import DrawnTurn, EngineClient

if TYPE_CHECKING:
    from pipeline.rollout.agents.policy_serving import PolicyServing
    from pipeline.types import Prompt

CUT_S = 2.0
"""Seconds for an agent to end by itself after its episode is cut."""


@dataclass(frozen=True)
class AgentResult:
    """The result of an agent's episode."""

    outcome: Outcome
    ends: tuple[int, ...]  # draws that end a conversation; the last is of the rollout's `turns`
    truncated: bool  # it was cut


class AgentFunction:
    """Plays episodes with the agent of an environment."""

    def __init__(self, environment: AgentEnvironment, serving: PolicyServing) -> None:
        self._environment, self._serving = environment, serving

    async def __call__(self, engine: EngineClient, prompt: Prompt, seed: int) -> AgentResult:
        """Return the result of an episode. Raises what the environment raises."""
        # These import vLLM, which judges without agents do not need.
        from pipeline.rollout.agents.agent_endpoint import AgentEndpoint
        from pipeline.rollout.agents.policy_serving import ServedEpisode

        episode = ServedEpisode(engine)
        endpoint = AgentEndpoint(self._serving, episode)
        try:
            access = await endpoint.start()
            outcome = await self._play(engine, self._environment.play(prompt, access, seed))
        finally:
            await endpoint.close()
        truncated = outcome is None
        outcome = replace(outcome or Outcome(0.0), observation=None)
        continued = {turn.previous.number for turn in engine.drawn if turn.previous is not None}
        ends = tuple(sorted(turn.number for turn in engine.drawn if turn.number not in continued))
        tree, metrics = episode.tree, {**outcome.metrics, "conversations": float(len(ends))}
        if answers := tree.matched + tree.unmatched:
            metrics["unmatched_answers"] = tree.unmatched / answers
        if outcome.of_turns and not math.isclose(sum(outcome.of_turns), outcome.reward, abs_tol=1e-6):
            got = f"the agent returned rewards of turns {outcome.of_turns}"
            raise EpisodeFailed(f"{got}; expected a sum of {outcome.reward}, its reward")
        if outcome.of_turns and (turns := len(_conversation(engine, ends))) != len(outcome.of_turns):
            got = f"the agent returned {len(outcome.of_turns)} rewards of turns"
            raise EpisodeFailed(f"{got}; expected {turns}, of its last conversation")
        return AgentResult(replace(outcome, metrics=metrics), ends, truncated)

    async def _play(self, engine: EngineClient, played: Any) -> Outcome | None:
        """Return the outcome of an agent, or None if its episode was cut and the agent gave none."""
        playing, cut = asyncio.ensure_future(played), asyncio.ensure_future(engine.was_cut.wait())
        try:
            await asyncio.wait({playing, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                await asyncio.wait({playing}, timeout=CUT_S)
            if not playing.done() or (engine.was_cut.is_set() and playing.exception()):
                return None
            return playing.result()
        finally:
            for task in (playing, cut):
                task.cancel()
            await asyncio.wait({playing, cut})


def _conversation(engine: EngineClient, ends: tuple[int, ...]) -> list[DrawnTurn]:
    """Return the turns of the conversation that was drawn last."""
    return next((turn.conversation for turn in engine.drawn if ends and turn.number == ends[-1]), [])
