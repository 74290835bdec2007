"""`python -m tests.nemo_rl.table`: keys of NeMo-RL's with another meaning, name or default than ours, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.nemo_rl.test_meanings import MEANINGS, NOTHING, effective, given_with, translated


def differing() -> Iterator[str]:
    """Return a row for each key that becomes something else, or for which the import makes a note."""
    for name, rows in MEANINGS.items():
        for key, row in rows.items():
            ours = row.get("ours", {key: row["give"]})
            notes = translated(name, {**given_with(row), key: row["give"]}).changed
            said = [note.partition(": ")[2] for note in notes if row.get("note") and note.startswith(row["note"])]
            if said or ours != {key: row["give"]}:
                becomes = ", ".join(f"`{one}: {json.dumps(value)}`" for one, value in ours.items())
                yield f"| `{key}: {json.dumps(row['give'])}` | {becomes} | {said[0] if said else 'the same, in our words'} |"


def defaults() -> Iterator[str]:
    """Return a row for each key whose default differs from ours."""
    for rows in MEANINGS.values():
        for key, row in rows.items():
            ours = effective({}, next(iter(row.get("ours", {key: None}))))
            if "absent" in row and ours is not NOTHING and ours != row["absent"]:
                yield f"| `{key}` | {json.dumps(row['absent'])} | {json.dumps(ours)} |"


if __name__ == "__main__":
    print("| theirs | ours | what the import says |\n|---|---|---|")
    print("\n".join(differing()))
    print("\n| left out | theirs, which the import sets | ours |\n|---|---|---|")
    print("\n".join(defaults()))
