"""Transformers' own model tests on `SiameseNormForCausalLM`, one class of tests for each of several configurations.

::

    pip download --no-deps --no-binary transformers transformers==5.22.2 && tar xf transformers-5.22.2.tar.gz
    pip install parameterized
    python scripts/transformers_tests.py transformers-5.22.2/tests -q -rs

The folder is that of a source distribution, or of a checkout of the same version. A checkout has `CausalLMModelTest`,
which is then run whole. A source distribution has the parts of it that lie in files named test_*: the common model,
configuration and training tests, but neither those of generation nor of pipelines. Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "transformers_tests"
# What the common tests import and a source distribution does not have.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
MODULE = '''
import unittest

import torch

from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM, SiameseNormModel

from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_training_mixin import TrainingTesterMixin

try:
    from .causal_lm_tester import CausalLMModelTest, CausalLMModelTester
except ModuleNotFoundError:
    class CausalLMModelTester:
        """The part of transformers' own that the common tests ask for."""

        def __init__(self, parent):
            self.batch_size, self.seq_length, self.is_training = 4, 7, True
            self.vocab_size, self.hidden_size, self.intermediate_size = 99, 32, 40
            self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads = 2, 4, 2
            self.max_position_embeddings, self.pad_token_id, self.bos_token_id, self.eos_token_id = 512, 0, 1, 2
            self.num_labels = 3

        def get_config(self):
            names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
            return SiameseNormConfig(**{name: getattr(self, name) for name in names})

        def prepare_config_and_inputs_for_common(self):
            ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
            return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    class CausalLMModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
        model_tester = None

        def setUp(self):
            self.model_tester = self.model_tester_class(self)
            self.all_model_classes = self.model_tester.all_model_classes

        def test_config(self):
            ConfigTester(self, config_class=SiameseNormConfig).run_common_tests()


def cases(fields):
    class Tester(CausalLMModelTester):
        config_class, base_model_class, causal_lm_class = SiameseNormConfig, SiameseNormModel, SiameseNormForCausalLM
        all_model_classes = (SiameseNormModel, SiameseNormForCausalLM)

        def get_config(self):
            config = super().get_config()
            for name, value in fields.items():
                setattr(config, name, value)
            return config

    class Tests(CausalLMModelTest, unittest.TestCase):
        model_tester_class = Tester
        pipeline_model_mapping = {"feature-extraction": SiameseNormModel, "text-generation": SiameseNormForCausalLM}

    return Tests


MOE = {"experts": 4, "top_k": 2, "expert_dim": 12}
TestSiamese = cases({"topology": "siamese"})
TestHybridPre = cases({"topology": "siamese:form=hybrid_pre"})
TestExperts = cases({"topology": "siamese", "moe": MOE})
TestWindow = cases({"topology": "pre", "sliding_window": 4})
TestTied = cases({"topology": "siamese", "tie_word_embeddings": True})
TestSpan = cases({"topology": "span"})
TestHyper = cases({"topology": "hyper"})
TestManifold = cases({"topology": "mhc"})
'''


def main() -> int:
    """Lay out the package, run pytest on it, and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path, help="the folder tests of transformers' source")
    options, for_pytest = parser.parse_known_args()
    if not (options.tests / "test_modeling_common.py").is_file():
        parser.error(f"tests: {str(options.tests)!r} is not the folder tests of transformers' source")
    with tempfile.TemporaryDirectory() as folder:
        package = lay_out(options.tests.resolve(), Path(folder))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(package / "test_siamesenorm.py")]
        return subprocess.run([*command, *for_pytest], cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode


def lay_out(tests: Path, folder: Path) -> Path:
    """A package of links to transformers' tests, stubs for what is not there, and the tests of our models."""
    package = folder / PACKAGE
    package.mkdir()
    for entry in tests.iterdir():
        (package / entry.name).symlink_to(entry)
    for name, source in STUBS.items():
        stub = package / name
        if not stub.exists():
            stub.parent.mkdir(exist_ok=True)
            (stub.parent / "__init__.py").touch()
            stub.write_text(source)
    (package / "__init__.py").touch()
    (package / "test_siamesenorm.py").write_text(MODULE)
    return package


if __name__ == "__main__":
    sys.exit(main())
