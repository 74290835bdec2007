"""The process that forks what containers of one rank need: their roots, guards of their programs, and forwarders.

A fork takes a millisecond, where a new interpreter would take forty. For each, the rank sends a message with descriptors, and
gets the new process's id and the numbers of the descriptors there. When the rank ends, this process does, and the kernel then
ends what it forked.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.sandbox import container_root, guard, linux, processes, squashfs_mount
from pipeline.sandbox.start import PROGRAM_SCORE

MOST_BYTES, MOST_DESCRIPTORS = 1 << 18, 8
POLL_S = 0.5
CONNECTIONS = 128  # of one forwarder at the same time
CHUNK = 1 << 16


def main() -> None:
    """Fork processes until the rank, whose id is argv[1], ends or closes the socket argv[2]."""
    rank, control = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.raise_oom_score(PROGRAM_SCORE - 2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody needs to wait for them
    gc.freeze()
    try:
        _fork_until_the_end(rank, control)
    finally:
        while _end_children(set()):
            time.sleep(0.005)


def _fork_until_the_end(rank: int, control: socket.socket) -> None:
    forked: set[int] = set()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == rank:
        forked &= set(processes.children(os.getpid()))
        _end_children(forked)  # of a guard that was killed before its program had begun
        if not poll.poll(1e3 * POLL_S):
            continue
        message, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # a program would have those that only its guard needs
        if (child := os.fork()) == 0:
            _work(json.loads(message), descriptors, control)
        forked.add(child)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            control.send(json.dumps([child, descriptors]).encode())
        except OSError:
            return


def _end_children(spared: set[int]) -> bool:
    """Kill all children but `spared` and those that keep a squashfs mounted. Return whether there were any."""
    found = False
    for child in set(processes.children(os.getpid())) - spared:
        with contextlib.suppress(OSError):  # it ended by itself
            if Path(f"/proc/{child}/comm").read_bytes().strip() != squashfs_mount.NAME:
                os.kill(child, signal.SIGKILL)
                found = True
    return found


def _work(asked: dict, descriptors: list[int], control: socket.socket) -> None:
    """Do what the rank asked for, and end."""
    try:
        server = os.getppid()
        linux.die_with_parent()
        if os.getppid() != server:
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        gc.disable()
        match asked["role"]:
            case "root":
                container_root.keep(asked, socket.socket(fileno=descriptors[0]))
            case "guard":
                os.dup2(descriptors[0], 0)
                os.dup2(descriptors[1], 1)
                for descriptor in descriptors[:2]:
                    os.close(descriptor)
                sys.argv[1] = str(server)
                try:
                    guard.main()
                    sys.stdout.flush()
                except OSError as error:
                    os.write(1, json.dumps({"error": f"the guard failed: {error}"}).encode() + b"\n")
            case "forwarder":
                _forward(socket.socket(fileno=descriptors[0]), descriptors[1], asked["socket"])
    except (OSError, EOFError):
        pass  # the rank has gone
    finally:
        os._exit(0)


def _forward(listener: socket.socket, until: int, path: str) -> None:
    """Connect each connection of `listener`, in a container, with the Unix socket `path` of this machine.

    until: a descriptor of the container's root process, at whose end this process ends.
    """
    import threading

    room = threading.BoundedSemaphore(CONNECTIONS)
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(until, select.POLLIN)
    while all(descriptor != until for descriptor, _ in poll.poll()):
        with contextlib.suppress(OSError):  # the program has ended the connection
            inside, _ = listener.accept()
            if room.acquire(blocking=False):
                threading.Thread(target=_connect, args=(inside, path, room), daemon=True).start()
            else:
                inside.close()


def _connect(inside: socket.socket, path: str, room: Any) -> None:
    import threading

    try:
        with inside, socket.socket(socket.AF_UNIX) as outside:
            inside.setblocking(True)
            outside.connect(path)
            back = threading.Thread(target=_copy, args=(outside, inside), daemon=True)
            back.start()
            _copy(inside, outside)
            back.join()
    except OSError:
        pass  # the machine's end is gone; the container's is closed
    finally:
        room.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while content := source.recv(CHUNK):
            target.sendall(content)
    except OSError:
        pass
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        try:
            end.shutdown(how)
        except OSError:
            pass


if __name__ == "__main__":
    main()
