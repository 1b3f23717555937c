"""Columns: parquet by row group, and datasets through their library, from local files."""

from collections import Counter

import pytest

from siamesenorm.data import DataError
from siamesenorm.data.columns import HubDataset, ParquetFile
from siamesenorm.data.documents import Reading

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def texts_of(source, reading, target):
    skipped = Counter()
    pieces = source.pieces(target, reading)
    return (
        [document.text for piece in pieces for document in source.read(piece, reading, skipped)],
        skipped,
        len(pieces),
    )


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.parquet"
    texts = [f"row {number} é" for number in range(100)]
    columns = {"text": [*texts, None], "n": list(range(101)), "raw": [b"x"] * 101}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=10)
    return path, texts


def test_rows_do_not_depend_on_the_cut(table):
    path, texts = table
    source = ParquetFile("rows.parquet", path)
    for target, pieces in ((1, 11), (path.stat().st_size // 3, 3), (1 << 30, 1)):
        assert texts_of(source, Reading(), target) == (texts, Counter(empty=1), pieces)


def test_binary_columns_are_utf8(table):
    assert texts_of(ParquetFile("rows", table[0]), Reading(field="raw"), 1 << 30)[0] == ["x"] * 101


def test_bad_columns_and_files_are_said(table, tmp_path):
    source = ParquetFile("rows.parquet", table[0])
    with pytest.raises(DataError, match="no column 'body'; the columns are text, n, raw"):
        source.pieces(1, Reading(field="body"))
    with pytest.raises(DataError, match=r"rows\.parquet, row 0: field 'n' holds a number"):
        texts_of(source, Reading(field="n"), 1 << 30)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="not a sound parquet file"):
        ParquetFile("bad", tmp_path / "bad.parquet").pieces(1, Reading())


def test_datasets_by_name(table, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path, texts = table
    source = HubDataset("hf:local", str(path.parent), None, "train")
    assert texts_of(source, Reading(), 500)[0] == texts
    assert source.sha256() == source.sha256()
    with pytest.raises(DataError, match="no column 'body'"):
        source.pieces(1, Reading(field="body"))
    with pytest.raises(DataError, match=r"source: 'hf:.*' \(subset None, split 'nope'\) cannot be loaded"):
        HubDataset("hf:local", str(path.parent), None, "nope").size()
