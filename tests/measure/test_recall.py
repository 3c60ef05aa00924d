"""``mlx-linattn recall``: the same dialogues in every mode, distances that are true, and nothing read twice."""

import json
from itertools import islice

import pytest

from mlx_linattn import cli, load
from mlx_linattn.bench import recall
from mlx_linattn.bench.dialogues import KINDS, dialogue, prose, sentences_of
from mlx_linattn.session import Session
from mlx_linattn.state import KVOptions


@pytest.fixture(scope="module")
def demo():
    return load("demo", dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_dialogues_tell_the_value_that_they_ask_for(kind):
    for seed in range(40):
        talk = dialogue(kind, seed)
        assert talk == dialogue(kind, seed)
        told = [message["content"] for message in talk.told if message["role"] == "user"]
        asked = talk.question.removeprefix("What is ").removesuffix("?")
        says = [line for line in told if asked.lower() in line.lower()]
        assert recall.is_right(says[-1], talk.value), talk
        assert sum(recall.is_right(line, talk.value) for line in told) == 1, "another line has the value too"
        assert len(told) == {"needle": 1, "overwritten": 2, "multi-key": 4}[kind]
        if kind == "multi-key":
            assert len(says) == 1
    assert len({dialogue(kind, seed).value for seed in range(40)}) > 10


def test_what_is_read_in_between_says_none_of_the_values():
    text = " ".join(islice(prose(3), 400))
    assert text == " ".join(islice(prose(3), 400)) and len(set(text.split(". "))) > 390
    for kind in KINDS:
        for seed in range(40):
            value = dialogue(kind, seed).value
            assert value.isdecimal() or not recall.is_right(text, value)
    assert list(islice(sentences_of("a\n\nb\nc", 1), 6)) in (["a", "b", "c"] * 2, ["b", "c", "a", "b", "c", "a"], ["c", "a", "b", "c", "a", "b"])  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "value", "right"),
    [
        ("It is 4821.", "4821", True),
        ("It is 48210.", "4821", False),
        ("It is 94821.", "4821", False),
        ("Your dog's name is Pepper", "Pepper", True),
        ("Peppermint", "Pepper", False),
        ("pepper", "Pepper", False),
        ("", "red", False),
    ],
)
def test_only_the_exact_value_counts(answer, value, right):
    assert recall.is_right(answer, value) is right


def test_distances_are_true_and_nothing_is_read_twice(demo, monkeypatch):
    turns, send = [], Session.send

    def watched(self, *arguments, **options):
        answer = send(self, *arguments, **options)
        turns.append((self.last.prompt_tokens, self.last.prefilled_tokens))
        return answer

    monkeypatch.setattr(Session, "send", watched)
    model, tokenizer = demo
    talk, distances = dialogue("needle", 0), (64, 256, 512)
    answers = list(
        recall.ask(model, tokenizer, talk, prose(0), distances, KVOptions(max_kv_size=128), mode="constant", seed=0,
                   max_tokens=32, limit=None, template={}, progress=lambda done: None)
    )  # fmt: skip
    assert [(one.distance, one.right) for one in answers] == [(64, True), (256, True), (512, True)]
    without = tokenizer.apply_chat_template(
        [*talk.told, {"role": "user", "content": talk.question}], add_generation_prompt=True
    )
    for (prompt, _), distance in zip(turns, distances):
        assert prompt - len(without) == pytest.approx(distance, abs=max(24, 0.05 * distance))
    read = sum(prefilled for _, prefilled in turns)
    assert read < turns[-1][0] + 3 * 40, "between two questions more was read than what came in between"


def test_the_command_prints_blocks_and_writes_every_answer(tmp_path, capsys):
    command = "recall --kinds needle,overwritten --modes exact,constant --n 1 --distances 48,96 --max-kv-size 64 --dtype float32 -o"
    assert cli.main([*command.split(), str(tmp_path / "out")]) == 0
    out, _ = capsys.readouterr()
    assert "1/1" in out and "overwritten" in out and "96" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["answers"]) == 8 and len(found["cells"]) == 8
    assert all(one["asked"] == 1 for one in found["cells"])
    assert all(one["right"] == recall.is_right(one["answer"], one["value"]) for one in found["answers"])
    assert (tmp_path / "out.csv").read_text().startswith("mode,kind,distance,right,asked\nexact,needle,48,")
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_an_interrupt_keeps_what_was_asked(monkeypatch, capsys):
    ask = recall.ask

    def interrupted(*arguments, seed, **options):
        if seed == 1:
            raise KeyboardInterrupt
        return ask(*arguments, seed=seed, **options)

    monkeypatch.setattr(recall, "ask", interrupted)
    assert cli.main("recall --kinds needle --modes exact --n 3 --distances 48 --json".split()) == 130
    out, err = capsys.readouterr()
    assert len(json.loads(out)["answers"]) == 1 and "stopped" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kinds", "needles"), "'needles' is not known"),
        (("--kinds", ""), "is not known"),
        (("--n", "0"), "--n is 0"),
        (("--max-tokens", "0"), "--max-tokens is 0"),
        (("--text", "/no/such/file"), "cannot be read"),
        (("--modes", "all"), "'all' is not known"),
        (("--output", "/no/such/folder/out"), "there is no folder"),
        (("--chat-template-config", "["), "not JSON"),
        (("/no/such/model",), "no such folder"),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, words, capsys):
    assert cli.main(["recall", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
