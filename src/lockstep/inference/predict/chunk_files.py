"""The predictions so far: a folder beside the output, with a file for each chunk that is done."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock, Timeout
from pyarrow import parquet

from lockstep.base import storage
from lockstep.base.errors import DataError, LaunchError
from lockstep.inference.predict.input_scan import Chunk

FACTS, LOCK = "predicting.json", ".lock"
OWN_FILES = re.compile(r"(\d{8}-[0-9a-f]{16}\.parquet|predicting\.json)(\.tmp-[0-9a-f]+)?|\.lock")


@dataclass(frozen=True)
class ChunkFiles:
    folder: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this command alone; remove it afterwards if no chunk is in it.

        Raises LaunchError where another command holds it, DataError where it contains other files.
        """
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write to {self.folder.parent}: {error.strerror}; name another --out") from None
        other = next((path for path in self.folder.iterdir() if not OWN_FILES.fullmatch(path.name)), None)
        if other is not None:
            raise DataError(f"{self.folder} is needed for what is done so far, but holds {other.name}: move it away")
        lock = FileLock(self.folder / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise LaunchError(f"another command has {self.folder}: wait for it, or name another --out") from None
        try:
            yield
        finally:
            is_empty = not self.count()
            lock.release()
            if is_empty:
                shutil.rmtree(self.folder, ignore_errors=True)

    def count(self) -> int:
        return len(list(self.folder.glob("*.parquet")))

    def resume(self, facts: Mapping[str, Any], chunks: Sequence[Chunk]) -> tuple[set[str], str]:
        """Keep the files that are still valid, remove the others -> the names of those kept, a message for the user.

        `facts` is everything besides the rows that the predictions depend on.
        """
        previous = self._facts()
        existing = {path.name for path in self.folder.iterdir() if path.suffix == ".parquet"}
        done = existing & {chunk.file_name for chunk in chunks} if previous == facts else set()
        for path in self.folder.iterdir():
            if path.name not in done and path.name not in (FACTS, LOCK):
                path.unlink()
        if previous != facts:  # only now: new facts must never lie beside old predictions
            storage.write(self.folder / FACTS, json.dumps(facts, indent=1))
        if done:
            stale = f"; the rows of {len(existing - done):,} more have changed" if existing - done else ""
            return done, f"resuming: {len(done):,} of {len(chunks):,} chunks are done{stale}"
        if previous != facts and previous is not None and existing:
            names = [name for name in facts if previous.get(name) != facts[name]]
            return done, f"starting anew: what {self.folder} holds was made with another {', '.join(names)}"
        if existing:
            return done, f"starting anew: what {self.folder} holds was made of another input"
        return done, ""

    def _facts(self) -> Any:
        try:
            return storage.read_json(self.folder / FACTS)
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def tables(self, chunks: Sequence[Chunk]) -> Iterator[pa.Table]:
        """Yield the predictions, in the order of the input."""
        for chunk in chunks:
            yield parquet.read_table(self.folder / chunk.file_name, partitioning=None)

    def clear(self) -> None:
        for path in self.folder.glob("*.parquet"):
            path.unlink()
