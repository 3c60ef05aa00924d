"""Broken versions of the kernels. Every one must be seen by a check of test_mutants.py or test_step_mutants.py.

A mutant is (kernel, what is broken, text in the loaded source, text in its place). The text must occur in the source;
``n`` picks one of several occurrences.
"""

from __future__ import annotations

from typing import NamedTuple

from mlx_linattn import metal


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


def broken(mutant: Mutant):
    """:func:`metal.source` with one kernel broken."""

    def sources(name):
        s = metal.source(name)
        if name != mutant.kernel:
            return s
        inside = mutant.old in s.body
        return s._replace(**{"body" if inside else "header": mutant.applied(s.body if inside else s.header)})

    return sources


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
    Mutant("recurrence", "only the first row writes", "if (piece == 0) op[0]", "if (lane == 0) op[0]"),
    Mutant("recurrence", "writes its input", "kp += Hk * Dk;", "kp += Hk * Dk; ((device float*)(bp))[0] = 0.0f;"),
    Mutant("chunked", "no barrier before the next chunk is staged", BARRIER, ""),
    Mutant("chunked", "no barrier after staging", BARRIER, "", 1),
    Mutant("chunked", "no barrier before P multiplies the keys", BARRIER, "", 2),
    Mutant("chunked", "no barrier before Z * k replaces the gates", BARRIER, "", 3),
    Mutant("chunked", "no barrier before A is inverted", BARRIER, "", 4),
    Mutant("chunked", "no barrier after the inverses", BARRIER, "", 5),
    Mutant(
        "chunked",
        "a barrier that not every SIMD-group reaches",
        "simdgroup_load(N, lower",
        BARRIER + " simdgroup_load(N, lower",
    ),
    Mutant(
        "chunked",
        "more than 32 KB",
        "threadgroup float strength[C];",
        "threadgroup float strength[C]; threadgroup float big[6000]; if (tid == 0) big[0] = 0;",
    ),
    Mutant("chunked", "the value after the last token", "i < n ? float(vp[row + c])", "i <= n ? float(vp[row + c])"),
    Mutant("chunked", "a decay of 0 after the last token", "+ d + c] : 1.0f", "+ d + c] : 0.0f"),
    Mutant("chunked", "stores after the last token", "if (i < n) {\nop[row]", "if (true) {\nop[row]"),
    Mutant("chunked", "padded outputs unwritten", "t < T; t += 4", "t < real; t += 4"),
    Mutant("chunked", "lengths ignored", "real = metal::min(int(lengths[b]), T)", "real = T"),
    Mutant(
        "chunked",
        "A with its diagonal",
        "lower[i * C + j] = i > j ? -strength[i] * w",
        "lower[i * C + j] = i >= j ? -strength[i] * w",
    ),
    Mutant("chunked", "M without its diagonal", "attend[i * C + j] = i >= j ? w", "attend[i * C + j] = i > j ? w"),
    Mutant("chunked", "a decay too many", "for (int l = j + 1; l <= i; ++l)", "for (int l = j; l <= i; ++l)"),
    Mutant("chunked", "a carried decay too many", "if (i > j) carried[c]", "if (i >= j) carried[c]"),
    Mutant(
        "chunked", "queries without P", "queries[i * Dk + d] = TT(p * float", "queries[i * Dk + d] = TT(1.0f * float"
    ),
    Mutant(
        "chunked",
        "a state channel's decay for its neighbour",
        "total[VECTOR ? d * 8 + fm : 0]",
        "total[VECTOR ? d * 8 + fn : 0]",
    ),
    Mutant("chunked", "the update without Z", "W[I].thread_elements()[1] *= after[I * 8 + fm];", ""),
    Mutant(
        "chunked", "the inverse without its corner", "simdgroup_multiply_accumulate(inverse, inverse, F, inverse);", ""
    ),
    Mutant(
        "chunked", "the inverse without A^2", "simdgroup_multiply_accumulate(inverse, inverse, square, inverse);", ""
    ),
    Mutant(
        "chunked",
        "one block of the substitution left out",
        "for (int J = 0; J < I; ++J)",
        "for (int J = 1; J < I; ++J)",
    ),
    Mutant(
        "chunked",
        "a transpose lost",
        "simdgroup_load(y, keys + J * 8 * Dk + d * 8, Dk, ulong2(0, 0), true)",
        "simdgroup_load(y, keys + J * 8 * Dk + d * 8, Dk)",
    ),
    Mutant("chunked", "the lane map", "(lane / 2) % 4, fn", "(lane / 2) % 2, fn"),
    Mutant("chunked", "heads interleaved", "hk = hv / (Hv / Hk)", "hk = hv % Hk"),
    Mutant("delta_step", "no barrier before the norms of q and k", BARRIER, ""),
    Mutant("delta_step", "no barrier after the norms of q and k", BARRIER, "", 1),
    Mutant("delta_step", "no barrier before the gated norm", BARRIER, "", 2),
    Mutant("delta_step", "the window does not move", "past[i] = past[i + 1]", "past[i] = past[i]"),
    Mutant("delta_step", "the window is not read", "past[i] = float(window[", "past[i] = 0.0f * float(window["),
    Mutant("delta_step", "no head writes a key's window", "hv % (Hv / Hk) == 0", "hv % (Hv / Hk) == 1"),
    Mutant("delta_step", "heads interleaved", "hk = hv / (Hv / Hk)", "hk = hv % Hk"),
    Mutant("delta_step", "q is not scaled", "metal::rsqrt(float(Dk))", "1.0f"),
    Mutant("delta_step", "lengths ignored", "real = metal::min(int(lengths[row]), T)", "real = T"),
    Mutant("delta_step", "padded outputs unwritten", "t = group; t < T;", "t = group; t < real;"),
    Mutant("delta_step", "no snapshot of a padded token", "t < (EVERY ? T : real)", "t < real"),
    Mutant("delta_step", "a small softplus loses its digits", "metal::log(u) * (e / (u - 1.0f))", "metal::log(u)"),
    Mutant("delta_step", "the lower bound is ignored", "return bounded ?", "return false ?"),
    Mutant("delta_step", "beta is not scaled", "constants[2] * sigmoid_of", "sigmoid_of"),
    Mutant("delta_step", "a shuffle step is missing", "m < LANES", "2 * m < LANES"),
    Mutant("delta_step", "the output's shuffle is too short", "m < LANES", "2 * m < LANES", 1),
    Mutant("delta_step", "every lane subtracts the value", "piece == 0 ? -values", "true ? -values"),
    Mutant("delta_step", "the vector gate of channel 0", "(VECTOR ? (i * LANES + piece) * 4 + c : 0)", "0"),
    Mutant("delta_step", "the first rows again", "matrix + at + ROWS * Dk", "matrix + at"),
    Mutant("delta_step", "sigmoid taken for silu", "SIGMOID ? 1.0f : gate", "1.0f"),
    Mutant("scan/diagonal_scan", "no barrier before the ends are read", BARRIER, ""),
    Mutant("scan/diagonal_scan", "no barrier before the next tile", BARRIER, "", 1),
    Mutant("scan/diagonal_scan", "the last decay for the product", "product *= a[i]", "product = a[i]"),
    Mutant("scan/diagonal_scan", "a segment starts one late", "if (g == group)", "if (g + 1 == group)"),
    Mutant("scan/diagonal_scan", "writes beyond the last channel", "if (mine && t < T)", "if (t < T)"),
    Mutant("scan/diagonal_scan", "lengths ignored", "real = metal::min(int(lengths[b]), T)", "real = T"),
    Mutant("scan/selective_scan", "no barrier after staging", BARRIER, ""),
    Mutant("scan/selective_scan", "no barrier before the outputs", BARRIER, "", 1),
    Mutant("scan/selective_scan", "a shuffle step is missing", "m < LANES", "2 * m < LANES"),
    Mutant("scan/selective_scan", "lengths ignored", "t < real ? float(delta", "t < T ? float(delta"),
    Mutant("scan/selective_scan", "B of the tile's first token", "added * writes[n]", "added * writes[n % N]"),
    Mutant("scan/selective_scan", "writes beyond the last channel", "if (t < T && d < inner)", "if (t < T)"),
    Mutant("short_conv", "a prompt's tile begins with the window", "t < 0 ? float(wp", "i < K ? float(wp"),
    Mutant("short_conv", "lengths ignored", "real = metal::min(int(lengths[b]), T)", "real = T"),
    Mutant("short_conv", "the window begins one early", "real - (K - 1) + i", "real - K + i"),
    Mutant("gated_norm", "no barrier before the sums are read", BARRIER, ""),
    Mutant("gated_norm", "the weight of the first part", "part = row % PARTS * D", "part = 0"),
    Mutant("gated_norm", "the gate twice", "BEFORE ? 1.0f : open[i]", "open[i]"),
]
