"""Mend an installed torchvision that was built for another torch, so that what wants it can be imported.

A CUDA build of torchvision cannot load its operators beside a CPU build of torch. Its import then ends with "operator
torchvision::nms does not exist", because it describes the shapes of operators that nobody defined, and so does the
import of what takes torchvision where it finds it: timm, transformers, diffusers. The cure is a torchvision from where
torch came from. Where there is none::

    python scripts/mend_torchvision.py

adds to the installed torchvision the lines that declare these operators. Calling them stays an error; nothing of image
classification does.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from siamesenorm.data.atomic import whole_file

COMMAND = "python scripts/mend_torchvision.py"
ADDED = f"""

# Added by {COMMAND}: operators whose shapes _meta_registrations.py describes.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def mend(folder: Path) -> None:
    """Add the declarations to the torchvision in a folder, once."""
    file = folder / "extension.py"
    source = file.read_text(encoding="utf-8")
    if ADDED not in source:
        with whole_file(file) as whole:  # a new file: installers link the old one into other environments
            whole.write((source + ADDED).encode())


def main() -> int:
    """Mend torchvision where that is needed, and say what was done; 1 where it could not be."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        print("torchvision is not installed: nothing to do")
        return 0
    if _imports():
        print("torchvision goes with torch: nothing to do")
        return 0
    folder = Path(spec.origin).parent
    try:
        mend(folder)
    except OSError as error:
        print(f"torchvision cannot be mended: {error}", file=sys.stderr)
        return 1
    if not _imports():
        print(f"torchvision in {folder} still does not import; its own message: python -c 'import torchvision'")
        return 1
    print(f"nms and qnms are declared in {folder / 'extension.py'}: torchvision imports")
    return 0


def _imports() -> bool:
    """Whether torchvision imports, tried elsewhere: a failed import leaves halves behind."""
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
