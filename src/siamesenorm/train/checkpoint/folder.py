"""The folder that checkpoints lie in, as one process handles it::

run.json                  the run's identity
step-00001000/            a complete checkpoint: shards, index.json, progress.json, manifest.json
step-00001000-2/          the same step, saved again after a return to an earlier one
.step-00002000.partial/   one that is being written, or was when its writer was killed
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from siamesenorm.data.atomic import sync_folder, write_json, write_whole
from siamesenorm.data.listing import names_in
from siamesenorm.data.reading import read_object
from siamesenorm.data.removal import check_removable, hidden_names, remove_tree
from siamesenorm.data.replacement import rename_free
from siamesenorm.errors import DataError
from siamesenorm.train.checkpoint.manifest import MANIFEST, CheckpointError, Damage, Manifest, ManifestEntry, record
from siamesenorm.train.checkpoint.shards import INDEX

PROGRESS = "progress.json"
RUN = "run.json"
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
PARTIAL = ".partial"
LEFT = re.compile(rf"\.{NAME.pattern}{re.escape(PARTIAL)}|{hidden_names(NAME.pattern)}")
"""One that is being written, or that was on its way out."""
FILES = r"__\d+_\d+\.distcp|index\.json|progress\.json|manifest\.json"
CHECKPOINT = re.compile(rf"{FILES}|{hidden_names(FILES)}")
"""What lies in a checkpoint."""
MADE = re.compile(
    rf"run\.json|{hidden_names('run[.]json')}"
    rf"|(?:{NAME.pattern}|{LEFT.pattern})(?:/(?:{CHECKPOINT.pattern}))?"
)
"""What lies in the folder of all checkpoints."""


class CheckpointFolder:
    """Begins, publishes, lists and removes checkpoints; keep: how many of the newest complete ones stay.

    Those that were published as permanent stay beside them.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep
        self._known_good: set[Path] = set()

    def begin(self, step: int) -> tuple[Path, int]:
        """An empty folder to write into, and the number of the checkpoint; clears what killed writers left."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in filter(LEFT.fullmatch, names_in(self.path)):
            self.abandon(self.path / name)
        known = sorted((m.sequence, m.run) for m in self.manifests().values() if m is not None)
        sequence, run = known[-1] if known else (0, secrets.token_hex(8))
        if self.run() is None:
            write_json(self.path / RUN, {"run": run})
        partial = self.path / f".step-{step:08d}{PARTIAL}"
        partial.mkdir()
        return partial, sequence + 1

    def abandon(self, partial: Path) -> None:
        """Remove one that did not come to its end; what is not a checkpoint's own stays, and its folder with it."""
        if partial.parent == self.path and LEFT.fullmatch(partial.name):
            with contextlib.suppress(OSError):
                remove_tree(partial, CHECKPOINT)

    def publish(
        self,
        partial: Path,
        step: int,
        sequence: int,
        world: int,
        shards: dict[str, ManifestEntry],
        progress: str,
        permanent: bool = False,
    ) -> tuple[Path, int]:
        """Complete a folder whose shards are written, give it its name, and remove what is now too old."""
        write_whole(partial / PROGRESS, progress)
        files = dict(sorted((shards | record(partial, (INDEX, PROGRESS))).items()))
        run = self.run()
        if run is None:
            raise CheckpointError(f"{self.path / RUN} is gone or damaged")
        Manifest(version=1, run=run, step=step, sequence=sequence, world=world, files=files, permanent=permanent).write(
            partial
        )
        sync_folder(partial)
        place, again = self.path / f"step-{step:08d}", 2
        while place.exists():  # this step was saved before: damaged, or left by a return to an earlier step
            place, again = self.path / f"step-{step:08d}-{again}", again + 1
        rename_free(partial, place)
        sync_folder(self.path)
        self.found_good(place)
        with contextlib.suppress(OSError):  # the new one is there; what cannot be removed now is so next time
            self._remove_old()
        return place, sequence

    def found_good(self, place: Path) -> None:
        """Note one that was written or verified here; only such ones count when old ones are removed."""
        self._known_good.add(place)

    def _remove_old(self) -> None:
        """Remove what is older than `keep` checkpoints that are known to be good, whole or damaged.

        Permanent ones stay.
        """
        found = self.manifests()
        numbers = {path: manifest.sequence for path, manifest in found.items() if manifest is not None}
        good = sorted((path for path in self._known_good if path in numbers), key=numbers.__getitem__, reverse=True)
        if len(good) < self.keep:
            return
        oldest_kept = numbers[good[self.keep - 1]]
        for path, manifest in found.items():
            if numbers.get(path, -1) < oldest_kept and not (manifest is not None and manifest.permanent):
                with contextlib.suppress(OSError):  # where others have put something into it, it stays whole
                    check_removable(path, CHECKPOINT)
                    doomed = path.with_name(f".{path.name}{PARTIAL}")  # first out of sight, then gone
                    rename_free(path, doomed)
                    self.abandon(doomed)
                    self._known_good.discard(path)

    def candidates(self) -> tuple[list[tuple[Path, Manifest]], list[str]]:
        """Checkpoints with a readable manifest of this run, newest first, and what is wrong with the others."""
        found: list[tuple[Path, Manifest]] = []
        problems, run = [], self.run()
        for path, manifest in self._read():
            if isinstance(manifest, Damage):
                problems.append(str(manifest))
            elif run is not None and manifest.run != run:
                problems.append(f"{path / MANIFEST} is of run {manifest.run!r} instead of {run!r}")
            else:
                found.append((path, manifest))
        return sorted(found, key=lambda pair: pair[1].sequence, reverse=True), problems

    def manifests(self) -> dict[Path, Manifest | None]:
        """Every checkpoint with its manifest, None where that cannot be read."""
        return {path: None if isinstance(read, Damage) else read for path, read in self._read()}

    def _read(self) -> Iterator[tuple[Path, Manifest | Damage]]:
        """Every checkpoint with its manifest, or with what is wrong with that."""
        for path in (self.path / name for name in names_in(self.path) if NAME.fullmatch(name)):
            try:
                yield path, Manifest.read(path)
            except Damage as damage:
                yield path, damage

    def run(self) -> str | None:
        """The run's identity, made at its first save; where its file is unreadable, the manifests give it again."""
        try:
            return str(read_object(self.path / RUN, "checkpoint")["run"])
        except (DataError, KeyError) as error:
            if isinstance(error.__cause__, OSError):  # a file that cannot be read is not a file that is not there
                raise error.__cause__ from None
            return None
