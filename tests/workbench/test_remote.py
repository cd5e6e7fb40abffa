"""A service by its address and key, before anything is sent."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from workbench.remote import Remote


@pytest.mark.parametrize("key", ["one\ntwo", "schlüssel", "two words", "tab\t", "€"])
def test_a_key_that_http_would_refuse_is_refused_without_being_shown(key):
    with pytest.raises(ConfigError) as refused:
        Remote("http://127.0.0.1:9", key)
    assert key not in str(refused.value) and "ASCII" in str(refused.value)


def test_an_address_must_be_one_and_a_key_may_be_missing():
    with pytest.raises(ConfigError, match="must be like"):
        Remote("127.0.0.1:9", "trw_op_9k-x")
    for key in (None, "", "trw_op_9k-x"):
        with Remote("http://127.0.0.1:9/v1/", key) as remote:
            assert remote.url == "http://127.0.0.1:9"
