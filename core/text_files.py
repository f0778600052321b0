"""Reads the text side of a model folder as data: tokenizer.json, its configs, its chat template, its decoding rule."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs


class TextError(ValueError):
    """A text, a chat or a tokenizer folder that cannot be used; the message is one line with the reason."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no such file. Raises ``TextError`` for a damaged one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TextError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} does not hold a JSON object")
    return value


def token_content(value: Any) -> str | None:
    """The text of a special token, which configs write as a string or as an object with ``content``."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def token_ids(value: Any) -> frozenset[int]:
    """Token ids that configs write as one number, a list, or null."""
    found = value if isinstance(value, list) else [value]
    return frozenset(item for item in found if type(item) is int and item >= 0)


def load_backend(folder: Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a folder; a folder with only a sentencepiece file goes through transformers."""
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        if not folder.is_dir():
            raise TextError(f"{folder} is not a folder")
        from transformers import AutoTokenizer  # seconds to import, and needed by few models

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except TextError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions, transformers almost anything
        raise TextError(f"no usable tokenizer in {folder}: {' '.join(str(error).split())[:300]}") from error


# Chat template.


def find_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The source of the chat template: chat_template.jinja, else the (default) one in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TextError(f"{path} cannot be read: {error}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def compile_template(source: str | None) -> Any | None:
    """The template, in the sandbox and with the helpers that templates on the hub count on."""
    if source is None:
        return None
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TextError(f"the chat template is broken: {error}") from error


def cut_after(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """A rendered chat up to the end of its last message's words, for an answer that continues them."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise TextError("there is no last message whose words could be continued")
    at = text.rfind(content)
    if at >= 0:
        return text[: at + len(content)]
    words = content.strip()  # templates may trim
    at = text.rfind(words)
    if at < 0:
        raise TextError("the chat template changes the last message, so it cannot be continued")
    return text[: at + len(words)]


def _generation_tag() -> type:
    """``{% generation %}`` marks the assistant's words for training; for a prompt it changes nothing."""
    from jinja2.ext import Extension

    def parse(_extension: Extension, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return type("Generation", (Extension,), {"tags": {"generation"}, "parse": parse})


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TextError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


# Decoding rule.


@attrs.frozen
class PieceRule:
    """How a vocabulary turns into bytes: ``piece(token, is_first)``, and how many leading spaces the text drops."""

    piece: Callable[[str, bool], bytes]
    strip: int = 0
    first_differs: bool = False


def piece_rule(decoder: dict[str, Any] | None) -> PieceRule | None:
    """The rule that a tokenizer.json's decoder stands for; None where it is not one of bytes per token."""
    steps = _flatten(decoder)
    if steps and steps[0]["type"] == "ByteLevel" and all(step["type"] == "Fuse" for step in steps[1:]):
        return PieceRule(_byte_level_piece)
    return _sentencepiece_rule(steps)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


def _byte_level_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 letters stand for themselves, the others for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [value for value in range(256) if value not in set(plain)]
    return {chr(value): value for value in plain} | {chr(256 + index): value for index, value in enumerate(other)}


_LETTERS = _byte_level_letters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_piece(token: str, _is_first: bool) -> bytes:
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:  # an added token, which is written as it is
        return token.encode("utf-8")


def _sentencepiece_rule(steps: list[dict[str, Any]]) -> PieceRule | None:
    """Decoders built from Replace, ByteFallback, Metaspace, Fuse and, behind Fuse, Strip."""
    replaces: list[tuple[str, str]] = []
    fused = bytes_as_tokens = False
    strip, mark, drops_first = 0, "", False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not strip and step["content"] == " " and not step["stop"]:
            strip = step["start"]
        elif kind == "Replace" and not fused and not mark and "String" in step["pattern"]:
            replaces.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused and not bytes_as_tokens:
            bytes_as_tokens = True
        elif kind == "Metaspace" and not fused and not mark:
            mark, drops_first = step["replacement"], step.get("prepend_scheme", "always") != "never"
        else:
            return None
    if not replaces and not mark:  # words without a mark for spaces: not this family
        return None

    def piece(token: str, is_first: bool) -> bytes:
        if bytes_as_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replaces:
            token = token.replace(old, new)
        if mark:
            token = token.replace(mark, "" if is_first and drops_first else " ")
        return token.encode("utf-8")

    return PieceRule(piece, strip, drops_first)
