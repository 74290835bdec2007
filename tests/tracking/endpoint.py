"""A tracking server with faults, and the tracker that talks to it. Real services cannot be made to hang or to answer 500.

`python -m tests.tracking.endpoint RUN_DIR ATTEMPT PARENT` is the process beside a run, with this tracker in the registry.
"""

import json
import os
import sys
import threading
import urllib.request
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline import trackers
from pipeline.recipe.values import Text
from pipeline.trackers.tracker import Tracker
from tests import http_server


@dataclass
class EndpointConfig:
    address: Text = ""


class EndpointTracker(Tracker):
    Section = EndpointConfig
    title = "the endpoint"
    package = "json"
    place = ("address",)

    def __init__(self, section, run, state):
        self.address, self.run, self.state = section.address, run, state

    def _post(self, path, body):
        request = urllib.request.Request(f"{self.address}/{self.run.id}/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def open(self):
        return self._post("open", {"pid": os.getpid()})

    def log(self, steps):
        self._post("steps", [[each.step, each.time, each.values] for each in steps])

    def log_samples(self, kind, step, samples):
        self._post("attached", [f"{kind} {step}", len(samples)])

    def log_scores(self, suite, scored):
        self._post("attached", [f"{suite} {scored.step}", scored.values])

    def log_file(self, path):
        self._post("attached", [path.name, path.read_text()])

    def log_model(self, folder):
        self._post("attached", ["model", str(folder)])

    def close(self, ended):
        if ended:
            self._post("attached", ["ended", True])


class Endpoint:
    """What the server has received, by run id, and its fault."""

    def __init__(self):
        self.steps = defaultdict(list)
        self.attached = defaultdict(list)
        self.pids = []
        self.fault = ""  # "500"; "500 after": once, when the steps are recorded; "hang"
        self.asked = threading.Semaphore(0)  # once for each request
        self.go_on = threading.Event()  # ends a hang
        self.address = ""

    def answer(self, run, path, body):
        self.asked.release()
        if self.fault == "hang":
            self.go_on.wait(60)
        if self.fault == "500":
            return 500, None
        if path == "open":
            self.pids.append(body["pid"])
            return 200, max((step for step, *_ in self.steps[run]), default=-1)
        (self.steps if path == "steps" else self.attached)[run].extend(body if path == "steps" else [body])
        if path == "steps" and self.fault == "500 after":
            self.fault = ""
            return 500, None
        return 200, None


@contextmanager
def serving():
    endpoint = Endpoint()

    def answer(request, body):
        status, value = endpoint.answer(*request.path[1:].split("/"), body)
        text = json.dumps(value).encode()
        return status, text, ("Content-Length", str(len(text)))

    with http_server.serving(answer) as endpoint.address:
        try:
            yield endpoint
        finally:
            endpoint.go_on.set()


if __name__ == "__main__":
    trackers.TRACKERS["endpoint"] = EndpointTracker  # before the schema is made of it

    from pipeline.tracking import tracking_process

    tracking_process.POLL_S = float(os.environ.get("TEST_POLL_S", "0.05"))
    tracking_process.HANG_S = float(os.environ.get("TEST_HANG_S", "300"))
    tracking_process.FINISH_S = float(os.environ.get("TEST_FINISH_S", "30"))
    status = tracking_process.main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    sys.stderr.flush()
    os._exit(status)
