"""siamesenorm sample: grids, strips and single files of a run, and what it refuses."""

import os
import signal
import sys

import numpy as np
import pytest
from PIL import Image
from tests.data.images.files import some_pixels, write_folder

from failing_files import contents
from siamesenorm.cli import main
from siamesenorm.lab.sampling import open_generator
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve

from .refusals import one_sentence

SMALL = ["dim=16", "blocks=2", "heads=2", "ffn_dim=32", "batch_size=8", "warmup=0", "steps=2", "peak_flops=1e12"]


@pytest.fixture
def run(diffusion_run):
    return diffusion_run


def sample(run, *options):
    assert main(["sample", str(run), "--sampler", "ddim", "--steps", "2", *map(str, options)]) == 0


def test_a_grid_a_strip_and_every_sample(run, tmp_path, capsys):
    grid, strip, every = tmp_path / "grid.png", tmp_path / "strip.png", tmp_path / "every.npz"
    options = ["--out", grid, "--filmstrip", strip, "--individually", every, "--classes", "3,7-9", "--per-class", 2]
    sample(run, *options)
    assert "8 samples of 4 classes at step 2" in capsys.readouterr().out
    with np.load(every, allow_pickle=False) as found:
        images, labels = found["arr_0"], found["arr_1"]
    assert images.shape == (8, 8, 8, 1)
    assert labels.tolist() == [3, 7, 8, 9, 3, 7, 8, 9]
    with Image.open(grid) as picture:
        pixels = np.asarray(picture)
    factor, gap = 6, 2
    assert pixels.shape[0] == gap + 4 * (8 * factor + gap)
    first = pixels[gap : gap + 48 : factor, -2 * 50 : -2 * 50 + 48 : factor, 0]
    assert np.array_equal(first, images[0, :, :, 0])
    assert strip.is_file()


def test_the_same_seed_makes_the_same_samples_and_single_files_go_by_class(run, tmp_path):
    def made(name, *options):
        sample(run, "--out", tmp_path / "g.png", "--individually", tmp_path / name, "--per-class", 1, *options)

    made("one.npz")
    made("two.npz", "--at-once", 3)
    made("other.npz", "--seed", 1)
    made("folder", "--classes", "5")
    one, two, other = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in ("one", "two", "other"))
    assert abs(one - two).max() <= 1  # other products in a batch of another size
    assert abs(one - other).max() > 1
    assert [path.name for path in (tmp_path / "folder" / "5").iterdir()] == ["000000.png"]


def test_samples_of_no_class_are_those_of_the_label_of_none(run, tmp_path):
    sample(run, "--classes", "0-2,1,unconditional", "--per-class", 1, "--out", tmp_path / "g.png",
           "--individually", tmp_path / "s.npz")  # fmt: skip
    with np.load(tmp_path / "s.npz", allow_pickle=False) as found:
        assert found["arr_1"].tolist() == [0, 1, 2, 10]
    sample(run, "--classes", "Unconditional", "--per-class", 3, "--out", tmp_path / "g.png",
           "--individually", tmp_path / "folder")  # fmt: skip
    assert len(list((tmp_path / "folder" / "unconditional").iterdir())) == 3


def test_folders_that_are_not_there_are_made(run, tmp_path):
    targets = [tmp_path / "new" / "grid.png", tmp_path / "other" / "strip.png", tmp_path / "more" / "every.npz"]
    options = zip(("--out", "--filmstrip", "--individually"), targets, strict=True)
    sample(run, *(part for option in options for part in option), "--classes", "1", "--per-class", 1)
    assert all(target.is_file() for target in targets)


def test_classes_have_the_names_of_the_images_also_in_a_run_that_is_not_finished(tmp_path):
    names = ("Bag", "ankle boot", "t-shirt+top")
    write_folder(tmp_path / "clothes", some_pixels(12, 8, 8, 1), np.arange(12) % 3, names)
    config = resolve("dit-digits", [*SMALL, f"data.train={tmp_path / 'clothes'}", "evaluation.every=null", "samples=0"])
    train(config, tmp_path / "run")
    for name in ("weights.safetensors", "images.json"):  # as if it had been stopped before its end
        (tmp_path / "run" / name).unlink()
    generator = open_generator(tmp_path / "run")
    assert generator.classes("bag, Ankle Boot,1") == [0, 1, 1]
    assert [generator.name(number) for number in range(4)] == [*names, "3"]


def test_refusals_leave_nothing_behind(run, tmp_path, capsys):
    out = str(tmp_path / "grid.png")
    for options, message in (
        (["--classes", "12"], "classes: '12' is not allowed; it takes 0 to 9"),
        (["--classes", "3-99999999999"], "classes: '99999999999' is not allowed; it takes 0 to 9"),
        (["--classes", "10"], "classes: '10' is not allowed; it takes 0 to 9"),
        (["--classes", "9-3"], "classes: '9-3' is not allowed"),
        (["--classes", "cat"], "classes: 'cat' is not allowed"),
        (["--sampler", "heun"], "'heun' is not known; it takes one of ddpm, ddim, dpm, euler"),
        (["--sampler", "euler"], "'euler' is not allowed for epsilon"),
        (["--steps", "5000"], "steps: 5000 is not allowed; ddpm takes 1 to 1000"),
        (["--vae", str(tmp_path)], "this model makes pixels"),
        (["--classes", ""], "classes: '' is not allowed"),
        (["--guidance", "-1"], "guidance: -1.0 is not allowed; it takes 0 or more"),
        (["--guidance", "nan"], "guidance: nan is not allowed"),
        (["--individually", str(run)], "--individually: "),
        (["--filmstrip", str(run / "config.yaml" / "strip.png")], "cannot be written: "),
        (["--filmstrip", "/proc/strip.png"], "'/proc/strip.png' cannot be written: "),  # a folder that takes no files
        (["--filmstrip", out], "it takes another file than --out"),
    ):
        assert message in one_sentence(["sample", str(run), "--out", out, *options], capsys)
    assert "ends with .png" in one_sentence(["sample", str(run), "--out", str(tmp_path / "grid.jpg")], capsys)
    assert "run" in one_sentence(["sample", str(tmp_path / "nothing"), "--out", out], capsys)
    assert list(tmp_path.iterdir()) == []


def killed(folder, touch, command):
    """Call a command in a process that dies when it touches a folder for the so-many-th time; whether it did."""
    child = os.fork()
    if child == 0:
        left = touch

        def watch(event, arguments):
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        os._exit(main(command))
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("target", ["every.npz", "pictures"])
def test_a_killed_command_goes_on_to_the_same_bytes(run, tmp_path, target):
    def command(folder):
        place = ["--individually", str(folder / target), "--out", str(folder / "grid.png")]
        return ["sample", str(run), "--sampler", "ddim", "--steps", "1", "--per-class", "1", "--at-once", "4", *place]

    (tmp_path / "whole").mkdir()
    assert main(command(tmp_path / "whole")) == 0
    whole, kills = contents(tmp_path / "whole"), 0
    for first in (1, 4, 9):
        folder, touch = tmp_path / f"{first}", first
        folder.mkdir()
        while killed(folder, touch, command(folder)) and kills < 60:  # a little further every time, to the end
            kills, touch = kills + 1, touch + 3
        left = {name: content for name, content in contents(folder).items() if not name.startswith(".grid.png.")}
        assert left == whole
    assert kills > 10


def test_an_archive_has_the_bytes_of_numpy(run, tmp_path):
    sample(run, "--out", tmp_path / "g.png", "--individually", tmp_path / "ours.npz", "--at-once", 4, "--per-class", 1)
    with np.load(tmp_path / "ours.npz") as found:
        np.savez(tmp_path / "numpys.npz", arr_0=found["arr_0"], arr_1=found["arr_1"])
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "numpys.npz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.png", "numpys.npz", "ours.npz"]


def test_samples_of_other_settings_are_not_mixed(run, tmp_path, capsys):
    options = ["--out", tmp_path / "g.png", "--individually", tmp_path / "folder", "--classes", "1-2", "--per-class", 1]
    sample(run, *options)
    before = contents(tmp_path)
    sample(run, *options)
    assert contents(tmp_path) == before
    command = ["sample", str(run), "--sampler", "ddim", "--steps", "2", *map(str, options), "--seed", "7"]
    assert "holds samples of seed = 0, and not of 7" in one_sentence(command, capsys)
    assert contents(tmp_path) == before


def test_a_grid_of_many_shows_the_first_of_each_class(run, tmp_path, capsys, monkeypatch):
    from siamesenorm.lab import sample_request as module

    monkeypatch.setattr(module, "GRID_BYTES", 64 * 3 * 4)  # of two images of each class, as colours
    options = ["--out", tmp_path / "g.png", "--individually", tmp_path / "folder", "--classes", "1-2", "--per-class", 5]
    sample(run, *options)
    assert "the grid shows the first 4" in capsys.readouterr().out
    with Image.open(tmp_path / "g.png") as picture:
        assert picture.height == 2 + 2 * 50
        assert picture.width < 3 * 50
