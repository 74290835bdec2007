"""The Slurm tests on several versions of Slurm: this machine's, and those of other Debians, each in a root of its own.

    python -m tests.slurm.roots [PYTEST ARGUMENT ...]    all versions, one after the other (make test-slurm-matrix)
    python -m tests.slurm.roots others [ARGUMENT ...]    without this machine's, which `make test` covers
    python -m tests.slurm.roots build                    only make the roots
    python -m tests.slurm.roots in SUITE COMMAND ...     by hand

debootstrap makes a root once, in ${XDG_CACHE_HOME:-~/.cache}/hetstep/slurm-roots (delete it to have newer packages); that needs
root and a Debian mirror. bubblewrap then runs the whole of pytest inside: this machine's Python, virtual environment and code
come along as they are. Leaves out: other distributions than Debian.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tests.slurm.cluster import SEARCH

CODE = Path(__file__).parents[2]
SUITES = ("trixie", "forky")  # Slurm 24.11; 26.05 and later
PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge"),
    *("gcc", "libc6-dev", "libslurm-dev"),  # for a plugin of the tests'
    "squashfs-tools",  # with which Apptainer makes SIF files
    "python3",  # not run: it brings the libraries that this machine's Python was linked with
)
MARKS = "slurm and not gpu and (not long or faults)"
DEFAULT_MIRROR = "http://deb.debian.org/debian"


class CannotBuild(RuntimeError):
    """The reason why a root cannot be built."""


# ---- the roots ----------------------------------------------------------------------------------------------------------


def root(suite: str) -> Path:
    """Return the folder of that Debian, made if it does not exist. Raises CannotBuild."""
    wanted = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetstep/slurm-roots"
    path = cache / f"{suite}-{wanted}"
    if not path.exists():
        partial = cache / f".{path.name}.{os.getpid()}"
        try:
            _debootstrap(suite, partial)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def _debootstrap(suite: str, target: Path) -> None:
    if os.geteuid() != 0:
        raise CannotBuild("debootstrap needs root")
    if (program := shutil.which("debootstrap", path=SEARCH)) is None:
        raise CannotBuild("there is no debootstrap (Debian and Ubuntu: apt-get install debootstrap)")
    source = mirror()
    print(f"making a Debian {suite} in {target.parent} from {source}", flush=True)
    target.mkdir(parents=True)
    log = target.with_name(f"{suite}.log")
    # Every Debian of today is made as sid is; an older debootstrap has no script by the name of a newer Debian.
    command = [program, "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(target), source, "sid"]
    with open(log, "wb") as out:
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode != 0:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise CannotBuild(f"debootstrap of {suite} failed; the end of {log}:\n{last}")
    for unused in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(target / unused, ignore_errors=True)


def mirror() -> str:
    """Return the Debian mirror that this machine's apt uses."""
    release = platform.freedesktop_os_release()
    if release["ID"] == "debian" and shutil.which("apt-get"):
        answer = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(COMPONENT) $(REPO_URI)"],
            capture_output=True,
            text=True,
            check=True,
        )
        for line in answer.stdout.splitlines():
            kind, name, component, uri = line.split()
            if (kind, name, component) == ("Packages", release["VERSION_CODENAME"], "main"):
                return uri
    return DEFAULT_MIRROR


def inside(path: Path, command: list[str]) -> list[str]:
    """Return the command that runs `command` in the root `path`, or on this machine if that is /."""
    if path == Path("/"):
        return command
    if (program := shutil.which("bwrap", path=SEARCH)) is None:
        raise CannotBuild("there is no bwrap (Debian and Ubuntu: apt-get install bubblewrap)")
    binds = ["--bind", str(path), "/", "--dev-bind", "/dev", "/dev", "--bind", "/proc", "/proc", "--ro-bind", "/sys", "/sys"]
    for own in ("/etc/hosts", "/etc/passwd", "/etc/group"):
        binds += ["--ro-bind", own, own]
    for own in ("/tmp", str(Path.home()), sys.prefix, str(CODE)):  # in this order: a later one may be inside an earlier
        binds += ["--bind", own, own]
    for own in python_paths():
        binds += ["--ro-bind", own, own]
    return [program, *binds, "--chdir", str(CODE), *command]


def python_paths() -> list[str]:
    """Return the interpreter's files that the virtual environment needs. A distribution's own is in folders of others."""
    if sys.base_prefix != "/usr":
        return [sys.base_prefix]
    return [os.path.realpath(sys.executable), sysconfig.get_path("stdlib")]


# ---- the matrix ---------------------------------------------------------------------------------------------------------


def matrix(roots: list[Path], arguments: list[str]) -> int:
    """Run the tests in each root; return 0 if all pass."""
    results = []
    for path in roots:
        version = subprocess.run(
            inside(path, ["slurmctld", "-V"]), capture_output=True, text=True, check=True, env=_environment()
        )
        name = f"{version.stdout.split()[-1]} ({'this machine' if path == Path('/') else path.name.partition('-')[0]})"
        print(f"\n==== Slurm {name} ====", flush=True)
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", MARKS, "-p", "no:cacheprovider", *arguments]
        status = subprocess.run(inside(path, command), cwd=CODE, env=_environment()).returncode
        results.append((name, status, time.monotonic() - start))
    print("\n==== Slurm's versions ====")
    for name, status, seconds in results:
        print(f"{name:24} {'passed' if status == 0 else f'FAILED ({status})'} in {seconds:.0f} s")
    return 1 if any(status for _, status, _ in results) else 0


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH, "HETSTEP_REQUIRE_SLURM": "1"}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["in"]:
        return subprocess.run(inside(root(arguments[1]), arguments[2:]), env=_environment()).returncode
    if arguments == ["build"]:
        for suite in SUITES:
            print(root(suite))
        return 0
    others = [root(suite) for suite in SUITES]
    if arguments[:1] == ["others"]:
        return matrix(others, arguments[1:])
    return matrix([Path("/"), *others], arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CannotBuild as error:
        sys.exit(f"the Slurm tests cannot run on other versions of Slurm here: {error}")
