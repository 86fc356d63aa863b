"""The global model that a joint run ended with, as its trainer's last line of metrics says."""

from __future__ import annotations

from dataclasses import dataclass

from composer_prime.monitor.tail import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Compared by eye across machines."""

    step: int
    """The last optimizer step."""
    outer_step: int
    hash: str
    left_behind: int | None
    """The outer step of this peer's delta whose round had not ended; None where there was none."""

    @classmethod
    def of(cls, line: Line) -> Ending | None:
        """None for a line that does not tell of an end."""
        if "diloco/final_hash" not in line:
            return None
        left_behind = line.get("diloco/final_left_behind")
        return cls(
            step=line["step"],
            outer_step=int(line["diloco/final_outer_step"]),
            hash=str(line["diloco/final_hash"]),
            left_behind=None if left_behind is None else int(left_behind),
        )

    @property
    def text(self) -> str:
        behind = f"; a delta of outer step {self.left_behind} was left behind" if self.left_behind is not None else ""
        return (
            f"outer step {self.outer_step}, hash {self.hash}, equal on every peer that ended at this outer step{behind}"
        )
