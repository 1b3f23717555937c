"""safetensors files that are written a tensor at a time: the bytes of safetensors' own writer, and shards of them."""

import io
import json

import pytest
import torch
from safetensors.torch import load_file, save

from siamesenorm.data.tensor_files import DTYPES, INDEX, Kind, LazyTensors, parse_size, write_shards, write_tensors
from siamesenorm.errors import DataError

TENSORS = {
    **{f"{dtype}".removeprefix("torch."): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
    "b.scalar": torch.tensor(1.5),
    "a.ünï": torch.randn(4, 2).T,
    "none": torch.empty(0, 3),
}


def test_a_file_has_the_bytes_of_safetensors_own_writer():
    file = io.BytesIO()
    write_tensors(file, LazyTensors.of(TENSORS), {"format": "pt"})
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    assert file.getvalue() == save(contiguous, metadata={"format": "pt"})


def test_shards_hold_all_of_it_and_no_two_tensors_are_in_memory(tmp_path):
    asked = []
    lazy = LazyTensors.of(TENSORS)
    counted = LazyTensors(lazy.kinds, lambda name: asked.append(name) or lazy.read(name))
    write_shards(tmp_path, counted, 50)
    index = json.loads((tmp_path / INDEX).read_text())
    assert sorted(asked) == sorted(index["weight_map"]) == sorted(TENSORS)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], TENSORS[name])
    write_shards(tmp_path / "..", lazy, 10**6)
    assert load_file(tmp_path.parent / "model.safetensors").keys() == TENSORS.keys()


def test_what_was_not_announced_is_refused():
    wrong = LazyTensors({"w": Kind(torch.float32, (2,))}, lambda name: torch.zeros(3))
    with pytest.raises(DataError, match=r"w: it is torch.float32 \(3,\)"):
        write_tensors(io.BytesIO(), wrong, {})


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("2 GiB", 2**31), ("300", 300), ("7kb", 7000), ("0GB", None), ("x", None)]
)
def test_sizes(text, size):
    if size is None:
        with pytest.raises(DataError, match=rf"shards: {text!r} is not allowed; it takes a size such as 5GB"):
            parse_size(text, "shards")
    else:
        assert parse_size(text, "shards") == size
