"""A taskset of the verifiers package whose environment has the conversation of `tests.end_to_end.agents.Talk`."""

from collections.abc import Iterable

import verifiers.v1 as vf

from pipeline.data.scratchpad import addition
from tests.end_to_end.agents import TURNS, digits, reply


class Talk(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterable[vf.Task]:
        for record in addition("train", 100, 42, digits=[1, 2]):
            yield vf.Task(vf.TaskData(prompt=record["input"]))


class TalkConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        total = 0.0
        async with agents.speaker.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(TURNS):
                total += digits(segment.messages[-1].content or "")
                if turn + 1 < TURNS:
                    segment = await interaction.turn(reply(turn))
        interaction.trace.record_reward("of_digits", total)
        interaction.trace.record_metric("accuracy", 0.0)


__all__ = ["Talk", "TalkEnv"]
