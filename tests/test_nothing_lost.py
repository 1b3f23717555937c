"""Whatever file operation fails: other people's files stay, what was whole is whole, and one sentence says it.

Every sweep lets the first operation fail, then the second, and so on until none fails any more.
"""

from __future__ import annotations

import ast
import errno
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import siamesenorm
from data.latents.test_latents import SPLITS, Blocks
from failing_files import contents, failing, yard
from interop.huggingface_models import language_model
from siamesenorm.data import prepare, read_index, resume, verify
from siamesenorm.data.index import damaged_files
from siamesenorm.data.latents import encoding
from siamesenorm.data.latents.encoding import encode_images
from siamesenorm.data.latents.index import read_latent_index
from siamesenorm.data.tensor_files import LazyTensors
from siamesenorm.interop.huggingface import export as export_hf
from siamesenorm.interop.staging import RECORD, check_target
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.refusal import refusal
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.train import folder
from siamesenorm.train.checkpoint import folder as checkpoint_folder
from siamesenorm.train.checkpoint.store import CheckpointStore
from siamesenorm.train.folder import CONFIG, OWN, RunFolder
from siamesenorm.train.loop import train
from siamesenorm.train.trained import Stored, is_export, save_stored
from train.small_runs import tiny

CODES = (errno.ENOSPC, errno.EACCES)
LEFT = re.compile(r"\.[^/]+\.[0-9a-f]{8}\.(partial|replaced)(/.*)?")
"""What a removal that fails itself may leave behind, out of sight."""

Act = Callable[[Path], object]


class Sweep:
    """A place in a yard, made ready once, on a copy of which every failure is tried."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, ready: Act) -> None:
        self.folder, self.monkeypatch, self.name = folder, monkeypatch, name
        ready(yard(folder / "pristine") / name)

    def __call__(self, act: Act, check: Callable[[Path, bool], None], step: int = 1) -> int:
        """Try every step-th failure; how many there were. check: of the place, and whether something failed."""
        for number in itertools.count(1, step):
            root = self.folder / "tried"
            shutil.copytree(self.folder / "pristine", root, symlinks=True)
            place = root / "work" / self.name
            self.monkeypatch.chdir(root / "work")
            before, sentence = contents(root, leave_out=place), ""
            with failing(root, number, CODES[number // step % 2]) as state:
                try:
                    act(place)
                except (OSError, ValueError) as error:
                    sentence = (refusal(error) or (str(error), 0))[0]
            after = contents(root, leave_out=place)
            assert before.items() <= after.items(), state.failed
            for path in after.keys() - before.keys():
                assert LEFT.fullmatch(path.removeprefix("work/")), (state.failed, path)
            assert "\n" not in sentence, sentence
            try:
                check(place, state.failed is not None)
            except Exception as error:
                raise AssertionError(f"{state.failed}: {sentence}") from error
            self.monkeypatch.chdir(self.folder)
            shutil.rmtree(root)
            if state.failed is None:
                assert sentence == ""
                return number - 1
        raise AssertionError("there is no end to it")


def visible(place: Path) -> dict[str, bytes]:
    """The files of a folder that nothing hides."""
    return {name: content for name, content in contents(place).items() if not LEFT.fullmatch(name)}


# Checkpoints -------------------------------------------------------------------------------------------------


def state_of(step: int) -> dict:
    return {"tensors": {"weights": torch.full((3,), float(step))}, "progress": {"step": step}}


def save(folder: Path, step: int) -> list[str]:
    said: list[str] = []
    store = CheckpointStore(folder, 1, report=said.append)
    store.latest()
    saved = store.save(step, state_of(step), wait=True)
    assert saved is not any("was not saved" in sentence for sentence in said)
    return said


def test_a_save(tmp_path, monkeypatch):
    """Also the first removal of an old one, whose place it takes."""
    sweep = Sweep(tmp_path, monkeypatch, "made", lambda place: save(place, 1))

    def act(place):
        for sentence in save(place, 2):
            assert re.fullmatch(r"(checkpoint of step 2 was not saved|damaged checkpoint): .*", sentence)

    def check(place, failed):
        store, state = CheckpointStore(place, 1, report=lambda text: None), state_of(0)
        found = store.latest()
        assert found.step in ((1, 2) if failed else (2,))
        store.load(found, state)
        assert state["tensors"]["weights"].tolist() == [found.step] * 3
        assert store.save(3, state_of(3), wait=True)  # nothing is in the way of the next one
        assert store.latest().step == 3

    assert sweep(act, check) > 40


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a file", "missing folder that is a file"])
def test_a_save_that_cannot_begin_removes_nothing(kind, tmp_path, monkeypatch):
    work = yard(tmp_path)
    monkeypatch.chdir(work)
    folder = work / "saved"
    if kind == "file":
        folder.write_text("mine")
    elif kind == "missing folder that is a file":
        folder = work / "notes.txt" / "saved"
    else:
        folder.symlink_to("nowhere" if kind == "dangling link" else "notes.txt")
    before = contents(tmp_path)
    said: list[str] = []
    assert CheckpointStore(folder, 1, report=said.append).save(1, state_of(1), wait=True) is False
    (sentence,) = said
    assert sentence.startswith("checkpoint of step 1 was not saved: ")
    assert contents(tmp_path) == before
    assert (work / ".git" / "config").is_file()


# Restarts ----------------------------------------------------------------------------------------------------


def test_a_restart(tmp_path, monkeypatch):
    old, new = tiny("steps=2", "warmup=0", "tensorboard=true"), tiny("steps=2", "warmup=0", "lr=1e-3")

    def ready(place):
        train(old, place)
        (place / "notes.txt").write_text("mine")
        (place / "inspection").mkdir()
        (place / "inspection" / "mine.html").write_text("mine")

    sweep = Sweep(tmp_path, monkeypatch, "run", ready)
    whole = visible(tmp_path / "pristine" / "work" / "run")

    def act(place):
        run = RunFolder(place)
        run.check(new, "restart")
        run.begin(new, "restart")

    def check(place, failed):
        found = visible(place)
        if found == whole:
            assert failed
            return
        own = {name for name in found if name.split("/")[0] in OWN}
        assert own == set()
        assert RunFolder(place).config().optimizer.lr == 1e-3
        assert found.keys() == {CONFIG, ".lock", "notes.txt", "inspection/mine.html"}
        assert found["notes.txt"] == found["inspection/mine.html"] == b"mine"
        RunFolder(place).begin(new, "auto")  # what could not be removed then is so now
        assert contents(place).keys() == found.keys()

    assert sweep(act, check) > 30


def test_a_run_that_is_restarted(tmp_path, monkeypatch):
    """The whole of it, of which some operations fail; what happened stands in its folder."""
    config = tiny("steps=2", "warmup=0", "checkpoint.every=1")

    def ready(place):
        train(config, place)
        (place / "notes.txt").write_text("mine")

    def check(place, failed):
        assert (place / "notes.txt").read_text() == "mine"
        run = RunFolder(place)
        status = run.status()
        assert status["state"] in ("finished", "failed", "running") if status else not (place / "checkpoints").exists()
        if status.get("state") == "failed":
            assert "No space left" in status["message"] or "Permission denied" in status["message"]
        assert train(config, place).state == "finished"

    sweep = Sweep(tmp_path, monkeypatch, "run", ready)
    assert sweep(lambda place: train(config, place, mode="restart"), check, step=31) > 200


# Exports -----------------------------------------------------------------------------------------------------


def old_or_new(old: dict[str, bytes], changed: str) -> Callable[[Path, bool], None]:
    """Whether a folder is the old one to the byte, or whole and new."""

    def check(place: Path, failed: bool) -> None:
        found = visible(place)
        assert found.keys() == old.keys()
        if found != old:
            assert found[changed] != old[changed]
            check_target(place, overwrite=True)  # every file is what the record says

    return check


def test_an_export_to_hugging_face(tmp_path, monkeypatch):
    old, new = language_model(vocab_size=300), language_model(vocab_size=302)
    sweep = Sweep(tmp_path, monkeypatch, "hf", lambda place: export_hf(old, place, remote_code=False))
    whole = visible(tmp_path / "pristine" / "work" / "hf")
    assert RECORD in whole
    count = sweep(
        lambda place: export_hf(new, place, remote_code=False, overwrite=True), old_or_new(whole, "config.json")
    )
    assert count > 30


def test_an_export_to_diffusers(tmp_path, monkeypatch):
    pytest.importorskip("diffusers")
    from siamesenorm.interop.diffusers import export

    shape = {"input_size": 4, "patch_size": 2, "channels": 1, "dim": 8, "blocks": 1, "heads": 1, "ffn_dim": 8}
    old, new = (DiT(DiTConfig(**shape, classes=classes)) for classes in (3, 4))
    sweep = Sweep(tmp_path, monkeypatch, "pipeline", lambda place: export(old, Process(), place))
    whole = visible(tmp_path / "pristine" / "work" / "pipeline")
    check = old_or_new(whole, "transformer/config.json")
    assert sweep(lambda place: export(new, Process(), place, overwrite=True), check, step=2) > 40


def test_an_export_to_a_file(tmp_path, monkeypatch):
    def write(place, value):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        weights = LazyTensors.of(model.state_dict())
        save_stored(Stored(model, tiny("max_length=32"), 1, place.parent, weights), place)

    def check(place, failed):
        assert is_export(place)
        assert load_file(place)["weight"][0, 0].item() in ((1.0, 2.0) if failed else (2.0,))

    sweep = Sweep(tmp_path, monkeypatch, "weights.safetensors", lambda place: write(place, 1.0))
    assert sweep(lambda place: write(place, 2.0), check) > 4


# Data --------------------------------------------------------------------------------------------------------


def test_a_preparation_that_replaces_another(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {number}" for number in range(40)))
    options = {"unit": "paragraph", "validation": 0.3, "workers": 1}

    def ready(place):
        prepare([text], place, **options)
        (place / "README.md").write_text("mine")

    sweep = Sweep(tmp_path, monkeypatch, "corpus", ready)
    plans = {read_index(tmp_path / "pristine" / "work" / "corpus").plan}

    def check(place, failed):
        assert (place / "README.md").read_text() == "mine"
        assert verify(place) == []
        if not failed:
            assert read_index(place).settings.seed == 7
        plans.add(read_index(place).plan)
        index = prepare([text], place, **options, seed=7, overwrite=True)  # nothing is in its way
        assert index.settings.seed == 7
        assert sorted(p.name for p in place.iterdir()) == sorted(
            ["README.md", "index.json", *(name for name, *_ in index.files())]
        )

    assert sweep(lambda place: prepare([text], place, **options, seed=7, overwrite=True), check) > 60
    assert len(plans) == 2


def test_an_encoding_that_replaces_another(tmp_path, monkeypatch):
    def ready(place):
        encode_images(SPLITS, Blocks(), place, size=8)
        (place / "README.md").write_text("mine")

    def check(place, failed):
        assert (place / "README.md").read_text() == "mine"
        assert damaged_files(place, list(read_latent_index(place).files())) == []
        assert read_latent_index(place).views in ((1, 2) if failed else (2,))

    sweep = Sweep(tmp_path, monkeypatch, "latents", ready)
    assert sweep(lambda place: encode_images(SPLITS, Blocks(), place, size=8, flip=True, overwrite=True), check) > 60


# The source --------------------------------------------------------------------------------------------------

REMOVERS = {"rmtree", "unlink", "rmdir", "removedirs", "rename", "renames"}
OF_OS = {"remove", "replace", "truncate"}
WRITERS = {"write_text", "write_bytes", "savefig"}
ALLOWED = {"data/removal.py", "data/replacement.py"}
WRITING = {
    "data/atomic.py",  # everything is written through it
    "data/replacement.py",
    "data/streams.py",
    "train/folder.py",  # lines that are added, and status.json on a full disk
    "interop/huggingface/exporter.py",  # into a folder that is being made
    "lab/report/paper_figures.py",  # into a whole file
    "lab/study/plots.py",  # into a whole file
    "lab/sample_files.py",  # into a whole file
    "train/inference.py",  # to nowhere, what other processes would say
    "lab/evaluation.py",  # to nowhere, likewise
}


@pytest.mark.parametrize("module", [checkpoint_folder, folder, resume, encoding], ids=lambda module: module.__name__)
def test_what_counts_as_made_is_made_nowhere_else(module):
    """Names that people give fit none of the expressions by which the program knows its own files."""
    found = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    assert len(found) >= 2 or module is folder
    for made in (*found, *getattr(module, "FOLDERS", {}).values()):
        for name in (".git", ".git/config", "notes.txt", "README.md", "model.pt", "data/train.npy", ".x.partial"):
            assert not made.fullmatch(name), (made.pattern, name)
            assert not made.fullmatch(f"step-00000001/{name}")
            assert not made.fullmatch(f".progress/{name}")


def test_nobody_else_removes_renames_or_writes_over():
    """A new `unlink`, `rename` or ``open(…, "w")`` anywhere in the source fails here: it belongs into these files."""
    root = Path(siamesenorm.__file__).parent
    found: set[tuple[str, str]] = set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                from_os = {alias.name for alias in node.names} if getattr(node, "module", None) == "os" else set()
                imported = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                banned = imported & {"shutil", "tempfile"} | from_os & (REMOVERS | OF_OS)
                found |= {(name, f"import {module}") for module in banned}
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            one_path = called == "replace" and len(node.args) == 1 and not node.keywords  # text takes two
            of_path = isinstance(node.func, ast.Attribute) and called in REMOVERS
            if of_path or one_path or (owner == "os" and called in OF_OS):
                found.add((name, called))
            modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
            opens = called == "open" and any(isinstance(m, str) and set(m) & set("wxa+") and len(m) < 4 for m in modes)
            if name not in WRITING and (opens or called in WRITERS):
                found.add((name, called))
    found = {(name, call) for name, call in found if name not in ALLOWED}
    named = ("lab/compare/ray_engine.py", "import tempfile")  # for the name of the system's folder
    looked_up = ("train/parallel/parallelize.py", "import shutil")  # for `which`
    copied = ("train/branching.py", "import shutil")  # for `copyfile`, into a folder of its own
    handed_on = ("interop/gguf/exporter.py", "import shutil")  # for `copyfileobj`, into a whole file
    assert found == {named, looked_up, copied, handed_on}
    assert all((root / name).is_file() for name in ALLOWED | WRITING)
