"""What commands are told to write: a full disk and a missing permission are one sentence, pipes and links are kept."""

import errno
import os
import threading

import numpy as np
import pytest
from tests.tasks.fidelity.means import Means

from failing_files import contents, failing
from siamesenorm.cli import main

from .refusals import one_sentence

SMALL = ["dim=16", "blocks=1", "heads=2", "ffn_dim=16", "batch_size=4", "warmup=0", "steps=1", "peak_flops=1e12"]


@pytest.fixture
def commands(language_run, diffusion_run, tmp_path, monkeypatch):
    """Every command that writes one file, with the ending that the file must have, and those that write folders."""
    from siamesenorm.tasks.fidelity.features import FeatureNetwork

    made = tmp_path / "in" / "made.npz"
    made.parent.mkdir()
    np.savez(made, np.random.default_rng(0).integers(0, 256, (20, 8, 8, 1), dtype=np.uint8))
    (made.parent / "text.txt").write_text("a text " * 50)
    network = FeatureNetwork("classifier", Means(), channels=1, size=(8, 8))
    monkeypatch.setattr("siamesenorm.lab.fidelity.open_network", lambda *arguments: network)
    sample = ["sample", str(diffusion_run), "--steps", "1", "--sampler", "ddim", "--classes", "1", "--per-class", "1"]
    files = {
        "evaluate": (["evaluate", str(language_run), "-o"], ".json"),
        "export": (["export", str(language_run), "--to", "safetensors"], ".safetensors"),
        "fid": (["fid", str(made), str(made), "--save-stats"], ".npz"),
        "sample": ([*sample, "--out"], ".png"),
        "sample each": ([*sample, "--out", str(tmp_path / "in" / "grid.png"), "--individually"], ".npz"),
        "tokenizer": (["data", "tokenizer", str(made.parent / "text.txt"), "--vocab-size", "258", "-o"], ".json"),
    }
    folders = {
        "hf": ["export", str(language_run), "--to", "hf"],
        "diffusers": ["export", str(diffusion_run), "--to", "diffusers"],
        "sample folder": [*sample, "--out", str(tmp_path / "in" / "grid.png"), "--individually"],
    }
    return files, folders


def test_every_full_disk_and_missing_permission_is_one_sentence(commands, tmp_path, capsys):
    files, folders = commands
    out = tmp_path / "out"
    out.mkdir()
    for name, (command, ending) in files.items():
        (out / f"full{ending}").unlink(missing_ok=True)
        (out / f"full{ending}").symlink_to("/dev/full")  # takes nothing, as a full disk does
        code = main([*command, str(out / f"full{ending}")])
        err = capsys.readouterr().err
        assert (code, err.count("\n")) == ((1 if name == "tokenizer" else 2), 1), (name, err)
        assert f"full{ending}" in err
        assert "No space left on device" in err
        for path in (out / "absent" / f"file{ending}", tmp_path / "in" / "text.txt" / f"file{ending}"):
            if not name.startswith("sample") or "text.txt" in str(path):
                assert str(path) in one_sentence([*command, str(path)], capsys), name
        (out / f"folder{ending}").mkdir(exist_ok=True)
        assert f"folder{ending}" in one_sentence([*command, str(out / f"folder{ending}")], capsys)
    before = contents(out)
    for command in folders.values():  # its second operation, of the first of which it need not know
        for code in (errno.ENOSPC, errno.EACCES):
            with failing(out, at=2, code=code):
                assert str(out / "new") in one_sentence([*command, str(out / "new")], capsys)
            assert contents(out) == before


def test_pipes_are_written_to_and_links_are_followed(commands, tmp_path, capsys):
    files, _ = commands
    for name, (command, ending) in files.items():
        pipe, link, got = tmp_path / f"pipe{ending}", tmp_path / f"link{ending}", []
        os.mkfifo(pipe) if not pipe.exists() else None
        link.unlink(missing_ok=True)
        link.symlink_to(f"file{ending}")
        reader = threading.Thread(target=lambda pipe=pipe, got=got: got.append(pipe.read_bytes()), daemon=True)
        reader.start()
        assert main([*command, str(pipe)]) == 0, (name, capsys.readouterr().err)
        reader.join(60)
        assert pipe.is_fifo()
        assert main([*command, str(link)]) == 0, name
        assert link.is_symlink()
        size = (tmp_path / f"file{ending}").stat().st_size
        assert abs(size - len(got[0])) < 32, name  # the command that is noted in it has another name
        (tmp_path / f"file{ending}").unlink()
