"""Print the difference of every loss and estimator from its second implementation: `python -m tests.algorithms`.

The output is a Markdown table. Each test file in this folder with such a comparison has a `largest_differences`, which its own
test calls too.

Each test file beside this one that has such a comparison has a `largest_differences`, which its own test calls too.
"""

from __future__ import annotations

import importlib
from pathlib import Path


def main() -> None:
    print("| algorithm | cases | largest difference of the loss, or estimate | of the gradient |\n|---|---:|---:|---:|")
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.algorithms.{path.stem}")
        for name, (cases, loss, gradient) in getattr(module, "largest_differences", dict)().items():
            print(f"| {name} | {cases} | {loss:.1e} | {'' if gradient is None else f'{gradient:.1e}'} |")


if __name__ == "__main__":
    main()
