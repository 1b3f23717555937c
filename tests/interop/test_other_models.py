"""Folders, configurations and weights of other models are refused: none of our classes gives a fresh model for them."""

import json
import shutil
import sys

import pytest
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from siamesenorm.errors import InteropError, OfficialError
from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM, SiameseNormModel

from .huggingface_models import causal_lm

OURS = (SiameseNormForCausalLM, SiameseNormModel)
AUTO = (AutoModelForCausalLM, AutoModel)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Ours, two others, one that says nothing of its type, and our configuration beside Llama's weights."""
    root = tmp_path_factory.mktemp("models")
    own = causal_lm()
    llama = LlamaConfig(
        vocab_size=own.config.vocab_size, hidden_size=own.config.hidden_size, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=24,
    )  # fmt: skip
    own.save_pretrained(root / "own")
    LlamaForCausalLM(llama).save_pretrained(root / "llama")
    GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)).save_pretrained(root / "gpt2")
    shutil.copytree(root / "llama", root / "untyped")
    config = json.loads((root / "llama/config.json").read_text())
    (root / "untyped/config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
    shutil.copytree(root / "llama", root / "mixed")
    shutil.copy(root / "own/config.json", root / "mixed/config.json")
    return root


def refusal(act):
    with pytest.raises((InteropError, OfficialError)) as refused:
        act()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", [*OURS, SiameseNormConfig])
def test_other_types_are_refused(folders, kind):
    for name, said in {"llama": "'llama'", "gpt2": "'gpt2'", "untyped": "no model_type"}.items():
        message = refusal(lambda name=name: kind.from_pretrained(folders / name))
        assert str(folders / name) in message
        assert said in message
        assert "'siamesenorm'" in message


def test_other_configurations_are_refused(folders):
    llama = LlamaConfig(vocab_size=9)
    for act in (
        lambda: SiameseNormConfig.from_dict(llama.to_dict()),
        lambda: SiameseNormConfig.from_json_file(folders / "llama/config.json"),
        *(lambda kind=kind: kind(llama) for kind in OURS),
        *(lambda kind=kind: kind.from_pretrained(folders / "own", config=llama) for kind in OURS),
    ):
        assert "'llama'" in refusal(act)


@pytest.mark.parametrize("kind", [*OURS, *AUTO])
def test_other_weights_are_refused(folders, kind):
    config = SiameseNormConfig.from_pretrained(folders / "own")
    assert "no weight for a block" in refusal(lambda: kind.from_pretrained(folders / "mixed"))
    assert "no weight for a block" in refusal(lambda: kind.from_pretrained(folders / "llama", config=config))


def test_own_folders_and_no_weights_at_all_are_taken(folders):
    for kind in (*OURS, *AUTO):
        assert type(kind.from_pretrained(folders / "own")) in OURS
    model, info = SiameseNormForCausalLM.from_pretrained(folders / "own", output_loading_info=True)
    assert not info["missing_keys"]
    assert type(SiameseNormForCausalLM.from_pretrained(None, config=model.config, state_dict={})) in OURS


def test_auto_classes_still_give_others(folders):
    assert type(AutoModelForCausalLM.from_pretrained(folders / "llama")) is LlamaForCausalLM


def test_diffusers(tmp_path):
    ours = pytest.importorskip("siamesenorm.interop.diffusers", exc_type=ImportError)
    diffusers = sys.modules["diffusers"]
    size = {"patch_size": 2, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8}
    other = diffusers.DiTTransformer2DModel(in_channels=2, sample_size=4, num_embeds_ada_norm=5, **size)
    shape = {"input_size": 4, "patch_size": 2, "channels": 2, "classes": 3, "dim": 16, "heads": 2, "ffn_dim": 16}
    own, scheduler = ours.ResidualDiTModel(blocks=1, **shape), diffusers.DDPMScheduler()
    other.save_pretrained(tmp_path / "dit")
    ours.ResidualDiTPipeline(own, scheduler).save_pretrained(tmp_path / "own")
    weights, config = "diffusion_pytorch_model.safetensors", "config.json"
    for number, files in enumerate(((weights,), (config,), (weights, config))):
        folder = shutil.copytree(tmp_path / "own", tmp_path / f"foreign {number}")
        for file in files:
            shutil.copy(tmp_path / "dit" / file, folder / "transformer" / file)
        refusal(lambda folder=folder: ours.ResidualDiTPipeline.from_pretrained(folder))
        for low in (True, False):
            how = {"subfolder": "transformer", "low_cpu_mem_usage": low}
            refusal(lambda folder=folder, how=how: ours.ResidualDiTModel.from_pretrained(folder, **how))
    assert "'DiTTransformer2DModel'" in refusal(lambda: ours.ResidualDiTModel.from_config(other.config))
    assert "num_layers = 1" in refusal(lambda: ours.ResidualDiTModel.from_config({"dim": 16, "num_layers": 1}))
    assert "DiTTransformer2DModel" in refusal(lambda: ours.ResidualDiTPipeline(other, scheduler))
    assert type(ours.ResidualDiTPipeline.from_pretrained(tmp_path / "own").transformer) is ours.ResidualDiTModel
    assert type(ours.ResidualDiTModel.from_config(own.config)) is ours.ResidualDiTModel


@pytest.mark.parametrize("classes", [5, 7])
def test_timm(tmp_path, classes):
    """Also with another number of classes, where timm's own loading takes what fits."""
    pytest.importorskip("siamesenorm.interop.timm", exc_type=ImportError)
    timm = sys.modules["timm"]
    small = {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 1}
    plain, siamese = "deit_tiny_patch16_224", "deit_tiny_patch16_224_siamese"
    for name in (plain, siamese):
        save_file(timm.create_model(name, num_classes=5, **small).state_dict(), tmp_path / f"{name}.safetensors")

    def load(name, file, **how):
        overlay = {"file": str(tmp_path / f"{file}.safetensors"), "num_classes": 5}
        return timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=classes, **small, **how
        )

    assert "missing: blocks.0.links." in refusal(lambda: load(siamese, plain))
    assert "missing: blocks.0.links." in refusal(lambda: load(siamese, siamese, topology="pre"))
    assert "has no official vision model" in refusal(lambda: load(siamese, plain, topology="siamese:form=plain"))
    assert load(siamese, plain, topology="pre").num_classes == load(siamese, siamese).num_classes == classes
