"""Kills or stops a rank, or spoils a message, at a chosen moment. Python imports this by itself where it is on PYTHONPATH.
`tests/end_to_end/warm.py` imports it too, after the pipeline.

HETSTEP_TEST_FAULT is JSON: {"phase", "count", "actor", "victim", "signal", "once", "message", "folder"}. Every rank that
joins the world leaves its process id in `folder`. When rank `actor` enters a phase that begins with `phase` for the `count`-th
time, it sends `signal` to rank `victim`, which may be itself (`once`: only in the run's first attempt); or, with a `message`,
the first message of a refit that it sends from then on is not as it was: "flip" turns one bit of it, "drop" leaves it out,
"die" kills the rank with the message on its way. The pipeline knows nothing of this: `World` and the refit's `post` are wrapped
when their modules are imported.

HETSTEP_TEST_NCCL puts NCCL's rules under the run: see tests/nccl.
"""

import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path


class Wrap(importlib.abc.MetaPathFinder):
    """Calls `wrap` on the module of this name once it is loaded."""

    def __init__(self, name, wrap):
        self.name, self.wrap = name, wrap

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.wrap(module)

        spec.loader.exec_module = exec_module
        return spec


fault = json.loads(os.environ.get("HETSTEP_TEST_FAULT", "{}"))
spoil = []  # what is to be done to the next message


def wrap_world(module):
    folder = Path(fault["folder"])
    begin, original, entered = module.World.__init__, module.World.phase, 0

    def leave_process_id(self, place, *rest):
        (folder / str(place.rank)).write_text(str(os.getpid()))
        begin(self, place, *rest)

    @contextmanager
    def phase(self, phase, verb=None):
        nonlocal entered
        with original(self, phase, verb):
            if self.rank == fault["actor"] and phase.startswith(fault["phase"]):
                entered += 1
                if entered == fault["count"] and not (fault["once"] and (folder / "done").exists()):
                    strike(folder)
            yield

    module.World.__init__, module.World.phase = leave_process_id, phase


def strike(folder):
    if fault["message"]:
        spoil.append(fault["message"])
        return
    time.sleep(0.3)  # its peers come as far as they can
    (folder / "done").touch()
    os.kill(int((folder / str(fault["victim"])).read_text()), fault["signal"])


def wrap_transfer(module):
    original = module.post

    def post(world, out, into, *rest):
        if not (out and spoil):
            return original(world, out, into, *rest)
        (Path(fault["folder"]) / "done").touch()
        (peer, tensor, tag), *others = out
        match spoil.pop():
            case "flip":
                tensor = tensor.clone()
                tensor[len(tensor) // 2] ^= 16
                return original(world, [(peer, tensor, tag), *others], into, *rest)
            case "drop":
                return original(world, others, into, *rest)
            case "die":
                original(world, out, into, *rest)
                os.kill(os.getpid(), signal.SIGKILL)

    module.post = post


def keep_rules(module):
    importlib.import_module("tests.nccl.install").into(module)


wraps = [("pipeline.job.world", wrap_world), ("pipeline.refit.transfer", wrap_transfer)] if fault else []
wraps += [("pipeline.job.world", keep_rules)] if os.environ.get("HETSTEP_TEST_NCCL") else []
for name, wrap in wraps:
    if name in sys.modules:
        wrap(sys.modules[name])
    else:
        sys.meta_path.insert(0, Wrap(name, wrap))
