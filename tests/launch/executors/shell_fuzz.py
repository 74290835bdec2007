"""Make recipes with shell syntax in their texts, and run their scripts with stand-ins for Slurm's commands and for Python.

A case is made of a seed alone. Wherever a shell reads a part of a text as syntax, it runs the command `pwned` or writes a file
of that name. What the checks of a recipe do not refuse must reach sbatch, srun and the ranks exactly as the recipe has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.executors import allocation, nodes, slurm
from launch.executors.components import components
from launch.executors.containers import runtimes
from pipeline import config
from pipeline.config import Recipe, schema_validation
from tests.launch.model import write_recipe

SYNTAX = (
    *("$(pwned)", "`pwned`", ";pwned;", "|pwned", "&pwned&", "&&pwned", "||pwned", ">pwned", ">>pwned ", "<(pwned)", "'", '"'),
    *("\\", "'$(pwned)'", '"$(pwned)"', "';pwned;'", '";pwned;"', "\\';pwned;\\'", "\\\\", "${x:-$(pwned)}", "a[$(pwned)]"),
    *("$((a[$(pwned)]))", "#", " #", " ", "é", "%j", "%%", "!!", "~", "*", "?", "{a,b}", "[", "]", "=", "--", "-x", "a b"),
    *(" --wrap=pwned", "$'\\n'pwned", " Restarts=a[$(pwned)]", " JobState=a[$(pwned)] ", " EndTime=0;pwned"),
    *("hetjob", "packjob", "@", ":", ",", "x", "gpu", "0", "rank"),
)
CONTROL = (
    *("\npwned\n", "\r\npwned", "\npwned #", "\\\npwned\n", "\n#SBATCH --wrap=pwned\n", "\t", "\v", "\x00", "\x7f", "\x85"),
    *("\u2028", "\ud800"),
)
VARIABLES = (
    *("A", "_b", "NCCL_DEBUG", "RANDOM", "SRANDOM", "OPTIND", "HISTCMD", "SECONDS", "UID", "PPID", "BASHPID", "IFS", "PS4"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME", "OMP_NUM_THREADS", "x"),
)
KEYS = ("constraint", "mem", "container_image", "container_workdir")
NAMES = ("partition", "account", "qos")
LISTS = ("container_mounts", "srun_args")
PATTERNS = "/%\\"
BOUND_S = 60.0

COMMANDS = {
    "pwned": 'echo "$0 $*" >>{out}/side_effect',
    "srun": "printf '%s\\0' \"$@\" >{out}/srun.$$\n"
    'exec env SLURM_PROCID=0 SLURM_LOCALID=0 SLURMD_NODENAME=n1 SLURM_CPUS_ON_NODE=8 bash -c "${{@: -1}}"',
    "scontrol": '[[ $2 == job ]] && cat {out}/job || {{ [[ "$1 $2" == "show hostnames" ]] && echo n1; }}',
}
RANK = """#!{python} -IS
import json, os, sys
found = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
with open("{out}/rank." + os.environ["HETSTEP_COMPONENT"], "w") as file:
    json.dump(found, file)
open(os.environ["HETSTEP_RUN_DIR"] + "/done.json", "w").close()
"""


@dataclass(frozen=True)
class Outcome:
    seed: int
    recipe: Recipe
    refused: list[str]
    wrong: list[str]  # what the script did that it should not


@dataclass(frozen=True)
class Author:
    """Writes texts. refusable: also such as must be refused."""

    rng: random.Random
    refusable: bool

    def sometimes(self, share: float = 0.3) -> bool:
        return self.rng.random() < share

    def text(self, without: str = "") -> str:
        pieces = (*SYNTAX, *CONTROL) if self.refusable else SYNTAX
        made = "".join(self.rng.choices(pieces, k=self.rng.randint(1, 4)))
        return made.translate(dict.fromkeys(map(ord, without)))

    def variables(self) -> dict[str, str]:
        names = self.rng.sample(VARIABLES, self.rng.randint(0, 3))
        if self.refusable and self.sometimes():
            names.append(self.text())
        return {name: self.text() for name in names}

    def component(self, before: config.ComponentConfig, folder: Path) -> config.ComponentConfig:
        values = {key: self.text() for key in KEYS if self.sometimes()}
        values |= {key: self.text("" if self.refusable else " ") for key in NAMES if self.sometimes()}
        values |= {key: [self.text() for _ in range(self.rng.randint(1, 3))] for key in LISTS if self.sometimes()}
        if self.sometimes():
            values["sbatch_options"] = {name: self.text() for name in self.rng.sample(("comment", "exclude", "gres"), 2)}
        python = f"{folder}/python{self.text('/=') if self.sometimes() else ''}"
        return dataclasses.replace(before, env_vars=self.variables(), python=python, **values)

    def recipe(self, base: Recipe, folder: Path) -> Recipe:
        """Return `base` with these texts in some of the places that reach its script."""
        cluster = base.cluster
        parts = {name: self.component(getattr(cluster, name), folder) for name in ("train", "generate")}
        return dataclasses.replace(
            base,
            name=self.text() if self.sometimes() else "tiny",
            run_dir=f"{folder}/run{self.text('/' if self.refusable else PATTERNS) if self.sometimes() else ''}",
            cluster=dataclasses.replace(cluster, time_min=60, **parts),
        )


@contextlib.contextmanager
def surroundings() -> Iterator[tuple[Path, Path, Path]]:
    """Yield new folders: one to run in, one of commands, and one for the commands' logs."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        work, bin, out = (Path(made, name) for name in ("work", "bin", "out"))
        for folder in (work, bin, out):
            folder.mkdir()
        for name, body in COMMANDS.items():
            _write_command(bin / name, f"#!/bin/bash\n{body.format(out=out)}\n")
        yield work, bin, out


def run(seed: int, base: Recipe) -> Outcome:
    """Make the case of this seed and run its script, unless it is refused."""
    rng = random.Random(seed)
    author = Author(rng, refusable=rng.random() < 0.3)
    with surroundings() as folders:
        recipe = author.recipe(base, folders[0])
        if refused := [str(problem) for problem in schema_validation.value_problems(recipe)]:
            return Outcome(seed, recipe, refused, [] if author.refusable else ["refused"])
        return Outcome(seed, recipe, [], run_script(recipe, rng.random() < 0.7, *folders))


def run_script(recipe: Recipe, in_job: bool, work: Path, bin: Path, out: Path) -> list[str]:
    """Run the script of a job or of an allocation in `work`; return what it does wrong."""
    parts, train, run_dir = components(recipe), recipe.cluster.train, Path(recipe.run_dir)
    for part in parts.values():
        with contextlib.suppress(FileExistsError):
            _write_command(Path(part.python), RANK.format(out=out, python=sys.executable))
    (out / "job").write_text(
        f"JobId=7 JobName={recipe.name.replace(' ', '_')} Account={train.account} QOS={train.qos} JobState=RUNNING Reason=None"
        " Restarts=0 EndTime=2099-01-01T00:00:00 ExcNodeList=(null)\n"
    )
    before = sorted(work.iterdir())
    Path(run_dir, "submitit").mkdir(parents=True)
    if in_job:
        script = slurm.batch_script(run_dir, recipe.name, recipe.cluster, parts)
    else:
        script = allocation.script(run_dir, recipe.cluster, parts)
    environment = {"PATH": f"{bin}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "HETSTEP_SETTLE_S": "0"}
    answer = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, errors="replace", timeout=BOUND_S
    )
    wrong = [path.read_text() for path in out.glob("side_effect")]
    wrong += [f"wrote {path.name!a}" for path in work.iterdir() if path not in (*before, run_dir)]
    wrong += _misread_header(script, recipe, parts) if in_job else []
    wrong += _misread_steps(out, run_dir, parts)
    return [*wrong, answer.stdout, answer.stderr] if wrong else []


def _write_command(path: Path, body: str) -> None:
    with open(path, "x") as file:
        file.write(body)
    path.chmod(0o755)


def _misread_header(script: str, recipe: Recipe, parts: dict[str, config.ComponentConfig]) -> Iterator[str]:
    """Yield what sbatch would read in place of the recipe's options; tests/slurm has the real one read such lines."""
    lines = script.partition("\n\n")[0].splitlines()[1:]
    words = [re.fullmatch(r'#SBATCH ("?)(.*)\1', line) for line in lines]
    read = [re.sub(r"\\(.)", r"\1", word[2]) for word in words if word]
    if len(read) < len(lines):
        yield f"lines that are not sbatch's: {lines}"
    for host in nodes.hosts(parts).values():
        for option in (*nodes.allocation_options(host), f"--job-name={recipe.name.replace(' ', '_')}"):
            if option not in read:
                yield f"{option!a} is not in {read}"


def _misread_steps(out: Path, run_dir: Path, parts: dict[str, config.ComponentConfig]) -> Iterator[str]:
    """Yield what srun and the ranks got that differs from the recipe."""
    steps = [path.read_bytes().decode().split("\0")[:-1] for path in out.glob("srun.*")]
    for name, share in nodes.shares(parts).items():
        part = share.component
        options = [*nodes.step_options(share), *runtimes.start("pyxis", part)[0], *part.srun_args, "bash", "-c"]
        if not any(step[step.index("--kill-on-bad-exit=1") + 1 : -1] == options for step in steps):
            yield f"{name}: no srun with {options} among {steps}"
        try:
            rank = json.loads((out / f"rank.{name}").read_text())
        except FileNotFoundError:
            yield f"{name}: no rank was started"
            continue
        for key, value in {"HETSTEP_RUN_DIR": str(run_dir), "HETSTEP_COMPONENT": name, **part.env_vars}.items():
            if (got := rank["environment"].get(key)) != value:
                yield f"{name}: {key} is {got!a}, not {value!a}"
        if rank["arguments"][-1] != f"{run_dir}/submitit":
            yield f"{name}: arguments {rank['arguments']}"


def fuzz(count: int, seed: int) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        base = config.load(str(write_recipe(Path(folder))))
        for number in range(count):
            yield run(seed * 1_000_000 + number, base)
