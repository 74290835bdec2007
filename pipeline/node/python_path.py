"""The search path with which child processes find this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder that holds `pipeline` and `launch`."""


def with_package(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with this package's folder first in PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    return {**variables, "PYTHONPATH": path}
