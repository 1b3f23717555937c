"""DeiT on any topology inside timm. Importing this registers the models; ``import siamesenorm`` alone does not.

::

    import siamesenorm.interop.timm
    import timm

    model = timm.create_model("deit_tiny_patch16_224_siamese", num_classes=10, drop_path_rate=0.1)
    other = timm.create_model("deit_tiny_patch16_224_siamese", topology="hyper")
"""

from siamesenorm.errors import check_torchvision

try:
    check_torchvision()
    import timm as _timm  # noqa: F401
except ImportError as error:
    if error.name not in ("timm", "torchvision"):
        raise
    raise ImportError("timm is needed here: pip install 'siamesenorm[vision]'", name=error.name) from None

from siamesenorm.interop.timm.deit_siamese import model_names
from siamesenorm.interop.timm.model import TimmVisionTransformer
from siamesenorm.interop.timm.weights import checkpoint_filter_fn, load_timm

__all__ = ["TimmVisionTransformer", "checkpoint_filter_fn", "load_timm", "model_names"]
