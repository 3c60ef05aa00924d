"""Broken versions of the kernels. Every one must be seen by a probe of :mod:`probes`: test_mutants.py runs them all.

A mutant is (kernel, what is broken, text in the loaded source, text in its place). The text must occur in the source;
``n`` picks one of several occurrences. To add a kernel: write its probe in probes.py and its mutants here.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    kernel: str
    what: str
    old: str
    new: str
    n: int = 0

    def applied(self, text: str) -> str:
        parts = text.split(self.old)
        assert len(parts) > self.n + 1, f"{self.kernel}: {self.old!r} is not there {self.n + 1} times"
        return self.old.join(parts[: self.n + 1]) + self.new + self.old.join(parts[self.n + 1 :])


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

MUTANTS = [
    Mutant("recurrence", "a shuffle step is missing", "m < LANES", "2 * m < LANES"),
    Mutant("recurrence", "the output's shuffle is too short", "m < LANES", "2 * m < LANES", 1),
    Mutant("recurrence", "decay after the write", "s[i][c] *= VECTOR ? float(ap[i * 4 * LANES + c]) : a;", ""),
    Mutant("recurrence", "the vector gate of channel 0", "ap[i * 4 * LANES + c]", "ap[0]"),
    Mutant("recurrence", "heads interleaved", "hk = hv / (Hv / Hk)", "hk = hv % Hk"),
    Mutant("recurrence", "lengths ignored", "real = metal::min(int(lengths[b]), T)", "real = T"),
    Mutant("recurrence", "padded outputs unwritten", "t < T; ++t, op", "t < real; ++t, op"),
    Mutant("recurrence", "one token too many", "t < real; ++t) {", "t <= real; ++t) {"),
    Mutant("recurrence", "wrong lane writes", "if (piece == 0) op[0]", "if (piece == 1) op[0]"),
    Mutant("recurrence", "writes its input", "kp += Hk * Dk;", "kp += Hk * Dk; ((device float*)(bp))[0] = 0.0f;"),
]
