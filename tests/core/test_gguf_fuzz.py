"""GGUF files that somebody made on purpose: a clear error or a model, never memory, time or places that the file does not pay for."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.convert import convert_gguf
from core.gguf_file import FetchError, GgufError, GgufFile
from tests.core.test_fetch import write_gguf

HUGE = (2**31, 2**32 - 1, 2**53, 2**60, 2**62, 2**63, 2**64 - 1)
WRITTEN = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"}
SLOW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    """One line of the tensor table."""
    count = struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return text(name) + count + b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, offset)


def file(
    path: Path,
    entries: Sequence[bytes] = (),
    keys: Sequence[bytes] = (),
    data: bytes = b"",
    num_entries: int | None = None,
    num_keys: int | None = None,
) -> Path:
    """A header with these parts, whatever its counts claim; data begin at the next multiple of 32."""
    head = b"GGUF" + struct.pack("<I", 3)
    head += struct.pack(
        "<QQ", len(entries) if num_entries is None else num_entries, len(keys) if num_keys is None else num_keys
    )
    head += b"".join(keys) + b"".join(entries)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def read_all(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file: within it, and no more bytes than its own."""
    source = GgufFile(path)
    size, found = path.stat().st_size, {}
    for name, info in source.tensors.items():
        assert 0 <= info.offset and info.offset + info.num_bytes <= size
        found[name] = source.array(name)
        assert found[name].shape == info.shape
    return found


def refuses(path: Path, said: str) -> str:
    """A clear error of one printable line, soon and without memory."""
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match=said) as caught:
            read_all(path)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 5
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 1000
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ one lie at a time


@pytest.mark.parametrize("count", HUGE)
def test_counts_that_the_file_cannot_hold(tmp_path: Path, count: int) -> None:
    """Of tensors, keys, characters, entries of an array, dimensions."""
    path = tmp_path / "x.gguf"
    good = entry("a", [8])
    refuses(file(path, [good], num_entries=count), "damaged or truncated")
    refuses(file(path, [], num_keys=count), "damaged or truncated")
    refuses(file(path, [], [text("key", count)], num_keys=1), "damaged or truncated")
    refuses(file(path, [text("a", count)]), "damaged or truncated")
    for kind in (0, 4, 8, 10):
        refuses(file(path, [], [text("key") + struct.pack("<IIQ", 9, kind, count)]), "key needs|damaged or truncated")
    refuses(file(path, [entry("a", [8], num_dims=min(count, 2**32 - 1))]), "dimensions")


@pytest.mark.parametrize("dims", [[0], [8, 0], [2**63, 2], [2**32, 2**32], [2**62] * 4, [2**64 - 1], [17]])
@pytest.mark.parametrize("kind", [0, 1, 2, 12, 30])
def test_shapes_that_the_data_cannot_have(tmp_path: Path, dims: list[int], kind: int) -> None:
    """Products beyond 64 bits, nothing, and parts of a block."""
    refuses(file(tmp_path / "x.gguf", [entry("a", dims, kind)], data=b"\0" * 32), "tensor a (of shape|ends at)")


@pytest.mark.parametrize("offset", [1, 32, 33, *HUGE])
def test_offsets_beyond_the_file(tmp_path: Path, offset: int) -> None:
    """By one byte or by all there are."""
    refuses(file(tmp_path / "x.gguf", [entry("a", [8], 0, offset)], data=b"\0" * 32), "tensor a ends at byte")


def test_tensors_that_share_bytes(tmp_path: Path) -> None:
    """Ten thousand names for the same megabyte would be ten gigabytes of model."""
    path = tmp_path / "x.gguf"
    many = [entry(f"t{i}", [2**18]) for i in range(10_000)]
    refuses(file(path, many, data=b"\0" * 2**20), "where another one lies")
    refuses(file(path, [entry("a", [8]), entry("b", [8], 0, 28)], data=b"\0" * 64), "tensor b begins at byte")
    assert set(read_all(file(path, [entry("b", [8], 0, 32), entry("a", [8])], data=b"\0" * 64))) == {"a", "b"}


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a\0b", "a\nb", "\x1b[2J", "blk.0.attn_q.weight/../x", "", " " * 300]
)
def test_names_lead_nowhere(tmp_path: Path, name: str) -> None:
    """A tensor's name is looked up and never opened; in a message it moves no cursor."""
    path = tmp_path / "in" / "x.gguf"
    path.parent.mkdir()
    assert read_all(file(path, [entry(name, [8])], data=b"\0" * 32))[name].shape == (8,)
    refuses(file(path, [entry(name, [8]), entry(name, [8], 0, 32)], data=b"\0" * 64), "appears twice")
    write_gguf(path, extra={name: np.zeros((32, 32), np.float32)} if name else {"x": np.zeros((32, 32), np.float32)})
    with pytest.raises(FetchError, match="more tensors than a llama model") as caught:
        convert_gguf(path, tmp_path / "in" / "out")
    assert str(caught.value).isprintable()
    assert [each.name for each in tmp_path.rglob("*")] == ["in", "x.gguf"], "nothing was written anywhere"


@pytest.mark.parametrize("key", [b"\xff\xfe", b"\xed\xa0\x80", b"a" * 70_000])
def test_texts_that_are_none(tmp_path: Path, key: bytes) -> None:
    """Not UTF-8, half a character, too long for a name."""
    refuses(file(tmp_path / "x.gguf", [entry(key, [8])]), "not UTF-8|characters")


@pytest.mark.parametrize("alignment", [0, 3, 2**32 - 1])
def test_alignments(tmp_path: Path, alignment: int) -> None:
    """A strange one moves the data, and where they cannot be they are not read."""
    key = text("general.alignment") + struct.pack("<II", 4, alignment)
    path = file(tmp_path / "x.gguf", [entry("a", [8])], [key], b"\0" * 64)
    if alignment == 3:
        assert read_all(path)["a"].shape == (8,)
    else:
        refuses(path, "general.alignment is 0|ends at byte")


def test_a_large_file_is_not_copied_to_be_looked_at(tmp_path: Path) -> None:
    """64 MB of which only the header is wanted."""
    path = file(tmp_path / "x.gguf", [entry("a", [2**24])])
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + 2**26)
    tracemalloc.start()
    try:
        assert GgufFile(path).tensors["a"].num_bytes == 2**26
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bos", ["a b", "", "$A", "$", " ", "<s>:3"])
def test_a_beginning_of_text_that_is_no_word(tmp_path: Path, bos: str) -> None:
    """A converted model or a clear error, no exception of a library."""
    from tests.core.test_fetch import TOKENS

    tokens = [*TOKENS[:1], bos, *TOKENS[2:]]
    path = write_gguf(tmp_path / "x.gguf", keys={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": True})
    try:
        assert convert_gguf(path, tmp_path / "out").is_dir()
    except FetchError as error:
        assert str(error).isprintable()


# ------------------------------------------------------------------------------------------------ many at random

KINDS = st.sampled_from([0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 20, 24, 28, 30, 34, 99])
NUMBERS = st.integers(0, 300) | st.sampled_from([32, 64, 256, 512, *HUGE])
NAMES = st.sampled_from(["a", "b", "../c", "/d", "blk.0.x", "\x1b", ""]) | st.text(max_size=4)
VALUES = st.one_of(
    st.tuples(st.sampled_from([0, 1, 4, 5, 6, 7, 10, 11, 12, 13, 255]), st.binary(max_size=9)).map(
        lambda v: struct.pack("<I", v[0]) + v[1]
    ),
    st.text(max_size=6).map(lambda value: struct.pack("<I", 8) + text(value)),
    st.tuples(st.integers(0, 13), NUMBERS, st.binary(max_size=40)).map(
        lambda v: struct.pack("<IIQ", 9, v[0], v[1]) + v[2]
    ),
)
KEYS = st.tuples(NAMES, VALUES).map(lambda pair: text(pair[0]) + pair[1])
ENTRIES = st.tuples(NAMES, st.lists(NUMBERS, min_size=1, max_size=4), KINDS, NUMBERS).map(lambda each: entry(*each))


@SLOW
@given(
    entries=st.lists(ENTRIES, max_size=4), keys=st.lists(KEYS, max_size=3), data=st.binary(max_size=600),
    counts=st.tuples(st.none() | NUMBERS, st.none() | NUMBERS), version=st.integers(0, 4),
)  # fmt: skip
def test_headers_of_any_parts(tmp_path: Path, entries: Any, keys: Any, data: bytes, counts: Any, version: int) -> None:
    """An error of ours, or tensors that lie in the file; memory by the file's size."""
    path = file(tmp_path / "x.gguf", entries, keys, data, *counts)
    whole = bytearray(path.read_bytes())
    whole[4] = version or 3
    path.write_bytes(whole)
    tracemalloc.start()
    try:
        read_all(path)
    except FetchError as error:
        assert str(error).isprintable() and len(str(error)) <= 1000
    finally:
        assert tracemalloc.get_traced_memory()[1] < 1e6 + 100 * len(whole)
        tracemalloc.stop()


@SLOW
@given(
    kind=st.sampled_from(sorted(GGMLQuantizationType)),
    rows=st.integers(1, 3),
    data=st.binary(min_size=1200, max_size=1200),
)
def test_any_bytes_are_numbers_of_any_type(tmp_path: Path, kind: GGMLQuantizationType, rows: int, data: bytes) -> None:
    """Infinite scales and codes that no encoder writes: floats of the right shape, or a type that is not covered."""
    path = file(tmp_path / "x.gguf", [entry("a", [256, rows], kind)], data=data * 6)
    try:
        assert read_all(path)["a"].shape == (rows, 256)
    except FetchError as error:
        assert "no decoder for" in str(error) or "unknown storage type" in str(error)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good file, small enough to be damaged often."""
    return write_gguf(tmp_path_factory.mktemp("made") / "x.gguf", GGMLQuantizationType.Q4_1).read_bytes()


SPLICES = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from([0, 1, 4, 8]),
        st.binary(max_size=8) | st.sampled_from([struct.pack("<Q", n) for n in HUGE]),
    ),
    min_size=1,
    max_size=3,
)


@SLOW
@given(splices=SPLICES, cut=st.floats(0.9, 1.2))
def test_damaged_models_are_converted_or_refused(made: bytes, tmp_path: Path, splices: Any, cut: float) -> None:
    """Bytes taken out, put in and replaced in the header: no other exception, and no file but the five of a model."""
    whole = bytearray(made)
    for place, num_taken, put in splices:
        at = int(place * 9000)  # the header
        whole[at : at + num_taken] = put
    path = tmp_path / "x.gguf"
    path.write_bytes(whole[: int(cut * len(whole))])
    try:
        convert_gguf(path, tmp_path / "out")
    except FetchError as error:
        assert str(error).isprintable()
    left = {each.name for each in tmp_path.rglob("*") if each.is_file()} - {"x.gguf"}
    assert left <= WRITTEN
