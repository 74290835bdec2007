"""A coding agent: the policy types commands, a shell runs them, and the files at the end decide.

The policy asks for nothing but a shell's output, so one message of it is one command. The task's files are made first; the
episode ends when the file says what it should, or after TURNS commands.
"""

from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell

TURNS = 3
COMMAND_S = 5.0
SANDBOX = Sandbox(ResourceLimits(wall_s=60.0, cpu_s=10.0, memory_bytes=1 << 28, output_bytes=4096))


async def play(client, task):
    """Play one episode, and return the rewards of its turns."""
    goal, said = task["answer"].split("=")
    messages, rewards = list(task["messages"]), []
    with Shell(SANDBOX, session_s=60.0) as shell:
        for name, text in task["record"]["files"].items():
            shell.run(f"echo {text} >{name}")
        while not (rewards and rewards[-1]) and len(rewards) < TURNS:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            command = answer.choices[0].message.content or ""
            output = shell.run(command, wall_s=COMMAND_S).output
            messages += [{"role": "assistant", "content": command}, {"role": "user", "content": output.strip()[:16]}]
            rewards.append(float(shell.run(f"cat {goal}").output.strip() == said))
    return {"rewards": rewards, "metrics": {"accuracy": rewards[-1], "commands": float(len(rewards))}}
