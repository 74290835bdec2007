"""The key comes from a file or a command, and shows in no text, error or pickle."""

import base64
import hashlib
import os
import pickle
import sys

import pytest

from pipeline import config
from pipeline.config import CheckpointingConfig
from pipeline.config.checkpointing import EncryptionConfig, check_encryption
from pipeline.encryption import EncryptionKey, key, obtain
from tests.encryption.keys import key_file
from tests.problems import named, refused

SECRET = hashlib.sha256(b"a key of tests").digest()  # the same in all of pytest's workers
FILE, COMMAND = "checkpointing.encryption.key_file", "checkpointing.encryption.key_command"


@pytest.mark.parametrize("text", [SECRET.hex(), f"{SECRET.hex().upper()}\n", base64.b64encode(SECRET).decode()])
def test_hex_digits_and_base64_are_the_same_key(tmp_path, text):
    from_file = obtain(str(key_file(tmp_path / "key", text)), None)
    from_command = obtain(None, f"{sys.executable} -c \"print('''{text.strip()}''')\"")
    assert from_file.fingerprint == from_command.fingerprint == EncryptionKey(SECRET).fingerprint
    assert obtain(None, None) is None


def test_a_key_shows_its_fingerprint_alone():
    secret = EncryptionKey(SECRET)
    assert repr(secret) == f"EncryptionKey({secret.fingerprint})" and len(secret.fingerprint) == 16
    assert secret.fingerprint not in SECRET.hex()
    with pytest.raises(TypeError, match="neither sent nor stored"):
        pickle.dumps(secret)


@pytest.mark.parametrize("text", ["", "short", SECRET.hex()[:-2], base64.b64encode(SECRET[:31]).decode(), "g" * 64])
def test_another_form_is_refused_without_the_text(tmp_path, text):
    with refused((FILE, "bad-format")) as error:
        obtain(str(key_file(tmp_path / "key", text)), None)
    assert not text or text not in str(error.value)


def test_a_file_that_others_may_read_is_refused(tmp_path):
    with refused((FILE, "permission-denied")) as error:
        obtain(str(key_file(tmp_path / "key", SECRET.hex(), 0o640)), None)
    assert "chmod 600" in str(error.value) and SECRET.hex() not in str(error.value)
    with refused((FILE, "file-not-found")):
        obtain(str(tmp_path / "none"), None)


def test_a_command_that_fails_is_quoted_with_what_it_said(monkeypatch):
    fails = f"{sys.executable} -c \"import sys; print('{SECRET.hex()}'); sys.exit('permission denied')\""
    with refused((COMMAND, "unreachable")) as error:
        obtain(None, fails)
    assert "exit status 1" in str(error.value) and "permission denied" in str(error.value)
    with refused((COMMAND, "file-not-found")):
        obtain(None, "no-such-program-of-hetstep")
    monkeypatch.setattr(key, "TIMEOUT_S", 0.2)
    with refused((COMMAND, "unreachable")) as error:
        obtain(None, f"{sys.executable} -c 'import time; time.sleep(600)'")
    assert "0.2 s" in str(error.value)


SECTION = "checkpointing.encryption"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"enabled": True}, (f"{SECTION}.enabled", "missing-value")),
        ({"key_file": "/k", "key_command": "show"}, (SECTION, "contradiction")),
        ({"key_file": "/runs/a/key"}, (FILE, "contradiction")),
        ({"key_file": f"/here/{SECRET.hex()}"}, (FILE, "secret-in-recipe")),
        ({"key_command": f"echo {SECRET.hex()}"}, (COMMAND, "secret-in-recipe")),
        ({"key_command": f"echo {base64.b64encode(SECRET).decode()}"}, (COMMAND, "secret-in-recipe")),
    ],
)
def test_contradictions_are_refused(given, expected):
    section = CheckpointingConfig(async_save=False, encryption=EncryptionConfig(**given))
    found = list(check_encryption(section, "/runs/a"))
    assert named(found) == {expected}
    assert SECRET.hex() not in str(found)


def test_a_key_in_the_run_folder_is_refused_by_another_name_of_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    for path in ("link/key", "x/../run/key"):
        section = CheckpointingConfig(async_save=False, encryption=EncryptionConfig(key_file=str(tmp_path / path)))
        assert named(check_encryption(section, str(tmp_path / "run"))) == {(FILE, "contradiction")}


def test_a_plain_copy_beside_encrypted_checkpoints_is_refused():
    section = CheckpointingConfig(save_consolidated=True, encryption=EncryptionConfig(enabled=True, key_command="show"))
    assert named(check_encryption(section, "/runs/a")) == {("checkpointing.save_consolidated", "contradiction")}


def test_the_checks_are_those_of_a_recipe(tmp_path):
    given = [f"run_dir={tmp_path}/run", f"{SECTION}.enabled=true", "checkpointing.save_consolidated=false"]
    with refused((f"{SECTION}.enabled", "missing-value")):
        config.load("tiny_sft", given)
    loaded = config.load("tiny_sft", [*given, f"{SECTION}.key_file=key"])
    assert loaded.checkpointing.encryption.key_file == os.path.abspath("key")
