"""Who sees whom, against the definition token by token; and no mask where none is needed."""

import pytest
import torch

from siamesenorm.layers.mask import document_positions, visibility


def sees(query, key, window=None, documents=None, padding=0):
    if query == key:
        return True
    ok = key <= query and (window is None or query - key < window) and key >= padding
    return ok and (documents is None or documents[query] == documents[key])


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_mask_is_the_definition(window, queries):
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 4, 4, 4]])
    padding = torch.tensor([0, 2])
    mask = visibility(queries, 9, window=window, document_ids=documents, padding=padding).mask
    assert mask is not None
    for row in range(2):
        for q in range(queries):
            for k in range(9):
                expected = sees(9 - queries + q, k, window, documents[row].tolist(), padding[row].item())
                assert mask[row, 0, q, k].item() == expected


def test_no_mask_where_sdpa_says_the_same():
    assert visibility(8, 8).mask is None
    assert visibility(8, 8).is_causal
    assert visibility(8, 8, window=8).mask is None
    assert visibility(1, 8).mask is None
    assert not visibility(1, 8).is_causal
    assert visibility(1, 8, window=3).last_keys == 3
    assert visibility(1, 8, window=3).mask is None


def test_positions_start_again_with_every_document():
    documents = torch.tensor([[7, 7, 7, 2, 2, 7], [1, 1, 1, 1, 1, 1]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
