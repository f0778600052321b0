"""Grammars: bounded, cached by bytes, one parser a sequence, and the end of a text only where it is complete."""

from __future__ import annotations

import json
import threading

import attrs
import numpy as np
import pytest

from core import structure
from core.executors.toy import ToyExecutor
from core.structure import Grammars
from core.types import RequestError, SamplingParams, Structure
from tests.toy import Work, make_engine

EOS = 257


def grammars() -> Grammars:
    toy = ToyExecutor()
    return Grammars(toy.tokenizer, toy.load())


def following(text: str, one: Structure) -> str:
    """The characters that may follow, "$" for the end."""
    state = grammars().compile(one).start()
    for byte in text.encode():
        state.advance(byte)
    allowed = np.nonzero(state.allowed(320))[0]
    return "".join("$" if token == EOS else chr(token) for token in allowed)


@pytest.mark.parametrize(
    ("kind", "text", "so_far", "then"),
    [
        ("regex", "ab?", "", "a"), ("regex", "ab?", "a", "$b"), ("regex", "ab?", "ab", "$"),
        ("choice", '["no", "nor"]', "no", "$r"),
        ("grammar", 'start: "(" start ")" | "x"', "((", "(x"), ("json_schema", '{"const": 7}', "", "7"),
        ("json_schema", '{"enum": ["a", true]}', "", '"t'), ("json_schema", "true", "1", None), ("json_schema", "{}", "n", "u"),
    ],
)  # fmt: skip
def test_what_may_follow(kind, text: str, so_far: str, then: str | None) -> None:
    found = following(so_far, Structure(kind, text))
    assert ("$" in found) if then is None else sorted(found) == sorted(then)


def test_every_id_of_the_logits_has_a_place_in_the_mask() -> None:
    """More logits than tokens (a padded vocabulary): those beyond may not come."""
    state = grammars().compile(Structure("regex", ".*")).start()
    mask = state.allowed(400)
    assert len(mask) == 400 and not mask[258:].any() and mask[ord("a")]


def test_parsers_are_independent() -> None:
    compiled = grammars().compile(Structure("regex", "(ab)*"))
    first, second = compiled.start(), compiled.start()
    first.advance(ord("a"))
    assert second.allowed(320)[ord("a")] and not first.allowed(320)[ord("a")]


def test_the_cache_is_bounded_by_bytes(monkeypatch) -> None:
    monkeypatch.setattr(structure, "CACHE_BYTES", 600_000)
    cache = grammars()
    first = cache.compile(Structure("regex", "a"))
    assert cache.compile(Structure("regex", "a")) is first
    for i in range(10):
        cache.compile(Structure("regex", f"b{i}"))
        assert cache.cached_bytes <= 600_000
    assert cache.compile(Structure("regex", "a")) is not first


def test_threads_may_compile_the_same_and_others() -> None:
    cache, errors = grammars(), []

    def work(i: int) -> None:
        try:
            for j in range(20):
                cache.compile(Structure("regex", f"x{(i + j) % 7}"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors and cache.cached_bytes == 7 * structure._size(Structure("regex", "x1"))


@pytest.mark.parametrize("levels", [65, 1000])
def test_deep_schemas_are_refused_before_they_are_compiled(levels: int) -> None:
    text = '{"items":' * levels + "{}" + "}" * levels
    with pytest.raises(RequestError, match="at most 64 levels"):
        grammars().compile(Structure("json_schema", text))


def test_a_parameter_error_names_its_kind() -> None:
    for kind, text in (("regex", "("), ("grammar", "x"), ("json_schema", "["), ("choice", "[]")):
        with pytest.raises(RequestError) as caught:
            grammars().compile(Structure(kind, text))
        assert caught.value.param == kind


SHAPE = Structure("regex", r"\[((1|22|333),){9}4\]")


@pytest.mark.parametrize("n", [1, 3])
def test_a_grammar_survives_preemptions(n: int) -> None:
    """Requests that push each other out give what they give alone, and all of it is complete."""
    engine = make_engine(num_blocks=16 * n, max_num_batched_tokens=7)
    params = SamplingParams(max_tokens=60, temperature=1, structure=SHAPE, n=n)
    ids = [engine.submit((i, 1, 2), attrs.evolve(params, seed=i)) for i in range(3)]
    got: dict[tuple[int, int], str] = {}
    preempted = 0
    while engine.has_work():
        report = engine.step()
        preempted += len(report.preempted)
        for out in report.outputs:
            got[ids.index(out.request_id), out.branch] = got.get((ids.index(out.request_id), out.branch), "") + out.text
            assert out.finish_reason in (None, "stop")
    engine.assert_idle()
    assert preempted
    for (i, branch), text in got.items():
        assert len(json.loads(text)) == 10
        alone = make_engine(num_blocks=512, max_model_len=512)
        alone.submit((i, 1, 2), attrs.evolve(params, seed=i))
        expected = "".join(
            o.text for _ in iter(alone.has_work, False) for o in alone.step().outputs if o.branch == branch
        )
        assert text == expected


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch) -> None:
    engine = make_engine()
    engine.submit((1, 2), SamplingParams(max_tokens=9, structure=Structure("regex", "a{9}")))
    engine.step()
    (seq,) = engine.state.sequences.values()
    monkeypatch.setattr(type(seq.grammar), "advance", lambda *_: 1 / 0)
    other = Work((3, 4), 6)
    other_id = engine.submit(other.prompt, other.params())
    ends = [o for _ in iter(engine.has_work, False) for o in engine.step().outputs if o.finish_reason]
    assert {(o.request_id == other_id, o.finish_reason) for o in ends} == {(True, "length"), (False, "error")}
    assert [o.error for o in ends if o.error] == ["following the grammar failed: ZeroDivisionError"]
    engine.assert_idle()


def test_every_kind_of_eos_is_allowed_exactly_where_the_text_is_complete() -> None:
    toy = ToyExecutor()
    model = attrs.evolve(toy.load(), eos_token_ids=frozenset({257, 0, 300}))
    state = Grammars(toy.tokenizer, model).compile(Structure("regex", "ab?")).start()
    assert not state.allowed(320)[[0, 257, 300]].any()
    state.advance(ord("a"))
    assert state.allowed(320)[[0, 257, 300]].all()
