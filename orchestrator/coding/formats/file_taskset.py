"""What task sets of one file share: which of its rows are played."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import verifiers.v1 as vf
from pydantic import Field

from composer_prime.errors import EmptyTaskSetError
from orchestrator.environments.answers import Split, split_of

Row = TypeVar("Row")


class FileTasksetConfig(vf.TasksetConfig):
    """Which file, and which of its rows."""

    file: Path
    """A .jsonl, .jsonl.gz, .json or .parquet file with one record a task. `programs` takes a folder of coding tasks as
    well, and plays those that delete one top-level function."""
    split: Split = "train"
    """Training or held-out rows, where `eval_share` is above 0."""
    eval_share: float = Field(0.0, ge=0, lt=1)
    """Share of the rows, or of a folder's repositories, that is held out; 0 plays all in both."""
    num_tasks: int | None = Field(None, ge=1)
    """Play only this many tasks, the first ones; None plays all."""

    def played(self, named: Iterable[tuple[str, Row]]) -> Iterator[Row]:
        """Yield the rows that are played. `named`: the name that decides the split, and the row.

        Raises EmptyTaskSetError for none.
        """
        count = 0
        for name, row in named:
            if self.eval_share and split_of(name, self.eval_share) != self.split:
                continue
            yield row
            count += 1
            if count == self.num_tasks:
                return
        if not count:
            raise EmptyTaskSetError(
                f"{self.file}: nothing of it is in split {self.split!r} with eval_share = {self.eval_share:g}; change "
                "eval_share or max_lines, or give the split a file of its own"
            )
