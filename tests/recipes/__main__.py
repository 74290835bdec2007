"""`python -m tests.recipes PATH_TO_NEMO_RL`: regenerate the values of `sources/` from a copy of NeMo-RL's repository.

A new source needs a file with repository, commit, path and, perhaps, over and given. Where the copy has other values than those
that are held to, say by `git diff`, each recipe that claims them has to follow or to say why not (`claims.yaml`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from pipeline.recipe.values import leaves
from tests.nemo_rl.__main__ import resolved
from tests.recipes import sources


def main(root: Path) -> None:
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    ordered = sorted(filter(lambda name: sources.read(name).is_nemo_rls, sources.names()), key=_depth)
    for name in ordered:
        source = sources.read(name)
        found = dict(sources.deciding(leaves(resolved(root / source.path))))
        base = dict(sources.read(source.over).values) if source.over else {}
        nothing = object()
        raw: dict[str, Any] = {"repository": source.repository, "commit": commit or source.commit, "path": source.path}
        raw |= {"over": source.over} if source.over else {}
        raw |= {"given": list(source.given)} if source.given else {}
        if absent := sorted(base.keys() - found.keys()):
            raw["absent"] = absent
        raw["values"] = {key: value for key, value in sorted(found.items()) if base.get(key, nothing) != value}
        (sources.FOLDER / f"{name}.yaml").write_text(yaml.safe_dump(raw, sort_keys=False, width=130, allow_unicode=True))
        print(f"{name}: {len(raw['values'])} of {len(found)} values")


def _depth(name: str) -> int:
    over = sources.read(name).over
    return 1 + _depth(over) if over else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
