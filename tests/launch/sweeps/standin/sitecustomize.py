"""Run test code in the product's processes. Python imports this by itself where it is on PYTHONPATH.

Ranks run HETSTEP_TEST_TASK=module:function in place of the pipeline. HETSTEP_TEST_SLOWER=1.5 makes every step of the real
pipeline take that many times as long. The product does not refer to this: functions are replaced as modules are imported.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from contextlib import contextmanager


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


def run_instead(module):
    name, _, function = os.environ["HETSTEP_TEST_TASK"].partition(":")
    module.rank_main = getattr(importlib.import_module(name), function)


def slow_down(module):
    original, factor = module.Metrics.clock, float(os.environ["HETSTEP_TEST_SLOWER"])

    @contextmanager
    def clock(self, name):
        with original(self, name):
            start = time.perf_counter()
            yield
            if name == "step":
                time.sleep((factor - 1) * (time.perf_counter() - start))

    module.Metrics.clock = clock


if "HETSTEP_TEST_TASK" in os.environ:
    sys.meta_path.insert(0, Wrap("launch.executors.rank_task", run_instead))
if "HETSTEP_TEST_SLOWER" in os.environ:
    sys.meta_path.insert(0, Wrap("pipeline.observe.metrics", slow_down))
