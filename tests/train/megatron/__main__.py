"""Print the largest differences of every family over all layouts, and of every layout over all families, as tables in Markdown.

They are those from Hugging Face eager, and of Megatron-Core's gradient norm from the one by our layout.
"""

import tempfile
from pathlib import Path

from tests.models.cases import FAMILIES
from tests.train.megatron.layouts import LAYOUTS, measured, write_families


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_families(Path(folder))
        found = {layout.name: measured(layout, Path(folder)) for layout in LAYOUTS}
    by_family = {family: [row[family] for row in found.values() if family in row] for family in FAMILIES}
    for title, rows in (("model", by_family), ("layout", {name: list(row.values()) for name, row in found.items()})):
        print(f"\n| {title} | log-prob | gradient | of the largest entry | norm |\n|---|---|---|---|---|")
        for name, differences in rows.items():
            worst = [max(getattr(d, field) for d in differences) for field in ("logprob", "gradient", "relative", "norm")]
            print(f"| {name} | " + " | ".join(f"{value:.1e}" for value in worst) + " |")


if __name__ == "__main__":
    main()
