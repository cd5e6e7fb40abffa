"""Callers who leave: what ran for them ends within two seconds, wherever it was."""

from __future__ import annotations

import http.client
import json
from contextlib import closing

import pytest

from tests.serve.conftest import NAME, slowly, until


def opened(server, **options):
    connection = http.client.HTTPConnection("127.0.0.1", server.listener.port, timeout=10)
    body = {"model": NAME, "prompt": "Der Server", "max_tokens": 400, "temperature": 0,
            "ignore_eos": True, **options}  # fmt: skip
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    return connection


def all_free(server):
    stats, books = server.service.engine.stats(), server.service.loop.books
    return (
        books.running == stats.num_running == stats.num_waiting == 0
        and stats.num_free_blocks == stats.num_blocks
    )


def test_after_the_first_chunk(server):
    before = server.service.loop.books.aborted
    with closing(opened(server, stream=True)) as connection:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        assert server.service.loop.books.running == 1
        response.close()
    assert until(lambda: all_free(server))
    assert server.service.loop.books.aborted == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_while_the_prompt_is_being_read(server, stream):
    before = server.service.loop.books.aborted
    with slowly(server):
        connection = opened(server, prompt=[5] * 500, max_tokens=2, stream=stream)
        assert until(lambda: server.service.engine.stats().num_running == 1)
        connection.close()
        assert until(lambda: all_free(server))
    assert server.service.loop.books.aborted == before + 1


def test_fifty_at_once_while_most_still_wait(server):
    before = server.service.loop.books.aborted
    with slowly(server):
        connections = [opened(server, stream=number % 2 == 0) for number in range(50)]
        assert until(lambda: server.service.loop.books.running == 50, 5)
        for connection in connections:
            connection.close()
        assert until(lambda: all_free(server), 3)
    assert server.service.loop.books.aborted == before + 50


def test_one_who_leaves_changes_nothing_for_the_others(server, complete):
    alone = complete(max_tokens=40, ignore_eos=True).json()["choices"]
    connection = opened(server, stream=True)
    connection.getresponse().readline()
    other = opened(server, max_tokens=40)
    connection.close()
    assert json.loads(other.getresponse().read())["choices"][0]["text"] == alone[0]["text"]
    other.close()
