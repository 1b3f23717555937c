import gzip
import hashlib
import io

import numpy as np
import pytest

from siamesenorm.data.images import open_images
from siamesenorm.data.images.image_files import decode
from siamesenorm.errors import DataError

from .files import png, some_pixels, write_folder, write_idx


def test_digits_are_split_by_class_and_nothing_is_in_both_parts():
    train, test = open_images("digits", "train"), open_images("digits", "test")
    assert (len(train), len(test), train.channels, train.size) == (1438, 359, 1, (8, 8))
    assert not set(train.numbers) & set(test.numbers)
    assert np.abs(np.bincount(test.labels) - 36).max() <= 1
    assert train[0].dtype == np.uint8
    assert train[0].shape == (8, 8, 1)
    assert train.class_names == tuple("0123456789")


def test_digits_are_those_of_scikit_learn_in_full_range():
    from sklearn.datasets import load_digits

    whole, test = load_digits(), open_images("digits", "test")
    number = int(test.numbers[17])
    assert test.label(17) == whole.target[number]
    np.testing.assert_array_equal(test[17][..., 0], np.rint(whole.images[number] / 16 * 255))


def test_the_split_of_digits_stays_what_it_was():
    numbers = open_images("digits", "test").numbers
    assert hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()[:16] == "a0eba01317299b87"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_as_they_were_written(tmp_path, ending):
    pixels, labels = some_pixels(5, 4, 3, 1), np.array([0, 2, 1, 9, 3], dtype=np.uint8)
    for name, part in (("train", slice(None)), ("t10k", slice(2))):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte{ending}", pixels[part, ..., 0])
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte{ending}", labels[part])
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert (len(train), len(test), train.channels, train.size) == (5, 2, 1, (4, 3))
    np.testing.assert_array_equal(train[3], pixels[3])
    assert list(train.labels) == [0, 2, 1, 9, 3]


def test_a_plain_idx_file_is_mapped_not_read(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", some_pixels(5, 4, 3, 1)[..., 0])
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(5, dtype=np.uint8))
    assert isinstance(open_images(tmp_path, "train")._images.base, np.memmap)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x05", "no IDX file"),
        (b"\0\0\x08\x03\0\0\0\x05\0\0\0\x02\0\0\0\x02abc", "damaged"),
        (b"\0\0\x08\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "damaged"),
    ],
)
def test_a_damaged_idx_file_is_said_in_one_sentence(tmp_path, content, said):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(5, dtype=np.uint8))
    with pytest.raises(DataError, match=said) as error:
        open_images(tmp_path, "train")
    assert "train-images-idx3-ubyte" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gzip_that_was_cut_off_is_said_in_one_sentence(tmp_path):
    content = gzip.compress(b"\0\0\x08\x03\0\0\0\x05\0\0\0\x02\0\0\0\x02" + bytes(range(20)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content[:-12])
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(5, dtype=np.uint8))
    with pytest.raises(DataError, match="cannot be read"):
        open_images(tmp_path, "train")


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_planes_become_pixels(tmp_path, classes):
    pixels, labels = some_pixels(6, 32, 32, 3), np.arange(6, dtype=np.uint8) + classes - 6
    coarse = np.full((6, 1), 7, dtype=np.uint8)
    heads = labels[:, None] if classes == 10 else np.concatenate([coarse, labels[:, None]], axis=1)
    records = np.concatenate([heads, pixels.transpose(0, 3, 1, 2).reshape(6, -1)], axis=1)
    folder = tmp_path / ("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    folder.mkdir()
    if classes == 10:
        records[:2].tofile(folder / "data_batch_1.bin")
        records[2:].tofile(folder / "data_batch_2.bin")
        records[:3].tofile(folder / "test_batch.bin")
        (folder / "batches.meta.txt").write_text("\n".join(f"kind {n}" for n in range(10)) + "\n\n")
    else:
        records.tofile(folder / "train.bin")
        records[:3].tofile(folder / "test.bin")
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert (len(train), len(test), len(train.class_names)) == (6, 3, classes)
    for number in range(6):
        np.testing.assert_array_equal(train[number], pixels[number])
        assert train.label(number) == labels[number]
    assert train.class_names[9] == ("kind 9" if classes == 10 else "9")
    with open(folder / ("data_batch_1.bin" if classes == 10 else "train.bin"), "ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="are not records of"):
        open_images(tmp_path, "train")


def test_folders_of_classes_are_read_by_name_and_decoded_when_asked(tmp_path):
    pixels, labels = some_pixels(8, 5, 6, 3), [0, 1, 1, 0, 1, 0, 1, 0]
    write_folder(tmp_path / "train", pixels, labels, ("ant", "bee"))
    write_folder(tmp_path / "val", pixels[1:3], [1, 1], ("ant", "bee"))
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert train.class_names == test.class_names == ("ant", "bee")
    assert list(train.labels) == [0] * 4 + [1] * 4
    assert list(test.labels) == [1, 1]  # numbered as in training, though the folder has no ants
    np.testing.assert_array_equal(train[4], pixels[1])
    assert open_images(tmp_path, "train", channels=1)[0].shape == (5, 6, 1)


def test_a_folder_without_splits_is_split_the_same_way_every_time(tmp_path):
    write_folder(tmp_path, some_pixels(10, 4, 4, 3), [0, 1] * 5, ("a", "b"))
    train, test = (open_images(tmp_path, split, held_out=0.4) for split in ("train", "test"))
    assert sorted([*train.numbers, *test.numbers]) == list(range(10))
    assert list(np.bincount(test.labels)) == [2, 2]
    assert list(open_images(tmp_path, "test", held_out=0.4).numbers) == list(test.numbers)
    assert train.fingerprint != test.fingerprint


def test_a_damaged_image_is_named(tmp_path):
    write_folder(tmp_path, some_pixels(4, 4, 4, 3), [0, 1, 0, 1], ("a", "b"))
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match=r"png' is not a sound image"):
        open_images(tmp_path, "train")[0]


@pytest.mark.parametrize("content", [b"", b"no image"])
def test_what_is_no_image_at_all_is_told_which_kinds_are(content):
    with pytest.raises(DataError, match=r"'here' is not a sound image: it is of none of PNG, JPEG, "):
        decode(content, "here")


def test_pictures_of_sixteen_bits_are_scaled_not_cut_off():
    from PIL import Image

    levels, file = np.arange(0, 2**16, 2**12, dtype=np.uint16).reshape(4, 4), io.BytesIO()
    Image.fromarray(levels).save(file, "PNG")
    for channels in (1, 3):
        expected = (levels // 256).astype(np.uint8)[..., None].repeat(channels, 2)
        np.testing.assert_array_equal(decode(file.getvalue(), "here", channels), expected)


def test_parquet_rows_are_images_with_named_classes(tmp_path):
    import datasets

    pixels = some_pixels(6, 5, 5, 3)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [{"bytes": png(image), "path": None} for image in pixels], "label": [0, 1, 1, 0, 1, 0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train-00000.parquet")
    datasets.Dataset.from_dict(rows, features=features).select([4]).to_parquet(tmp_path / "test-00000.parquet")
    train, test = open_images(tmp_path, "train"), open_images(tmp_path, "test")
    assert train.class_names == ("cat", "dog")
    assert (len(train), len(test), test.label(0)) == (6, 1, 1)
    np.testing.assert_array_equal(train[2], pixels[2])
    np.testing.assert_array_equal(test[0], pixels[4])
    with pytest.raises(DataError, match="no column 'picture'"):
        open_images(tmp_path, "train", image_column="picture")


def test_a_parquet_file_with_texts_for_labels_numbers_them_by_the_alphabet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pixels = some_pixels(10, 4, 4, 3)
    labels = ["zebra", "ape"] * 5
    table = pyarrow.table({"image": [png(image) for image in pixels], "label": labels})
    pyarrow.parquet.write_table(table, tmp_path / "animals.parquet")
    train = open_images(tmp_path / "animals.parquet", "train")
    assert train.class_names == ("ape", "zebra")
    assert [labels[n] for n in train.numbers] == [train.class_names[label] for label in train.labels]


def test_a_dataset_by_name_is_read_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pixels = some_pixels(4, 4, 4, 3)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    rows = {"image": [{"bytes": png(image), "path": None} for image in pixels], "label": [0, 1, 1, 0]}
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set" / f"{split}.parquet")
    images = open_images(f"hf:{tmp_path / 'set'}", "test")
    assert images.class_names == ("x", "y")
    np.testing.assert_array_equal(images[1], pixels[1])


def test_a_fingerprint_follows_the_contents(tmp_path):
    pixels = some_pixels(5, 4, 3, 1)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(5, dtype=np.uint8))
    write_idx(tmp_path / "train-images-idx3-ubyte", pixels[..., 0])
    first, again = open_images(tmp_path).fingerprint, open_images(tmp_path).fingerprint
    pixels[4, 0, 0, 0] ^= 1
    write_idx(tmp_path / "train-images-idx3-ubyte", pixels[..., 0])
    assert first == again != open_images(tmp_path).fingerprint


@pytest.mark.parametrize(
    ("source", "said"), [("nowhere", "neither a file nor a folder"), ("empty", "no sub-folders with images")]
)
def test_what_is_no_image_source_is_said_in_one_sentence(tmp_path, monkeypatch, source, said):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said):
        open_images(source)


def test_fashion_mnist_says_where_to_get_it_when_it_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("siamesenorm.data.images.opening.FASHION_FOLDERS", (tmp_path / "nowhere",))
    with pytest.raises(DataError, match="dataset-fashion-mnist"):
        open_images("fashion-mnist")
