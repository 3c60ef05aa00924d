"""Whether a result may be trusted: its tensors against the source's, and what both models say about the same text."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx

from mlx_linattn import arch
from mlx_linattn.budget import working_set
from mlx_linattn.errors import ConvertError, RequestError, TokenizerError
from mlx_linattn.loading import load_tokenizer
from mlx_linattn.weights import Tensors
from mlx_linattn.weights.checkpoint import Checkpoint

from .audit import Loss, audit
from .plan import Plan
from .quality import Quality, compare, memory_needed, rows_of
from .table import size
from .text import TEXT

WORST = 5
RANDOM_TOKENS = 128


@dataclass(frozen=True)
class Verification:
    tensors: int  # that were read back and compared
    losses: tuple[Loss, ...]  # of the quantized ones, the worst first
    text: str  # what the models read, or why they did not
    quality: Quality | None

    def report(self) -> dict:
        """For conversion_report.json."""
        found = {"tensors_checked": self.tensors, "worst_tensors": [asdict(loss) for loss in self.losses[:WORST]]}
        found["text"] = self.text
        if self.quality is not None:
            found["quality"] = {k: v for k, v in asdict(self.quality).items() if k != "layer_errors"}
            found["worst_layers"] = dict(self.worst_layers())
        return found

    def worst_layers(self) -> list[tuple[str, float]]:
        errors = self.quality.layer_errors if self.quality else {}
        return sorted(errors.items(), key=lambda item: -item[1])[:WORST]

    def summary(self) -> str:
        """A few lines for people."""
        lines = [f"verified: {self.tensors} tensors are what they were made from"]
        q = self.quality
        if q is None:
            return "\n".join([*lines, f"not compared on text: {self.text}"])
        lines.append(
            f"on {q.tokens} tokens of {self.text}: KL mean {q.mean_kl:.2g}, 95 % below {q.kl_95:.2g}, max {q.max_kl:.2g}; "
            f"same best token {q.top_1_agreement:.1%}; perplexity {q.source_perplexity:.4g} -> {q.perplexity:.4g}"
        )
        if self.losses:
            worst = ", ".join(f"{name} {error:.1%}" for name, error in self.worst_layers()[:3])
            lines.append(f"layers that changed most: {worst}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """What to verify."""

    calibration: Path | None = None  # read after the bundled text
    max_kl: float | None = None  # mean KL above which the result is refused

    def __post_init__(self) -> None:
        if self.calibration is not None and not self.calibration.is_file():
            raise RequestError(f"{self.calibration}: no such file of calibration text")


def verify(plan: Plan, source: Tensors, folder: Path, config: dict, check: Check) -> Verification:
    """Raises ConvertError where the result in ``folder`` is wrong, or further from the source than ``check`` allows."""
    checkpoint = Checkpoint(folder, config)
    family = arch.family(config)
    losses = tuple(audit(plan, source, Tensors(checkpoint, family, family.spec(config))))
    source.checkpoint.close()
    checkpoint.close()
    ids, text = tokens(source.checkpoint, check)
    needed, here = memory_needed(plan, ids.size), working_set()
    if needed > 0.8 * here:
        text = f"that takes {size(needed)}, this machine has {size(here)}"
        quality = None
    else:
        quality = compare(source.checkpoint, checkpoint, ids)
    if check.max_kl is not None and (quality is None or not quality.mean_kl <= check.max_kl):
        got = "was not measured" if quality is None else f"is {quality.mean_kl:.3g}"
        raise ConvertError(
            f"the mean KL divergence from the source {got}, allowed is {check.max_kl:g} ({text}); what was written stays "
            f"in {folder}: start again and allow more to keep it, or delete it"
        )
    return Verification(len(plan.entries), losses, text, quality)


def tokens(source: Checkpoint, check: Check) -> tuple[mx.array, str]:
    """What to read: real text where the source has a tokenizer."""
    try:
        tokenizer = load_tokenizer(source.folder, copy.deepcopy(source.config))
    except TokenizerError:
        if check.calibration is not None:
            raise
        family = arch.family(source.config)
        vocabulary = family.spec(source.config).vocab_size
        ids = mx.random.randint(0, vocabulary, (1, RANDOM_TOKENS), key=mx.random.key(0))
        return ids, "random tokens (no tokenizer)"
    text, what = TEXT, "bundled text"
    if check.calibration is not None:
        try:
            text = check.calibration.read_text(encoding="utf-8") + "\n" + TEXT
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{check.calibration}: cannot be read as text ({error})") from error
        what = f"{check.calibration.name} and bundled text"
    return rows_of(list(tokenizer.encode(text))), what
