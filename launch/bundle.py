"""Pack what a bug report needs into one archive: `python launch/bundle.py run=RUN_DIR [out=FILE]`.

The archive holds the recipe, the batch script, versions, the metrics and, for each attempt, its logs, checks of nodes and
failure. It holds no model, checkpoint, rollout, TensorBoard event or pickle. Secrets are replaced by ***. A log longer than
1 MiB loses its middle. What your own code prints or raises can quote an answer or a record, so look at the logs before you
send them.

Exit status: 0 if the archive was written; 2 if the command line, the run or the disk has an error.
"""

from __future__ import annotations

import io
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

from launch.executors import slurm_client
from launch.executors.record import read_record
from launch.executors.slurm_client import SlurmError
from launch.runs.run_folder import RunFolder
from launch.terminal import command_line
from launch.terminal.command_line import Key
from pipeline.config import Problem, RecipeError, environment_names
from pipeline.files import small_files
from pipeline.recipe import secrets, user_files

PATTERNS = (
    *("recipe.yaml", "batch.sh", "manifest.json", "job.json", "done.json", "metrics.jsonl", "steer.jsonl"),
    *("submitit/controller.log", "submitit/plan.json", "submitit/*.out", "submitit/*.err"),
    *("attempts/current", "attempts/*/rank*.log", "attempts/*/srun-*.out", "attempts/*/failure.json"),
    *("attempts/*/nodes.json", "attempts/*/startup.json"),
    *("attempts/*/trackers.log", "tracking/*.json"),
    *(f"attempts/*/{name}" for name in ("started", "signals", "failed_step", "progress", "requeue", "bad_nodes", "verdict")),
)
"""Patterns of the files of a run folder that a bundle holds. A file that no pattern matches stays out."""
LONGEST = 1 << 20
"""Maximum bytes of a log in a bundle: half of them from its beginning, half from its end."""
ALL_OF_METRICS = 1 << 27
"""Maximum bytes of metrics.jsonl in a bundle; those of a million steps fit."""
COMMAND_S = 10.0
"""Time limit, in seconds, of a command that describes this machine."""
ASSIGNED = re.compile(rf"\b({secrets.NAMES.pattern})(['\"]?\s*[=:]\s*['\"]?)[^\s,'\"]+")
"""Matches the variable of a secret with its value, as in a printed environment."""


@dataclass(frozen=True)
class BundleRequest:
    """The command line."""

    run: Annotated[Path, Key("RUN_DIR", "the run's folder; the run may still be active", bare=True)]
    out: Annotated[Path | None, Key("FILE", "the archive to write; default: NAME-bundle.tar.gz in this folder")] = None


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, BundleRequest, execute, arguments)


def execute(request: BundleRequest) -> int:
    """Write the archive, and print what it holds."""
    run = RunFolder.at(request.run)
    path = request.out or Path(f"{run.folder.resolve().name}-bundle.tar.gz")
    if path.exists():
        raise RecipeError(Problem("out", "already-exists", f"{path} exists already. Try to remove it, or another out=FILE"))
    files = dict(contents(run))
    _write(path, files)
    for name, text in files.items():
        print(f"{len(text.encode()):>12,} bytes  {name}")
    print(f"written: {path}")
    print("Logs can quote answers or records if your own code prints or raises them: read the logs before you send them.")
    return 0


def contents(run: RunFolder) -> Iterator[tuple[str, str]]:
    """Yield (name, redacted text) of each file of a run's bundle."""
    values = secrets.in_environment() | dict.fromkeys(_own_secret(run.folder), ".secret")
    for path in sorted({path for pattern in PATTERNS for path in run.folder.glob(pattern) if path.is_file()}):
        if path == run.folder / "recipe.yaml":
            text = environment_names.recipe_text(run.folder)
        else:
            text = _ends(path, ALL_OF_METRICS if path.name == "metrics.jsonl" else LONGEST)
            text = environment_names.masked(run.folder, text)
        yield str(path.relative_to(run.folder)), redact(text, values)
    yield "files.txt", _listing(run.folder)
    yield "machine.txt", redact(_machine(run.folder), values)


def redact(text: str, values: dict[str, str]) -> str:
    """Return the text with secrets replaced. values: the secrets, as `secrets.in_environment` returns them."""
    return ASSIGNED.sub(lambda found: f"{found[1]}{found.groups()[-1]}***", secrets.redact(text, values))


def _own_secret(folder: Path) -> list[str]:
    path = folder / ".secret"
    text = (small_files.read_text(path) or "").strip()
    return [text] if text else []


def _ends(path: Path, longest: int) -> str:
    """Return a file's text. If it is longer than `longest` bytes, leave out its middle."""
    size = path.stat().st_size
    with user_files.open_file(path) as file:
        if size <= longest:
            return file.read().decode(errors="replace")
        head = file.read(longest // 2).rpartition(b"\n")[0]
        file.seek(size - longest // 2)
        tail = file.read().partition(b"\n")[2]
    missing = size - len(head) - len(tail)
    return f"{head.decode(errors='replace')}\n[... {missing:,} bytes left out ...]\n{tail.decode(errors='replace')}"


def _listing(folder: Path) -> str:
    """Return a line for each file of a run folder: size, unix time of the last change, and name."""
    lines = []
    for path in sorted(folder.rglob("*")):
        try:
            status = path.lstat()
        except OSError:  # removed meanwhile: the run may be going on
            continue
        if not path.is_dir():
            lines.append(f"{status.st_size:>15} {status.st_mtime:.0f} {path.relative_to(folder)}")
    return "\n".join(lines) + "\n"


def _machine(folder: Path) -> str:
    """Return what this machine, its packages and Slurm say, as sections of text."""
    packages = sorted({f"{each.metadata['Name']}=={each.version}" for each in metadata.distributions()})
    sections = {
        "machine that made this bundle": f"{platform.platform()}, Python {platform.python_version()}",
        "nvidia-smi": _printed("nvidia-smi"),
        "sinfo --version": _printed("sinfo", "--version"),
        "accounting": _accounting(folder),
        "packages of this Python": "\n".join(packages),
    }
    return "".join(f"## {title}\n{text.strip()}\n\n" for title, text in sections.items())


def _printed(*command: str) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_S)
        return ended.stdout or ended.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not available: {error}"


def _accounting(folder: Path) -> str:
    """Return Slurm's record of the run's last job."""
    try:
        record = read_record(folder)
    except RecipeError as error:  # a damaged file is part of what the bundle shows
        return f"unknown: {error}"
    if record is None or record.executor == "local":
        return "no Slurm job"
    fields = "JobID,JobName,Partition,State,ExitCode,Start,End,NodeList,AllocTRES,MaxRSS"
    try:
        return slurm_client.run_command("sacct", "-P", "-j", str(record.job_id), f"--format={fields}")
    except SlurmError as error:
        return f"not available: {error}"


def _write(path: Path, files: dict[str, str]) -> None:
    """Write the archive, which only its owner may read. Raises FileExistsError."""
    with (
        open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
        tarfile.open(fileobj=file, mode="w:gz") as archive,
    ):
        for name, text in files.items():
            encoded = text.encode(errors="replace")
            entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            entry.size, entry.mode = len(encoded), 0o600
            archive.addfile(entry, io.BytesIO(encoded))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
