"""Encrypt a file in chunks that cannot be changed, dropped, swapped or cut off without notice, and read any part of it.

    header (64 bytes)   magic, fingerprint of the key, size of a chunk, salt
    chunk 0, 1, ...     AES-256-GCM: the bytes, and a tag of 16 bytes

The file's own key is HKDF-SHA256(key, salt, file name), so nonces need to be unique only within the file: a nonce is the number
of the chunk and whether it is the last one. This is the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizar, 2015,
https://eprint.iacr.org/2015/189, section 7), with a key for each file as in Tink's AES-GCM-HKDF streaming. The header is
associated data of every chunk. A renamed file has another key, so it cannot stand for another one. A file of the same name in
another folder can; in a checkpoint the list of digests, sealed with the key, finds it (pipeline/checkpoints/verification.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.encryption.key import FINGERPRINT_BYTES, EncryptionKey, ciphers
from pipeline.files.stored_files import MAGIC, fitting, is_encrypted
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK = 1 << 20
"""Bytes of a chunk before encryption."""
TAG = 16
_SALT = 32
_HEADER = struct.Struct(f"<8s{FINGERPRINT_BYTES}sI{_SALT}s12x")


class Encryptor:
    """Encrypts the bytes of one file, from its beginning to its end."""

    def __init__(self, key: EncryptionKey, name: str, chunk: int = CHUNK):
        """Begin a file. name: the file's, without folders. chunk: bytes of a chunk before encryption."""
        salt = os.urandom(_SALT)
        self.header = _HEADER.pack(MAGIC, bytes.fromhex(key.fingerprint), chunk, salt)
        self._cipher, self._chunk, self._number = _cipher(key, salt, name), chunk, 0
        self._held = bytearray()  # at most one chunk, which may be the last

    def update(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Add bytes of the file, and yield the encrypted chunks that are then complete."""
        pending = memoryview(data).cast("B")
        while pending:
            if len(self._held) == self._chunk:
                yield self._encrypt_chunk(self._held, last=False)
                self._held = bytearray()
            if not self._held and len(pending) > self._chunk:  # not the last one
                yield self._encrypt_chunk(pending[: self._chunk], last=False)
                pending = pending[self._chunk :]
                continue
            taken = min(self._chunk - len(self._held), len(pending))
            self._held += pending[:taken]
            pending = pending[taken:]

    def finish(self) -> bytes:
        """Return the last encrypted chunk."""
        return self._encrypt_chunk(self._held, last=True)

    def _encrypt_chunk(self, data: bytearray | memoryview, last: bool) -> bytes:
        nonce = _nonce(self._number, last)
        self._number += 1
        return self._cipher.encrypt(nonce, data, self.header)


class EncryptedFile:
    """An open encrypted file, of which any part can be read."""

    def __init__(self, path: Path, key: EncryptionKey | None):
        """Open a file and check that the key fits and that the file's end is there.

        Raises RecipeError if the key is missing or wrong, or if the file is damaged.
        """
        self.path = path
        self._file = user_files.open_file(path)  # it stays open
        self._header = self._file.read(_HEADER.size)
        if len(self._header) < _HEADER.size or not is_encrypted(self._header):
            raise _describe_damage(path, "got no header of an encrypted file")
        _, fingerprint, self._chunk, salt = _HEADER.unpack(self._header)
        key = fitting(key, fingerprint.hex(), path)
        self._cipher = _cipher(key, salt, path.name)
        body = os.fstat(self._file.fileno()).st_size - _HEADER.size
        self._chunks = max(1, -(-body // (self._chunk + TAG))) if self._chunk else 0
        self.size = body - TAG * self._chunks  # before encryption
        if self.size < 0 or not self._chunk:
            raise _describe_damage(path, f"got {body} bytes after the header")
        self._last = self._read(self._chunks - 1)  # whether the file ends where it was written to
        self._cached = self._chunks - 1, self._last

    def read(self, offset: int, length: int) -> bytearray:
        """Return `length` decrypted bytes from `offset` on. Raises RecipeError if one of their chunks is damaged."""
        content = bytearray(length)
        end = min(offset + length, self.size)
        if end - offset != length:
            raise _describe_damage(self.path, f"got {self.size} bytes; expected at least {offset + length}")
        at = offset
        while at < end:
            number, within = divmod(at, self._chunk)
            data = self._chunk_of(number)
            taken = min(len(data) - within, end - at)
            content[at - offset : at - offset + taken] = data[within : within + taken]
            at += taken
        return content

    def _chunk_of(self, number: int) -> bytes:
        if self._cached[0] != number:  # neighbours in a file often share a chunk
            self._cached = number, self._read(number)
        return self._cached[1]

    def _read(self, number: int) -> bytes:
        sealed = os.pread(self._file.fileno(), self._chunk + TAG, _HEADER.size + number * (self._chunk + TAG))
        return _decrypt_chunk(self._cipher, sealed, number, number == self._chunks - 1, self._header, self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def decrypt(content: bytes, key: EncryptionKey | None, path: Path) -> bytes:
    """Decrypt the content that an `Encryptor` made for the file `path`. Raises RecipeError: no key, a wrong one, or damage."""
    if len(content) < _HEADER.size:
        raise _describe_damage(path, f"got {len(content)} bytes")
    header, body = content[: _HEADER.size], content[_HEADER.size :]
    _, fingerprint, chunk, salt = _HEADER.unpack(header)
    cipher = _cipher(fitting(key, fingerprint.hex(), path), salt, path.name)
    parts = [body[at : at + chunk + TAG] for at in range(0, len(body), chunk + TAG)] or [b""]
    last = len(parts) - 1
    return b"".join(_decrypt_chunk(cipher, part, number, number == last, header, path) for number, part in enumerate(parts))


def _cipher(key: EncryptionKey, salt: bytes, name: str) -> AESGCM:
    derived = key.derived(salt, b"hetstep: file " + name.encode())
    return ciphers().AESGCM(derived)


def _nonce(number: int, last: bool) -> bytes:
    return struct.pack(">3xQB", number, last)


def _decrypt_chunk(cipher: AESGCM, sealed: bytes, number: int, last: bool, header: bytes, path: Path) -> bytes:
    try:
        return cipher.decrypt(_nonce(number, last), sealed, header)
    except (ciphers().InvalidTag, ValueError):
        raise _describe_damage(path, f"chunk {number}{', the last,' if last else ''} has changed") from None


def _describe_damage(path: Path, symptom: str) -> RecipeError:
    message = f"{path}: {symptom}; expected the encrypted file that was written. Its bytes, its length or its name have changed"
    return RecipeError(Problem("run", "damaged", message))
