"""What is removed: what the program made, all of it or nothing; what is replaced comes back after an error."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data.removal import (
    NOTHING,
    PARTIAL,
    REPLACED,
    NotOurs,
    hidden_name,
    hidden_names,
    remove_entries,
    remove_file,
    remove_tree,
    scratch_folder,
)
from siamesenorm.data.replacement import Replacement, rename_free, replace_file

from .folders import contents

ANYTHING = re.compile(r".*")
MADE = re.compile(r"part-\d+(/shard\.bin)?|index\.json")


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "made"
    for number in (1, 2):
        (folder / f"part-{number}").mkdir(parents=True)
        (folder / f"part-{number}" / "shard.bin").write_text("ours")
    (folder / "index.json").write_text("ours")
    (tmp_path / "beside.txt").write_text("mine")
    return folder


@pytest.mark.parametrize("name", ["", ".", "..", "/", "../..", "inner/.."])
def test_no_name_is_nothing_to_remove(tmp_path, monkeypatch, name):
    (tmp_path / "inner").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path / "inner")
    (tmp_path / "inner" / "inner").mkdir()
    path = Path(name) if name else Path()
    for remover in ("unlink", "rmdir"):  # should the claim be wrong one day, nothing is lost by finding out
        monkeypatch.setattr(os, remover, lambda *path, **options: pytest.fail("something was removed"))
    for remove in (lambda: remove_tree(path, ANYTHING), lambda: remove_file(path)):
        with pytest.raises(NotOurs):
            remove()
    assert contents(tmp_path) == {"mine.txt": b"mine"}


def test_folders_that_somebody_works_in_stay(tmp_path, monkeypatch):
    (tmp_path / "home" / "inner").mkdir(parents=True)
    (tmp_path / "here" / "inner").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "inner"))
    monkeypatch.chdir(tmp_path / "here" / "inner")
    for path in (tmp_path, tmp_path / "home", tmp_path / "home" / "inner", tmp_path / "here", tmp_path / "here/inner"):
        with pytest.raises(NotOurs, match=r"is or holds the (current|home) folder"):
            remove_tree(path, ANYTHING)
    monkeypatch.chdir(tmp_path)
    remove_tree(tmp_path / "here", ANYTHING)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_folder_of_the_programs_making_goes_whole(made, tmp_path):
    remove_tree(made, MADE)
    assert contents(tmp_path) == {"beside.txt": b"mine"}
    assert not made.exists()
    remove_tree(made, MADE)  # what is not there is nothing to remove
    remove_file(made)


@pytest.mark.parametrize("stranger", ["notes.txt", "part-1/notes.txt", "part-3/other/shard.bin", "empty/"])
def test_one_stranger_keeps_all_of_it(made, stranger):
    path = made / stranger
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if stranger.endswith("/") else path.write_text("mine")
    before = contents(made)
    with pytest.raises(NotOurs, match=r"was not made by this program"):
        remove_tree(made, MADE)
    with pytest.raises(NotOurs), Replacement() as swap:
        swap.set_aside(made, MADE)
    assert contents(made) == before
    assert path.exists()


@pytest.mark.parametrize("place", ["index.json", "part-1/shard.bin", "part-2", "."])
def test_links_are_neither_followed_nor_removed(made, tmp_path, place):
    """Also those that have the names of files and folders of ours."""
    (tmp_path / "elsewhere" / "shard.bin").parent.mkdir()
    (tmp_path / "elsewhere" / "shard.bin").write_text("mine")
    path = made / place
    if path.is_dir():
        os.rename(path, tmp_path / "kept")
        path.symlink_to(tmp_path / ("kept" if place == "." else "elsewhere"))
    else:
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere" / "shard.bin")
    before = contents(tmp_path)
    with pytest.raises(NotOurs):
        remove_tree(made, MADE)
    if place == "index.json":
        with pytest.raises(NotOurs, match="is a link"):
            remove_file(path)
    assert contents(tmp_path) == before


def test_a_folder_or_pipe_in_the_place_of_a_file_stays(tmp_path):
    (tmp_path / "index.json").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("index.json", "pipe"):
        with pytest.raises(NotOurs, match=r"is (a folder|no plain file)"):
            remove_file(tmp_path / name)
        (tmp_path / "new").write_text("ours")
        with pytest.raises(NotOurs):
            replace_file(tmp_path / "new", tmp_path / name)
    remove_entries(tmp_path, ANYTHING)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "pipe"]


def test_what_comes_while_it_is_removed_stays(made, monkeypatch):
    unlink = os.unlink

    def late(path, **options):
        unlink(path, **options)
        (made / "part-2" / "late.txt").write_text("mine")

    monkeypatch.setattr(os, "unlink", late)
    with pytest.raises(OSError, match="not empty"):
        remove_tree(made, MADE)
    assert (made / "part-2" / "late.txt").read_text() == "mine"


def test_entries_go_by_name(made):
    (made / "index.json.txt").write_text("mine")
    remove_entries(made, re.compile(r"index\.json|part-\d"))
    assert contents(made).keys() == {"index.json.txt", "part-1/shard.bin", "part-2/shard.bin"}


@given(name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=120))
def test_hidden_names_are_short_and_known_again(name):
    for ending in (PARTIAL, REPLACED):
        hidden = hidden_name(name, ending)
        assert len(hidden.encode()) < 200
        if len(name) <= 40:
            assert re.compile(hidden_names(re.escape(name))).fullmatch(hidden)
    assert not re.compile(hidden_names(re.escape(name))).fullmatch(name)


# Scratch folders -----------------------------------------------------------------------------------------------


def test_a_scratch_folder_goes_with_all_that_is_in_it(tmp_path):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "mine.txt").write_text("mine")
    with scratch_folder(tmp_path, "made") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("ours")
        (folder / "link").symlink_to(tmp_path / "beside")
    assert contents(tmp_path) == {"beside/mine.txt": b"mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["beside"]


def test_a_scratch_folder_that_was_moved_away_stays_and_so_does_what_took_its_name(tmp_path):
    with scratch_folder(tmp_path, "made") as folder:
        rename_free(folder, tmp_path / "made")
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
    assert (tmp_path / "made").is_dir()
    assert (folder / "mine.txt").read_text() == "mine"


# Replacement ---------------------------------------------------------------------------------------------------


def replaced(made, tmp_path):
    """One of everything, then an error if asked for."""
    new = tmp_path / "new"
    new.mkdir()
    (new / "index.json").write_text("new")
    with Replacement() as swap:
        swap.set_aside(made / "index.json")
        swap.set_aside(made / "part-1", re.compile(r"shard\.bin"))
        swap.set_aside(made / "absent")
        swap.move(new / "index.json", made / "index.json")
        swap.write(made / "part-2" / "shard.bin", b"new")
        swap.write(made / "more", b"new")
        yield


def test_new_ones_take_the_places_of_old_ones(made, tmp_path):
    for _ in replaced(made, tmp_path):
        pass
    assert contents(made) == {"index.json": b"new", "part-2/shard.bin": b"new", "more": b"new"}
    assert sorted(path.name for path in made.iterdir()) == ["index.json", "more", "part-2"]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_after_an_error_all_is_as_it_was(made, tmp_path, error):
    before = contents(made)
    moved = replaced(made, tmp_path)
    next(moved)
    assert contents(made) != before
    with pytest.raises(error):
        moved.throw(error())
    assert contents(made) == before
    assert contents(tmp_path / "new") == {"index.json": b"new"}


def test_what_is_there_is_not_moved_over(made, tmp_path):
    (tmp_path / "new").write_text("new")
    before = contents(tmp_path)
    with pytest.raises(NotOurs, match="is there already"), Replacement() as swap:
        swap.move(tmp_path / "new", made / "index.json")
    with pytest.raises(FileExistsError):
        rename_free(tmp_path / "new", made)
    assert contents(tmp_path) == before


def test_an_empty_folder_may_be_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_text("new")
    with Replacement() as swap:
        swap.set_aside(tmp_path / "empty", NOTHING)
        swap.move(tmp_path / "new", tmp_path / "empty")
    assert contents(tmp_path) == {"empty/file": b"new"}
