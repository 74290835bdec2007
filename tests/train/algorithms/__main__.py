"""Print, for every algorithm, the largest difference of any setup from one rank of FSDP2, as a table in Markdown."""

import tempfile
from pathlib import Path

from tests.models.cases import write_models
from tests.train.algorithms.cases import CASES
from tests.train.algorithms.invariance import FOUR_RANKS, OF_EXPERTS, OF_LLAMA, WITH_EXPERTS, differences


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        found = differences((*OF_LLAMA, *FOUR_RANKS), tuple(CASES), Path(folder))
        found |= {f"{case}, experts": row for case, row in differences(OF_EXPERTS, WITH_EXPERTS, Path(folder)).items()}
    print("| algorithm | setups | loss | gradient norm | weights |\n|---|---|---|---|---|")
    for case, row in found.items():
        cells = []
        for field in ("loss", "norm", "weights"):
            name = max(row, key=lambda setup: getattr(row[setup], field))
            cells.append(f"{getattr(row[name], field):.1e} ({name})")
        print(f"| {case} | {len(row)} | " + " | ".join(cells) + " |")
    print("\nSetups: " + ", ".join(sorted({name for row in found.values() for name in row})))


if __name__ == "__main__":
    main()
