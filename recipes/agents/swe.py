"""A software engineer: the policy changes a repository by commands, and the tests of its record decide.

The repository lies in an image of the record, in a container of its own. Each message of the policy has one command, which a
shell runs there; `submit` ends the episode. What has changed becomes a patch. A second container, which the policy never sees,
gets the patch and runs the tests. The reward is 1 if all tests that the record names pass, else 0, as in SWE-bench.

Columns of a record, those of SWE-bench, SWE-Gym and their like:

    FAIL_TO_PASS, PASS_TO_PASS   names of tests, as lists or as JSON
    eval_script                  a script of Bash that adds the tests and runs them; if it is absent:
    test_patch                   a patch that adds the tests, whose files pytest then runs

The patch cannot change the files of these tests, what configures pytest and Python (PROTECTED), and pytest itself (PYTEST). But
it is code that runs in the tests' process: one that finds the tests and prints their results can fake them, as in SWE-bench.
"""

import asyncio
import json
import re
import shlex
from typing import NamedTuple

import openai

from pipeline.environments.environment import Outcome
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell

COMMAND = re.compile(r"```(?:bash|sh)\n(.*?)\n?```", re.DOTALL)
FORM = "Expected one command in one block that begins with ```bash. Nothing was run."
ACTIVATE = "test ! -f ~/.bashrc || . ~/.bashrc"
"""Commands that activate the Python of an image, such as SWE-bench's."""
TRUST = "git config --global --add safe.directory '*'"
SNAPSHOT = f"{TRUST} && git add -A && git write-tree && git reset -q"
CHANGES = "git add -A && git diff --cached --binary --no-ext-diff --no-textconv {} >/tmp/work.patch"
PROTECTED = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("sitecustomize.py", "usercustomize.py", "*.egg-info/*", "*.dist-info/*"),  # metadata names plugins
)
PYTEST = tuple(
    f"{folder}{name}{end}"
    for folder in ("", "src/", "lib/", "python/")  # in which Python looks for modules
    for name in ("pytest", "_pytest", "pluggy", "iniconfig")
    for end in (".py", "/*")
)
TEST_FILE = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)
COLOR = re.compile(r"\x1b\[[\d;]*m")
RESULT = re.compile(
    r"^(?:(PASSED|XFAIL|FAILED|ERROR) (\S+)|(\S.*?) \.\.\. (ok|FAIL|ERROR)$|(test_\w+) (ok|[EFf])\b)", re.MULTILINE
)
PASSES = {"PASSED", "XFAIL", "ok"}
ENDED = (400, 410)  # statuses of the endpoint: the window is full, the episode has ended
PATCH_BYTES, NOTE = 1 << 20, 2000
SESSION_S = 4 * 3600.0
SHARED = {"memory_bytes": 8 << 30, "processes": 256, "scratch_bytes": 4 << 30, "scratch_files": 200_000, "open_files": 1024}
WORK = Sandbox(ResourceLimits(wall_s=600.0, cpu_s=3600.0, output_bytes=10_000, **SHARED))
TESTS = Sandbox(ResourceLimits(wall_s=600.0, cpu_s=7200.0, output_bytes=16 << 20, **SHARED))


class Tests(NamedTuple):
    """The tests of a record."""

    script: str  # of Bash
    patch: str  # that the script may apply
    files: list[str]  # that they add or change
    names: list[str]  # of those that must pass

    @classmethod
    def of(cls, record):
        """Read the tests of a record. Raises KeyError or ValueError if it has none."""
        names = [name for column in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _list(record[column])]
        patch = record.get("test_patch") or ""
        files = TEST_FILE.findall(patch or record["eval_script"])
        if not names or not files:
            raise ValueError(f"the record names {len(names)} tests in {len(files)} files; expected some")
        if not all(name.strip() for name in names):
            raise ValueError("FAIL_TO_PASS or PASS_TO_PASS: got an empty name; expected names of tests")
        built = f"{ACTIVATE}\ngit apply /tmp/tests.patch && python3 -m pytest -rA {shlex.join(files)}"
        return cls(record.get("eval_script") or built, patch, files, names)

    def pass_by(self, log):
        """Return whether all pass by a log of pytest, Django or SymPy, and none of them fails in it."""
        results = {}
        for match in RESULT.finditer(COLOR.sub("", log)):
            result, name = (match[1], match[2]) if match[1] else (match[4] or match[6], match[3] or match[5])
            results.setdefault(name, set()).add(result)
        broken = tuple(f"{name}{end}" for name, result in results.items() if "ERROR" in result for end in ("::", "/"))
        if any(name.startswith(broken) for name in self.names):  # their file or folder could not be imported
            return False
        found = [results.get(name) or results.get(name.split()[0]) for name in self.names]  # data sets cut names at a space
        return all(result and result <= PASSES for result in found)


def _list(names):
    return json.loads(names) if isinstance(names, str) else list(names)


async def play(client, task, image, turns, repository="/testbed", command_s=180.0, tests_s=3600.0):
    """Play one episode. image: path with columns of the record in it, such as /images/{instance_id}.sqsh."""
    tests, path, patch = Tests.of(task["record"]), image.format_map(task["record"]), b""
    metrics = dict.fromkeys(("accuracy", "submitted", "applied", "commands", "malformed"), 0.0)
    with await asyncio.to_thread(WORK.open, path) as container:
        ran = await asyncio.to_thread(container.run, ["bash", "-c", SNAPSHOT], cwd=repository)
        if ran.status:
            why = ran.stderr.decode(errors="replace").strip()
            raise ValueError(f"{path}: got {why} in {repository}; expected a git repository")
        start = ran.stdout.decode().split()[-1]
        with Shell(container, SESSION_S, repository) as shell:
            await _work(client, list(task["messages"]), shell, turns, command_s, metrics)
        if metrics["submitted"]:
            patch = await asyncio.to_thread(_patch, container, start, repository)
    if not patch.strip():
        return Outcome(0.0, metrics)
    with await asyncio.to_thread(TESTS.open, path) as container:  # closed, and its tests with it, if the episode is cut
        log = await asyncio.to_thread(_log, container, tests, patch, repository, tests_s)
    metrics |= {"applied": float(log is not None), "accuracy": float(log is not None and tests.pass_by(log))}
    return Outcome(metrics["accuracy"], metrics, notes={"patch": patch.decode(errors="replace"), "tests": (log or "")[-NOTE:]})


async def _work(client, messages, shell, turns, command_s, metrics):
    """Run the policy's commands until it submits, or has no more turns or tokens."""
    active = False
    for left in range(turns - 1, -1, -1):
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages)
        except openai.APIStatusError as error:
            if error.status_code in ENDED:
                return
            raise
        said = answer.choices[0].message.content or ""
        commands = [command.strip() for command in COMMAND.findall(said)]
        if commands == ["submit"]:
            metrics["submitted"] = 1.0
            return
        reply = FORM
        if len(commands) == 1:
            if not active:
                await asyncio.to_thread(shell.run, ACTIVATE)
            result = await asyncio.to_thread(shell.run, commands[0], command_s)
            reply, active = _shown(result, command_s), not result.shell_ended_by
        metrics["commands" if len(commands) == 1 else "malformed"] += 1
        told = f"{reply}\n\n{left} messages are left."
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]


def _shown(result, command_s):
    """Return what the policy reads of a command."""
    note = f"[exit status {result.status}]"
    if result.ended_by != "exit":
        note = f"[it took more than {command_s:g} s and was killed]" if result.ended_by == "wall time" else "[the shell ended]"
    return f"{result.output.rstrip()}\n{note}".lstrip()


def _patch(container, start, repository):
    """Return what has changed since the tree `start`; b"" if the policy's container does not tell, or if it is too much."""
    try:
        ran = container.run(["bash", "-c", CHANGES.format(start)], cwd=repository)
        return b"" if ran.status else container.read_file("/tmp/work.patch", PATCH_BYTES)
    except ValueError:
        return b""


def _log(container, tests, patch, repository, tests_s):
    """Return the output of the tests in a new container; None if the patch does not apply."""
    container.write_file("/tmp/work.patch", patch)
    container.write_file("/tmp/tests.patch", tests.patch.encode())
    container.write_file("/tmp/tests.sh", tests.script.encode())
    own = container.run(["bash", "-c", f"{TRUST} && {shlex.join(['git', 'ls-files', '--', *PYTEST])}"], cwd=repository).stdout
    pytest = () if own else PYTEST  # the repository may be pytest's
    kept = [*tests.files, *PROTECTED, *(f"*/{name}" for name in PROTECTED), *pytest]
    apply = shlex.join(["git", "apply", *(f"--exclude={pattern}" for pattern in kept), "/tmp/work.patch"])
    if container.run(["bash", "-c", apply], cwd=repository).status:
        return None
    ran = container.run(["bash", "/tmp/tests.sh"], cwd=repository, wall_s=tests_s)
    return (ran.stdout + b"\n" + ran.stderr).decode(errors="replace")
