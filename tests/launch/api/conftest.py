"""Make `hetstep` importable from this checkout, whatever is installed."""

import sys

from launch.executors.executor import ROOT

PACKAGE = str(ROOT / "launch/api")

if PACKAGE not in sys.path:
    sys.path.insert(0, PACKAGE)
