"""Keys, other sites' pages, clients that leave or never finish."""

import asyncio
import json
import socket

import httpx
import pytest
from server.fake import DONE, PLAIN, FakeEngine
from server.running import CHAT, USER, problem, serving
from threads import eventually

from mlx_linattn.engine.types import Progress, Text


def test_a_key_is_asked_for():
    with serving(FakeEngine(), api_key="s3cret-ü") as url, httpx.Client(base_url=url, timeout=20) as client:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret-ü".encode()}):
            problem(client.get("/v1/models", headers=header), 401, "invalid_api_key")
            problem(client.post(CHAT, json={"messages": USER}, headers=header), 401, "invalid_api_key")
        assert client.get("/v1/models", headers={"Authorization": "Bearer s3cret-ü".encode()}).status_code == 200
        assert client.get("/health").status_code == 200


def test_named_pages_may_ask():
    with serving(FakeEngine(), origins=["https://chat.example"], api_key="k") as url:
        asking = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        answer = httpx.options(url + CHAT, headers={**asking, "Access-Control-Request-Headers": "authorization"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://chat.example"
        answer = httpx.options(url + CHAT, headers={**asking, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_a_comment_keeps_the_connection_while_the_prompt_is_read():
    gate = asyncio.Event()
    engine = FakeEngine([Progress(512, 2048), gate, *PLAIN])
    with (
        serving(engine, keep_alive=0.02) as url,
        httpx.stream("POST", url + CHAT, json={"messages": USER, "stream": True}, timeout=20) as answer,
    ):
        lines = answer.iter_lines()
        comments = []
        while len(comments) < 3:
            line = next(lines)
            comments += [line] if line.startswith(":") else []
        assert comments == [": prompt 512/2048", ": waiting", ": waiting"]
        gate._loop.call_soon_threadsafe(gate.set)
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(stream):
    engine = FakeEngine([Text("Hel"), asyncio.Event(), DONE])
    with serving(engine, keep_alive=60) as url:
        body = json.dumps({"messages": USER, "stream": stream}).encode()
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            if stream:
                while b"Hel" not in connection.recv(65536):
                    pass
            else:
                eventually(lambda: engine.open == 1)
        eventually(lambda: engine.open == 0)
    assert engine.closed


def test_a_body_that_does_not_arrive_is_not_waited_for():
    with serving(FakeEngine(), body_seconds=0.05) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode()
            )
            assert b" 408 " in connection.recv(65536)
