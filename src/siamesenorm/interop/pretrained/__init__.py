"""Language models that others have trained, from their Hugging Face folders: each in the topology that it is.

::

    from siamesenorm.interop import pretrained
    model = pretrained.load("Qwen3-0.6B")              # a LanguageModel; its logits are transformers'
    pretrained.convert("Qwen3-0.6B", "imported")       # a folder of ours, with tokenizer and generation settings
"""

from siamesenorm.interop.pretrained.architectures import ARCHITECTURES
from siamesenorm.interop.pretrained.convert import convert
from siamesenorm.interop.pretrained.load import load

__all__ = ["ARCHITECTURES", "convert", "load"]
