"""Token ids as bytes."""

from __future__ import annotations

import pytest

from headwater.tokens import TOKEN_BYTES, pack, unpack


def test_ids_come_back_and_are_little_endian_on_the_wire() -> None:
    ids = [0, 1, 258, 2**32 - 1]
    assert pack(ids) == b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x01\x00\x00\xff\xff\xff\xff"
    assert list(unpack(pack(ids))) == ids
    assert len(pack(range(7))) == 7 * TOKEN_BYTES
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"abc")
