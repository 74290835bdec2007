"""Print, for every family, the largest difference from Hugging Face eager over all layouts, as a table in Markdown."""

import tempfile
from pathlib import Path

from tests.models.cases import FAMILIES
from tests.train.megatron.layouts import LAYOUTS, measured, write_families


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_families(Path(folder))
        found = {layout.name: measured(layout, Path(folder)) for layout in LAYOUTS}
    print("| model | layouts | log-prob | gradient | of the largest entry |\n|---|---|---|---|---|")
    for family in FAMILIES:
        rows = {name: row[family] for name, row in found.items() if family in row}
        worst = [max(getattr(d, field) for d in rows.values()) for field in ("logprob", "gradient", "relative")]
        print(f"| {family} | {' '.join(rows)} | " + " | ".join(f"{value:.1e}" for value in worst) + " |")


if __name__ == "__main__":
    main()
