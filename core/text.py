"""Text in and out: tokenizers, chat templates and streaming decoders. No torch, no transformers.

One rule carries the streaming: a token is a piece of bytes, and text is the UTF-8 decoding of the pieces joined. So a
stream gives exactly what ``decode`` gives for all ids, at the cost of one look-up per token, and U+FFFD appears only
where the bytes really are broken or end inside a character.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from core.text_files import (
    PieceRule,
    TextError,
    compile_template,
    cut_after,
    find_template,
    load_backend,
    piece_rule,
    read_json,
    token_content,
    token_ids,
)

__all__ = ["ByteTokenizer", "FolderTokenizer", "Message", "TextError", "TextStream", "Tokenizer"]

Message = Mapping[str, Any]
_Piece = Callable[[int], bytes | None]  # the bytes of a token id; None for a token that is left out of the text


class TextStream(Protocol):
    """Turns the tokens of one sequence into text while they come. Every sequence and branch needs its own."""

    def push(self, token_id: int) -> str:
        """The text that is final now, perhaps "" (inside a character). Raises ``TextError`` for an impossible id."""

    def flush(self) -> str:
        """What was held back. Call once, at the end: all pushes and the flush together equal ``decode`` of the ids."""


class Tokenizer(Protocol):
    """What the engine and the frontends need. ``vocab_size`` counts ids; an id without a token decodes to ""."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    has_chat_template: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; no second BOS where the text already starts with one. Raises ``TextError`` for lone surrogates."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids. Raises ``TextError`` for a negative id."""

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        """The prompt for a chat, to be encoded with ``add_special_tokens=False``; ends inside the last message where
        that is to be continued. Raises ``TextError``.
        """

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        """A fresh decoder for one sequence."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for in the middle of a text, special tokens by their name; b"" for none."""

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` leaves this token out."""


class _ByteStream:
    """Pieces of bytes to text. ``first`` differs from ``rest`` where the first token drops its leading space."""

    def __init__(self, first: _Piece, rest: _Piece, strip: int = 0) -> None:
        self._first, self._rest, self._piece = first, rest, first
        self._strip = strip  # leading spaces still to be dropped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if (piece := self._piece(token_id)) is None:
            return ""
        self._piece = self._rest
        text = self._decoder.decode(piece)
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        text = self._decoder.decode(b"", True)
        return self._stripped(text) if self._strip else text

    def _stripped(self, text: str) -> str:
        cut = min(self._strip, _leading_spaces(text))
        self._strip = self._strip - cut if cut == len(text) else 0  # anything but a space ends the stripping
        return text[cut:]


class _WindowStream:
    """For decoders that are not pieces of bytes: decode a window of tokens, give what no later token can change.

    The window starts one emitted group before the tokens still held, since such decoders join neighbours (a space
    before a word, none before a full stop). It stays short unless the text keeps ending in U+FFFD, hence the bound.
    """

    _MAX_HELD = 16

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the group given last, then the tokens held
        self._given = 0  # how many of them belong to the group given last
        self._all: list[int] = []
        self._text: list[str] = []

    def push(self, token_id: int) -> str:
        self._all.append(token_id)
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._given
        if text.endswith("\N{REPLACEMENT CHARACTER}") and held < self._MAX_HELD:
            return ""
        new = text[len(self._decode(self._ids[: self._given])) :]
        if new or held >= self._MAX_HELD:
            self._ids, self._given = self._ids[self._given :], held
        self._text.append(new)
        return new

    def flush(self) -> str:
        return self._decode(self._all)[sum(map(len, self._text)) :]


class ByteTokenizer:
    """The tokenizer of the toy models: ids 0..255 are bytes, 256 is BOS, 257 is EOS, the rest decode to "".

    Needs no third-party package. Special tokens kept in the text are written ``<bos>`` and ``<eos>``. ``add_bos``
    says whether a prompt begins with BOS.
    """

    bos_id = 256
    eos_id = 257
    has_chat_template = True

    def __init__(self, vocab_size: int = 258, add_bos: bool = False) -> None:
        if vocab_size < 258:
            raise TextError(f"the byte tokenizer needs a vocabulary of at least 258, not {vocab_size}")
        self.vocab_size = vocab_size
        self.eos_ids = frozenset({self.eos_id})
        self._add_bos = add_bos
        padding = [b""] * (vocab_size - 258)
        letters = [bytes([value]) for value in range(256)]
        self._pieces = {True: [*letters, b"", b"", *padding], False: [*letters, b"<bos>", b"<eos>", *padding]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.bos_id] * (self._add_bos and add_special_tokens) + list(_utf8(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        pieces = self._pieces[skip_special_tokens]
        return b"".join([_look_up(pieces, token_id) for token_id in ids]).decode("utf-8", "replace")

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        lines = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                raise TextError("a message needs a role and a content that are texts")
            lines.append(f"{role}: {content}\n")
        if continue_final_message:
            return cut_after("".join(lines), messages)
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        piece = functools.partial(_look_up, self._pieces[skip_special_tokens])
        return _ByteStream(piece, piece)

    def token_bytes(self, token_id: int) -> bytes:
        return _look_up(self._pieces[False], token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in (self.bos_id, self.eos_id)


class FolderTokenizer:
    """The tokenizer of a model folder: tokenizer.json, read by the ``tokenizers`` package, and the configs beside it.

    ``decode`` equals ``tokenizers.Tokenizer.decode`` for byte-level vocabularies. For vocabularies with byte fall-back
    it differs in one case: where a run of byte tokens holds a broken byte, only the broken ones become U+FFFD, while
    ``tokenizers`` gives up the whole run, which a stream could know only at its end. Raises ``TextError`` for a folder
    without a tokenizer or with a damaged file. Safe to use from several threads.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._backend = load_backend(self.folder)
        self._backend.no_truncation()  # a file may carry the limits of its training script
        self._backend.no_padding()
        settings = read_json(self.folder / "tokenizer_config.json")
        model, generation = read_json(self.folder / "config.json"), read_json(self.folder / "generation_config.json")
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._named = {key: token_content(value) for key, value in settings.items() if key.endswith("_token")}
        self.bos_id = self._find_bos(settings, model, generation)
        self.eos_ids = self._find_eos(model, generation)
        self._bos_text: str | None = None if self.bos_id is None else self._backend.id_to_token(self.bos_id)
        self._file_adds_bos = self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]
        self._adds_bos = self.bos_id is not None and (self._file_adds_bos or settings.get("add_bos_token") is True)
        self._template = compile_template(find_template(self.folder, settings))
        self.has_chat_template = self._template is not None
        added = self._backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._rule = piece_rule(json.loads(self._backend.to_str()).get("decoder"))
        self._pieces: dict[tuple[bool, bool], dict[int, bytes | None]] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _utf8(text)
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if not add_special_tokens or not self._adds_bos or self.bos_id is None:
            return ids
        already = self._bos_text is not None and text.startswith(self._bos_text)
        if self._file_adds_bos:
            return ids[1:] if already and ids[:2] == [self.bos_id] * 2 else ids
        return ids if already and ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self._rule is None:
            return self._plain_decode(list(ids), skip_special_tokens)
        piece_of, rest = (self._table(self._rule, skip_special_tokens, is_first) for is_first in (True, False))
        pieces = []
        for token_id in ids:
            if (piece := piece_of(token_id)) is not None:
                pieces.append(piece)
                piece_of = rest
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[min(self._rule.strip, _leading_spaces(text)) :]

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> str:
        if self._template is None:
            raise TextError(f"the model in {self.folder} has no chat template; use a plain completion")
        names = {key: value for key, value in self._named.items() if value is not None}
        try:
            text = self._template.render(
                **names,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            return cut_after(text, messages) if continue_final_message else text
        except Exception as error:  # a template is a program from the model's folder: it may raise anything
            raise TextError(f"the chat template refused these messages: {_one_line(error)}") from error

    def stream(self, skip_special_tokens: bool = True) -> TextStream:
        if self._rule is None:
            return _WindowStream(functools.partial(self._plain_decode, skip_special_tokens=skip_special_tokens))
        first, rest = (self._table(self._rule, skip_special_tokens, is_first) for is_first in (True, False))
        return _ByteStream(first, rest, self._rule.strip)

    def token_bytes(self, token_id: int) -> bytes:
        if self._rule is None:
            return self._plain_decode([token_id], False).encode()
        return self._piece(self._rule, token_id, False, False) or b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def _plain_decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            raise TextError(f"{min(ids)} is not a token id") from error

    def _table(self, rule: PieceRule, skip: bool, is_first: bool) -> _Piece:
        """The bytes of a token, worked out on first use and shared by all streams of this tokenizer."""
        known = self._pieces.setdefault((skip, is_first and rule.first_differs), {})

        def piece(token_id: int) -> bytes | None:
            try:
                return known[token_id]
            except KeyError:
                found = known[token_id] = self._piece(rule, token_id, skip, is_first)
                return found

        return piece

    def _piece(self, rule: PieceRule, token_id: int, skip: bool, is_first: bool) -> bytes | None:
        try:
            token = self._backend.id_to_token(token_id)
        except OverflowError as error:
            raise TextError(f"{token_id} is not a token id") from error
        if token is None or (skip and token_id in self._special):
            return None
        return rule.piece(token, is_first)

    def _find_bos(self, settings: dict, model: dict, generation: dict) -> int | None:
        if "bos_token" in settings:
            name = self._named["bos_token"]
            return None if name is None else self._backend.token_to_id(name)
        found = token_ids(generation.get("bos_token_id")) or token_ids(model.get("bos_token_id"))
        return min(found) if found else None

    def _find_eos(self, model: dict, generation: dict) -> frozenset[int]:
        """Ids that end a text: those of the generation config (else the model's), and the tokenizer's own."""
        found = token_ids(generation.get("eos_token_id")) or token_ids(model.get("eos_token_id"))
        name = self._named.get("eos_token")
        own = None if name is None else self._backend.token_to_id(name)
        return found if own is None else found | {own}


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def _look_up(pieces: list[bytes], token_id: int) -> bytes:
    if token_id < 0:
        raise TextError(f"{token_id} is not a token id")
    return pieces[token_id] if token_id < len(pieces) else b""


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"the text is not valid Unicode: lone surrogate at character {error.start}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
