"""Types are read by decoders that are made one at a time: msgspec crashes otherwise."""

import ast
import threading
import time
from pathlib import Path

import msgspec
import pytest

from dlrover._util import decoding

SOURCES = Path(decoding.__file__).parents[1]
HERE_ALONE = {"msgspec.convert", "msgspec.json.Decoder", "msgspec.msgpack.Decoder"}
WITH_A_TYPE = {"msgspec.json.decode", "msgspec.msgpack.decode"}


class Part(msgspec.Struct):
    number: int


class Whole(msgspec.Struct):
    parts: list[Part]


@pytest.mark.parametrize("module", ["json", "msgpack"])
def test_decoders_are_made_one_at_a_time_and_kept(module, monkeypatch):
    making, most = [], []

    class Slow:
        def __init__(self, kind: object) -> None:
            making.append(kind)
            time.sleep(0.05)
            most.append(len(making))
            making.remove(kind)

        def decode(self, _data: bytes) -> object:
            return self

    monkeypatch.setattr(getattr(msgspec, module), "Decoder", Slow)
    monkeypatch.setattr(decoding, f"_{module}", {})
    read, found = getattr(decoding, module), []
    threads = [
        threading.Thread(target=lambda kind=kind: found.append(read(b"", kind)))
        for kind in (Part, Whole, list[Part], dict[str, Part])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
    assert read(b"", Whole) in found


def test_values_are_those_of_msgspec():
    whole = Whole([Part(1), Part(2)])
    assert decoding.json(msgspec.json.encode(whole), Whole) == whole
    assert decoding.msgpack(msgspec.msgpack.encode(whole), Whole) == whole
    assert decoding.convert({"parts": [{"number": "3"}]}, Whole, strict=False) == Whole([Part(3)])
    with pytest.raises(msgspec.ValidationError):
        decoding.convert({"parts": [{"number": "3"}]}, Whole)


def test_all_of_the_package_reads_types_by_them():
    found = []
    for path in SOURCES.rglob("*.py"):
        if path == Path(decoding.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                typed = name in WITH_A_TYPE and any(word.arg == "type" for word in node.keywords)
                if name in HERE_ALONE or typed:
                    found.append(f"{path}:{node.lineno}: {name}")
    assert not found


@pytest.mark.parametrize("read", [decoding.json, decoding.msgpack])
def test_text_that_is_no_utf8_is_damage_like_any_other(read):
    for data in (b'{"name": "\xff"}', b"\x81\xa4name\xa1\xff"):
        with pytest.raises(msgspec.DecodeError):
            read(data, dict[str, str])
