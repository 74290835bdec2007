"""Search folders for bytes that only encrypted files may hold."""

from collections.abc import Iterable
from pathlib import Path


def holding(folder: Path, pieces: Iterable[bytes]) -> list[str]:
    """Return the files below a folder, hidden ones too, that hold one of these byte strings."""
    pieces = list(pieces)
    assert pieces and all(len(piece) >= 4 for piece in pieces)
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return sorted(str(path.relative_to(folder)) for path, held in contents.items() if any(piece in held for piece in pieces))
