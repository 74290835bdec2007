"""A taskset of the verifiers package, as its users write them: sums, with a tool that adds."""

from collections.abc import Iterable

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str
    tool: bool


class Sum(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class CarelessSum(vf.Task[SumData]):
    """Counts up to the reply: never ends for -1, and raises for a reply that is not a number."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        reply, counted = int(trace.last_reply or ""), 0
        while counted != reply:
            counted += 1
        return float(counted == int(self.data.answer))


class SumWithTool(Sum):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]


class SumsConfig(vf.TasksetConfig):
    tool: bool = False
    careless: bool = False


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterable[Sum]:
        kind = SumWithTool if self.config.tool else CarelessSum if self.config.careless else Sum
        for n in range(5):
            data = SumData(prompt=f"{n}+{n}=", system_prompt="Only the number.", answer=str(2 * n), tool=self.config.tool)
            yield kind(data)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
