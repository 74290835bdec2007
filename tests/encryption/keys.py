"""Keys for tests, and files of them."""

import os
from pathlib import Path

from pipeline.encryption import EncryptionKey


def random_key() -> EncryptionKey:
    return EncryptionKey(os.urandom(32))


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path
