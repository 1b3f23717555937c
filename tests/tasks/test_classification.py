import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from siamesenorm.errors import ConfigError, DataError
from siamesenorm.models.vit import VisionTransformer
from siamesenorm.tasks import find_task
from siamesenorm.tasks.base import Ranks
from siamesenorm.tasks.classification_config import ClassificationLossConfig
from siamesenorm.tasks.confusion import Confusion
from siamesenorm.tasks.distillation import distillation_loss, open_teacher
from siamesenorm.train.display import Display
from siamesenorm.train.distributed import World
from siamesenorm.train.folder import WEIGHTS
from siamesenorm.train.loop import train
from siamesenorm.train.micro_batch import MicroBatches
from siamesenorm.train.optimizer import parameter_groups
from siamesenorm.train.recipes import in_steps, resolve
from siamesenorm.train.trained import open_trained

SMALL = [
    "dim=16",
    "blocks=2",
    "heads=2",
    "ffn_dim=32",
    "train.batch_size=16",
    "warmup=2",
    "steps=8",
    "checkpoint.every=null",
    "evaluation.every=null",
    "tensorboard=false",
    "peak_flops=1e12",
]
DISTILLED = ["model.distilled=true", "loss.alpha=0.3", "tau=3.0"]


def small(*overrides):
    return resolve("deit-digits", [*SMALL, *overrides])


def task(*overrides):
    config = small(*overrides)
    return find_task(config.task)(config)


def some_batch(opened, size=8):
    return opened.data.batch(np.arange(size, dtype=np.int64))


# The loss -------------------------------------------------------------------------------------------------


def test_without_mixing_the_loss_is_cross_entropy_with_smoothed_labels():
    opened = task("smoothing=0.2")
    model, batch = opened.build_model(), some_batch(opened)
    log = F.log_softmax(model(batch["image"]), dim=1)
    target = 0.8 * F.one_hot(batch["label"], 10) + 0.02
    assert torch.allclose(opened.loss(model, batch).total, -(target * log).sum(1).mean(), atol=1e-6)


def test_mixup_mixes_images_and_labels_with_the_same_share():
    seen = {}

    class Spy(torch.nn.Module):
        def forward(self, images):
            seen["images"] = images
            return self.logits

    opened = task("mixup=0.8", "smoothing=0.1", "augment=none")
    batch = some_batch(opened)
    before = batch["image"].clone()
    spy = Spy()
    spy.logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(4)
    loss = opened.loss(spy, batch).total
    assert torch.equal(batch["image"], before)  # the batch may be computed again
    difference = before - before.flip(0)
    share = float(((seen["images"] - before.flip(0)) * difference).sum() / (difference**2).sum())
    assert 0 < share < 1
    assert torch.allclose(seen["images"], share * before + (1 - share) * before.flip(0), atol=1e-5)
    one_hot = 0.9 * F.one_hot(batch["label"], 10) + 0.01
    target = share * one_hot + (1 - share) * one_hot.flip(0)
    assert torch.allclose(loss, -(target * F.log_softmax(spy.logits, 1)).sum(1).mean(), atol=1e-5)


def test_cutmix_puts_a_box_of_another_image_in():
    opened = task("cutmix=1.0", "augment=none")
    batch = some_batch(opened)
    torch.manual_seed(1)
    images, target = opened.mixer(batch["image"].clone(), batch["label"])
    own = images == batch["image"]
    assert (own | (images == batch["image"].flip(0))).all()
    assert torch.allclose(target.sum(1), torch.ones(8))


def test_mixing_follows_torchs_seed_alone():
    opened = task("mixup=0.8", "cutmix=1.0")
    model, batch = opened.build_model(), some_batch(opened)

    def loss(seed):
        torch.manual_seed(seed)
        return opened.loss(model, batch).total.item()

    assert loss(3) == loss(3)
    assert len({loss(seed) for seed in range(4)}) > 1


def test_hard_distillation_is_cross_entropy_with_the_teachers_class():
    student, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    expected = -F.log_softmax(student, 1)[torch.arange(5), teacher.argmax(1)].mean()
    assert torch.allclose(distillation_loss(student, teacher, "hard", 1.0), expected)


def test_soft_distillation_is_the_divergence_at_a_temperature_by_deits_scale():
    student, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    p = torch.softmax(teacher / 3, 1)
    expected = (p * (p / torch.softmax(student / 3, 1)).log()).sum() * 9 / 35
    assert torch.allclose(distillation_loss(student, teacher, "soft", 3.0), expected)
    assert distillation_loss(teacher, teacher, "soft", 3.0).abs() < 1e-12


@pytest.fixture(scope="module")
def teacher_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train(small("evaluation.every=8"), folder, display=Display())
    return folder


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_distilled_model_learns_from_labels_and_a_teacher_by_their_weights(teacher_run, kind):
    opened = task(*DISTILLED, f"loss.teacher={teacher_run}", f"distillation={kind}")
    model, batch = opened.build_model(), some_batch(opened)
    loss = opened.loss(model, batch)
    logits, taught = model(batch["image"])
    teacher = open_trained(teacher_run).model(batch["image"])
    labels = F.cross_entropy(logits, batch["label"], label_smoothing=0.1)
    learnt = distillation_loss(taught, teacher, kind, 3.0)
    assert torch.allclose(loss.total, 0.7 * labels + 0.3 * learnt, atol=1e-6)
    assert loss.metrics.keys() == {"loss", "distillation"}
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in opened.teacher.model.parameters())


def test_a_teacher_of_timm_comes_with_weights_from_a_file(tmp_path):
    from siamesenorm.data.images.timm_transforms import import_timm

    timm = import_timm("timm", "the test")
    made = timm.create_model("test_vit", num_classes=10).eval()
    save_file(made.state_dict(), tmp_path / "teacher.safetensors")
    teacher = open_teacher("timm:test_vit", str(tmp_path / "teacher.safetensors"), 10)
    image = torch.randn(1, 3, 160, 160)
    assert torch.equal(teacher(image), made(image))
    with pytest.raises(DataError, match="is not a file"):
        open_teacher("timm:test_vit", str(tmp_path / "nothing.safetensors"), 10)
    with pytest.raises(DataError, match="timm does not know"):
        open_teacher("timm:no_such_model", None, 10)


# Runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("mixup=0.8", "drop_path=0.2", "repeats=3", "ema=0.9")])
def test_a_run_resumed_in_the_middle_of_an_epoch_ends_bit_by_bit_as_one_left_alone(tmp_path, options):
    class Stop(Display):
        def step(self, record, unit, rate):
            if record["step"] == 5:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGTERM)

    config = small("logging.every=1", *options)
    train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", display=Stop()).state == "interrupted"
    assert train(config, tmp_path / "parts").state == "finished"
    whole, parts = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_workers_do_not_change_a_run(tmp_path):
    for name, workers in (("none", 0), ("two", 2)):
        train(small("steps=3", f"workers={workers}"), tmp_path / name)
    none, two = (load_file(tmp_path / name / WEIGHTS) for name in ("none", "two"))
    assert all(torch.equal(none[name], two[name]) for name in none)


def test_a_run_leaves_its_classes_and_confusion_beside_its_weights(teacher_run):
    facts = json.loads((teacher_run / "images.json").read_text())
    assert facts["class_names"] == list("0123456789")
    assert facts["test"]["images"] == 359
    found = json.loads((teacher_run / "evaluation.json").read_text())
    rows = [line.split(",") for line in (teacher_run / "confusion.csv").read_text().splitlines()]
    counts = np.array([row[1:] for row in rows[1:]], dtype=int)
    assert counts.sum() == found["images"] == 359
    status = json.loads((teacher_run / "status.json").read_text())
    assert np.trace(counts) / 359 == pytest.approx(found["accuracy"]) == status["evaluation"]["accuracy"]


def test_evaluation_over_two_ranks_gives_what_one_gives(teacher_run):
    trained = open_trained(teacher_run)
    opened = find_task("classification").for_evaluation(trained.config)
    alone = opened.evaluate(trained.model, Ranks(final=True))
    counts, sums, matrices = opened.confusion.counts, [], []
    kept = {"average": lambda v: sums.append(v) or v, "gather": lambda v: matrices.append(v) or [v]}
    for rank in range(2):
        opened.evaluate(trained.model, Ranks(rank=rank, world_size=2, final=True, **kept))

    def average(values):
        return {name: sum(part[name] for part in sums) / 2 for name in values}

    whole = {"average": average, "gather": lambda value: matrices}
    together = opened.evaluate(trained.model, Ranks(rank=0, world_size=2, final=True, **whole))
    assert together == pytest.approx(alone)
    assert (opened.confusion.counts == counts).all()


def test_accuracy_and_top_five_are_counted_right():
    opened = task("evaluation.every=1", "evaluation.images=50")
    labels = torch.from_numpy(opened.held_out.images.labels[opened.held_out.numbers])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.anything = torch.nn.Parameter(torch.zeros(()))

        def forward(self, image):
            scores = -torch.arange(10.0).repeat(len(image), 1)  # class 0 first, then 1, 2, …
            return scores + self.anything

    found = opened.evaluate(Model())
    assert found["accuracy"] == pytest.approx((labels == 0).double().mean().item())
    assert found["top5"] == pytest.approx((labels < 5).double().mean().item())


def test_chance_is_the_entropy_of_the_smoothed_frequencies_of_classes():
    opened = task("smoothing=0.0")
    shares = np.bincount(opened.images.labels) / len(opened.images)
    assert opened.chance_loss() == pytest.approx(-(shares * np.log(shares)).sum())
    assert task("smoothing=0.5").chance_loss() > opened.chance_loss()


def test_positions_and_tokens_are_not_decayed():
    groups = {group["name"]: group["names"] for group in parameter_groups(task().build_model(), small().optimizer)}
    assert {"pos_embed", "cls_token"} <= {*groups["plain"]}
    assert "head.weight" in groups["decayed"]


def test_epochs_and_their_warm_up_become_steps_of_the_data():
    config = in_steps(resolve("deit-digits", ["epochs=3", "warmup_epochs=0.5", "batch_size=64"]))
    assert (config.steps, config.schedule.warmup, config.train.epochs) == (3 * (1438 // 64), 11, None)


def test_a_run_in_epochs_resumes_with_the_same_command(tmp_path):
    config = resolve("deit-digits", [*SMALL, "epochs=0.05", "warmup=0"])
    assert train(config, tmp_path / "run").step == 4
    assert "already" in train(config, tmp_path / "run").message


# Bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["classes=7"], "model.classes = 7 is not allowed; it takes 10 or more"),
        (["data.train=nowhere"], "neither a file nor a folder"),
        (["mean=[0.1, 0.2]"], "data.mean = [0.1, 0.2] is not allowed"),
        (["std=[0.0]"], "data.std = [0.0] is not allowed"),
        (["model.distilled=true"], "a distillation token takes a teacher"),
        (["loss.teacher=here"], "a distillation token takes a teacher"),
        (["model.distilled=true", "loss.teacher=here"], "neither a run folder nor timm:NAME"),
        (["mixup=0.8", "batch_size=15"], "mixing takes even numbers of images"),
        (["mixup=0.8", "micro_batch_size=5"], "train.micro_batch_size = 5 is not allowed"),
        (["epochs=1000000", "warmup_epochs=2000000"], "it takes 0 to all"),
        (["schedule.warmup_epochs=2"], "it takes null unless train.epochs is given"),
        (["augment=strong"], "one of none, shift, timm"),
        (["loss.unknown=1"], "unknown field"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, overrides, said):
    with pytest.raises((ConfigError, DataError)) as error:
        train(resolve("deit-digits", overrides), tmp_path / "run")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_odd_part_of_a_batch_is_no_assertion_of_timm():
    config = resolve("deit-digits", ["mixup=0.8", "batch_size=6"])
    with pytest.raises(ConfigError, match=r"batch_size: 6 is not allowed; samples are mixed in pairs, and 2 processes"):
        MicroBatches(config, find_task(config.task)(config), World(0, 2, mode="ddp"))


def test_every_recipe_of_deit_has_the_published_settings():
    config = resolve("deit-small")
    assert (config.model.dim, config.model.heads, config.model.blocks) == (384, 6, 12)
    assert config.optimizer.lr == 5e-4 * config.train.batch_size / 512
    assert (config.train.epochs, config.schedule.warmup_epochs, config.optimizer.weight_decay) == (300, 5, 0.05)
    loss = ClassificationLossConfig(smoothing=0.1, mixup=0.8, cutmix=1.0)
    assert config.loss == loss
    assert (config.data.rand_augment, config.data.erasing, config.data.repeats) == ("rand-m9-mstd0.5-inc1", 0.25, 3)
    assert config.model.drop_path == 0.1
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in VisionTransformer(resolve(name, ["topology=pre"]).model).parameters())
            for name in ("deit-tiny", "deit-small", "deit-base")
        ]
    assert sizes == [5_717_416, 22_050_664, 86_567_656]


def test_confusion_names_classes_that_have_no_name_and_lists_mistakes():
    confusion = Confusion(np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]), ["cat", "dog"])
    assert confusion.by_class() == {"cat": 0.75, "dog": 0.5, "2": None}
    assert confusion.mistakes() == [("dog", "2", 2), ("cat", "dog", 1)]
    assert confusion.as_csv().splitlines()[1] == "cat,3,1,0"
