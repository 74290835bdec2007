"""Images for a real Apptainer or SingularityCE: this machine's bash and C library, without its Python, which mounts bring."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from launch.executors.containers.apptainer import PROGRAMS
from launch.executors.executor import ROOT
from tests.slurm.cluster import SEARCH
from tests.slurm.roots import python_paths

OWN = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetstep/apptainer/usr/bin"
"""Where containers/install-apptainer.sh puts the programs of another Debian."""
PATH = f"{SEARCH}{os.pathsep}{OWN}"
COMMANDS = ("bash", "cat", "cut", "env", "id", "ls", "mkdir", "sleep", "touch", "uname")
FOLDERS = ("dev", "etc", "proc", "root", "sys", "tmp", "usr/bin", "usr/lib", "var/tmp")
LIBRARY = re.compile(r"^\s*(?:\S+ => )?((?:/usr)?/lib\S*)", re.M)


def program() -> str | None:
    """Return the path of apptainer or singularity; None if neither is installed."""
    return next(filter(None, (shutil.which(name, path=PATH) for name in PROGRAMS)), None)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run Apptainer with these arguments."""
    command = [program() or PROGRAMS[0], *arguments]
    return subprocess.run(command, env={**os.environ, "PATH": PATH, **variables}, capture_output=True, text=True, timeout=120)


def image(path: Path, name: str, commands: Iterable[str] = COMMANDS) -> Path:
    """Make an image at `path`, in which /etc/image has the text `name`: a SIF file if its name ends in .sif, else a folder."""
    root = path if path.suffix != ".sif" else path.with_name(f"{path.name}.root")
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{'bin' if link == 'bin' else 'lib'}")
    for command in commands:
        source = os.path.realpath(shutil.which(command) or command)
        shutil.copy(source, root / "usr/bin" / command)
    for library in _libraries([*(root / "usr/bin").iterdir(), *_extensions()]):
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    (root / "etc/image").write_text(name)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    if path != root:
        built = run("build", str(path), str(root))
        assert built.returncode == 0, built.stderr
        shutil.rmtree(root)
    return path


def mounts(*folders: Path) -> list[str]:
    """Return mounts of the code, of this Python with its packages, and of some folders."""
    return [f"{path}:{path}:ro" for path in (ROOT, *python_paths(), os.path.realpath(sys.prefix))] + [
        f"{folder}:{folder}" for folder in folders
    ]


def _extensions() -> Iterable[Path]:
    """Yield the shared objects of Python and torch, whose libraries belong to the image."""
    yield from Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("[!_]*.so")
    yield from Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("_[!t]*.so")  # without tkinter
    yield from Path(sysconfig.get_path("purelib"), "torch/lib").glob("libtorch_*.so")
    yield Path(sys.executable)


def _libraries(files: Iterable[Path]) -> set[str]:
    """Return the libraries of this machine's /lib and /usr/lib that some files need."""
    answer = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True)
    return {match for match in LIBRARY.findall(answer.stdout) if not match.startswith(sys.base_prefix + "/")}
