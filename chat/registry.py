"""The chat's commands in one place: name, aliases, argument, help, handler, and what Tab offers for the argument."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable
from dataclasses import dataclass

from .lines import last_word

PATH, SESSION, COMMAND = "path", "session", "command"
Handler = Callable[..., None]  # takes the chat (a Repl), and the rest of the line


@dataclass(frozen=True)
class Command:
    name: str
    argument: str
    help: str
    handler: Handler
    aliases: tuple[str, ...] = ()
    offers: str | tuple[str, ...] = ()  # PATH, SESSION, COMMAND, or the words there are


REGISTRY: dict[str, Command] = {}


def command(name: str, argument: str, help: str, aliases: tuple[str, ...] = (), offers: str | tuple[str, ...] = ()):
    """Register a handler."""

    def register(handler: Handler):
        REGISTRY[name] = Command(name, argument, help, handler, aliases, offers)
        return handler

    return register


def find(name: str) -> Command | None:
    if name in REGISTRY:
        return REGISTRY[name]
    return next((one for one in REGISTRY.values() if name in one.aliases), None)


def nearest(name: str) -> str:
    """The command that somebody who typed ``name`` most likely meant."""
    names = [*REGISTRY, *(alias for one in REGISTRY.values() for alias in one.aliases)]
    begun = [one for one in REGISTRY if one.startswith(name)] if len(name) > 1 else ["/help"]
    best = begun or difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return find(best[0]).name


def completions(line: str, sessions: Callable[[], list[str]]) -> list[str]:
    """What could stand in place of the last word of ``line``."""
    if not line.startswith("/") or line.startswith("//"):
        return []
    word = last_word(line)
    if word == line:
        return [name for name in REGISTRY if name.startswith(line)]
    known = find(line.partition(" ")[0])
    if known is None:
        return []
    if known.offers == PATH:
        found = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
        return [path + os.sep if os.path.isdir(path) else path for path in found]
    if known.offers == COMMAND:
        offers = list(REGISTRY)
    else:
        offers = sessions() if known.offers == SESSION else list(known.offers)
    return [one for one in offers if one.startswith(word)]
