"""Sessions on disk: one safetensors file, with everything that is not an array as JSON in its header. No pickle.

    header    format, version; "session": messages, tokens, options, fingerprints, which array belongs where; two digests
    arrays    the state, and the recurrent arrays of the latest checkpoints at messages

The header alone is enough for the messages, so they survive whatever happens to the arrays behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx

from ..errors import RequestError, SessionFileError
from ..state import ModelState
from . import archive
from .archive import Kind
from .timeline import Checkpoint, Timeline

CHECKPOINTS = 4  # latest ones that are kept, besides the first; each is as large as the recurrent state
KIND = Kind("session", 1)


def write(path: str | Path, session: dict, timeline: Timeline) -> None:
    """Write ``session`` (what JSON can hold) and its timeline to ``path``, at once or not at all."""
    path = Path(path).expanduser()
    arrays: dict[str, mx.array] = {}
    names: dict[int, str] = {}  # arrays that checkpoints share are written once

    def place(name: str, parts: Iterable[mx.array | None] | int) -> list[str | None] | int:
        if isinstance(parts, int):
            return parts
        found: list[str | None] = []
        for i, array in enumerate(parts):
            if array is not None and id(array) not in names:
                names[id(array)] = f"{name}.{i}"
                arrays[f"{name}.{i}"] = array
            found.append(None if array is None else names[id(array)])
        return found

    kept = _worth_keeping(timeline)
    state, *snapshots = timeline.state.dump([one.snapshot for one in kept])
    session = {
        **session,
        "tokens": timeline.tokens,
        "state": [place(f"state.{i}", part) for i, part in enumerate(state)],
        "checkpoints": [
            {
                "position": one.position,
                "layers": [place(f"checkpoint.{one.position}.{i}", part) for i, part in enumerate(layers)],
            }
            for one, layers in zip(kept, snapshots)
        ],
    }
    try:
        text = json.dumps(session)
    except (TypeError, ValueError) as error:
        raise RequestError(f"a message or template argument cannot be written as JSON: {error}") from error
    archive.write(path, KIND, text, arrays)


def _worth_keeping(timeline: Timeline) -> list[Checkpoint]:
    boundaries = [one for one in timeline.checkpoints if one.boundary and timeline.state.reaches(one.snapshot)]
    return boundaries[:1] + boundaries[1:][-CHECKPOINTS:]


def read_session(path: str | Path) -> dict:
    """What the header of a session file holds: messages and the rest, no arrays. Raises SessionFileError."""
    return archive.read_header(Path(path).expanduser(), KIND).data


def read_timeline(path: str | Path, state: ModelState, room: int) -> Timeline:
    """The timeline of a session file, in ``state``, which is empty and of the right model. Raises SessionFileError."""
    path = Path(path).expanduser()
    header = archive.read_header(path, KIND)
    keep = "its messages are whole: load it with state=False to keep them"
    try:
        arrays = archive.read_arrays(path, header)
        return _rebuild(header.data, arrays, state, room)
    except SessionFileError as error:
        raise SessionFileError(f"{error}; {keep}") from error
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise SessionFileError(f"{path}: its state cannot be read ({error}); {keep}") from error


def _rebuild(session: dict, arrays: dict, state: ModelState, room: int) -> Timeline:
    def take(names) -> list[mx.array | None] | int:
        return names if isinstance(names, int) else [None if name is None else arrays[name] for name in names]

    timeline = Timeline(state, room)
    timeline.tokens = [int(token) for token in session["tokens"]]
    length = len(timeline.tokens)
    if len(session["state"]) != len(state):
        raise ValueError(f"it has {len(session['state'])} layers, the model {len(state)}")
    if length:
        moments = [([take(names) for names in one["layers"]], one["position"]) for one in session["checkpoints"]]
        snapshots = state.load([take(names) for names in session["state"]], length, moments)
        timeline.checkpoints = [Checkpoint(snapshot, True) for snapshot in snapshots]
    return timeline
