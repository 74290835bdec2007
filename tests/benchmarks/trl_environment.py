"""Create TRL's own virtual environment on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TRL = "trl==1.16.0"
# the versions that TRL 1.16.0 resolved to on first use
PINNED = ("transformers==5.23.0", "datasets==5.2.0", "accelerate==1.15.0")


def python(folder: Path) -> str:
    """Return the interpreter of the environment in `folder`."""
    ready = folder / TRL
    if not ready.exists():
        print(f"installing {TRL} in {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # torch first and alone: the same build as ours, from whichever index.
        for packages in (["torch==2.13.0"], [TRL, *PINNED]):
            subprocess.run([str(folder / "bin/pip"), "install", "--quiet", *packages], check=True)
        ready.touch()
    return str(folder / "bin/python")
