"""Encrypted files come back byte for byte, in any part, and any change to their bytes, length or name is found."""

import pytest

pytest.importorskip("cryptography")

from pipeline.encryption import EncryptedFile, Encryptor, decrypt
from pipeline.encryption.encrypted_file import TAG
from pipeline.files.stored_files import encrypt, is_encrypted, read_bytes
from tests.encryption.keys import random_key
from tests.problems import refused

CHUNK, HEADER = 16, 64
DATA = bytes(range(100))
DAMAGED, WRONG = ("run", "damaged"), ("checkpointing.encryption", "wrong-key")


def encrypted(data: bytes, key, name: str, pieces: int) -> bytes:
    """Encrypt in small chunks, given in pieces of this size."""
    encryptor = Encryptor(key, name, CHUNK)
    parts = [encryptor.header]
    for at in range(0, len(data), pieces):
        parts += encryptor.update(data[at : at + pieces])
    return b"".join([*parts, encryptor.finish()])


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 100])
@pytest.mark.parametrize("pieces", [1, 7, CHUNK, 40, 1000])
def test_every_part_comes_back(tmp_path, size, pieces):
    key, path, data = random_key(), tmp_path / "weights", DATA[:size]
    path.write_bytes(encrypted(data, key, "weights", pieces))
    assert path.stat().st_size == HEADER + size + TAG * max(1, -(-size // CHUNK))
    assert read_bytes(path, key) == data
    file = EncryptedFile(path, key)
    assert file.size == size
    for begin in range(0, size + 1, 9):
        for end in range(begin, size + 1, 13):
            assert file.read(begin, end - begin) == data[begin:end]


def test_the_same_bytes_never_look_the_same():
    key = random_key()
    first, second = (encrypt(DATA * 3, key, "weights") for _ in range(2))
    assert first[HEADER:] != second[HEADER:] and DATA[:8] not in first
    assert is_encrypted(first) and not is_encrypted(DATA)


def chunks(content: bytes) -> list[bytes]:
    return [content[at : at + CHUNK + TAG] for at in range(HEADER, len(content), CHUNK + TAG)]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


CHANGES = {
    "a bit of the first chunk": lambda content, other: flipped(content, HEADER),
    "a bit of the last tag": lambda content, other: flipped(content, len(content) - 1),
    "a bit of the salt": lambda content, other: flipped(content, 30),
    "a bit of the chunks' size": lambda content, other: flipped(content, 16),
    "a bit of what is reserved": lambda content, other: flipped(content, HEADER - 1),
    "cut within a chunk": lambda content, other: content[:-3],
    "cut after a chunk": lambda content, other: content[: HEADER + 3 * (CHUNK + TAG)],
    "cut after the header": lambda content, other: content[:HEADER],
    "more at the end": lambda content, other: content + b"more",
    "a chunk twice": lambda content, other: content + chunks(content)[-1],
    "two chunks swapped": lambda content, other: b"".join(
        [content[:HEADER], *(chunks(content)[i] for i in (1, 0, 2, 3, 4, 5, 6))]
    ),
    "a chunk left out": lambda content, other: b"".join([content[:HEADER], *chunks(content)[1:]]),
    "a chunk of another file": lambda content, other: b"".join([content[:HEADER], chunks(other)[0], *chunks(content)[1:]]),
    "the header of another file": lambda content, other: other[:HEADER] + content[HEADER:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_refused(tmp_path, change):
    key, path = random_key(), tmp_path / "weights"
    content, other = (encrypted(DATA, key, "weights", 100) for _ in range(2))
    path.write_bytes(CHANGES[change](content, other))
    with refused(DAMAGED) as error:
        decrypt(path.read_bytes(), key, path)
    assert str(path) in str(error.value)
    with refused(DAMAGED):
        EncryptedFile(path, key).read(0, len(DATA))


def test_a_file_that_was_cut_is_refused_before_it_is_read(tmp_path):
    key, path = random_key(), tmp_path / "weights"
    path.write_bytes(encrypted(DATA, key, "weights", 100)[: HEADER + 3 * (CHUNK + TAG)])
    with refused(DAMAGED):
        EncryptedFile(path, key)


def test_a_renamed_file_is_refused(tmp_path):
    key = random_key()
    (tmp_path / "step_000002.jsonl").write_bytes(encrypt(DATA, key, "step_000001.jsonl"))
    with refused(DAMAGED):
        read_bytes(tmp_path / "step_000002.jsonl", key)


def test_another_key_and_no_key_name_the_one_that_is_expected(tmp_path):
    key, other, path = random_key(), random_key(), tmp_path / "weights"
    path.write_bytes(encrypt(DATA, key, "weights"))
    for given in (other, None):
        with refused(WRONG) as error:
            read_bytes(path, given)
        assert key.fingerprint in str(error.value) and str(path) in str(error.value)
    assert other.fingerprint not in str(error.value)
