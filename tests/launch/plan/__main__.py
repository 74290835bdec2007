"""Print predicted beside measured memory: python -m tests.launch.plan memory [tensors|generate] [NAME ...]

    tensors     bytes of all tensors of the fullest train rank, at the fullest moment of a step
    generate    vLLM's weights and KV cache
NAME: of cases in memory_cases.py; all of that kind if none is given.
"""

import sys
import tempfile
from pathlib import Path

from tests.launch.plan import measure, memory_cases


def main(arguments: list[str]) -> None:
    if arguments[:1] != ["memory"]:
        sys.exit(__doc__.strip())
    kinds = [argument for argument in arguments[1:] if argument in ("tensors", "generate")]
    names = [argument for argument in arguments[1:] if argument not in kinds]
    print(f"{'':44s}{'predicted':>14s}{'measured':>14s}{'off by':>8s}")
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds or ["tensors", "generate"]:
            table(kind, names, Path(folder))


def table(kind: str, names: list[str], folder: Path) -> None:
    if kind == "generate":
        for model, precision in measure.ENGINES:
            for part, (predicted, found) in measure.engine(model, precision, folder).items():
                line(f"vLLM {model} {precision}: {part}", predicted, found)
        return
    for name in names or memory_cases.CASES:
        case = memory_cases.CASES[name]
        predicted, phase = case.predicted()
        line(f"{name} {kind}", predicted, measure.measured(case, folder, kind), phase)


def line(name: str, predicted: float, found: float, note: str = "") -> None:
    shown = [f"{n:14,.0f}" if name.endswith("tokens") else f"{n / 1e6:11.2f} MB" for n in (predicted, found)]
    print(f"{name:44s}{''.join(shown)}{predicted / found - 1:+8.1%}  {note}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
