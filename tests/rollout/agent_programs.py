"""An agent that behaves as its task's first number says."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.end_to_end.agents import ask

BEHAVIOURS = ("good", "hangs", "crashes", "floods", "endless", "guesses", "leaves", "silent", "sleeps", "raises", "early")


def good(messages: list) -> None:
    ask(messages)


def hangs(messages: list) -> None:
    ask(messages)
    time.sleep(1e6)


def crashes(messages: list) -> None:
    ask(messages)
    os.abort()


def floods(messages: list) -> None:
    ask(messages)
    while True:
        print("x" * 1000)


def endless(messages: list) -> None:
    while True:
        ask(messages)


def guesses(messages: list) -> None:
    """Try other endpoints of this host, and hold connections to its own and to theirs; report what let it in."""
    ask(messages)
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(fields[1].split(":")[1], 16) for fields in listening if fields[3] == "0A"}
    held = []
    for port in sorted(ports)[:16]:
        for key in (os.environ["OPENAI_API_KEY"], "", "x" * 64):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {key}"})
            try:
                with urllib.request.urlopen(request, timeout=0.5):
                    own = f":{port}/" in os.environ["OPENAI_BASE_URL"] and key == os.environ["OPENAI_API_KEY"]
                    if not own:
                        sys.exit(f"port {port} let a stranger in")
            except (OSError, ValueError, http.client.HTTPException):
                pass
        for _ in range(4):
            connection = socket.socket()
            connection.settimeout(0.5)
            try:
                connection.connect(("127.0.0.1", port))
                connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n{")
            except OSError:
                continue
            held.append(connection)
    ask(messages)


def leaves(messages: list) -> None:
    """Leave a process in a session of its own."""
    ask(messages)
    subprocess.Popen(["sleep", "98765"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def silent(messages: list) -> None:
    """Print no reward."""
    ask(messages)
    sys.stdout.close()
    os._exit(0)


def sleeps(messages: list) -> None:
    """Ask once all agents sleep, and once more."""
    ask(messages)
    while not Path(os.environ["ALL_SLEEP"]).exists():
        time.sleep(1)
    ask(messages)


def raises(messages: list) -> None:
    ask(messages)
    print("x" * 9000, file=sys.stderr)
    messages[0]["nothere"]


def early(messages: list) -> None:
    messages[0]["nothere"]


if __name__ == "__main__":
    messages = json.load(sys.stdin)["messages"]
    globals()[BEHAVIOURS[int(re.match(r"\d+", messages[-1]["content"])[0])]](messages)
    print(1.0)
