"""Ordinary programs work with the system calls that the filter allows."""

import importlib.util
from pathlib import Path

import pytest

from tests.sandbox.hosts import Host

LIBRARIES = ("numpy", "sympy", "pandas")


def test_threads_and_processes(host: Host):
    host.held(
        """
import concurrent.futures, multiprocessing, subprocess, threading
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert list(pool.map(abs, range(-20, 0))) == list(range(20, 0, -1))
def answer(end):
    end.send([n * n for n in range(1000)])
processes = multiprocessing.get_context("fork")
here, there = processes.Pipe()
child = processes.Process(target=answer, args=(there,))
child.start()
assert here.recv()[-1] == 999 ** 2
child.join()
said = subprocess.run(["/bin/sh", "-c", "ls / | sort | head -1; echo $((6 * 7)) | cat; exit 3"], capture_output=True)
assert (said.returncode, said.stdout.split()[-1]) == (3, b"42"), said
child = subprocess.Popen([sys.executable, "-c", "print(input()[::-1])"], stdin=-1, stdout=-1, text=True)
assert child.communicate("ab")[0] == "ba\\n"
try:
    subprocess.run(["/bin/sleep", "5"], timeout=0.1)
except subprocess.TimeoutExpired:
    print("in time")
""",
        wall_s=10.0,
        cpu_s=5.0,
    )


def test_asyncio(host: Host):
    host.held(
        """
import asyncio, socket
async def main():
    async def double(n):
        await asyncio.sleep(0.01 * (n % 3))
        return 2 * n
    assert sum(await asyncio.gather(*map(double, range(50)))) == 2450
    child = await asyncio.create_subprocess_exec("/bin/cat", stdin=-1, stdout=-1)
    out, _ = await child.communicate(b"x" * 300_000)
    assert len(out) == 300_000 and child.returncode == 0
    one, other = socket.socketpair()
    here, there = await asyncio.open_connection(sock=one), await asyncio.open_connection(sock=other)
    there[1].write(b"a line\\n")
    assert await here[0].readline() == b"a line\\n"
    assert await asyncio.to_thread(sum, [1, 2]) == 3
    try:
        await asyncio.wait_for(asyncio.sleep(5), 0.05)
    except asyncio.TimeoutError:
        pass
asyncio.run(main())
""",
        wall_s=10.0,
        cpu_s=5.0,
    )


def test_files_and_their_attributes(host: Host):
    host.held(
        """
import dbm, glob, mmap, pathlib, shelve, shutil, sqlite3, tarfile, tempfile, zipfile, gzip
os.makedirs("a/b")
pathlib.Path("a/b/c").write_text("text")
shutil.copytree("a", "d")
shutil.copy2("a/b/c", "e")
shutil.move("e", "f")
os.link("f", "g"), os.symlink("f", "h"), os.replace("g", "i"), os.chmod("f", 0o600), os.utime("f", (1, 2))
with tarfile.open("t.tgz", "w:gz") as tar:
    tar.add("a")
with tarfile.open("t.tgz") as tar:
    tar.extractall("x")
shutil.make_archive("z", "zip", "a")
assert sorted(glob.glob("**/c", recursive=True)) == ["a/b/c", "d/b/c", "x/a/b/c"]
with shelve.open("shelf") as shelf:
    shelf["x"] = [1, 2]
with shelve.open("shelf") as shelf:
    assert shelf["x"] == [1, 2]
with sqlite3.connect("base") as base:
    base.execute("pragma journal_mode=wal")
    base.executescript("create table t (x); insert into t values (1); insert into t values (2)")
    assert base.execute("select sum(x) from t").fetchone() == (3,)
with open("mapped", "wb+") as file:
    file.truncate(8192)
    with mmap.mmap(file.fileno(), 8192) as mapped:
        mapped[:5] = b"bytes"
    assert file.read(5) == b"bytes"
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as file:
    os.fsync(file.fileno()), os.posix_fallocate(file.fileno(), 0, 4096), os.statvfs(folder)
shutil.rmtree("d")
""",
        wall_s=10.0,
        cpu_s=5.0,
        scratch_bytes=16 << 20,
    )


def test_signals_and_time(host: Host):
    host.held(
        """
import faulthandler, random, resource, secrets, select, selectors, shutil, threading, uuid
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.02)
signal.pause()
assert seen == [1]
signal.raise_signal(signal.SIGALRM)
assert seen == [1, 1]
reader, writer = os.pipe()
for kind in (selectors.SelectSelector, selectors.PollSelector, selectors.EpollSelector):
    with kind() as wait:
        wait.register(reader, selectors.EVENT_READ)
        assert wait.select(0.01) == []
resource.setrlimit(resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS))
resource.getrusage(resource.RUSAGE_SELF), os.sched_getaffinity(0), os.cpu_count(), os.getpriority(os.PRIO_PROCESS, 0)
time.monotonic(), time.perf_counter(), time.process_time(), time.thread_time(), time.sleep(0.001), time.localtime()
secrets.token_bytes(8), uuid.uuid4(), os.urandom(4), random.random(), os.uname()
shutil.get_terminal_size(), sys.stdin.isatty(), os.nice(1)
thread = threading.Thread(target=faulthandler.dump_traceback, kwargs={"file": open("trace", "w")})
thread.start(), thread.join()
""",
        wall_s=10.0,
        cpu_s=5.0,
    )


@pytest.mark.full
def test_libraries(host: Host):
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing or host.place != "here":
        pytest.skip(f"without {', '.join(missing)}" if missing else "this Python's libraries are not another user's")
    packages = str(Path(importlib.util.find_spec("numpy").origin).parents[1])
    host.held(
        f"import sys; sys.path.insert(0, {packages!r})"
        + """
import numpy, pandas, sympy
a = numpy.random.default_rng(0).normal(size=(200, 200))
assert numpy.allclose(numpy.linalg.solve(a, a @ numpy.ones(200)), 1)
numpy.save("a.npy", a)
assert numpy.load("a.npy", mmap_mode="r+").sum() == a.sum()
x = sympy.symbols("x")
assert sympy.integrate(sympy.exp(-x**2), (x, -sympy.oo, sympy.oo)) == sympy.sqrt(sympy.pi)
table = pandas.DataFrame({"k": list("abab"), "v": range(4)})
table.to_csv("t.csv", index=False)
assert pandas.read_csv("t.csv").groupby("k").v.sum().tolist() == [2, 4]
""",
        readable=(packages,),
        wall_s=60.0,
        cpu_s=30.0,
        memory_bytes=1 << 30,
        scratch_bytes=16 << 20,
        open_files=64,
    )
