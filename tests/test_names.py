"""One name, one thing: no class has the name of another."""

import ast
from collections import defaultdict
from pathlib import Path

import siamesenorm

SOURCE = Path(siamesenorm.__file__).parent
LOOKED_FOR = {"SiameseNormForCausalLM", "SiameseNormModel"}
"""Names that transformers and vLLM each look for in a module of their own."""


def test_no_two_classes_share_a_name():
    homes = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(SOURCE)))
    assert len(homes) > 100
    assert {name: files for name, files in homes.items() if len(files) > 1 and name not in LOOKED_FOR} == {}
