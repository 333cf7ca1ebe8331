"""What is done so far: a folder beside the output, with a file of predictions for each chunk that is."""

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
OURS = re.compile(r"(\d{8}-[0-9a-f]{16}\.parquet|predicting\.json)(\.tmp-[0-9a-f]+)?|\.lock")


@dataclass(frozen=True)
class OutputParts:
    folder: Path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have it for this command alone; one that holds no part is not left behind.

        Raises LaunchError where another command has it, DataError where it holds something else.
        """
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot write to {self.folder.parent}: {error.strerror}; name another --out") from None
        other = next((path for path in self.folder.iterdir() if not OURS.fullmatch(path.name)), None)
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
            is_needed = self.count() > 0
            lock.release()
            if not is_needed:
                shutil.rmtree(self.folder, ignore_errors=True)

    def count(self) -> int:
        return len(list(self.folder.glob("*.parquet")))

    def settle(self, facts: Mapping[str, Any], chunks: Sequence[Chunk]) -> tuple[set[str], str]:
        """Keep what can be gone on with -> the files of chunks that are done, and what there is to say about it.

        `facts` is all that the predictions depend on, beside the rows.
        """
        before = self._facts()
        there = {path.name for path in self.folder.iterdir() if path.suffix == ".parquet"}
        done = there & {chunk.part for chunk in chunks} if before == facts else set()
        for path in self.folder.iterdir():
            if path.name not in done and path.name not in (FACTS, LOCK):
                path.unlink()
        if before != facts:  # only now: no old part may ever lie beside new facts
            storage.write(self.folder / FACTS, json.dumps(facts, indent=1))
        if done:
            stale = f"; the rows of {len(there - done):,} more have changed" if there - done else ""
            return done, f"resuming: {len(done):,} of {len(chunks):,} chunks are done{stale}"
        if before != facts and before is not None and there:
            names = [name for name in facts if before.get(name) != facts[name]]
            return done, f"starting anew: what {self.folder} holds was made with another {', '.join(names)}"
        if there:
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
        """The predictions, in the order of the input."""
        for chunk in chunks:
            yield parquet.read_table(self.folder / chunk.part, partitioning=None)

    def clear(self) -> None:
        for path in self.folder.glob("*.parquet"):
            path.unlink()
