"""The plug-in for ``llm``, through llm's own interface and command line."""

import json
import os
import subprocess
import sys

import click
import llm
import pytest
from click.testing import CliRunner
from llm.cli import cli
from llm.parts import AttachmentPart, Message
from llm.plugins import load_plugins, pm

from mlx_linattn.interop import llm_plugin
from mlx_linattn.session import Session

FACT, QUESTION, ANSWER = "My dog is called Pepper.", "What is my dog's name?", "Your dog's name is Pepper."


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    """llm with our plug-in alone, and a folder of its own."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setattr("llm.plugins.LLM_LOAD_PLUGINS", "")
    load_plugins()
    ours = pm.get_plugin("mlx_linattn") or llm_plugin
    if not pm.is_registered(ours):
        pm.register(ours, "mlx_linattn")
    yield tmp_path
    pm.unregister(ours)


def test_a_conversation_reads_only_what_is_new(plugged):
    conversation = llm.get_model("linattn/demo").conversation()
    conversation.prompt(FACT, stream=False).text()
    second = conversation.prompt(QUESTION)
    assert "".join(second) == ANSWER
    assert second.input_tokens > 40 and second.output_tokens > 5
    assert second.response_json["finish_reason"] == "stop" and second.response_json["reused_tokens"] >= 10
    assert json.loads(json.dumps(second.token_details)) == {
        "prompt_tokens_details": {"cached_tokens": second.response_json["reused_tokens"]}
    }


def test_prompts_without_a_conversation_know_nothing_of_each_other(plugged):
    model = llm.get_model("linattn/demo")
    assert model.prompt(f"{FACT} {QUESTION}").text() == ANSWER
    assert "Pepper" not in model.prompt(QUESTION).text()
    cut = model.prompt(f"{FACT} {QUESTION}", max_tokens=2)
    assert ANSWER.startswith(cut.text()) and cut.response_json["finish_reason"] == "length"


def test_reasoning_is_told_apart_and_can_be_hidden(plugged, monkeypatch):
    real = Session.stream

    def thinking(self, *args, **kwargs):
        for i, piece in enumerate(real(self, *args, **kwargs)):
            piece.kind = "reasoning" if i == 0 else "text"
            yield piece

    monkeypatch.setattr(Session, "stream", thinking)
    model = llm.get_model("linattn/demo")
    kinds = [event.type for event in model.prompt(f"{FACT} {QUESTION}").stream_events()]
    assert kinds[0] == "reasoning" and set(kinds[1:]) == {"text"}
    hidden = [event.type for event in model.prompt(f"{FACT} {QUESTION}", hide_reasoning=True).stream_events()]
    assert set(hidden) == {"text"}


def test_what_it_cannot_do_is_said(plugged):
    conversation = llm.get_model("linattn/demo").conversation()
    picture = Message(role="user", parts=[AttachmentPart(attachment=llm.Attachment(url="https://example.com/a.png"))])
    with pytest.raises(llm.ModelError, match="text only"):
        conversation.prompt("hi", messages=[picture]).text()
    with pytest.raises(llm.ModelError, match="no such folder"):
        llm_plugin.LinAttnModel("./nothing").prompt("hi").text()


def test_models_are_added_and_removed(plugged):
    run = CliRunner().invoke
    known = [model.model_id for model in llm.get_models()]
    assert "linattn/demo" in known
    commands = click.Group("test")
    llm_plugin.register_commands(commands)
    assert "linattn/./mine" in run(commands, ["linattn", "add", "./mine"]).output
    assert "linattn/./mine" in [model.model_id for model in llm.get_models()]
    assert run(commands, ["linattn", "remove", "./mine"]).exit_code == 0
    assert "was not added" in run(commands, ["linattn", "remove", "./mine"]).output
    (plugged / llm_plugin.LIST).write_text("{", encoding="utf-8")
    assert "delete it and add" in run(cli, ["models", "list"]).output


def test_llm_starts_without_loading_mlx(tmp_path):
    """llm reads every plug-in at each of its commands."""
    program = (
        "import sys, mlx_linattn.interop.llm_plugin; "
        "sys.exit(bool({'mlx', 'mlx_lm', 'transformers'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "LLM_USER_PATH": str(tmp_path)}).returncode
        == 0
    )
