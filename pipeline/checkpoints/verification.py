"""Verify checkpoints and exports before they are read: each file is what was written, and the key is the right one.

`checkpointing.verify` says how much is compared. full: the SHA-256 of every file, so all bytes are read once more; the ranks
divide the files. size: names and sizes of files, and the seals of complete.json and digests.sha256. off: only names and sizes
of the files that complete.json lists, which `pipeline.checkpoints.checkpoint.read` always compares.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.checkpoints.checkpoint import COMPLETE, DIGESTS, Checkpoint, complete_in, seals
from pipeline.config import CheckpointingConfig, Problem, RecipeError, Verify
from pipeline.files import digests, stored_files
from pipeline.files.digests import MANIFEST
from pipeline.files.stored_files import FileKey, fitting

SHOWN = 4
WITHOUT_DIGEST = ("README.md", digests.ORIGIN)
"""Files of an export that have no digest: the model card, which people edit, and lineage.json, which holds the hashes."""
WHOLE = (0, 1)


def obtain_key(config: CheckpointingConfig) -> FileKey | None:
    """Return the key that a recipe names, from its file or its command; None without either. Raises RecipeError."""
    section = config.encryption
    return stored_files.obtain_key(section.key_file, section.key_command)


def check_same_key(key: FileKey | None, fingerprint: str) -> None:
    """Raise RecipeError if this node's key is not rank 0's. fingerprint: of rank 0's key."""
    if key is None or key.fingerprint != fingerprint:
        node_key = "none" if key is None else key.fingerprint
        message = f"got the key {node_key} on {socket.gethostname()}; expected the key of rank 0, {fingerprint}, on every node"
        raise RecipeError(Problem("checkpointing.encryption", "wrong-key", message))


def check_key(checkpoint: Checkpoint | None, key: FileKey | None) -> None:
    """Raise RecipeError, which names the fingerprints, if a checkpoint is encrypted with another key than `key`."""
    if checkpoint is not None and checkpoint.fingerprint is not None:
        fitting(key, checkpoint.fingerprint, checkpoint.folder)


def check_record(checkpoint: Checkpoint, verify: Verify, key: FileKey | None) -> None:
    """Raise RecipeError if `key` is not the checkpoint's key, or if the names of its files or its seals are wrong.

    The error names the files. A checkpoint of an earlier version has no digests, so only its key is checked.
    """
    check_key(checkpoint, key)
    if verify != "off" and checkpoint.version >= DIGESTS:
        _refuse(checkpoint, _record_problems(checkpoint, key))


def check_before_submission(checkpoint: Checkpoint, config: CheckpointingConfig) -> None:
    """Raise RecipeError for problems that a login node can find: a missing or wrong key, and wrong names and seals.

    The key is checked only if its file is on this node.
    """
    section = config.encryption
    is_here = section.key_command is None and (section.key_file is None or Path(section.key_file).exists())
    if checkpoint.fingerprint and is_here:  # only ranks start the command
        fitting(obtain_key(config), checkpoint.fingerprint, checkpoint.folder)
    if config.verify != "off" and checkpoint.version >= DIGESTS:
        _refuse(checkpoint, _record_problems(checkpoint, None))


def check_share(checkpoint: Checkpoint, verify: Verify, share: tuple[int, int] = WHOLE) -> None:
    """Raise RecipeError, which names the files, if files of a checkpoint differ from their digests.

    Does nothing unless `verify` is "full". share: (i, n) compares the ith of n shares of the files. Call `check_record` first,
    in one process.
    """
    if verify == "full" and checkpoint.version >= DIGESTS:
        listed, _ = digests.read_manifest(checkpoint.folder)
        _refuse(checkpoint, _content_problems(checkpoint.folder, listed, checkpoint.record["files"], share))


def check_export(key: str, folder: Path, verify: Verify, share: tuple[int, int] = WHOLE) -> None:
    """Raise RecipeError, which names the files, if an exported model's folder has digests and was changed since the export.

    key: the recipe's key that names the folder. Hidden files do not count.
    """
    if verify == "off" or not (folder / MANIFEST).exists():
        return
    try:
        listed, _ = digests.read_manifest(folder)
    except ValueError as error:
        raise _describe_damage(key, "", [str(error)], "to export it again") from None
    names = [name for name in digests.names_in(folder) if name not in (MANIFEST, *WITHOUT_DIGEST) and not name.startswith(".")]
    problems = list(_name_problems(names, listed))
    if not problems and verify == "full":
        sizes = {name: (folder / name).stat().st_size for name in listed}
        problems = list(_content_problems(folder, listed, sizes, share))
    if problems:
        advice = f"to export it again, or to remove {MANIFEST} if you made the change"
        raise _describe_damage(key, f"{folder}: ", problems, advice)


def _record_problems(checkpoint: Checkpoint, key: FileKey | None) -> Iterator[str]:
    """Yield `NAME: got ...; expected ...` for each problem that can be found without reading the large files."""
    folder, record = checkpoint.folder, checkpoint.record
    expected = seals(record, key if checkpoint.fingerprint else None)  # without the key, all but what only the key shows
    if any(record.get(name) != value for name, value in expected.items()):
        yield f"{COMPLETE}: got values that do not match their seals; expected the values that the run wrote"
        return
    try:
        listed, digest = digests.read_manifest(folder)
    except FileNotFoundError:
        yield f"{MANIFEST}: got no such file; expected the file that the run wrote"
        return
    except ValueError as error:
        yield str(error)
        return
    if digest != record["digests"]:
        yield f"{MANIFEST}: got SHA-256 {digest[:16]}...; expected {record['digests'][:16]}..., which {COMPLETE} has"
        return
    yield from _name_problems([name for name in digests.names_in(folder) if name not in (COMPLETE, MANIFEST)], listed)


def _name_problems(names: Sequence[str], listed: Mapping[str, str]) -> Iterator[str]:
    """Yield `NAME: got ...; expected ...` for each missing and each extra file. names: of the files in the folder."""
    there = set(names)
    for name in sorted(listed.keys() - there):
        yield f"{name}: got no such file; expected it, because {MANIFEST} lists it"
    for name in sorted(there - listed.keys()):
        yield f"{name}: got a file that {MANIFEST} does not list; expected none"


def _content_problems(
    folder: Path, listed: Mapping[str, str], sizes: Mapping[str, int], share: tuple[int, int]
) -> Iterator[str]:
    """Yield `NAME: got ...; expected ...` for each file whose content has another digest than the list.

    share: (i, n) compares every nth file in the order of sizes, from the ith on, so that n processes divide the work. Raises
    OSError.
    """
    names = sorted(listed, key=lambda name: (-sizes.get(name, 0), name))[share[0] :: share[1]]
    for name, digest in digests.of_files(folder, names).items():
        if digest != listed[name]:
            yield f"{name}: got SHA-256 {digest[:16]}...; expected {listed[name][:16]}..."


def _refuse(checkpoint: Checkpoint, problems: Iterator[str]) -> None:
    if listed := list(problems):
        raise _describe_damage("checkpoint", f"{checkpoint.folder}: ", listed, _advise_step(checkpoint))


def _advise_step(checkpoint: Checkpoint) -> str:
    """Return advice that names the last complete step before a damaged checkpoint, from which the run can go on."""
    earlier = [sibling.step for sibling in complete_in(checkpoint.folder.parent) if sibling.step < checkpoint.step]
    if not earlier:
        return "to restore it from a copy; no earlier step is complete"
    return f"to move {checkpoint.folder} away: the run then goes on from step {max(earlier)}"


def _describe_damage(key: str, where: str, problems: list[str], advice: str) -> RecipeError:
    more = f"; and {len(problems) - SHOWN} more files" if len(problems) > SHOWN else ""
    return RecipeError(Problem(key, "damaged", f"{where}{'; '.join(problems[:SHOWN])}{more}. Try {advice}"))
