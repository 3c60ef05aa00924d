"""Commands that keep conversations, bring documents in and take answers out."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_linattn.errors import RequestError, SessionFileError

from .documents import matching, read_text
from .registry import PATH, SESSION, command
from .sessions import Store, private
from .view import shortened, table

if TYPE_CHECKING:
    from .repl import Repl

CLIPBOARDS = (("pbcopy",), ("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input"))
CODE = re.compile(r"^\s*```[^\n]*\n(.*?)^\s*```\s*$", re.DOTALL | re.MULTILINE)
LISTED = 20  # conversations that /load lists


def is_path(text: str) -> bool:
    return os.sep in text or text.startswith("~") or bool(Path(text).suffix)


@command("/save", "[NAME|FILE]", "keep this conversation under a name, or in a file of its own", offers=SESSION)
def save(repl: Repl, rest: str) -> None:
    if rest and is_path(rest):
        with private():
            repl.session.save(rest)
        repl.view.note(f"Saved to {rest}; /load {rest} brings it back.")
        return
    repl.conversation.keep_as(rest or repl.conversation.record.name)
    repl.view.note(
        f"Saved as {repl.conversation.record.name}; mlx-linattn chat --session {shlex.quote(repl.conversation.record.name)} goes on with it."
    )


@command("/load", "[NAME|FILE]", "go on with a kept conversation; alone: list them", ("/sessions",), SESSION)
def load(repl: Repl, rest: str) -> None:
    if not rest:
        repl.view.say(list_sessions(repl.conversation.store, repl.conversation.record.name))
        return
    if is_path(rest) and Path(rest).expanduser().exists():
        repl.resumed(repl.conversation.resume_file(rest))
        return
    repl.resumed(repl.conversation.resume(rest))


def list_sessions(store: Store | None, current: str = ""):
    """The latest conversations, as a table."""
    rows = []
    for name in store.names()[:LISTED] if store else []:
        try:
            record = store.read(name)
        except SessionFileError as error:
            rows.append((name, shortened(error)))
            continue
        day = time.strftime("%b %d %H:%M", time.localtime(record.saved))
        mark = " (this one)" if name == current else ""
        rows.append((name, f"{day}, {len(record.messages)} messages: {shortened(record.title, 40)}{mark}"))
    return table(rows) if rows else "There are no kept conversations yet; /save NAME keeps the one you are in."


@command("/fork", "[NAME]", "go on in a copy; this conversation stays as it is")
def fork(repl: Repl, rest: str) -> None:
    old = repl.conversation.record.name
    repl.conversation.fork(rest)
    repl.view.note(f"Now in {repl.conversation.record.name}; /load {old} goes back.")


@command("/read", "FILE…", "read text files into the conversation; patterns like notes/*.md work", ("/file",), PATH)
def read(repl: Repl, rest: str) -> None:
    repl.read_documents({name: read_text(name) for name in matching(rest)})


@command("/copy", "[code]", "the last answer, or its last block of code, to the clipboard", offers=("code",))
def copy(repl: Repl, rest: str) -> None:
    text = repl.last_answer()
    if rest:
        blocks = CODE.findall(text)
        if rest != "code" or not blocks:
            raise RequestError(
                "the last answer has no block of code"
                if rest == "code"
                else f"/copy wants code or nothing, got {rest!r}"
            )
        text = blocks[-1]
    for tool in CLIPBOARDS:
        if shutil.which(tool[0]):
            done = subprocess.run(tool, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if done.returncode == 0:
                repl.view.note(f"Copied {len(text):,} characters.")
                return
    if not repl.view.live:
        raise RequestError(
            f"there is no clipboard tool here: install one of {', '.join(tool[0] for tool in CLIPBOARDS)}"
        )
    # Many terminals take the clipboard's content in an escape sequence, through ssh as well.
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
    sys.stdout.flush()
    repl.view.note(f"Sent {len(text):,} characters to the terminal's clipboard.")


@command("/export", "[FILE]", "write the conversation as Markdown, or as JSON where FILE ends in .json", offers=PATH)
def export(repl: Repl, rest: str) -> None:
    if not repl.session.messages:
        raise RequestError("there is nothing to export yet")
    file = Path(rest or f"{repl.conversation.record.name}.md").expanduser()
    if file.exists():
        raise RequestError(f"{file} exists already: choose another name")
    system = [{"role": "system", "content": repl.session.system}] if repl.session.system else []
    messages = [*system, *repl.session.messages]
    if file.suffix == ".json":
        text = (
            json.dumps({"model": repl.conversation.model_id, "messages": messages}, ensure_ascii=False, indent=1) + "\n"
        )
    else:
        heads = {"user": "You", "assistant": repl.conversation.model_name, "system": "System"}
        text = "\n".join(
            f"## {heads.get(one['role'], one['role'])}\n\n{one.get('content') or ''}\n" for one in messages
        )
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise RequestError(f"{file}: cannot be written ({error.strerror or error})") from error
    repl.view.note(f"Wrote {len(messages)} messages to {file}.")
