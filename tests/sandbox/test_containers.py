"""Containers of each form of image: what programs see, what stays, and what is left."""

import http.server
import os
import shutil
import signal
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.sandbox import container, image_cache, processes
from pipeline.sandbox.container import Container, ContainerEndpoint
from pipeline.sandbox.image import ImageError, read_image
from pipeline.sandbox.limits import ResourceLimits, SandboxError
from pipeline.sandbox.sandbox import Sandbox
from pipeline.sandbox.shell import Shell
from tests.sandbox.conftest import unusable
from tests.sandbox.hosts import until
from tests.sandbox.images import entry, layout, squashed

LIMITS = ResourceLimits(wall_s=20.0, memory_bytes=256 << 20, processes=16, scratch_bytes=16 << 20, output_bytes=4000)
DIRECTORY, LINK, HARD = {"type": b"5", "mode": 0o755}, {"type": b"2"}, {"type": b"1"}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    if reason := unusable():
        pytest.skip(reason)
    return Sandbox(LIMITS)


@pytest.fixture(scope="module")
def root(image_root: Path) -> Path:
    return image_root


@pytest.fixture(scope="module")
def squashfs(root: Path) -> Path:
    return squashed(root)


@pytest.fixture
def cache(image_folder: Path) -> Path:
    return image_folder / "cache"


def printed(made: Container, script: str, **how) -> str:
    ran = made.run(["sh", "-c", script], **how)
    assert (ran.status, ran.ended_by) == (0, "exit"), ran
    return ran.stdout.decode()


@pytest.mark.parametrize("form", ["folder", "squashfs", pytest.param("oci", marks=pytest.mark.full)])
def test_each_form_of_image(sandbox: Sandbox, root: Path, request: pytest.FixtureRequest, tmp_path: Path, form: str):
    """Changes are there for the next program of the container, not in the image, and not for another container."""
    image = root if form == "folder" else request.getfixturevalue("squashfs") if form == "squashfs" else layout(tmp_path, root)
    with sandbox.open(str(image)) as one, sandbox.open(str(image)) as other:
        assert printed(
            one, "id -u; cat /opt/kept/file; rm -r /opt/kept; mkdir /opt/kept; echo x > /usr/new; echo y > /root/y"
        ) == ("0\nof opt/kept\n")
        assert printed(one, "ls -A /opt/kept; cat /usr/new /root/y; ls -A /proc/1/root/opt") == "x\ny\ngone\nkept\n"
        assert printed(other, "cat /opt/kept/file; test ! -e /usr/new && echo none") == "of opt/kept\nnone\n"
    assert (root / "opt/kept/file").read_text() == "of opt/kept\n" and not (root / "usr/new").exists()
    assert all(stat.S_ISDIR(path.stat().st_mode) for path in root.glob("opt/*"))


def test_a_program_of_a_container(sandbox: Sandbox, root: Path):
    with sandbox.open(str(root)) as made:
        made.write_file(
            "/work/deep/main.py", b"import os, sys; print(os.getcwd(), os.environ['A'], sys.stdin.read()); sys.exit(3)"
        )
        ran = made.run(["python3", "deep/main.py"], b"in", cwd="/work", env={"A": "x y"})
        assert (ran.status, ran.stdout, ran.ended_by) == (3, b"/work x y in\n", "exit")
        assert made.run(["sleep", "60"], wall_s=0.3).ended_by == "wall time"
        assert (
            printed(made, "nohup sleep 60 >/dev/null & echo $PATH")
            == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        )
        for argv, how, error in [
            (["no-such"], {}, b"execvp no-such: No such"),
            (["id"], {"cwd": "/no"}, b"Can't chdir to /no"),
        ]:
            ran = made.run(argv, **how)
            assert ran.status == 127 and ran.stderr.startswith(error)
        secret = os.urandom(8).hex()  # such as the key of an endpoint
        program = made.start(
            ["python3", "-u", "-c", "import os; print(input()[::-1], os.environ['KEY']); input()"], env={"KEY": secret}
        )
        program.send(b"abc\n", time.monotonic() + 20)
        assert program.receive(21, time.monotonic() + 20) == f"cba {secret}\n".encode()
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if secret in _text(path)]
    assert program.close() == "closed"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def test_files_go_in_and_out(sandbox: Sandbox, root: Path, tmp_path: Path):
    (tmp_path / "in/below").mkdir(parents=True)
    (tmp_path / "in/below/run.sh").write_text("echo it ran")
    (tmp_path / "in/below/run.sh").chmod(0o755)
    with sandbox.open(str(root)) as made:
        made.put_folder(tmp_path / "in", "/in")
        assert (
            printed(made, "bash -c /in/below/run.sh; ln -s /opt/kept/file /in/link; cd /in; seq 9 > seq; mkdir empty")
            == "it ran\n"
        )
        made.get_folder("/in", tmp_path / "out")
        copied = {path.name: path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()}
        assert copied == {"run.sh": "echo it ran", "seq": "1\n2\n3\n4\n5\n6\n7\n8\n9\n"}
        assert (tmp_path / "out/below/run.sh").stat().st_mode & 0o777 == 0o755
        assert made.read_file("/in/link") == b"of opt/kept\n"
        for path, most, error in [
            ("/in", 9, "directory"),
            ("/no", 9, "No such"),
            ("/in/seq", 9, "more than 9 bytes"),
            ("/dev/null", 9, "no regular"),
        ]:
            with pytest.raises(ValueError, match=error):
                made.read_file(path, most)
        with pytest.raises(ValueError, match="more than 1 files"):
            made.get_folder("/in", tmp_path / "few", most_files=1)
        with pytest.raises(ValueError, match="No space left"):
            made.write_file("/big", bytes(17 << 20))
        with pytest.raises(ValueError, match="expected an absolute path"):
            made.read_file("in/seq")


def test_layers_replace_and_remove_files_of_those_below(sandbox: Sandbox, root: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    second = [
        entry("./opt/", **DIRECTORY),
        entry("opt/.wh.gone"),
        entry("opt/kept/", **DIRECTORY),
        entry("opt/kept/.wh..wh..opq"),
        entry("opt/kept/new", b"new\n"),
        entry("usr/bin/suid", b"", mode=0o6755),
        entry("work/far/away", b"implied\n"),
        entry("tmp/below", b"its folder keeps its mode\n"),
    ]
    third = [
        entry("opt/kept/new", b"newer\n"),
        entry("hard", linkname="opt/kept/new", **HARD),
        entry("../../escaped", b"dots\n"),
        entry("/absolute", b"absolute\n"),
        entry("way", linkname=str(outside), **LINK),
        entry("way/through", b"a link that leads out of the layer\n"),
        entry("dev/sda", type=b"4", devmajor=8),
        entry("usr/bin/.wh.seq"),
    ]
    image = layout(tmp_path / "oci", root, second, third, Env=["A=from the image", "PATH=/usr/bin"], WorkingDir="/work/far")
    with sandbox.open(f"{image}:latest") as made:
        script = "pwd; echo $A $PATH; ls -A /opt; cat /opt/kept/* /hard away /escaped /absolute; ls /dev"
        assert printed(made, script).split("\n")[:9] == [
            *("/work/far", "from the image /usr/bin", "kept", "newer", "newer", "implied", "dots", "absolute", "fd")
        ]
        modes = [line.split()[0] for line in printed(made, "ls -ld /usr/bin/suid /tmp; ls /dev").splitlines()]
        assert modes[:2] == ["drwxrwxrwt", "-rwxr-xr-x"] and "sda" not in modes
        assert made.run(["seq", "1"]).status == 127
    assert not list(outside.iterdir()) and not Path("/escaped").exists() and not Path("/absolute").exists()


def test_what_enroot_writes_of_an_image(sandbox: Sandbox, root: Path, tmp_path: Path):
    """`enroot import` keeps an image's variables and working folder in files (enroot/src/docker.sh)."""
    rc = b'mkdir -p "/work/here" 2> /dev/null\ncd "/work/here" && unset OLDPWD || exit 1\n'
    image = layout(tmp_path / "oci", root, [entry("etc/environment", b"A=x=y\nPATH=/usr/bin\n# no\n"), entry("etc/rc", rc)])
    with sandbox.open(str(image)) as made:
        assert printed(made, "pwd; echo $A $PATH") == "/work/here\nx=y /usr/bin\n"


@pytest.mark.parametrize("name", ["dev", "proc"])
def test_an_image_whose_mount_points_lead_elsewhere(sandbox: Sandbox, root: Path, tmp_path: Path, name: str):
    image = layout(tmp_path / "oci", root, [entry(name, linkname="/oldroot/etc", **LINK)])
    with pytest.raises(ImageError, match=f"whose /{name} is no folder"):
        sandbox.open(str(image))


def test_a_process_that_is_killed_while_it_unpacks(
    sandbox: Sandbox, root: Path, tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next one begins anew; several at once unpack each layer once."""
    cache = image_folder / "another-cache"
    monkeypatch.setenv(image_cache.VARIABLE, str(cache))
    image = layout(tmp_path / "oci", root, [entry("second", b"")])
    keys = [layer.key for layer in read_image(str(image)).layers]
    script = f"from pipeline.sandbox.sandbox import Sandbox, ResourceLimits\nSandbox(ResourceLimits()).open({str(image)!r})"
    killed = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    until(lambda: (cache / "new" / keys[0] / "usr").exists() or None, every_s=0.005)
    killed.kill()
    killed.wait()
    assert not (cache / "trees" / keys[0]).exists()
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: sandbox.open(str(image)), range(4)))
    for made in opened:
        assert printed(made, "ls /second") == "/second\n"
        made.close()
    assert not list((cache / "new").iterdir()) and all((cache / "trees" / key).is_dir() for key in keys)


def path_of(folder: Path, *names: str) -> str:
    """Return a PATH with the named programs and a few that each system has."""
    for name in (*names, "cp", "du", "rm", "find", "chmod", "chown"):
        (folder / name).symlink_to(shutil.which(name) or pytest.skip(f"{name} is not installed"))
    return str(folder)


@pytest.mark.parametrize("lacks", [("squashfuse",), ("squashfuse", "unsquashfs")])
def test_a_squashfs_file_without_its_tools(
    sandbox: Sandbox, squashfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...]
):
    image = shutil.copy(squashfs, squashfs.parent / f"{len(lacks)}.sqsh")  # not unpacked before
    monkeypatch.setenv("PATH", path_of(tmp_path, "unsquashfs") if "unsquashfs" not in lacks else path_of(tmp_path))
    monkeypatch.setattr(container, "_servers", [])
    if "unsquashfs" in lacks:
        with pytest.raises(SandboxError, match=r"there is no squashfuse.*Try to install squashfuse, or squashfs-tools"):
            sandbox.open(str(image))
    else:
        with sandbox.open(str(image)) as made:
            assert printed(made, "cat /opt/kept/file; echo > /usr/new") == "of opt/kept\n"


WITHOUT_OVERLAY = """
import errno
from pipeline.sandbox import linux
real = linux.call
def without_overlay(name, *arguments):
    if name == "mount" and "overlay" in arguments:
        raise OSError(errno.EINVAL, "no overlay for users")
    return real(name, *arguments)
linux.call = without_overlay
"""


@pytest.mark.parametrize("has_fuse", [True, False])
def test_a_kernel_without_overlays_for_users(
    sandbox: Sandbox, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fuse: bool
):
    """fuse-overlayfs takes its place."""
    if has_fuse and (shutil.which("fuse-overlayfs") is None or not os.stat("/dev/fuse").st_mode & 0o006):
        pytest.skip("no fuse-overlayfs here that each user may use")
    if not has_fuse:
        monkeypatch.setenv("PATH", path_of(tmp_path))
    monkeypatch.setattr(container, "_servers", [])
    monkeypatch.setattr(
        container,
        "MAIN",
        container.MAIN.replace("container_server.main()", f"exec({WITHOUT_OVERLAY!r}); container_server.main()"),
    )
    if has_fuse:
        with sandbox.open(str(root)) as made:
            script = "rm -r /opt/kept; mkdir /opt/kept; mv /opt/gone /opt/kept; echo x > /usr/new; find /opt; ls -ld /usr/new"
            assert printed(made, script).startswith("/opt\n/opt/kept\n/opt/kept/gone\n/opt/kept/gone/file\n-rw-r--r-- 1 ")
            assert made.run(["python3", "-c", "open('/big', 'wb').write(bytes(17 << 20))"]).status != 0
    else:
        with pytest.raises(SandboxError, match=r"no overlay for users; and there is no fuse-overlayfs. Try Linux 6.6"):
            sandbox.open(str(root))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("relative", "expected an absolute path"),
        ("/there/is/none", "which does not exist"),
        ("FOLDER", "a folder without bin, usr/bin or oci-layout"),
        ("FOLDER/file", "a file that is no squashfs"),
        ("FOLDER/oci:other", "expected FOLDER:TAG with one of: latest"),
        ("FOLDER/damaged", "lacks the blob"),
    ],
)
def test_what_is_no_image(name: str, error: str, tmp_path: Path):
    (tmp_path / "file").write_text("text")
    layout(tmp_path / "oci", [])
    shutil.rmtree(layout(tmp_path / "damaged", []) / "blobs")
    with pytest.raises(ImageError, match=f"image: got .*{error}.*"):
        read_image(name.replace("FOLDER", str(tmp_path)))


# ---- network -----------------------------------------------------------------------------------------------------------------

ASK = """
import http.client, socket
for port in (8000, 9999):
    try:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        link.request("POST", "/v1/chat", body=b"x" * 300_000)
        print(link.getresponse().read().decode())
    except OSError as error:
        print(type(error).__name__)
"""
CLOSED = (b"RemoteDisconnected", b"ConnectionResetError", b"BrokenPipeError")
LOCAL = """
import asyncio, multiprocessing, os, socket, tempfile
async def echo(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()
async def main():
    folder = tempfile.mkdtemp()
    for serve, connect in [
        (asyncio.start_server(echo, "127.0.0.1", 5000), lambda: asyncio.open_connection("127.0.0.1", 5000)),
        (asyncio.start_server(echo, "::1", 5001), lambda: asyncio.open_connection("::1", 5001)),
        (asyncio.start_unix_server(echo, folder + "/s"), lambda: asyncio.open_unix_connection(folder + "/s")),
    ]:
        async with await serve:
            reader, writer = await connect()
            writer.write(b"line\\n")
            assert await reader.readline() == b"line\\n"
            writer.close()
if __name__ == "__main__":
    asyncio.run(main())
    os.mkfifo("fifo")
    with multiprocessing.Pool(2) as pool:
        print(pool.map(abs, [-1, -2]))
"""


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.path} {len(body)}".encode())

    def address_string(self) -> str:
        return "container"

    def log_message(self, *_: object) -> None: ...


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def test_the_only_address_that_a_container_reaches(sandbox: Sandbox, root: Path, tmp_path: Path):
    path = str(tmp_path / "endpoint")
    with _UnixServer(path, _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sandbox.open(str(root), ContainerEndpoint(path)) as with_endpoint, sandbox.open(str(root)) as without:
            assert with_endpoint.run(["python3", "-c", ASK]).stdout == b"/v1/chat 300000\nConnectionRefusedError\n"
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: with_endpoint.run(["python3", "-c", ASK]).stdout, range(4)))
            assert answers == [b"/v1/chat 300000\nConnectionRefusedError\n"] * 4
            assert without.run(["python3", "-c", ASK]).stdout == b"ConnectionRefusedError\n" * 2
            server.shutdown()
            server.server_close()
            assert with_endpoint.run(["python3", "-c", ASK]).stdout.splitlines()[0] in CLOSED


def test_sockets_inside(sandbox: Sandbox, root: Path):
    """Programs of a container reach each other, and ordinary libraries work."""
    with sandbox.open(str(root)) as made:
        made.write_file("/work/main.py", LOCAL.encode())
        assert printed(made, "cd /work && python3 main.py") == "[1, 2]\n"
        assert (
            printed(made, "cat /proc/sys/net/ipv4/tcp_rmem /proc/sys/net/ipv4/tcp_wmem").split()
            == ["4096", "65536", "131072"] * 2
        )
        server = made.start(["python3", "-u", "-m", "http.server", "7000", "--bind", "127.0.0.1"], cwd="/opt")
        server.receive_some(100, time.monotonic() + 20)
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:7000/kept/file').read().decode(), end='')"
        assert made.run(["python3", "-c", ask]).stdout == b"of opt/kept\n"


# ---- shells ------------------------------------------------------------------------------------------------------------------


BOMB = "i=0; while [ $i -lt 25 ]; do sleep 50 & i=$((i+1)); done; wait"


@pytest.fixture(params=["bash", pytest.param("sh", marks=pytest.mark.full)])
def shell(request: pytest.FixtureRequest, sandbox: Sandbox, root: Path) -> Iterator[Shell]:
    with sandbox.open(str(root)) as made:
        if request.param == "sh":
            printed(made, "rm /bin/bash")
        yield Shell(made, session_s=60.0)


def test_what_persists_in_a_shell(shell: Shell):
    said = shell.run("cd /opt; A='x y'; f() { echo f $1; }; sleep 50 & echo $A; (exit 4)")
    assert (said.output, said.status, said.ended_by) == ("x y\n", 4, "exit")
    said = shell.run("pwd; echo $A; f 1; kill -0 $! && printf 'runs'")
    assert (said.output, said.status) == ("/opt\nx y\nf 1\nruns", 0)
    assert shell.run("cat; echo \"it's\" $(cat <<'EOF'\nhere\nEOF\n)").output == "it's here\n"
    said = shell.run("seq 100000; echo err >&2; false")
    assert (
        said.status == 1
        and said.output.startswith("1\n2\n")
        and said.output.endswith("\n100000\nerr\n")
        and len(said.output) < 4100
    )
    assert "bytes cut" in said.output


def test_a_command_that_takes_too_long(shell: Shell):
    """It is killed with all that it started, and nothing else."""
    shell.run("cd /opt; sleep 50 & first=$!")
    begun = time.monotonic()
    said = shell.run("echo begun; sleep 51 & sleep 52", wall_s=0.5)
    assert said.output.startswith("begun\n") and (said.status, said.ended_by, said.shell_ended_by) == (None, "wall time", "")
    assert time.monotonic() - begun < 10
    assert shell.run("pwd; kill -0 $first && echo runs; kill -0 $! 2>/dev/null || echo gone").output.splitlines()[-3:] == [
        "/opt",
        "runs",
        "gone",
    ]
    said = shell.run("while :; do :; done", wall_s=0.5)
    assert (said.status, said.ended_by, said.shell_ended_by) == (None, "wall time", "closed")
    assert shell.run("pwd").output == "/\n"


@pytest.mark.parametrize(
    ("command", "how"),
    [("exit 3", "exit"), ("kill -9 $$", "signal 9"), ("exec 1>&-; exec sleep 50", "closed"), (BOMB, "processes")],
)
def test_a_shell_that_ends_is_replaced(shell: Shell, command: str, how: str):
    shell.run("echo kept > /opt/mine")
    said = shell.run(command, wall_s=1.0)
    assert said.status is None and said.shell_ended_by in (how, "closed"), said  # closed: it had not quite ended
    assert shell.run("cat /opt/mine").output == "kept\n"


def test_a_container_without_a_shell(shell: Shell):
    """A program may remove it."""
    shell.run("rm -f /bin/sh /bin/bash")
    shell.close()
    said = shell.run("echo x")
    assert (said.output, said.status, said.ended_by) == ("there is no bash or sh that works", None, "shell")


# ---- what is left ------------------------------------------------------------------------------------------------------------


def _left(before: set[str]) -> list[str]:
    """Return the processes that run now and that are not in `before`."""
    found = []
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - before:
        try:
            state = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if ") Z " not in state and (int(pid) in processes.descendants(os.getpid()) or "squash" in state):
            found.append(state)
    return found


def test_a_closed_container_leaves_nothing(sandbox: Sandbox, squashfs: Path, cache: Path):
    sandbox.open(str(squashfs)).close()
    before, mounts = set(os.listdir("/proc")), Path("/proc/mounts").read_text()
    descriptors, files = len(os.listdir("/proc/self/fd")), set(cache.rglob("*/*"))
    for number in range(3):
        made = sandbox.open(str(squashfs))
        shell = Shell(made, 60.0)
        shell.run("nohup sleep 60 >/dev/null & echo x > /root/x")
        if number < 2:
            made.close()
        else:
            del made, shell
    until(lambda: not _left(before) or None)
    assert Path("/proc/mounts").read_text() == mounts
    # The process that keeps a squashfs of an earlier test mounted may have ended, and has removed LOCK.keeper.
    assert {path for path in files ^ set(cache.rglob("*/*")) if path not in files or path.suffix != ".keeper"} == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


RANK = """
import sys, time
from pipeline.sandbox.sandbox import Sandbox, ResourceLimits
made = Sandbox(ResourceLimits(wall_s=300.0)).open(sys.argv[1])
program = made.start(["sleep", "300"])
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("killed", ["rank", "server", pytest.param("guard", marks=pytest.mark.full)])
def test_nothing_outlives_a_rank(sandbox: Sandbox, root: Path, killed: str):
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(root)], cwd=Path(__file__).parents[2], stdout=-1, stderr=-3)
    try:
        assert rank.stdout and rank.stdout.readline() == b"ready\n"
        begun = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\0" + b"300\0" and _runs(pid)  # noqa: E731
        tree = until(lambda: found if any(map(begun, found := processes.descendants(rank.pid))) else None)
        server = tree[0]
        guard = next(pid for pid in processes.children(server) if processes.children(pid))
        ends = tree if killed != "guard" else [guard, *processes.descendants(guard)]
        os.kill({"rank": rank.pid, "server": server, "guard": guard}[killed], signal.SIGKILL)
        until(lambda: not [pid for pid in ends if _runs(pid)] or None)
    finally:
        rank.kill()
        rank.wait()


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
