from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.embedded import datadir
from perdure.embedded.datadir import DataDir, InUseError, write_json
from perdure.embedded.process import Identity


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    found = DataDir(tmp_path / "data")
    found.open()
    return found


def test_second_copy_is_refused_and_told_who_holds_the_folder(data: DataDir) -> None:
    assert not data.in_use()
    data.lock()
    assert data.locked
    other = DataDir(data.root)
    assert other.in_use()
    with pytest.raises(InUseError, match=rf"pid {os.getpid()}\b.*--data-dir"):
        other.lock()
    data.unlock()
    assert not other.in_use()
    other.lock()
    other.unlock()


def test_lock_ends_with_its_process(data: DataDir) -> None:
    program = (
        "import sys; from pathlib import Path; from perdure.embedded.datadir import DataDir\n"
        "d = DataDir(Path(sys.argv[1])); d.lock(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(data.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert data.in_use()
        holder.kill()
        holder.wait()
    assert not data.in_use()


def test_a_folder_that_was_never_used_is_not_in_use(tmp_path: Path) -> None:
    assert not DataDir(tmp_path / "none").in_use()
    assert not (tmp_path / "none").exists()


def test_secrets_are_made_once_and_private(data: DataDir) -> None:
    assert data.secret("one", lambda: "first") == "first"
    assert data.secret("one", lambda: "second") == "first"
    assert DataDir(data.root).secret("one", lambda: "third") == "first"
    assert data.secret("two", lambda: "other") == "other"
    assert (data.root / "secrets" / "one").stat().st_mode & 0o777 == 0o600


def test_children_are_read_back_and_junk_is_nothing(data: DataDir) -> None:
    children = {"api": Identity(12, "345"), "gpu:local:0": Identity(13, "346")}
    data.record_children(children)
    assert data.recorded_children() == children
    for junk in ("", "{", "[]", '{"api": 3}', '{"api": ["x", 1]}', "null"):
        (data.root / "children.json").write_text(junk)
        assert data.recorded_children() == {}


def test_json_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "dev.json"
    write_json(path, {"a": 1}, mode=0o600)
    with path.open() as reader:
        write_json(path, {"b": 2}, mode=0o600)
        assert json.load(reader) == {"a": 1}  # who had it open reads the old one, whole
    assert json.loads(path.read_text()) == {"b": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["dev.json"]


def test_log_that_grew_too_long_is_moved_aside(data: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datadir, "MAX_LOG_BYTES", 100)
    path = data.new_log("gpu:local:0")
    with path.open("ab") as writer:
        writer.write(b"old line\n" * 20)
        writer.flush()
        data.bound_log("gpu:local:0")
        writer.write(b"new line\n")
    assert path.read_text() == "new line\n"
    assert path.with_suffix(".log.1").read_text().startswith("old line")
    data.bound_log("never written")


def test_new_log_keeps_the_one_before(data: DataDir) -> None:
    data.new_log("api").write_text("first start\n")
    assert not data.new_log("api").exists()
    assert data.log("api").with_suffix(".log.1").read_text() == "first start\n"


def test_tail_is_the_last_lines(data: DataDir) -> None:
    data.log("api").write_text("".join(f"line {n}\n" for n in range(5000)))
    assert data.log_tail("api", lines=2) == ["line 4998", "line 4999"]
    size = data.log_size("api")
    with data.log("api").open("a") as log:
        log.write("x" * 5000 + "\n")
    (line,) = data.log_tail("api", since=size)
    assert line == "x" * datadir.MAX_TAIL_LINE + " …"
    assert data.log_size("nobody") == 0
    assert data.log_tail("nobody") == []
