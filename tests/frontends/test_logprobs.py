"""Numbers that JSON does not have never reach it."""

from __future__ import annotations

import json
import math

from core.frontends.logprobs import FLOOR, CompletionLogprobs, chat_content, prompt_logprobs
from core.text import ByteTokenizer
from core.types import TokenLogprobs

BAD = [
    TokenLogprobs(97, -math.inf, ((98, -0.5), (99, -math.inf)), 3),
    TokenLogprobs(97, math.nan, ((98, math.nan),), 1),
]


def test_infinities_become_a_floor() -> None:
    """In every shape: completions, chats, prompts."""
    tokenizer = ByteTokenizer()
    lists = CompletionLogprobs(tokenizer, 2, True).output(BAD)
    shapes = [lists, chat_content(tokenizer, BAD, 2), prompt_logprobs(tokenizer, BAD, 2)]
    for shape in shapes:
        json.dumps(shape, allow_nan=False)
    assert lists["token_logprobs"] == [FLOOR, FLOOR]
    assert lists["top_logprobs"][0] == {"b": -0.5, "c": FLOOR, "a": FLOOR}


def test_of_tokens_that_look_alike_the_likeliest_is_shown() -> None:
    """Several ids may have the same text: a dictionary has room for one."""
    found = CompletionLogprobs(ByteTokenizer(300), 3, True).output(
        [TokenLogprobs(299, -3.0, ((280, -1.0), (281, -2.0), (97, -2.5)))]
    )
    assert found["top_logprobs"] == [{"": -1.0, "a": -2.5}]
