"""Files that are whole or absent; streams and links are written to, and nothing special is ever replaced."""

import io
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from siamesenorm.data import DataError
from siamesenorm.data.atomic import check_output, whole_file, write_json

from .folders import contents


def write(path, content=b"new"):
    with whole_file(path) as file:
        file.write(content)


def test_an_error_leaves_the_old_one(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "file") as file:
        file.write(b"half" * (1 // 0))
    assert contents(tmp_path) == {"file": b"old"}
    write(tmp_path / "file")
    assert contents(tmp_path) == {"file": b"new"}


def test_the_longest_names_that_the_system_takes(tmp_path):
    for name in ("x" * 255, "ö" * 127):
        write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"new"


def test_nothing_that_looks_like_a_partial_file_is_written_over(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "00000000")
    (tmp_path / ".file.00000000.partial").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file")
    assert contents(tmp_path) == {".file.00000000.partial": b"mine"}


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("old")
    (tmp_path / "link").symlink_to("inner/file")
    (tmp_path / "again").symlink_to("link")
    (tmp_path / "dangling").symlink_to("inner/absent")
    for name in ("again", "dangling"):
        check_output(tmp_path / name, "out")
        write(tmp_path / name)
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "inner" / "file").read_bytes() == (tmp_path / "inner" / "absent").read_bytes() == b"new"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match=r"link"):
        write(tmp_path / "round")
    assert (tmp_path / "round").is_symlink()


def test_a_fifo_is_written_to_when_the_content_is_whole(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_output(tmp_path / "pipe", "out")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    with whole_file(tmp_path / "pipe") as file:
        np.savez(file, numbers=np.arange(100_000))  # more than a pipe holds
    reader.join()
    assert np.load(io.BytesIO(got[0]))["numbers"][-1] == 99_999
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
def test_devices_stay_devices(name):
    device, before = Path(name), os.stat(name)
    check_output(device, "out")
    if name == "/dev/full":
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write(device)
    else:
        write(device)
    assert (os.stat(name).st_ino, os.stat(name).st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("form", ["/dev/fd/{}", "/proc/self/fd/{}", "link"])
def test_an_open_file_is_written_behind_what_it_holds(tmp_path, form):
    """As /dev/stdout is where it goes into a file: the file is neither replaced nor cut."""
    with open(tmp_path / "log", "wb") as log:
        log.write(b"before ")
        log.flush()
        path = Path(form.format(log.fileno()))
        if form == "link":
            path = tmp_path / "link"
            path.symlink_to(f"/dev/fd/{log.fileno()}")
        check_output(path, "out")
        write(path)
        log.write(b" after")
    assert (tmp_path / "log").read_bytes() == b"before new after"
    closed = Path(f"/dev/fd/{os.dup(0)}")
    os.close(int(closed.name))
    with pytest.raises(DataError, match=r"out: '/dev/fd/\d+' cannot be written"):
        check_output(closed, "out")


def test_disks_and_folders_are_refused(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "folder")
    for path in (tmp_path / "folder", tmp_path / "absent" / "file"):
        with pytest.raises(DataError, match=r"out: '.*' is not allowed; it takes a file in a folder that is there"):
            check_output(path, "out")
    (tmp_path / "disk").write_text("partitions")
    status = os.stat_result((stat.S_IFBLK | 0o600, *os.stat(tmp_path / "disk")[1:]))
    plain = os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **options: status if str(path).endswith("disk") else plain(path, **options)
    )
    for attempt in (lambda: write(tmp_path / "disk"), lambda: check_output(tmp_path / "disk", "out")):
        with pytest.raises((OSError, DataError), match="it is a block device; it takes a file, a pipe or a character"):
            attempt()
    monkeypatch.undo()
    assert contents(tmp_path) == {"disk": b"partitions"}


def test_a_try_leaves_nothing_behind(tmp_path):
    check_output(tmp_path / "file", "out")
    assert list(tmp_path.iterdir()) == []
    write_json(tmp_path / "file", {"a": 1})
    check_output(tmp_path / "file", "out")
    assert contents(tmp_path) == {"file": b'{\n "a": 1\n}\n'}
