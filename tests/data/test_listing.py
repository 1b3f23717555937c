"""A folder that cannot be looked into is an error wherever folders are read, and never an empty one."""

import errno

import pytest

from failing_files import failing
from siamesenorm.data.images.image_folder import FolderImages
from siamesenorm.data.listing import files_below, names_in
from siamesenorm.data.sources import find_sources
from siamesenorm.data.tokens import open_tokens
from siamesenorm.lab.report.records import find_runs
from siamesenorm.tasks.fidelity.image_batches import open_pictures
from siamesenorm.train.provenance import hash_of


def test_names_are_sorted_and_absent_folders_have_none(tmp_path):
    for name in ("b", "a/c", "a/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names_in(tmp_path) == ["a", "b"]
    assert names_in(tmp_path / "absent") == []
    assert [path.relative_to(tmp_path).as_posix() for path in files_below(tmp_path)] == ["a/a", "a/c", "b"]
    with pytest.raises(NotADirectoryError):
        names_in(tmp_path / "b")


READERS = {
    "text": lambda folder: find_sources([folder]),
    "images": lambda folder: FolderImages(folder / "train"),
    "tokens": open_tokens,
    "pictures": open_pictures,
    "runs": lambda folder: find_runs([folder]),
    "hashes": lambda folder: hash_of(str(folder)),
    "files": files_below,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_no_part_of_a_folder_is_passed_over(tmp_path, read):
    """The listing of one of its folders is refused, first of the outer one, then of an inner one."""
    for name in ("train/one/a.png", "train/two/b.png", "test/one/c.txt", "d.npy", "run/config.yaml"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("not read here")
    folder = tmp_path / "in"
    for place in (1, 2):
        with failing(folder, place, errno.EACCES, only="scandir"), pytest.raises(OSError, match="Permission denied"):
            read(folder)
