"""Keys are compared in constant time: by `hmac.compare_digest` alone, once for whoever comes."""

from __future__ import annotations

import hmac

import pytest

from engine.serve import auth
from engine.serve.auth import Keys, add_key


class Shy(bytes):
    """A digest that refuses to be compared byte by byte until the first difference."""

    def __eq__(self, other):
        raise AssertionError("compared with ==, which stops at the first difference")

    __ne__ = __eq__
    __hash__ = None


@pytest.mark.parametrize(
    ("shown", "good"),
    [
        ("{key}", True),
        ("{key}x", False),
        ("trw_operator_wrong", False),
        ("trw_nobody_wrong", False),
        ("", False),
    ],
)
def test_every_key_is_compared_once_and_in_constant_time(tmp_path, monkeypatch, shown, good):
    key = add_key(tmp_path / "keys", "operator", ["operate"])
    keys, digest, compare = Keys.read(tmp_path / "keys"), auth._digest, hmac.compare_digest
    compared = []

    def noted(one, other):
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(auth, "_digest", lambda *parts: Shy(digest(*parts)))
    monkeypatch.setattr(hmac, "compare_digest", noted)
    caller = keys.caller(f"Bearer {shown.format(key=key)}")
    assert (caller is not None) == good
    assert compared == [(32, 32)], "an unknown name must cost as much as a wrong secret"
