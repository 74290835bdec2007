"""Run random command lines: the exit status of each must be 0, 1 or 2, without a traceback.

A case follows from a seed alone: a shipped recipe and one or more `key=value` with keys of the schema, mutated or invented
ones, and values that are right, of another type, odd unicode, huge, deeply nested, shell syntax, YAML tags and anchors,
interpolations, or mutations of right ones. Commands run in this process, in a folder of their own, and may write only there.

    python -m tests.launch.fuzz [lines=5000] [folders=500] [seed=1] [workers=2]

runs so many command lines, and every command over so many mutated folders (tests/launch/folder_fuzz.py), in forked processes.
It prints the cases that fail, the counts of exit statuses, the longest time and the largest memory.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import os
import random
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch import export, plan_refit, report, status, submit, sweep, timeline
from launch.executors import slurm_client
from pipeline.config import RECIPES, Recipe, config_tree, schema_validation, yaml_text

MODES = ("show", "plan", "dry_run")
ALLOWED = (0, 1, 2)
BOUND_S = 10.0
"""CPU seconds that a case may take. A refusal takes a fraction of a second; plans of the largest models take some seconds."""
WALL_S = 6 * BOUND_S
"""Seconds that a case may take when it waits, or when the machine is busy."""
MEMORY_KB, LIBRARIES_KB = 1_000_000, 300_000
"""Memory of a process that has run a few cases, at most, and how much of it Python and the imported libraries may take. A
process of tests that holds more may grow by the rest."""

SCALARS = (
    *("", " ", "null", "~", "true", "false", "yes", "no", "on", "0", "-1", "1", "2", "7", "1e400", "-1e400", "1e-400", "nan"),
    *(".nan", ".inf", "-.inf", "0x10", "0o7", "1_000", "1:30", "00:00:00:01", "2001-01-01", "1.5", "1e3", "-0", "+1", "1."),
    *("9" * 30, "9" * 5000, "-" + "9" * 30, "1" + "0" * 400, "0." + "0" * 400 + "1", "18446744073709551616", "[]", "{}"),
    *("[1, 2]", "{a: 1}", "{a: {b: {c: []}}}", "[null]", "[[]]", "{1: 2}", "{null: 1}", "{[1]: 2}", "{true: 1}"),
)
YAML = (
    *("!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!set {a, b}", "!!binary aGk=", "!!omap [a: 1]"),
    *("!!timestamp 2001-01-01", "!!float 1", "!!int a", "!!int 0b", "!!float _", "!!null x", "!!bool 2", "!!str 1", "!x y"),
    *("!<tag:yaml.org,2002:int> 5", "&a [*a]", "&a {b: *a}", "*nobody", "&a [1, *a, &a 2]", "<<: {a: 1}", "{<<: 1}"),
    *("{<<: [1]}", "{a: 1, a: 2}", "? a", "? [a, b] : c", "- a", "- - - a", "a: b: c", "%YAML 1.1", "---", "--- a\n--- b"),
    *("...", "|\n a\n b", ">\n a", '"\\x00"', '"\\ud800"', '"\\UFFFFFFFF"', "'", '"', "[", "{", "]", "}", ",", ":", "#", "@"),
    *("`", "%", "!", "&", "*", "!!", "[,]", "{,}", "{a", "[a", "\t", "\ta: 1", "a\t: 1", "=", "==", "!!value =", "0b2", "0_"),
    *("_", "!!int ''", "!!float ''", "!!bool ''", "!!int '0x'", "!!int ':'", "190:20:30.15", "-:1", "1:_", "_1:2"),
)
INTERPOLATIONS = (
    *("${", "${}", "${.}", "${..}", "${....}", "${a}", "${a.b.c}", "${grpo}", "${policy}", "${.max_num_steps}"),
    *("${cluster.train}", "${${a}}", "${oc.env:HOME}", "${oc.env:NOBODY_HAS_THIS}", "${oc.env:HOME,x}", "${oc.create:{a: 1}}"),
    *("${oc.decode:'[1'}", "${oc.select:a}", "${oc.select:grpo}", "${oc.deprecated:grpo}", "${oc.dict.keys:grpo}"),
    *("${oc.dict.values:policy}", "${mul:1}", "${mul:1,2}", "${mul:a,b}", "${mul:9999999999,[1]}", "${div:1,0}"),
    *("${add:[1],[2]}", "${max:1,a}", "${if:1}", "${if:${nothing},1,2}", "${nobody:1}", "${mul:${mul:2,3},4}", "\\${a}"),
    *("\\\\${a}", "$${a}", "${run_dir}", "${name}", "x${run_dir}y", "${run_dir}${name}", "${[0]}", "${a[0]}"),
    *("${policy[model_name]}", "${mul:1e308,1e308}", "${div:1e-320,1e300}", "${mul:'a',99999999999}", "${add:null,1}"),
    *("${max:null,null}", "${oc.env:PATH,${oc.env:HOME}}", "[${run_dir}, ${]", "{a: ${b}}"),
)
SHELL = (
    *("$(id)", "`id`", "; id", "| id", "&& id", "> /dev/null", "$HOME", "~", "~root", "*", "?", "'; id; '", '"; id; "', "a b"),
    *("-x", "--help", "-", "--", "../../etc", "/", "/dev/null", "/dev/full", "/proc/self/mem", "/nonexistent/a", ".", ".."),
    *("//", "a/../b", "a\nb", "a\rb", "a\x1b[31mb", "\x07", "\x7f", "\x01", "\x85", "\u2028", "/" * 5000, "a/" * 2000),
    *("x" * 300,),
)
UNICODE = (
    *(
        "ü",
        "é",
        "e\u0301",
        "日本",
        "🙂",
        "\u202e",
        "\ufeff",
        "\u200b",
        "\u0000".replace("\0", "\u0378"),
        "\ue000",
        "\U0010ffff",
    ),
    *("\udcff", "a\udc80b", "\ud800", "\ufffe", "\uffff", "İ", "ß", "ﬃ", "٣", "²", "\uff11\uff12", "½", "Ⅷ", "\u00a0"),
    *("\u3000", "\U0001d7cf"),
)


@dataclass(frozen=True)
class Case:
    """A command with its arguments."""

    command: str
    arguments: list[str]

    def __str__(self) -> str:
        text = shlex.join([self.command, *self.arguments]).encode(errors="backslashreplace").decode()
        return text if len(text) < 400 else f"{text[:400]} ... ({len(text)} characters)"


@dataclass(frozen=True)
class Outcome:
    case: Case
    status: int | None  # None: it raised
    seconds: float  # of CPU time
    raised: str = ""
    wrote: tuple[str, ...] = ()  # outside its folder
    memory_kb: int = 0  # the largest of this process so far
    held_kb: int = 0  # likewise before the case
    waited_s: float = 0.0  # with the time in which it waited, or other processes ran

    @property
    def bad(self) -> bool:
        grown = self.memory_kb - max(self.held_kb, LIBRARIES_KB) > MEMORY_KB - LIBRARIES_KB
        return self.status not in ALLOWED or self.seconds > BOUND_S or grown or bool(self.wrote)


# ---- cases ----------------------------------------------------------------------------------------------------------------


def recipes() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def values(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(SCALARS)
    if kind < 0.45:
        return draw.choice(YAML)
    if kind < 0.6:
        return draw.choice(INTERPOLATIONS)
    if kind < 0.7:
        return draw.choice(SHELL)
    if kind < 0.8:
        return draw.choice(UNICODE)
    if kind < 0.85:
        depth = draw.choice((3, 30, 300, 3000))
        opening, closing = draw.choice((("[", "]"), ("{a: ", "}"), ("${", "}"), ("- ", ""), ("(", ")")))
        return opening * depth + "x" + closing * draw.choice((depth, depth - 1, 0))
    if kind < 0.88:
        return draw.choice(("x", "9", "[1,", " ", "🙂", "a: ", "'")) * draw.choice((1000, 20000))
    return "".join(
        draw.choice("abc019 .,:;=-_[]{}()'\"!&*#|>%@`~$\\/\n\t?<+\u00fc\u20ac\udc81") for _ in range(draw.randint(0, 40))
    )


def keys(draw: random.Random) -> str:
    known = draw.choice(schema_validation.keys(Recipe)).replace("*", draw.choice(("math", "train", "a", "ü")))
    kind = draw.random()
    if kind < 0.6:
        return known
    if kind < 0.75:
        return mutated(draw, known)
    if kind < 0.85:
        return draw.choice(
            (".", "..", "a..b", ".a", "a.", "a" * 300, "a." * 400 + "a", "_override_", "defaults", "needs", "name")
        )
    if kind < 0.93:
        return known + draw.choice((".x", ".0", "[0]", "._override_", ".defaults", ".", " ", "~", "+", ".a.b.c"))
    return draw.choice(("", "+", "++", "~", *UNICODE, *SHELL)).replace("=", "")


def mutated(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    letter = draw.choice("aeiou._-+~ =\u00fc\n\udc80[]$")
    return draw.choice(
        (text[:at] + text[at + 1 :], text[:at] + letter + text[at:], text[:at] + letter + text[at + 1 :], text * 2)
    )


def override(draw: random.Random) -> str:
    if draw.random() < 0.04:
        return draw.choice(
            ("==b", "=", "", "b", "=b", "==", "a==b", "--a=b", "-a", "--", "+a=b", "~a", "a=b=c", "\udc80", "=\n")
        )
    return f"{keys(draw)}={values(draw)}"


@cache
def true_pairs(name: str) -> list[tuple[str, str]]:
    """Return (key, value as typed) of each value that a shipped recipe sets."""
    leaves = config_tree.load_with_parents(RECIPES / f"{name}.yaml").leaves()
    return [(key, yaml_text.dump(leaf.value, on_one_line=True).removesuffix("...\n").strip()) for key, leaf in leaves]


def nearly_true(draw: random.Random, name: str) -> str:
    """Return a key of a recipe with a value near its own, or a key close to it."""
    pairs = true_pairs(name)
    key, value = draw.choice(pairs)
    kind = draw.random()
    if kind < 0.3:
        value = draw.choice(pairs)[1]
    elif kind < 0.6:
        value = draw.choice(
            ("0", "1", "-1", "2", "3", "5", "64", "1000000", "0.0", "0.5", "1e-9", "null", "true", "false", "[]", "{}")
        )
    elif kind < 0.75:
        value = mutated(draw, value)
    elif kind < 0.85:
        key = mutated(draw, key)
    elif kind < 0.9:
        value = f"${{{draw.choice(pairs)[0]}}}"
    return f"{key}={value}"


def of_submit(draw: random.Random) -> list[str]:
    name = draw.choice(recipes()) if draw.random() < 0.96 else draw.choice((*SHELL, *UNICODE, "", "tiny", "README.md"))
    junk = name not in recipes() or draw.random() < 0.5
    given = [override(draw) if junk else nearly_true(draw, name) for _ in range(draw.choice((1, 1, 1, 2, 3, 6)))]
    if draw.random() < 0.1:
        given *= 2
    if draw.random() < 0.03:
        given.append(f"{draw.choice(('detach', 'follow', 'plan_from', 'show', 'recipe', 'plan'))}={values(draw)}")
    executor = [] if draw.random() < 0.7 else [f"cluster.executor={draw.choice(('slurm', 'allocation', 'auto'))}"]
    arguments = [f"recipe={name}", f"{draw.choice(MODES)}=true", *executor, *given]
    if draw.random() < 0.2:
        draw.shuffle(arguments)
    return arguments


def _with(*names: str) -> Callable[[random.Random], list[str]]:
    """Make cases of a command with these keys."""

    def make(draw: random.Random) -> list[str]:
        some = [f"{draw.choice(names)}={values(draw)}" for _ in range(draw.randint(1, 3))]
        some += [values(draw)] if draw.random() < 0.3 else []
        some += [override(draw)] if draw.random() < 0.2 else []
        some += ["run=run"] if draw.random() < 0.6 else []
        draw.shuffle(some)
        return some

    return make


def of_sweep(draw: random.Random) -> list[str]:
    own = [f"{draw.choice(('seeds', 'max_concurrent', 'retries', 'runs', 'gates', 'folder', 'check', 'name'))}={values(draw)}"]
    name = draw.choice(("suite.yaml", "suite.yaml", "suite.yaml", values(draw)))
    more = [override(draw)] if draw.random() < 0.7 else own
    more += [f"id={values(draw)}"] if draw.random() < 0.1 else []
    return [f"{'check' if draw.random() < 0.1 else 'sweep'}={name}", "dry_run=true", *more]


def of_plan_refit(draw: random.Random) -> list[str]:
    name = draw.choice([recipe for recipe in recipes() if recipe.startswith("tiny_")])
    more = [f"{draw.choice(('model_config', 'out'))}={values(draw)}"] if draw.random() < 0.2 else []
    return [f"recipe={name}", *[override(draw) for _ in range(draw.randint(1, 2))], *more]


COMMANDS: dict[str, tuple[Callable[[list[str]], int], Callable[[random.Random], list[str]]]] = {
    "submit": (submit.main, of_submit),
    "status": (status.main, _with("run", "json", "watch", "x")),
    "report": (report.main, _with("run", "run", "x")),
    "timeline": (timeline.main, _with("run", "step", "steps", "attempts", "gz")),
    "sweep": (sweep.main, of_sweep),
    "export": (export.main, _with("run", "step", "out")),
    "plan_refit": (plan_refit.main, of_plan_refit),
}


def cases(command: str, count: int, seed: int) -> Iterator[Case]:
    for number in range(count):
        draw = random.Random(f"{command} {seed} {number}")
        arguments = [argument.replace("\0", "") for argument in COMMANDS[command][1](draw)]  # no process can be given a NUL
        if command == "status":
            arguments = [argument for argument in arguments if not argument.startswith("watch=")] + ["json=true"]
        yield Case(command, arguments)


# ---- running them -----------------------------------------------------------------------------------------------------------


BOUNDS = ((signal.SIGPROF, signal.ITIMER_PROF, BOUND_S), (signal.SIGALRM, signal.ITIMER_REAL, WALL_S))


class TooSlow(Exception):
    """A case ran longer than BOUND_S or WALL_S."""


def run(case: Case, writes: list[str], main: Callable[[list[str]], int] | None = None) -> Outcome:
    """Run a case.

    main: of its command; None: that of COMMANDS. writes: this process's audit hook appends the paths opened for writing, or
    created, outside the current folder.
    """

    def give_up(*_: object) -> None:
        raise TooSlow

    writes.clear()
    begin, began = time.process_time(), time.monotonic()
    held_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGTERM)}
    for number, timer, seconds in BOUNDS:
        signal.signal(number, give_up)
        signal.setitimer(timer, seconds)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")  # as Python's own are
    raised, code = "", None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = (main or COMMANDS[case.command][0])(case.arguments)
            out.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else None
        raised = "" if code in ALLOWED else f"SystemExit({end.code!r})"
    except BaseException:
        raised = traceback.format_exc()
    finally:
        for _, timer, _ in BOUNDS:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    memory_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.process_time() - begin
    return Outcome(case, code, seconds, raised, tuple(writes), memory_kb, held_kb, time.monotonic() - began)


@contextlib.contextmanager
def surroundings() -> Iterator[list[str]]:
    """Change to a new folder, without Slurm and without a network, and list what is written elsewhere."""
    here, environment, writes, live = Path.cwd(), dict(os.environ), [], [True]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        inside = os.path.realpath(folder)

        def watch(event: str, arguments: tuple) -> None:
            if not live[0]:
                return
            path, link = arguments[0] if arguments else None, False
            if event == "open":
                mode, flags = arguments[1], arguments[2]
                if not (mode and set(str(mode)) & set("wax+")) and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    return
                link = bool(flags & os.O_NOFOLLOW)  # the system refuses a link
            elif event not in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.truncate", "os.chmod", "shutil.rmtree"):
                return
            if isinstance(path, str | bytes | os.PathLike) and not isinstance(path, int):
                folder, name = os.path.split(os.fsdecode(path))
                real = os.path.join(os.path.realpath(folder), name) if link else os.path.realpath(os.fsdecode(path))
                if not f"{real}/".startswith(f"{inside}/") and "__pycache__" not in real and real != "/dev/null":
                    writes.append(f"{event} {real}")

        sys.addaudithook(watch)  # an audit hook cannot be removed, so `live` silences it
        kept, tempfile.tempdir = tempfile.tempdir, inside  # it does not read TMPDIR again
        try:
            os.chdir(folder)
            Path("recipes").symlink_to(RECIPES)
            for name in [name for name in os.environ if name.startswith("SLURM_")]:
                del os.environ[name]
            os.environ |= {"HF_HOME": f"{inside}/hf", "HF_HUB_OFFLINE": "1", "TMPDIR": inside, "MPLCONFIGDIR": f"{inside}/mpl"}
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{inside}/inductor"
            os.environ["PATH"] = f"{inside}/nothing"
            slurm_client._unreachable.clear()
            yield writes
        finally:
            live[0], tempfile.tempdir = False, kept
            os.chdir(here)
            os.environ.clear()
            os.environ.update(environment)


def fuzz(command: str, count: int, seed: int) -> Iterator[Outcome]:
    with surroundings() as writes:
        _past_run(Path("run"))
        Path("suite.yaml").write_text(
            "seeds: [1]\nruns: {tiny_sft: {}}\ngates: {learns: {value: last(val/loss), at_most: 1}}\n"
        )
        for case in cases(command, count, seed):
            yield run(case, writes)


def _past_run(folder: Path) -> None:
    """Write a run folder for the commands that read runs."""
    from tests.launch import made_runs

    made_runs.folder(folder)
    made_runs.attempt(folder, "1-0", 0.0, "stop: crashed with status 1", {"rank": 0, "message": "no"})


# ---- many of them -------------------------------------------------------------------------------------------------------

SHARES = {"submit": 0.7, "status": 0.05, "report": 0.05, "timeline": 0.05, "sweep": 0.05, "export": 0.05, "plan_refit": 0.05}
"""Share of each command in the lines."""
CHUNK = {"lines": 50, "run": 5, "sweep": 10, "model": 10, "data": 10}
"""Cases that a forked process runs: its memory is that of its cases."""
LIMIT_BYTES = 8 << 30
"""Address space of a forked process, so that a fault does not take all memory."""
Job = tuple[str, str, int, int]
"""`lines` or a kind of folder, the command or "", seed, number of cases."""


def jobs(lines: int, folders: int, seed: int) -> list[Job]:
    """Return the work of all processes."""
    from tests.launch.folder_fuzz import KINDS

    found: list[Job] = []
    for command, share in SHARES.items():
        count = round(lines * share)
        found += [("lines", command, 1000 * seed + at, min(50, count - at)) for at in range(0, count, CHUNK["lines"])]
    for kind in KINDS:
        count = folders // len(KINDS)
        found += [(kind, "", 1000 * seed + at, min(CHUNK[kind], count - at)) for at in range(0, count, CHUNK[kind])]
    return found


def work(job: Job) -> tuple[Job, Counter, list[str], float, float, int]:
    """Run a job's cases; return (job, its statuses, what failed, longest CPU and waiting seconds, most memory)."""
    from tests.launch.folder_fuzz import fuzz_folders

    kind, command, seed, count = job
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    statuses, bad, seconds, waited, memory = Counter(), [], 0.0, 0.0, 0
    if kind == "lines":
        found = ((f"lines {command} {seed}", outcome) for outcome in fuzz(command, count, seed))
    else:
        found = fuzz_folders(kind, range(seed, seed + count), torch=True)
    for about, outcome in found:
        statuses[outcome.case.command, outcome.status] += 1
        seconds, waited = max(seconds, outcome.seconds), max(waited, outcome.waited_s)
        if outcome.bad:
            what = f"{outcome.status}, {outcome.seconds:.1f} s, {outcome.memory_kb:,} kB, wrote {outcome.wrote}"
            bad.append(f"{about}\n  {outcome.case}\n  {what}\n{outcome.raised}")
        memory = max(memory, outcome.memory_kb)
    return job, statuses, bad, seconds, waited, memory


def main(arguments: list[str]) -> int:
    """Run the cases in forked processes, and print what fails and the counts; return 1 if a case failed."""
    from pipeline.train.adapters import peft_files  # noqa: F401 before the fork, with torch and transformers: it takes seconds

    given = {"lines": 5000, "folders": 500, "seed": 1, "workers": 2}
    given |= {key: int(value) for key, _, value in (argument.partition("=") for argument in arguments)}
    statuses, failed, most = Counter(), 0, [0.0, 0.0, 0]
    with mp.get_context("fork").Pool(given["workers"], maxtasksperchild=1) as pool:
        for _, counts, bad, *largest in pool.imap_unordered(work, jobs(given["lines"], given["folders"], given["seed"])):
            statuses.update(counts)
            failed += len(bad)
            most = [max(pair) for pair in zip(most, largest, strict=True)]
            print("\n".join(bad), end="\n" if bad else "", flush=True)
            cost = f"at most {most[0]:.1f} s of CPU, {most[1]:.1f} s, {most[2]:,} kB"
            print(f"{sum(statuses.values())} commands, {failed} failed; {cost}", flush=True)
    for (command, code), count in sorted(statuses.items(), key=str):
        print(f"{command}: exit status {code}: {count}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
