"""Keep named versions of models: `python launch/registry.py add|promote|list|show [name=NAME] [key=value ...]`.

    add name=NAME export=PATH             the next version, a candidate, with the scores of the export's evaluations
    promote name=NAME version=N stage=S   into production (the version there is retired), or to candidate or retired
    list                                  every version of every name, or of name=NAME
    show name=NAME [version=N]            one version: by default the one in production, else the latest

`add`, and `promote` into production, compare the files of an export with the hashes in its lineage.json.
Each change is a line of the audit log.

Exit status: 0; 2 if the command line or the export has an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

from launch.api import provenance
from launch.governance.model_registry import STAGES, ModelVersion, Stage
from launch.terminal import command_line, console
from launch.terminal.command_line import Key
from launch.terminal.safe_text import on_one_line
from pipeline.config import Problem
from pipeline.config.cluster import AUDIT_AUTO

HEADER = ("stage", "name", "version", "run", "scores", "export")
NEEDED = {"add": ("name", "export"), "promote": ("name", "version", "stage"), "list": (), "show": ("name",)}
READ = {"add": ("root",), "list": ("name",), "show": ("version",)}
"""Command -> keys that it reads besides those that it needs."""


@dataclass(frozen=True)
class RegistryRequest:
    """The command line."""

    what: Annotated[Literal["add", "promote", "list", "show"], Key("add|promote|list|show", "what to do", bare=True)]
    name: Annotated[str | None, Key("NAME", "the name of a model")] = None
    export: Annotated[Path | None, Key("DIR", "add: a folder that `launch/export.py` wrote")] = None
    version: Annotated[int | None, Key("N", "the number of a version")] = None
    stage: Annotated[Stage | None, Key("STAGE", f"promote: {', '.join(STAGES)}")] = None
    registry: Annotated[Path, Key("FOLDER", "the folder of the registry; default: runs/registry")] = Path("runs/registry")
    root: Annotated[Path | None, Key("RUNS", "add: the folder of the runs and their evaluations; default: runs")] = None
    audit: Annotated[str, Key("FOLDER", "the folder of the audit log, or none; default: as cluster.audit=auto")] = AUDIT_AUTO
    json: Annotated[bool, Key("true", "list, show: print JSON")] = False

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each key that is missing or that the command does not read."""
        needed = NEEDED[self.what]
        for key in ("name", "export", "version", "stage", "root"):
            given = getattr(self, key) is not None
            if key in needed and not given:
                yield Problem(key, "missing-value", f"got none; expected {' and '.join(needed)} with {self.what}")
            elif given and key not in (*needed, *READ.get(self.what, ())):
                yield Problem(key, "has-no-effect", f"got a value with {self.what}, which does not read it; expected none")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, RegistryRequest, execute, arguments)


def execute(request: RegistryRequest) -> int:
    """Change or print the registry, and return the exit status. Raises RecipeError."""
    registry = provenance.registry(request.registry, audit=request.audit)
    name = request.name or ""
    if request.what == "add":
        assert request.export is not None
        _print([registry.add(name, request.export, root=request.root or provenance.RUNS)], request.json)
    elif request.what == "promote":
        assert request.version is not None and request.stage is not None
        _print([registry.promote(name, request.version, request.stage)], request.json)
    elif request.what == "show":
        print(json.dumps(asdict(registry.show(name, request.version)), indent=1))
    else:
        found = registry.versions(request.name)
        if not found and not request.json:
            print(f"no versions of {request.name or 'any model'} in {registry.folder}")
        else:
            _print(found, request.json)
    return 0


def _print(versions: list[ModelVersion], as_json: bool) -> None:
    rows = [_row(version) for version in versions]
    if as_json:
        print(json.dumps([asdict(version) for version in versions], indent=1))
    elif sys.stdout.isatty():
        console.print_table(HEADER, rows)
    else:
        print("\n".join("  ".join(map(on_one_line, row)) for row in rows))


def _row(version: ModelVersion) -> tuple[str, ...]:
    scores = ", ".join(f"{each['task']} {_number(each['value'])}" for each in version.scores)
    made = f"{version.run}, step {version.step}"
    return version.stage, version.name, str(version.version), made, scores or "no scores", version.export


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
