"""Write the run's secret, for tests that start ranks without a submission."""

import os
from pathlib import Path


def write_secret(run_dir: Path, mode: int = 0o600) -> None:
    path = run_dir / ".secret"
    path.write_text(os.urandom(32).hex() + "\n")
    path.chmod(mode)
