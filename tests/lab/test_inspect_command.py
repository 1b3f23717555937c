"""``siamesenorm inspect``: what it reads, shows and writes, and how it refuses."""

import hashlib
import io
import json
import re
import sys

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy

from siamesenorm.cli import main
from siamesenorm.data.texts import embedded_tokens
from siamesenorm.lab import Inspection, inspect
from siamesenorm.lab.inspection import terminal
from siamesenorm.lab.inspection.figures import plots
from siamesenorm.lab.inspection.page import write_report
from siamesenorm.lab.inspection.source import open_inspected
from siamesenorm.models.lm import LanguageModel
from siamesenorm.tasks import find_task
from siamesenorm.tasks.corpora import save_tokenizer_of
from siamesenorm.train.folder import METRICS, WEIGHTS, RunFolder
from siamesenorm.train.recipes import resolve
from siamesenorm.train.trained import open_language_model
from siamesenorm.train.weights import export_weights

from .stacks import ids, tiny_lm

SHAPE = ["model.dim=16", "model.blocks=2", "model.ffn_dim=24", "data.train=[arithmetic]", "data.sequence_length=32"]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder that a finished run leaves behind."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "tiny")
    config = resolve("lm-tiny", SHAPE)
    folder.begin(config, "auto")
    export_weights(LanguageModel(config.model, seed=0), folder.path / WEIGHTS)
    save_tokenizer_of(config.data, folder.path)
    folder.write_status("finished", step=7)
    lines = [{"step": step, "loss": 5.0 if step == 3 else 2.0} for step in range(1, 8)]
    (folder.path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder.path


@pytest.fixture(scope="module", params=["deit-digits", "dit-digits"])
def image_run(tmp_path_factory, request):
    """The same of a run on images."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / request.param)
    config = resolve(request.param, ["model.dim=16", "model.blocks=2", "model.heads=2"])
    folder.begin(config, "auto")
    task = find_task(config.task)(config)
    export_weights(task.build_model(), folder.path / WEIGHTS)
    task.save_extras(folder.path)
    folder.write_status("finished", step=7)
    return folder.path


# What it reads ---------------------------------------------------------------------------------------


def test_a_run_on_images_is_asked_for_its_own_loss(image_run, capsys):
    source = open_inspected(image_run, None, 512)
    assert main(["inspect", str(image_run), "--tokens", "512", "--json"]) == 0
    found = Inspection.from_json(capsys.readouterr().out)
    config = RunFolder(image_run).config()
    with torch.no_grad():
        if config.task == "diffusion":
            loss = find_task(config.task)(config).loss(source.model, source.batch).total
        else:  # without the label smoothing of training
            loss = cross_entropy(source.model(source.batch["image"]), source.batch["label"])
    assert found.loss == pytest.approx(float(loss), rel=1e-4)
    assert found.removal is not None
    assert len(found.updates["x"]) == 4
    assert (found.lens is None) == ("dit" in image_run.name)  # a denoiser predicts no classes
    assert main(["inspect", str(image_run), "--text", "mine.txt"]) == 2
    assert "reads images" in capsys.readouterr().err


def test_a_run_is_read_on_its_own_held_out_text_from_start_to_end(run):
    source = open_inspected(run, None, 256)
    held_out = embedded_tokens("arithmetic", "validation")
    inputs, labels = source.batch["input_ids"], source.batch["labels"]
    assert inputs.shape == labels.shape == (8, 32)
    assert inputs[0].tolist() == held_out.read(0, 32).tolist()
    assert labels[-1].tolist() == held_out.read(len(held_out) - 32, len(held_out)).tolist()
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert len({tuple(row) for row in inputs.tolist()}) == 8
    assert source.facts["step"] == 7
    expected = hashlib.sha256(source.batch["input_ids"].numpy().astype("<i8").tobytes()).hexdigest()
    assert source.facts["ids_sha256"] == expected


def test_a_text_of_ones_own_is_read_from_its_start(run, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("äöü€ " * 1000, encoding="utf-8")
    batch = open_inspected(run, text, 64).batch
    assert batch["labels"].flatten().tolist() == list(("äöü€ " * 1000).encode())[:64]


def test_a_short_text_is_one_short_sequence(run, tmp_path):
    (tmp_path / "short.txt").write_text("2+2=4")
    assert open_inspected(run, tmp_path / "short.txt", 2048).batch["input_ids"].shape == (1, 6)  # with its end


def test_an_exported_model_gives_the_numbers_of_its_run(run, tmp_path):
    huggingface = pytest.importorskip("siamesenorm.interop.huggingface", exc_type=ImportError)
    trained = open_language_model(run)
    huggingface.export(trained.model, tmp_path / "exported", tokenizer="byte", remote_code=False)
    (tmp_path / "mine.txt").write_text("12+34=46\n" * 40)
    found = []
    for folder in (run, tmp_path / "exported"):
        source = open_inspected(folder, tmp_path / "mine.txt", 32)
        found.append(inspect(source.model, source.batch))
    assert found[0] == found[1]


# What it shows and writes ------------------------------------------------------------------------------


def test_the_command_writes_numbers_and_page(run, capsys):
    assert main(["inspect", str(run), "--tokens", "64"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "hidden rms",
        "gradient norm",
        "gain share",
        "logit lens",
        "loss rise",
        "effective depth",
        "massive",
        "writers",
        "spikes",
    ):
        assert part in shown
    found = Inspection.from_json((run / "inspection" / "inspection.json").read_text(encoding="utf-8"))
    source = open_inspected(run, None, 64)
    again = inspect(source.model, source.batch)
    assert found.spikes.steps == (3,)
    assert found.model_copy(update={"source": {}, "spikes": None}) == again
    assert torch.__version__.startswith(found.source["versions"]["torch"])  # +cpu, +cu128
    assert found.source["folder"] == str(run)
    page = (run / "inspection" / "inspection.html").read_text(encoding="utf-8")
    for plot in plots(found):
        assert f'id="plot-{plot.name}"' in page


def test_json_goes_to_the_output_and_nowhere_else(run, tmp_path, capsys):
    before = sorted(run.rglob("*"))
    assert main(["inspect", str(run), "--tokens", "64", "--json", "--no-removal"]) == 0
    found = Inspection.from_json(capsys.readouterr().out)
    assert found.removal is None
    assert sorted(run.rglob("*")) == before
    assert main(["inspect", str(run), "--tokens", "64", "--json", "--no-removal", "--out", str(tmp_path / "o")]) == 0
    assert json.loads(capsys.readouterr().out)["rms"] == json.loads((tmp_path / "o/inspection.json").read_text())["rms"]


def test_the_page_asks_for_nothing_and_texts_stay_text(tmp_path):
    found = inspect(tiny_lm(), ids(1, 6)).model_copy(
        update={"source": {"folder": EVIL, "text": EVIL, "command": EVIL}, "topology": EVIL}
    )
    _, file = write_report(found, tmp_path / "report")
    page = file.read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # plotly and the page's own script
    assert EVIL not in page
    assert "<img" not in own
    assert "alert(1)&lt;/script&gt;" in own
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", own)
    assert "prefers-color-scheme" in own


@pytest.mark.parametrize("topology", ["siamese", "hyper", "pre", "residual_dual", "x0", "siamese:y=gr"])
def test_figures_are_json_and_have_every_stream(topology):
    found = inspect(tiny_lm(topology), ids(1, 6))
    drawn = {plot.name: plot.figure for plot in plots(found)}
    json.dumps(drawn, allow_nan=False)
    assert {line["name"] for line in drawn["rms"]["data"]} == set(found.streams)
    assert ("shares" in drawn) == (len(found.streams) > 1)
    assert drawn["rms"]["data"][0]["y"] == list(found.rms[found.streams[0]])


def test_a_shallow_model_has_whole_numbers_on_its_axes_and_no_sublayer_in_both_lists():
    found = inspect(tiny_lm("siamese"), ids(1, 6))
    axes = {plot.name: plot.figure["layout"]["xaxis"] for plot in plots(found)}
    assert {axis["dtick"] for axis in axes.values() if "ticktext" not in axis} == {1}
    told = dict(terminal.notes(found))
    most, least = (re.findall(r"\d+ \w+", told[f"needed {end}"]) for end in ("most", "least"))
    assert sorted([*most, *least]) == sorted(sublayer.label for sublayer in found.sublayers)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_tables_fit_the_terminal(width):
    console = Console(width=width, record=True, file=io.StringIO())
    terminal.show(console, inspect(tiny_lm("mhc"), ids(1, 6)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert any("h3" in line for line in lines)


def test_a_diverged_model_has_no_numbers_but_a_report(tmp_path):
    model = tiny_lm()
    with torch.no_grad():
        model.blocks[0].ffn.down.weight.fill_(torch.nan)
    found = inspect(model, ids(1, 6))
    assert found.loss is None
    assert found.rms["y"][0] is not None
    assert found.rms["y"][-1] is None
    assert Inspection.from_json(found.to_json()) == found
    terminal.show(Console(width=80, file=io.StringIO()), found)
    write_report(found, tmp_path)


# How it refuses ----------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, capsys):
    empty, latin, nothing, file = (tmp_path / name for name in ("empty", "latin.txt", "nothing.txt", "file"))
    empty.mkdir()
    latin.write_bytes(b"caf\xe9")
    nothing.write_text(" \n")
    file.write_text("x")
    assert "is not a folder" in refused(capsys, tmp_path / "absent")
    assert "neither a run" in refused(capsys, empty)
    assert "cannot be read" in refused(capsys, run, "--text", tmp_path / "absent.txt")
    assert "not UTF-8 at byte 3" in refused(capsys, run, "--text", latin)
    assert "holds no text" in refused(capsys, run, "--text", nothing)
    assert "is a file" in refused(capsys, run, "--out", file)
    assert "is a file" in refused(capsys, run, "--out", file / "deeper")
    assert list(empty.iterdir()) == []


def test_a_folder_of_another_kind_of_model_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type 'siamesenorm'" in refused(capsys, tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    assert "neither a run" in refused(capsys, tmp_path)


def test_an_exported_model_without_transformers_names_the_extra(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "siamesenorm"}')
    for name in [name for name in sys.modules if name.startswith("siamesenorm.interop.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    message = refused(capsys, tmp_path, "--json")
    assert "needs the package 'transformers'" in message
    assert "pip install 'siamesenorm[hf]'" in message


def test_weights_of_another_shape_are_refused(tmp_path, capsys):
    other = RunFolder(tmp_path / "other")
    config = resolve("lm-tiny", SHAPE)
    other.begin(config, "auto")
    assert "neither weights.safetensors nor a complete checkpoint" in refused(capsys, other.path)
    export_weights(LanguageModel(config.model.model_copy(update={"dim": 8}), seed=0), other.path / WEIGHTS)
    assert "cannot be read" in refused(capsys, other.path)
