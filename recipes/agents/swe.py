"""A software engineer: the policy changes a repository by commands, and the tests of its record decide.

The repository lies in an image of the record, in a container of its own. Each message of the policy has one command, which a
shell runs there; `submit` ends the episode. What has changed becomes a patch. A second container, which the policy never sees,
gets the patch and runs the tests. The reward is 1 if all tests that the record names pass, else 0, as in SWE-bench.

Columns of a record, those of SWE-bench, SWE-Gym and their like:

    FAIL_TO_PASS, PASS_TO_PASS   names of tests, as lists or as JSON
    eval_script                  a script of Bash that adds the tests and runs them; if it is absent:
    test_patch                   a patch that adds the tests, whose files pytest then runs

The patch cannot change the files of these tests, nor what configures pytest and Python (PROTECTED). But it is code that runs in
the tests' process: one that finds the tests and prints their results can fake them, as in SWE-bench.
"""

import asyncio
import json
import re
import shlex

import openai

from pipeline.environments.environment import Outcome
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell

COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)\n?```", re.DOTALL)
FORM = "Expected one command in one block that begins with ```bash. Nothing was run."
PROTECTED = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "sitecustomize.py",
    "usercustomize.py",
)
TEST_FILE = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
RESULT = re.compile(
    r"^(?:(PASSED|XFAIL|FAILED|ERROR) (\S+)|(\S.*?) \.\.\. (ok|FAIL|ERROR)$|(test_\w+) (ok|[EFf])\b)", re.MULTILINE
)
PASSES = {"PASSED", "XFAIL", "ok"}
PATCH_BYTES = 1 << 20
SESSION_S = 4 * 3600.0
NEEDS = ResourceLimits(60.0, 3600.0, 8 << 30, 256, 10_000, 4 << 30, 200_000, 1024)
WORK = Sandbox(NEEDS)
TESTS = Sandbox(ResourceLimits(3600.0, 2 * 3600.0, 8 << 30, 256, 16 << 20, 4 << 30, 200_000, 1024))


async def play(client, task, image, turns, repository="/testbed", command_s=180.0, tests_s=3600.0):
    """Play one episode. image: path with columns of the record in it, such as /images/{instance_id}.sqsh."""
    record = task["record"]
    path, metrics = image.format_map(record), dict.fromkeys(("accuracy", "submitted", "applied", "commands", "malformed"), 0.0)
    with await asyncio.to_thread(WORK.open, path) as container:
        start = await asyncio.to_thread(_run, container, "git add -A && git write-tree && git reset -q", repository)
        with Shell(container, SESSION_S, repository) as shell:
            await asyncio.to_thread(shell.run, "test ! -f ~/.bashrc || . ~/.bashrc")  # which activates the image's environment
            await _work(client, list(task["messages"]), shell, turns, command_s, metrics)
        patch = await asyncio.to_thread(_patch, container, start.split()[-1], repository) if metrics["submitted"] else b""
    if not patch.strip():
        return Outcome(0.0, metrics)
    log = await asyncio.to_thread(_test, path, record, patch, repository, tests_s)
    metrics |= {"applied": float(log is not None), "accuracy": float(passes(log or "", record))}
    return Outcome(metrics["accuracy"], metrics, notes={"patch": patch.decode(errors="replace"), "tests": (log or "")[-2000:]})


async def _work(client, messages, shell, turns, command_s, metrics):
    """Run the policy's commands until it submits, or has no more turns or tokens."""
    for left in range(turns - 1, -1, -1):
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages)
        except openai.APIStatusError:  # the window is full
            return
        said = answer.choices[0].message.content or ""
        commands = [command.strip() for command in COMMAND.findall(said)]
        if commands == ["submit"]:
            metrics["submitted"] = 1.0
            return
        reply = FORM
        if len(commands) == 1:
            reply = _shown(await asyncio.to_thread(shell.run, commands[0], command_s), command_s)
        metrics["commands" if len(commands) == 1 else "malformed"] += 1
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{reply}\n\n{left} messages are left."},
        ]


def _shown(result, command_s):
    """Return what the policy reads of a command."""
    note = f"[exit status {result.status}]"
    if result.ended_by != "exit":
        note = f"[it took more than {command_s:g} s and was killed]" if result.ended_by == "wall time" else "[the shell ended]"
    return f"{result.output.rstrip()}\n{note}".lstrip()


def _run(container, script, folder):
    """Return the output of a script. Raises RuntimeError if it fails."""
    ran = container.run(["bash", "-c", f"git config --global --add safe.directory '*' && {script}"], cwd=folder)
    if ran.status:
        raise RuntimeError(f"{folder}: {ran.stderr.decode(errors='replace').strip()}; expected a git repository in the image")
    return ran.stdout.decode()


def _patch(container, start, repository):
    """Return what has changed since the tree `start`; b"" if the policy's container does not tell, or if it is too much."""
    try:
        _run(
            container,
            f"git add -A && git diff --cached --binary --no-ext-diff --no-textconv {start} >/tmp/work.patch",
            repository,
        )
        return container.read_file("/tmp/work.patch", PATCH_BYTES)
    except (RuntimeError, ValueError):
        return b""


def _test(path, record, patch, repository, tests_s):
    """Return the output of the tests in a new container; None if the patch does not apply."""
    added = TEST_FILE.findall(record.get("test_patch") or record["eval_script"])
    kept = [f"--exclude={pattern}" for name in PROTECTED for pattern in (name, f"*/{name}")]
    script = record.get("eval_script") or f"git apply /tmp/tests.patch && python3 -m pytest -rA {shlex.join(added)}"
    with TESTS.open(path) as container:
        for name, content in {
            "work.patch": patch,
            "tests.patch": (record.get("test_patch") or "").encode(),
            "tests.sh": script.encode(),
        }.items():
            container.write_file(f"/tmp/{name}", content)
        try:
            _run(
                container,
                shlex.join(["git", "apply", *kept, *(f"--exclude={name}" for name in added), "/tmp/work.patch"]),
                repository,
            )
        except RuntimeError:
            return None
        ran = container.run(["bash", "-l", "/tmp/tests.sh"], cwd=repository, wall_s=tests_s)
    return (ran.stdout + b"\n" + ran.stderr).decode(errors="replace")


def passes(log, record):
    """Return whether all tests that a record names pass by a log of pytest, Django or SymPy, and none fails in it.

    Data sets cut the names of pytest's tests at the first space.
    """
    results = {}
    for match in RESULT.finditer(log):
        result, name = [part for part in match.groups() if part]
        result, name = (result, name) if match[1] else (name, result)
        results.setdefault(name, set()).add(result)
    names = [name for column in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _list(record[column])]
    found = [results.get(name) or results.get(name.split()[0]) for name in names]
    return bool(found) and all(result and result <= PASSES for result in found)


def _list(names):
    return json.loads(names) if isinstance(names, str) else names
