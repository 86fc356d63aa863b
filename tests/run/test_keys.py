"""Key files: what is read as a key, and who makes one."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_prime.errors import ConfigError
from composer_prime.run.keys import RunKeys


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


# A file that others can read, a link, one of another length, and one of another user are no keys.
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.chmod(0o640), "has mode 640, others may read it: chmod 600"),
        (_link, "cannot be read"),
        (lambda path: path.write_bytes(b"short"), "holds 5 bytes, expected"),
    ],
)
def test_no_secret_is_taken_from_just_any_file(tmp_path, spoil, said):
    keys = RunKeys.create(tmp_path / "keys")
    keys.operator_token()
    readers = {"signing.ed25519": keys.signer, "server.curve": lambda: keys.curve("server"),
               "operator.token": keys.operator_token}  # fmt: skip
    for name, read in readers.items():
        read()
        spoil(tmp_path / "keys" / name)
        with pytest.raises(ConfigError, match=said):
            read()


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    keys = RunKeys.create(tmp_path / "keys")
    if os.geteuid() == 0:
        os.chown(tmp_path / "keys" / "server.curve", 1, 1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        keys.curve("server")


# A folder that others can write in could hold keys, invites and nodes of their choice.
def test_a_planted_folder_is_refused(tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o777)
    with pytest.raises(ConfigError, match="has mode 777, others may write it: chmod go-w"):
        RunKeys.create(tmp_path / "keys")


# Those who ask for the operator's token at the same time get the same one.
def test_one_operator_token(tmp_path):
    for number in range(20):
        keys = RunKeys(tmp_path / str(number))
        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(RunKeys.operator_token, [keys] * 8))) == 1


# A key that exists is read on a full disk too: commands that steer a run must work there.
def test_a_full_disk_keeps_its_keys(tmp_path):
    keys, limit = RunKeys.create(tmp_path / "keys"), resource.getrlimit(resource.RLIMIT_FSIZE)
    token = keys.operator_token()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        assert keys.operator_token() == token
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(keys.folder.glob("*.partial"))
