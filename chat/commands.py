"""Commands that change the conversation, the settings or the model, or show how things stand."""

from __future__ import annotations

import difflib
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from mlx_linattn.errors import LinAttnError, RequestError

from .documents import read_text
from .footer import memory_chart, statistics
from .registry import COMMAND, REGISTRY, command, find
from .sessions import private
from .settings import NAMES, NUMBERS, SWITCHES, switch
from .view import shortened, table

if TYPE_CHECKING:
    from .repl import Repl

HINT = (
    'Alt-Enter, or \\ at the end of a line, begins a new line; """ opens and closes a block; // sends a literal slash.'
)


@command("/help", "[COMMAND]", "what there is, or what one command does", ("/?", "/h"), COMMAND)
def help_(repl: Repl, rest: str) -> None:
    if rest:
        name = rest if rest.startswith("/") else f"/{rest}"
        one = find(name)
        if one is None:
            raise RequestError(f"there is no command {name}: /help lists them")
        also = f" (also {', '.join(one.aliases)})" if one.aliases else ""
        repl.view.say(f"{one.name} {one.argument}".rstrip() + f": {one.help}{also}")
        return
    repl.view.say(table((f"{one.name} {one.argument}".rstrip(), one.help) for one in REGISTRY.values()))
    repl.view.note(HINT)


@command("/exit", "", "leave; the conversation is kept (also Ctrl-D)", ("/quit", "/bye", "/q"))
def exit_(repl: Repl, rest: str) -> None:
    repl.done = True


@command("/clear", "", "begin a new conversation; the system prompt stays, the old one is kept", ("/new", "/reset"))
def clear(repl: Repl, rest: str) -> None:
    repl.conversation.begin_anew()
    repl.view.note("The conversation is forgotten: a new one begins.")


@command("/system", "[TEXT|@FILE]", "show or set the system prompt; /system - removes it")
def system(repl: Repl, rest: str) -> None:
    if rest.startswith("@"):
        rest = read_text(rest[1:].strip()).strip()
    if rest:
        repl.session.system = None if rest == "-" else rest
        repl.conversation.autosave()
    repl.view.say(f"System prompt: {repl.session.system or '(none)'}")


@command("/set", "[NAME VALUE]", "show or change a setting", offers=tuple(NAMES))
def set_(repl: Repl, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name, value = name.lower().replace("-", "_"), value.strip()
    if not name:
        values = {key: getattr(repl.settings, key) for key in NAMES if key != "think"}
        values["think"] = repl.session.template.get("enable_thinking", "as the model's template has it")
        meaning = {key: row[3] for key, row in NUMBERS.items()} | SWITCHES
        repl.view.say(table((f"{key} {shown(value)}", meaning[key]) for key, value in values.items()))
        return
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)
        raise RequestError(f"there is no setting {name!r}; nearest: {near[0]} (/set lists them)")
    if not value:
        raise RequestError(f"/set {name} wants a value; /set alone lists what there is")
    if name == "think":
        think(repl, value)
        return
    if name in NUMBERS:
        repl.settings.number(name, value)
    else:
        setattr(repl.settings, name, switch(name, value))
    repl.view.note(f"{name} is {value} now.")


@command("/undo", "[N]", "take back the last N turns (1)")
def undo(repl: Repl, rest: str) -> None:
    try:
        n = int(rest or 1)
    except ValueError as error:
        raise RequestError(f"/undo wants a number of turns, got {rest!r}") from error
    gone = repl.session.undo(n)
    repl.conversation.autosave()
    repl.view.note(f"Taken back: {shortened(gone[0].get('content'))}  (/redo puts it back)")


@command("/redo", "", "put back what /undo took")
def redo(repl: Repl, rest: str) -> None:
    back = repl.session.redo()
    repl.conversation.autosave()
    repl.view.note(f"Back again: {shortened(back[0].get('content'))}")


@command("/retry", "", "another answer to the last question", ("/regen",))
def retry(repl: Repl, rest: str) -> None:
    if repl.settings.temp == 0:
        repl.view.note("(temp is 0, so the answer will be the same; /set temp 0.7 makes others possible)")
    repl.answer(repl.session.stream_retry)


@command("/edit", "[TEXT]", "change the last question, in $EDITOR or to TEXT, and answer it")
def edit(repl: Repl, rest: str) -> None:
    asked = [i for i, message in enumerate(repl.session.messages) if message.get("role") == "user"]
    if not asked:
        raise RequestError("there is no question to edit yet")
    old = str(repl.session.messages[asked[-1]].get("content") or "")
    new = rest or _in_editor(old)
    if not new.strip() or new == old:
        repl.view.note("Nothing was changed.")
        return
    repl.session.edit(asked[-1], new)
    repl.answer(repl.session.stream)


def _in_editor(text: str) -> str:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with private(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "question.md"
        file.write_text(text + "\n", "utf-8")
        try:
            done = subprocess.run([*shlex.split(editor), str(file)])
        except (OSError, ValueError) as error:
            raise RequestError(
                f"the editor {editor!r} cannot be started ({error}): set EDITOR, or /edit TEXT"
            ) from error
        if done.returncode:
            raise RequestError(f"the editor {editor!r} ended with status {done.returncode}: nothing was changed")
        return file.read_text("utf-8", errors="replace").rstrip("\n")


@command("/continue", "", "go on with the last answer, where it was cut short")
def continue_(repl: Repl, rest: str) -> None:
    repl.answer(repl.session.stream_continue)


@command("/think", "on|off|show|fold", "let the model think or not; show its thoughts or fold them", offers=("on", "off", "show", "fold"))  # fmt: skip
def think(repl: Repl, rest: str) -> None:
    word = rest.lower()
    if word in ("show", "fold"):
        repl.view.fold = word == "fold"
        thought = next((one.get("reasoning_content") for one in reversed(repl.session.messages) if one.get("role") == "assistant"), None)  # fmt: skip
        if word == "show" and thought:
            repl.view.say(Text(thought, style="dim italic"))
        repl.view.note("Thoughts are folded to one line." if repl.view.fold else "Thoughts are shown.")
        return
    if word in ("on", "off"):
        if not repl.session.tokenizer.has_thinking:
            raise RequestError(
                f"{repl.conversation.model_name} does not think: its vocabulary has no marks for thoughts"
            )
        template = getattr(repl.session.tokenizer, "chat_template", None)
        if isinstance(template, str) and "enable_thinking" not in template:
            raise RequestError(f"the chat template of {repl.conversation.model_name} has no switch for thinking")
        repl.session.template["enable_thinking"] = word == "on"
        repl.conversation.autosave()
    elif word:
        raise RequestError(f"/think wants on, off, show or fold, got {rest!r}")
    now = shown(repl.session.template.get("enable_thinking", "as the model's template has it"))
    repl.view.note(f"Thinking: {now}; thoughts are {'folded' if repl.view.fold else 'shown'}.")


@command("/stats", "", "counts, speeds and memory so far")
def stats(repl: Repl, rest: str) -> None:
    repl.view.say(table(statistics(repl.conversation.model_name, repl.session, repl.conversation.totals)))


@command("/memory", "", "state and cache against the context's length, as a chart")
def memory(repl: Repl, rest: str) -> None:
    repl.view.say(memory_chart(repl.session, repl.view.err.width))


@command("/model", "[MODEL]", "show the model, or go on with another one")
def model(repl: Repl, rest: str) -> None:
    if not rest:
        repl.view.say(f"Model: {repl.conversation.model_id} (another: /model FOLDER or /model ORG/NAME)")
        return
    began = time.perf_counter()
    try:
        repl.conversation.change_model(rest)
    except LinAttnError as error:
        raise RequestError(f"{error}; going on with {repl.conversation.model_id}") from error
    repl.view.note(
        f"{repl.conversation.model_name} loaded in {time.perf_counter() - began:.1f} s; it reads the conversation at your next turn."
    )


def shown(value) -> str:
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
