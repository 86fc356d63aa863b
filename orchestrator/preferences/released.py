"""Which pairs of a growing file the density gate lets through (composer_prime/pairs_gate.py), as its verdicts come."""

from __future__ import annotations

import logging

from composer_prime.errors import ConfigError
from composer_prime.pairs import PairFile
from composer_prime.pairs_gate import Gate, check_binding, gate_file, read_gate

logger = logging.getLogger(__name__)


class Released:
    """Not thread-safe."""

    def __init__(self, file: PairFile) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None
        """Time and size of the verdicts' file when it was last read."""
        self._gate = Gate(verdicts=[])

    @property
    def measured(self) -> int:
        """The first so many pairs have a verdict."""
        return self._gate.measured

    def refresh(self) -> bool:
        """Take in what verdicts there are now; whether they changed. Verdicts on other pairs release none."""
        try:
            status = gate_file(self._file.path).stat()
            seen = (status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            seen = None
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            gate = read_gate(self._file.path) or Gate(verdicts=[])
            check_binding(gate, self._file)
        except ConfigError as error:
            logger.warning("channel 3 trains no pair: %s", error)
            gate = Gate(verdicts=[])
        self._gate = gate
        return True

    def allows(self, index: int) -> bool:
        """Whether a verdict that passed covers pair `index`."""
        return any(verdict.first <= index < verdict.last and verdict.passed for verdict in self._gate.verdicts)
