"""Print the table of planned refits between every pair of layouts: python -m tests.refit [model ...]"""

import sys
import tempfile
from pathlib import Path

from tests.end_to_end.fresh_vllm import greedy
from tests.refit import matrix


def main(models: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        matrix.write_models(folder)
        chosen = matrix.cases(models)
        fresh = {model: greedy(folder / model, matrix.PROMPTS, matrix.MAX_TOKENS) for model in models}
        found = matrix.run(chosen, folder)
    print("| model | train | generate | received / owned | unlike the broadcast | equal to a fresh vLLM | rounds |")
    print("|---|---|---|---|---|---|---|")
    for case, result in zip(chosen, found, strict=True):
        ranks = result["generate"]
        ratios = ", ".join(f"{rank['received'] / rank['owned']:.2f}" for rank in ranks)
        same = sum(a == b for rank in ranks for a, b in zip(rank["completions"], fresh[case.model], strict=True))
        wrong, asked = sum(len(rank["wrong"]) for rank in ranks), len(ranks) * len(matrix.PROMPTS)
        print(f"| {case.model} | {case.train} | {case.generate} | {ratios} | {wrong} | {same}/{asked} | {result['rounds']} |")


if __name__ == "__main__":
    main(sys.argv[1:] or list(matrix.MODELS))
