"""The one place where a request is checked: what can be told from the request alone is refused here, before it costs anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from core.levels import ServiceLevels
from core.types import Limits, ModelInfo, RequestError, SamplingParams, Structure

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_N = 128
MAX_BEAMS = 32
MAX_LOGPROBS = 20
MAX_SEQUENCES = 1024  # prompts x n of one call
MAX_TOKEN_LISTS = 1024  # entries of logit_bias and of bad_words, and tokens of one bad word
MAX_STRUCTURE_CHARS = 65_536
KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")
MAX_SALT_CHARS = 256


def _number(name: str, value: object, low: float, high: float, allowed: str, *, low_open: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low < value if low_open else low <= value) or value > high:  # type: ignore[operator]
        raise RequestError(f"{name} must be {allowed}, got {value!r}", name)


def _integer(name: str, value: object, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be {allowed}, got {value!r}", name)


def _stops(params: SamplingParams, vocab_size: int) -> None:
    if not isinstance(params.stop, tuple) or not all(isinstance(s, str) for s in params.stop):
        raise RequestError(f"stop must be strings, got {params.stop!r}", "stop")
    if len(params.stop) > MAX_STOPS:
        raise RequestError(f"stop takes at most {MAX_STOPS} strings, got {len(params.stop)}", "stop")
    for stop in params.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}", "stop")
    _tokens("stop_token_ids", params.stop_token_ids, vocab_size)


def _tokens(name: str, ids: object, vocab_size: int) -> None:
    """Token ids within the logits' width, whatever the tokenizer knows."""
    if not isinstance(ids, (tuple, list)):
        raise RequestError(f"{name} must be token ids, got {ids!r}", name)
    for token in ids:
        _integer(name, token, 0, vocab_size - 1, f"token ids from 0 to {vocab_size - 1}")


def _choices(params: SamplingParams, vocab_size: int) -> None:
    """What changes logits by token."""
    if params.allowed_token_ids is not None:
        _tokens("allowed_token_ids", params.allowed_token_ids, vocab_size)
        if not params.allowed_token_ids:
            raise RequestError("allowed_token_ids must name at least one token, got none", "allowed_token_ids")
    for name, entries, kind in (("logit_bias", params.logit_bias, Mapping), ("bad_words", params.bad_words, tuple)):
        if not isinstance(entries, kind):
            raise RequestError(f"{name} must be a {kind.__name__.lower()}, got {entries!r:.200}", name)
        if len(entries) > MAX_TOKEN_LISTS:
            raise RequestError(f"{name} takes at most {MAX_TOKEN_LISTS} entries, got {len(entries)}", name)
    for token, bias in params.logit_bias.items():
        _integer("logit_bias", token, 0, vocab_size - 1, f"by token ids from 0 to {vocab_size - 1}")
        _number("logit_bias", bias, -100, 100, "numbers from -100 to 100")
    for word in params.bad_words:
        _tokens("bad_words", word, vocab_size)
        if not 1 <= len(word) <= MAX_TOKEN_LISTS:
            raise RequestError(
                f"a word of bad_words must have 1 to {MAX_TOKEN_LISTS} tokens, got {len(word)}", "bad_words"
            )


def bad_word_ids(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """The tokens of a word, at the beginning of a text and after a space: both must not come out."""
    spellings = [tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word.lstrip())]
    return list(dict.fromkeys(tuple(ids) for ids in spellings if ids))


def _structure(params: SamplingParams) -> None:
    structure = params.structure
    if structure is None:
        return
    if not isinstance(structure, Structure) or structure.kind not in KINDS or not isinstance(structure.text, str):
        raise RequestError(f"structure must be a text of kind {', '.join(KINDS)}, got {structure!r:.200}", "structure")
    if len(structure.text) > MAX_STRUCTURE_CHARS:
        raise RequestError(
            f"{structure.kind} takes at most {MAX_STRUCTURE_CHARS} characters, got {len(structure.text)}",
            structure.kind,
        )
    if params.ignore_eos:
        raise RequestError(
            "ignore_eos cannot be used with structured output, which says where an answer ends", "ignore_eos"
        )


_BEAMS_LEAVE = {
    "top_p": 1, "min_p": 0, "min_tokens": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
    "allowed_token_ids": None, "bad_words": (), "stop": (), "stop_token_ids": (), "structure": None, "prompt_logprobs": None,
}  # fmt: skip
"""What beam search leaves alone: it ranks the model's own log probabilities, and eos alone ends an answer."""


def _beams(params: SamplingParams) -> None:
    _number("length_penalty", params.length_penalty, -10, 10, "a number from -10 to 10")
    if params.beam_width is None:
        if params.length_penalty != 1:
            raise RequestError(f"length_penalty={params.length_penalty} is for beam search only", "length_penalty")
        return
    _integer("beam_width", params.beam_width, 1, MAX_BEAMS, f"an integer from 1 to {MAX_BEAMS}")
    if params.n > params.beam_width:
        raise RequestError(f"n={params.n} answers cannot come from a beam search with {params.beam_width} beams", "n")
    if params.temperature not in (0, 1):
        raise RequestError(
            f"temperature must be 0 or 1 with beam search, which draws nothing, got {params.temperature}", "temperature"
        )
    if params.top_k > 0:
        raise RequestError(f"top_k must be off (0 or -1) with beam search, got {params.top_k}", "top_k")
    for name, only in _BEAMS_LEAVE.items():
        if getattr(params, name) != only:
            raise RequestError(f"{name} cannot be used with beam search", name)


def check_salt(salt: object) -> None:
    """Check the name of a cache namespace: requests share cached blocks only with requests of the same ``cache_salt``."""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, got {type(salt).__name__}", "cache_salt")
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError(f"cache_salt must have at most {MAX_SALT_CHARS} characters, got {len(salt)}", "cache_salt")


def check_params(
    params: SamplingParams, *, vocab_size: int, max_model_len: int, num_prompt_tokens: int
) -> SamplingParams:
    """Check every field and settle ``max_tokens``; ``RequestError`` names the field, the value and what is allowed."""
    _number("temperature", params.temperature, 0, 100, "a finite number from 0 to 100")
    _number("top_p", params.top_p, 0, 1, "a number above 0 and at most 1", low_open=True)
    _integer("top_k", params.top_k, -1, 2**31 - 1, "an integer from -1 (0 and -1: off)")
    _integer("n", params.n, 1, MAX_N, f"an integer from 1 to {MAX_N}")
    if params.seed is not None:
        _integer("seed", params.seed, -(2**63), 2**63 - 1, "a 64-bit integer")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _integer(name, getattr(params, name), 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}")
    _number("min_p", params.min_p, 0, 1, "a number from 0 to 1")
    _number("repetition_penalty", params.repetition_penalty, 0, 100, "a number above 0 and at most 100", low_open=True)
    for name in ("presence_penalty", "frequency_penalty"):
        _number(name, getattr(params, name), -2, 2, "a number from -2 to 2")
    _integer("min_tokens", params.min_tokens, 0, 2**31 - 1, "an integer of at least 0")
    _stops(params, vocab_size)
    _choices(params, vocab_size)
    _structure(params)
    _beams(params)
    room = max_model_len - num_prompt_tokens
    max_tokens = room if params.max_tokens is None else params.max_tokens
    _integer("max_tokens", max_tokens, 1, 2**31 - 1, "an integer of at least 1")
    if max_tokens > room:
        raise RequestError(
            f"max_tokens is {max_tokens}, but a prompt of {num_prompt_tokens} tokens leaves {room} of the "
            f"{max_model_len} tokens of max_model_len",
            "max_tokens",
        )
    if params.min_tokens > max_tokens:
        raise RequestError(f"min_tokens is {params.min_tokens}, more than max_tokens ({max_tokens})", "min_tokens")
    return params if params.max_tokens is not None else attrs.evolve(params, max_tokens=max_tokens)


def check_request(token_ids: Sequence[int], params: SamplingParams, model: ModelInfo, limits: Limits) -> SamplingParams:
    """Check a prompt and its parameters; gives the parameters with ``max_tokens`` settled."""
    if not token_ids:
        raise RequestError("the prompt cannot be empty: it has no tokens", "prompt")
    # the length first: a huge prompt is then cheap to refuse
    if len(token_ids) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, but max_model_len is {limits.max_model_len} tokens "
            "and at least one must be left for the answer",
            "prompt",
        )
    top = model.vocab_size - 1
    if not all(type(t) is int and 0 <= t <= top for t in token_ids):
        bad = next(t for t in token_ids if type(t) is not int or not 0 <= t <= top)
        raise RequestError(f"prompt token ids must be integers from 0 to {top}, got {bad!r}", "prompt")
    return check_params(
        params, vocab_size=model.vocab_size, max_model_len=limits.max_model_len, num_prompt_tokens=len(token_ids)
    )


def check_labels(labels: Mapping[str, Any], levels: ServiceLevels, arrival_s: float) -> dict[str, Any]:
    """Check the labels of a request that policies calculate with, and settle its targets by its service class.

    A missing ``deadline_s`` is arrival + the class's ``ttft_s``; a missing ``tpot_s`` the class's. ``RequestError`` names the
    field.
    """
    labels = dict(labels)
    if "priority" in labels:
        _integer("priority", labels["priority"], -(2**31), 2**31 - 1, "a 32-bit integer")
    for name, low_open in (("deadline_s", False), ("tpot_s", True), ("stall_s", False)):
        if labels.get(name) is not None:
            _number(name, labels[name], 0, 1e12, "a finite number of seconds", low_open=low_open)
    level = levels.of(labels.get("service_class", ""))
    if labels.get("deadline_s") is None and level.ttft_s is not None:
        labels["deadline_s"] = arrival_s + level.ttft_s
    if labels.get("tpot_s") is None:
        labels["tpot_s"] = level.tpot_s
    return labels
