"""prime-rl's published configurations, in a clone of https://github.com/PrimeIntellect-ai/prime-rl."""

from __future__ import annotations

from pathlib import Path

from tests.foreign.verl_scripts import Published

NOT_TRAINING = ("evals", "infer", "k8s", "vlm", "multimodal")


def published(root: Path) -> list[Published]:
    """Return the TOML files in configs/ and examples/ that train on text."""
    found = sorted([*root.glob("configs/**/*.toml"), *root.glob("examples/**/*.toml")])
    names = [str(path.relative_to(root)) for path in found]
    return [
        Published(name, path)
        for name, path in zip(names, found, strict=True)
        if not any(part in name for part in NOT_TRAINING) and "resume" not in name and "llmd" not in name
    ]
