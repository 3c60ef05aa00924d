"""What is measured, a row for each program, mode and context; and the file that keeps the rows of an interrupted run."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from ..errors import RequestError
from ..weights.checkpoint import read_json

FORMAT = 1
MEASURED, FILLED, PREDICTED = "measured", "filled", "predicted"


@dataclass(frozen=True)
class Row:
    """One context of one program in one mode. Sizes in bytes; None where there is no number.

    read: tokens of the newest interval, which were read for this row; prefill_tps: how many of those a second.
    decode_ms: median milliseconds of a token.  state_bytes, kv_bytes: what stays the same size, and what grows.
    active_bytes: weights and state together, as MLX counts them.  peak_bytes: the most that MLX held at a time for this row.
    bandwidth_share: bytes that a token cannot do without, over its time, of the copy bandwidth.
    kind: "measured"; "filled": the context was not read, zeros stand in its place; "predicted": not run at all.
    load: processes that wanted to run on this machine, on average over the last minute.
    """

    library: str
    mode: str
    context: int
    read: int
    prefill_tps: float | None
    decode_ms: float | None
    state_bytes: int
    kv_bytes: int
    active_bytes: int
    peak_bytes: int
    bandwidth_share: float | None = None
    kind: str = MEASURED
    load: float | None = None


@dataclass
class Report:
    """All of one bench. ``settings`` and ``machine`` are what rows are comparable within."""

    settings: dict
    machine: dict
    copy_bandwidth: float = 0.0  # bytes read and written a second
    parity: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What was measured."""
        parallel = self.settings.get("parallel")
        return self.settings["model"] + (f" (parallel: {parallel}; bytes are the first rank's)" if parallel else "")

    def find(self, library: str, mode: str, context: int) -> Row | None:
        same = (row for row in self.rows if (row.library, row.mode, row.context) == (library, mode, context))
        return next(same, None)

    def run(self, library: str, mode: str) -> list[Row]:
        """What was really run of one program in one mode, by context."""
        found = [row for row in self.rows if (row.library, row.mode) == (library, mode) and row.kind != PREDICTED]
        return sorted(found, key=lambda row: row.context)

    def json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    def csv(self) -> str:
        text = io.StringIO()
        table = csv.DictWriter(text, [one.name for one in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(row) for row in self.rows)
        return text.getvalue()

    def save(self, name: Path) -> None:
        """NAME.json and NAME.csv, each at once or not at all."""
        write(name.with_name(name.name + ".json"), self.json() + "\n")
        write(name.with_name(name.name + ".csv"), self.csv())

    def resume(self, name: Path) -> None:
        """Take over the rows that an earlier run left in NAME.json; raises RequestError where they are of another kind."""
        file = name.with_name(name.name + ".json")
        if not file.exists():
            return
        found = read_json(file, "a bench")
        try:
            for what, own in (("format", FORMAT), *self.settings.items(), *self.machine.items()):
                held = found if what == "format" else found["settings" if what in self.settings else "machine"]
                if held.get(what) != own:
                    raise RequestError(
                        f"{file}: was measured with {what} {held.get(what)}, this is {own}: give another --output, or delete the file"
                    )
            self.rows = [Row(**row) for row in found["rows"] if row["kind"] != PREDICTED]
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{file}: is not a bench of this version; give another --output") from error


def write(file: Path, content: str | bytes) -> None:
    """At once or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, file)
    except OSError as error:
        raise RequestError(f"{file}: cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)


def ordered(rows: Iterable[Row], modes: Iterable[str]) -> list[Row]:
    """By mode as given, then context, ours before the peer's."""
    place = {mode: i for i, mode in enumerate(modes)}
    return sorted(rows, key=lambda row: (place.get(row.mode, len(place)), row.context, row.library != "mlx_linattn"))
