"""Play an episode with mini-swe-agent as it is: `PYTHON mini_swe_agent.py`, with a Python that has the package.

Prompts are short, for a model of letters, and whatever it says is a command, which an environment of ours answers unrun.
"""

import json
import sys
from typing import Any

STEPS = 3


class Unrun:
    """An environment that runs nothing."""

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        return {"output": f"{len(action['command'])}", "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


def main() -> None:
    from minisweagent.agents.default import DefaultAgent  # pyright: ignore[reportMissingImports]
    from minisweagent.models import get_model_class  # pyright: ignore[reportMissingImports]

    Model = get_model_class("openai/policy", "litellm_textbased")
    model = Model(model_name="openai/policy", action_regex=r"(?s)\A(.*)\Z", observation_template="{{output.output}}")
    agent = DefaultAgent(model, Unrun(), system_template="sum", instance_template="{{task}}", step_limit=STEPS)
    ended = agent.run(json.load(sys.stdin)["messages"][-1]["content"])
    assert ended["exit_status"] == "LimitsExceeded", ended
    print(json.dumps({"reward": 1.0, "metrics": {"calls": agent.n_calls}}))


if __name__ == "__main__":
    main()
