"""docs/hardware.md says of every recipe whether it ever ran at its size, and those that did not say it themselves."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = {path.stem: path.read_text() for path in (ROOT / "src" / "siamesenorm" / "recipes").glob("*.yaml")}


def named(beginning: str) -> set[str]:
    """The recipes of the line that begins so."""
    (line,) = [line for line in (ROOT / "docs" / "hardware.md").read_text().splitlines() if line.startswith(beginning)]
    return set(re.findall("`([^`]+)`", line))


def test_every_recipe_was_run_or_was_not():
    run, never = named("Recipes that were trained"), named("Recipes that were never run")
    assert not run & never
    assert run | never == set(RECIPES)


def test_recipes_that_were_never_run_say_so():
    says = {name for name, text in RECIPES.items() if "docs/hardware.md" in text.partition("\n")[0]}
    assert says == named("Recipes that were never run")


def test_the_readme_and_the_docs_lead_there():
    assert "(docs/hardware.md)" in (ROOT / "README.md").read_text()
    assert "(hardware.md)" in (ROOT / "docs" / "README.md").read_text()
