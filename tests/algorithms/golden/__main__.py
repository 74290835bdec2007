"""Print the difference of every formula from peers' own numbers, as a Markdown table: `python -m tests.algorithms.golden`."""

from __future__ import annotations

from collections import defaultdict

from tests.algorithms.golden.files import Golden, goldens
from tests.algorithms.golden.ours import deliberate, difference


def main() -> None:
    found: dict[tuple[str, str, str, str], list[Golden]] = defaultdict(list)
    for golden in goldens():
        found[golden.formula, golden.peer, golden.commit[:9], golden.function].append(golden)
    print("| formula | peer | commit | function | batches | largest difference, relative |\n|---|---|---|---|---:|---:|")
    for key, cases in found.items():
        why = f" (deliberate: {reason})" if (reason := deliberate(cases[0])) else ""
        print(f"| {' | '.join(key)} | {len(cases)} | {max(map(difference, cases)):.1e}{why} |")


if __name__ == "__main__":
    main()
