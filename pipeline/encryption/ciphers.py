"""The ciphers of the package `cryptography`. Only `key.ciphers` imports this file, since the package is optional."""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

__all__ = ["AESGCM", "InvalidTag", "derive"]


def derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose: HKDF-SHA256 (RFC 5869)."""
    return HKDF(SHA256(), 32, salt, purpose).derive(secret)
