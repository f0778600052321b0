"""Structured output: a schema, expression or grammar becomes a mask over the vocabulary for every token of an answer.

The parsing is llguidance's (Earley over derivatives of regular expressions: no table is made ahead, and its work is
counted, so a hostile grammar ends with an error instead of a hang). Here it is bounded, cached, and bound to one
sequence. llguidance is imported when the first grammar comes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from core.types import ModelInfo, RequestError, Structure, Unsamplable

CACHE_BYTES = 64 * 2**20
"""What compiled grammars may take together, by the estimate of ``_size``; the least recently used go first."""

MAX_DEPTH = 64
"""Levels of a JSON Schema: the compiler recurses over them."""

MAX_CHOICES = 1024
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
           "max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False}  # fmt: skip
"""llguidance's counted work: about 20 ms to compile, 15 ms a token, 40 MB a grammar at the very most."""


class Compiled:
    """A grammar that was found good. ``start`` gives each sequence a parser of its own."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def start(self) -> Constraint:
        """A parser at the beginning of an answer."""
        return Constraint(self._matcher.deep_copy())


class Constraint:
    """Where one sequence is in its grammar. It moves with the tokens, so it outlives any preemption."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def allowed(self, vocab_size: int) -> np.ndarray:
        """bool [V]: the tokens that may come next; eos tokens only where the text is complete.

        Raises ``Unsamplable`` when the grammar got too complex.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._failed()
        mask = np.zeros(vocab_size, bool)
        found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        mask[: len(found)] = found
        return mask

    def advance(self, token_id: int) -> None:
        """Take a token that was drawn (not eos); ``Unsamplable`` if the grammar does not."""
        if not self._matcher.consume_token(token_id):
            raise self._failed()

    def _failed(self) -> Unsamplable:
        reason = self._matcher.get_error().strip().splitlines()
        return Unsamplable(f"the grammar cannot be followed: {(reason or ['no reason given'])[0][:200]}")


class Grammars:
    """Compiles and keeps grammars for one tokenizer. Any thread may call ``compile``."""

    def __init__(self, tokenizer: Any, model: ModelInfo):
        self._tokenizer, self._model = tokenizer, model
        self._vocabulary: Any = None
        self._cache: OrderedDict[Structure, Compiled] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def compile(self, structure: Structure) -> Compiled:
        """The grammar, perhaps from the cache. ``RequestError`` names what is wrong with it."""
        with self._lock:
            found = self._cache.get(structure)
            if found is not None:
                self._cache.move_to_end(structure)
                return found
        compiled = self._compile(structure)
        with self._lock:
            if structure not in self._cache:
                self._cache[structure] = compiled
                self._bytes += _size(structure)
            while self._bytes > CACHE_BYTES:
                oldest, _ = self._cache.popitem(last=False)
                self._bytes -= _size(oldest)
        return compiled

    @property
    def cached_bytes(self) -> int:
        """The estimate for everything that is kept."""
        return self._bytes

    def _compile(self, structure: Structure) -> Compiled:
        if self._tokenizer is None or not self._model.eos_token_ids:
            raise RequestError(
                f"{self._model.name} has no tokenizer with an end of text: no structured output", structure.kind
            )
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise RequestError("structured output needs the package llguidance", structure.kind) from error
        grammar = _WRITERS[structure.kind](structure.text, LLMatcher)
        matcher = LLMatcher(self._words(), grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # some limits are met at the first token
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split()) or "no reason given"
            raise RequestError(f"{structure.kind} cannot be used: {reason[:200]}", structure.kind)
        return Compiled(matcher)

    def _words(self) -> Any:
        """The vocabulary as llguidance wants it: made once, with the bytes of every token."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._loading:
            if self._vocabulary is None:
                eos = sorted(self._model.eos_token_ids)
                words = TokenizerWrapper(_Words(self._tokenizer, eos[0]))
                self._vocabulary = LLTokenizer(words, n_vocab=len(words.tokens), eos_token=eos)
            return self._vocabulary


class _Words:
    """A tokenizer with the attributes that llguidance asks for."""

    def __init__(self, tokenizer: Any, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_id
        count = tokenizer.vocab_size
        self.special_token_ids = [i for i in range(count) if tokenizer.is_special(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in range(count)]

    def __call__(self, text: str | bytes) -> list[int]:
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(shown, add_special_tokens=False)


def _size(structure: Structure) -> int:
    return 131_072 + 64 * len(
        structure.text
    )  # measured: 123 kB for a schema of 250 characters, a part of its answer parsed


def _schema(text: str, matcher: Any) -> str:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"json_schema is not JSON: {error}", "json_schema") from error
    if not isinstance(schema, (dict, bool)):
        raise RequestError("json_schema must be an object", "json_schema")
    if _depth(schema) > MAX_DEPTH:
        raise RequestError(f"json_schema must have at most {MAX_DEPTH} levels", "json_schema")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return matcher.grammar_from_json_schema(orjson.dumps(schema).decode())


def _depth(value: Any) -> int:
    """Levels of nested objects and lists, without recursion."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _choice(text: str, matcher: Any) -> str:
    choices = orjson.loads(text)
    if not choices or len(choices) > MAX_CHOICES:
        raise RequestError(f"choice takes 1 to {MAX_CHOICES} texts, got {len(choices)}", "choice")
    return matcher.grammar_from_lark("start: " + " | ".join(orjson.dumps(each).decode() for each in choices))


def _grammar(text: str, matcher: Any) -> str:
    if not text.strip():
        raise RequestError("grammar cannot be empty", "grammar")
    return matcher.grammar_from_lark(text)


def _regex(text: str, matcher: Any) -> str:
    if not text:
        raise RequestError("regex cannot be empty", "regex")
    return matcher.grammar_from_regex(text)


_WRITERS: dict[str, Callable[[str, Any], str]] = {
    "json_schema": _schema,
    "json_object": lambda _, matcher: matcher.grammar_from_json_schema('{"type": "object"}'),
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
}
