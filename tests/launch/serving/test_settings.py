"""The service's settings are checked before it listens."""

import socket

import pytest

from launch import serve
from launch.serving import settings
from launch.serving.access import digest, new_token
from pipeline.config import RecipeError
from tests.launch.serving.team import TOKENS

GOOD = f"users: {{sam: {{role: submitter, token_sha256: {digest(TOKENS['sam'])}}}}}\n"


def read(tmp_path, text: str) -> settings.ServiceConfig:
    path = tmp_path / "serve.yaml"
    path.write_text(f"root: {tmp_path}\n{text}")
    return settings.load(path)


def test_defaults_read_only_on_this_machine(tmp_path):
    found = read(tmp_path, GOOD)
    assert (found.writable, found.host, found.users["sam"].role) == (False, "127.0.0.1", "submitter")


@pytest.mark.parametrize(
    ("text", "key", "code"),
    [
        ("", "users", "missing-value"),
        (GOOD + "writeable: true\n", "writeable", "unknown-key"),
        (GOOD + "port: 70000\n", "port", "too-large"),
        (GOOD + "host: 0.0.0.0\n", "host", "contradiction"),
        (GOOD + "tls_key: here.pem\n", "tls_certificate", "contradiction"),
        (GOOD + "tls_key: here.pem\n", "tls_key", "file-not-found"),
        (GOOD + f"tls_certificate: {__file__}\ntls_key: {__file__}\n", "tls_certificate", "unreadable"),
        (GOOD + "root: nowhere\n", "root", "given-twice"),
        (GOOD.replace("submitter", "boss"), "users.sam.role", "not-a-choice"),
        (GOOD.replace("sam", "../sam"), "users.../sam", "bad-format"),
        ("users: {sam: {token_sha256: abc}}\n", "users.sam.token_sha256", "bad-format"),
        (GOOD.replace("}}", f"}}, sue: {{token_sha256: {digest(TOKENS['sam'])}}}}}"), "users.sue.token_sha256", "given-twice"),
    ],
)
def test_wrong_settings(tmp_path, text: str, key: str, code: str):
    with pytest.raises(RecipeError) as error:
        read(tmp_path, text)
    assert (key, code) in {(problem.key, problem.code) for problem in error.value.problems}


def test_a_new_token_and_its_hash(capsys):
    assert serve.main(["new_token=true"]) == 0
    token, hashed = (line.split()[-1] for line in capsys.readouterr().out.splitlines())
    assert digest(token) == hashed and len(token) >= 40
    assert new_token() != new_token()


def test_no_settings(capsys):
    assert serve.main([]) == 2
    assert "settings=FILE   the settings, a YAML file" in capsys.readouterr().out  # as other commands: how to call it
    assert serve.main(["new_token=false"]) == 2
    assert "settings: got no file; expected settings=FILE" in capsys.readouterr().err


def test_a_port_that_is_taken(tmp_path, capsys):
    (tmp_path / "serve.yaml").write_text(f"root: {tmp_path}\n{GOOD}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (tmp_path / "serve.yaml").open("a") as file:
            file.write(f"port: {port}\n")
        assert serve.main([f"settings={tmp_path / 'serve.yaml'}"]) == 2
    assert f"port: got {port}, on which another process listens" in capsys.readouterr().err


def test_an_address_that_is_not_of_this_machine(tmp_path):
    config = read(tmp_path, GOOD + "host: nowhere.invalid\nplain_http: true\n")
    with pytest.raises(RecipeError, match=r"host: got nowhere.invalid, on which the service cannot listen"):
        settings.refuse_unusable_address(config)
