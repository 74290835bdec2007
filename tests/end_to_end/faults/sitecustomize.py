"""Kills or stops a rank at a chosen moment. Python imports this by itself where this folder is on PYTHONPATH.

HETSTEP_TEST_FAULT is JSON: {"phase", "count", "actor", "victim", "signal", "folder"}. Every rank leaves its process id in
`folder`. When rank `actor` enters `phase` for the `count`-th time, it sends `signal` to rank `victim`, which may be itself.
The pipeline knows nothing of this: `World.phase` is wrapped when `pipeline.world` is imported.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path


class WrapPhase(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "pipeline.world":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            wrap(module.World)

        spec.loader.exec_module = exec_module
        return spec


def wrap(world_class):
    fault = json.loads(os.environ["HETSTEP_TEST_FAULT"])
    folder = Path(fault["folder"])
    (folder / os.environ["HETSTEP_RANK"]).write_text(str(os.getpid()))
    if int(os.environ["HETSTEP_RANK"]) != fault["actor"]:
        return
    original, entered = world_class.phase, 0

    @contextmanager
    def phase(self, phase, verb=None):
        nonlocal entered
        with original(self, phase, verb):
            if phase == fault["phase"]:
                entered += 1
                if entered == fault["count"]:
                    time.sleep(0.3)  # its peers come as far as they can
                    (folder / "done").touch()
                    os.kill(int((folder / str(fault["victim"])).read_text()), fault["signal"])
            yield

    world_class.phase = phase


if os.environ.get("HETSTEP_TEST_FAULT") and "HETSTEP_RANK" in os.environ:
    sys.meta_path.insert(0, WrapPhase())
