"""Language models on any topology as transformers models. Importing this registers them with the Auto classes.

::

    import siamesenorm.interop.huggingface
    model = AutoModelForCausalLM.from_pretrained(directory)
"""

from siamesenorm.errors import check_torchvision

try:
    check_torchvision()  # transformers imports it where it is installed
    import transformers
except ImportError:
    raise ImportError(
        "transformers 5.17 or newer is needed here: pip install 'siamesenorm[hf]'", name="transformers"
    ) from None
if [int(part) for part in transformers.__version__.split(".")[:2]] < [5, 17]:
    raise ImportError(
        f"transformers {transformers.__version__} is installed, 5.17 or newer is needed: pip install 'siamesenorm[hf]'",
        name="transformers",
    )

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.huggingface.convert import from_language_model, to_language_model
from siamesenorm.interop.huggingface.exporter import export
from siamesenorm.interop.huggingface.modeling import (
    LORA_TARGET_MODULES,
    SiameseNormForCausalLM,
    SiameseNormModel,
    SiameseNormPreTrainedModel,
)
from siamesenorm.interop.huggingface.tokenizer import byte_tokenizer

# Trainer asks these tables of names which models predict the next token, and so which labels its smoothing shifts.
MODEL_MAPPING_NAMES[SiameseNormConfig.model_type] = SiameseNormModel.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SiameseNormConfig.model_type] = SiameseNormForCausalLM.__name__
transformers.AutoConfig.register(SiameseNormConfig.model_type, SiameseNormConfig, exist_ok=True)
transformers.AutoModel.register(SiameseNormConfig, SiameseNormModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(SiameseNormConfig, SiameseNormForCausalLM, exist_ok=True)

__all__ = [
    "LORA_TARGET_MODULES",
    "SiameseNormConfig",
    "SiameseNormForCausalLM",
    "SiameseNormModel",
    "SiameseNormPreTrainedModel",
    "byte_tokenizer",
    "export",
    "from_language_model",
    "to_language_model",
]
