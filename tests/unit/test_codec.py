"""What payloads look like in Temporal, and who can read them."""

from __future__ import annotations

import base64
import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.api.common.v1 import Payload

from perdure.codec import COMPRESS_ABOVE, Codec, PayloadKeyError, parse_keys

OLD, NEW = b"o" * 32, b"n" * 32


def plain(data: bytes) -> Payload:
    return Payload(metadata={"encoding": b"json/plain", "own": b"kept"}, data=data)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=20_000), keys=st.sampled_from([(), (OLD,), (NEW, OLD)]))
async def test_what_goes_in_comes_out(data: bytes, keys: tuple[bytes, ...]) -> None:
    codec = Codec(keys)
    (sealed,) = await codec.encode([plain(data)])
    assert await codec.decode([sealed]) == [plain(data)]


async def test_only_what_is_large_is_compressed() -> None:
    small, large = await Codec().encode([plain(b"a" * COMPRESS_ABOVE), plain(b"a" * (COMPRESS_ABOVE + 1))])
    assert small == plain(b"a" * COMPRESS_ABOVE)
    assert large.metadata["encoding"] == b"binary/zlib"
    assert len(large.data) < 200


async def test_what_does_not_compress_is_left_as_it_is() -> None:
    noise = plain(os.urandom(COMPRESS_ABOVE * 4))
    assert await Codec().encode([noise]) == [noise]


async def test_nothing_of_a_sealed_payload_can_be_read() -> None:
    codec = Codec([NEW])
    first, second = await codec.encode([plain(b"the prompt"), plain(b"the prompt")])
    for sealed in (first, second):
        assert set(sealed.metadata) == {"encoding", "key-id"}
        assert b"prompt" not in sealed.SerializeToString()
    assert first.data != second.data, "each has a nonce of its own"


async def test_a_retired_key_still_reads_and_never_writes() -> None:
    (before,) = await Codec([OLD]).encode([plain(b"x")])
    codec = Codec([NEW, OLD])
    assert await codec.decode([before]) == [plain(b"x")]
    (after,) = await codec.encode([plain(b"x")])
    with pytest.raises(PayloadKeyError, match="PERDURE_PAYLOAD_KEY"):
        await Codec([OLD]).decode([after])


async def test_a_payload_of_before_the_key_is_read() -> None:
    assert await Codec([NEW]).decode([plain(b"x")]) == [plain(b"x")]


@pytest.mark.parametrize("where", ["nonce", "text", "cut", "key"])
async def test_a_changed_payload_is_refused(where: str) -> None:
    (sealed,) = await Codec([NEW]).encode([plain(b"pay 1 euro")])
    data = bytearray(sealed.data)
    if where == "cut":
        del data[-1]
    elif where == "key":  # another of our keys in its place
        (other,) = await Codec([OLD]).encode([plain(b"")])
        sealed.metadata["key-id"] = other.metadata["key-id"]
    else:
        data[0 if where == "nonce" else -1] ^= 1
    changed = Payload(metadata=sealed.metadata, data=bytes(data))
    with pytest.raises(ValueError, match="changed or cut"):
        await Codec([NEW, OLD]).decode([changed])


async def test_a_payload_that_inflates_without_end_is_refused() -> None:
    bomb = Payload(metadata={"encoding": b"binary/zlib"}, data=zlib.compress(b"\0" * 40_000_000))
    with pytest.raises(ValueError, match="larger than any"):
        await Codec().decode([bomb])
    with pytest.raises(ValueError, match="broken"):
        await Codec().decode(
            [Payload(metadata={"encoding": b"binary/zlib"}, data=zlib.compress(b"abc")[:-3])]
        )


def test_keys_are_checked_in_words() -> None:
    good = base64.b64encode(NEW).decode()
    assert parse_keys(f" {good}, {base64.b64encode(b'k' * 16).decode()} ,") == [NEW, b"k" * 16]
    for bad in ("short", "!" + good, base64.b64encode(b"x" * 31).decode(), f"{good},nonsense"):
        with pytest.raises(PayloadKeyError, match="openssl rand"):
            parse_keys(bad)
