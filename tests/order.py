"""Tests of many seconds begin each half of the tests, with which a worker starts: all end together, on short ones."""

from pathlib import Path

HERE = Path(__file__).parent
SLOW = (
    "train/test_checkpoint_resharding.py",
    "train/test_combinations.py",
    "train/test_distributed.py",
    "layers/test_sanitizer.py",
    "train/test_looking.py",
    "train/test_distributed_runs.py",
    "lab/test_ray.py",
    "residual/test_triton.py",
    "train/test_compiled.py",
    "test_site.py",
    "commands/test_interrupts.py",
    "lab/test_runner.py",
)


def pytest_collection_modifyitems(items):
    """The slowest file first, the second one at the middle, and so on by turns; all others stay as they come."""
    halves, others = ([], []), []
    places = {HERE / name: number for number, name in enumerate(SLOW)}
    for item in sorted(items, key=lambda item: places.get(item.path, len(places))):
        number = places.get(item.path)
        (others if number is None else halves[number % 2]).append(item)
    first = max(0, len(items) // 2 - len(halves[0]))
    items[:] = [*halves[0], *others[:first], *halves[1], *others[first:]]
