"""Quire from Python and notebooks::

    import core

    with core.build(["model=tiny", "allocator=paged"]) as quire:
        for completion in quire.generate(["Once upon a time", "The sky is"], {"max_tokens": 32, "temperature": 0}):
            print(completion.text)

``build`` takes the words of the command line. Nothing is written to disk, and no frontend is started.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import attrs

from core.config import compose
from core.engine import Engine
from core.params import bad_word_ids, check_request
from core.start import Started, start
from core.types import FinishReason, Output, QuireError, RequestError, SamplingParams, Structure, TokenLogprobs

Params = SamplingParams | Mapping[str, Any]
Prompt = str | Sequence[int]


@attrs.frozen(kw_only=True)
class Completion:
    """One finished answer. With ``n`` > 1 a prompt has n of them, in the order of the branches."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of each prompt token but the first


def build(overrides: Sequence[str] = ()) -> Quire:
    """Start an engine for overrides such as ``["model=tiny", "cache.num_blocks=64"]``; ConfigError says what is wrong with them."""
    return Quire(start(compose(overrides)))


class Quire:
    """A running engine that answers lists of prompts. Calls from several threads take turns."""

    def __init__(self, started: Started):
        self.started = started
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        return self.started.engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None
    ) -> list[Completion]:
        """Answer every prompt: text, or token ids. ``params`` is for all of them, or a list with one for each.

        All requests are checked before the first one starts: a bad one raises ``RequestError`` and nothing ran. A request that the
        allocator refuses, or that fails, raises when the others have finished.
        """
        encoded = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        return self._serve(encoded, _params_for(params, len(encoded)))

    def chat(self, messages: Sequence[Mapping[str, Any]], params: Params | None = None) -> list[Completion]:
        """Answer one conversation of ``{"role": ..., "content": ...}`` messages, through the model's chat template."""
        tokenizer = self.engine.tokenizer
        if not tokenizer.has_chat_template:
            raise RequestError(f"{self.engine.model.name} has no chat template: use generate", "messages")
        token_ids = tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
        return self._serve([token_ids], _params_for(params, 1))

    def close(self) -> None:
        """Free the model and the pool; harmless when repeated."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _serve(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        engine = self.engine
        params = [_with_words(each, engine.tokenizer) for each in params]
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            try:
                check_request(tuple(prompt), each, engine.model, engine.limits)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}", error.param) from error
        with self._lock:
            ids = [engine.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
            try:
                outputs = self._run(dict(zip(ids, params, strict=True)))
            except BaseException:
                for request_id in ids:  # Ctrl-C, or a plugin at fault: nothing is left running for the next call
                    engine.abort(request_id)
                raise
        return [
            _completion(outputs[request_id, branch])
            for request_id, each in zip(ids, params, strict=True)
            for branch in range(each.n)
        ]

    def _run(self, requests: Mapping[int, SamplingParams]) -> dict[tuple[int, int], list[Output]]:
        """Step until every branch of every request has ended; its outputs by (request, branch)."""
        outputs: dict[tuple[int, int], list[Output]] = {
            (request_id, b): [] for request_id, p in requests.items() for b in range(p.n)
        }
        unfinished = set(outputs)
        refused: dict[int, str] = {}
        while unfinished:
            report = self.engine.step()
            for output in report.outputs:
                if output.request_id not in requests:
                    continue  # of a call that was interrupted
                outputs[output.request_id, output.branch].append(output)
                if output.finish_reason in ("refused", "error"):
                    refused.setdefault(output.request_id, output.error or output.finish_reason)
                if output.finish_reason == "refused":
                    unfinished -= {(output.request_id, branch) for branch in range(requests[output.request_id].n)}
                elif output.finish_reason is not None:
                    unfinished.discard((output.request_id, output.branch))
            if report.idle and report.wait_until is not None:
                self.engine.executor.wait_until(report.wait_until)
            if unfinished and not self.engine.has_work():
                raise QuireError(f"the engine is idle, but {len(unfinished)} sequences have not ended")
        if refused:
            order = list(requests)
            raise RequestError(
                "; ".join(f"prompt {order.index(request_id)}: {reason}" for request_id, reason in refused.items())
            )
        return outputs


def _completion(outputs: Sequence[Output]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    return Completion(
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        stop_reason=last.stop_reason,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of whole numbers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]  # type: ignore[list-item]
    for index, each in enumerate(listed):
        if not isinstance(each, str) and not (
            isinstance(each, Sequence) and all(isinstance(token, int) for token in each)
        ):
            raise RequestError(f"prompt {index} must be text or a list of token ids, got {each!r}", "prompts")
    return listed  # type: ignore[return-value]


def _params_for(params: Params | Iterable[Params] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [_sampling_params(params or {})] * num_prompts
    listed = [_sampling_params(each) for each in params]
    if len(listed) != num_prompts:
        raise RequestError(
            f"{len(listed)} params for {num_prompts} prompts: give one for all, or one for each", "params"
        )
    return listed


def _with_words(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Bad words that are texts become token ids."""
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    words = [[word] if not isinstance(word, str) else bad_word_ids(word, tokenizer) for word in params.bad_words]
    return attrs.evolve(params, bad_words=tuple(ids for spellings in words for ids in spellings))


def _sampling_params(params: Params) -> SamplingParams:
    """A SamplingParams, from a mapping if need be; its lists become tuples, and one stop string is one."""
    if isinstance(params, SamplingParams):
        return params
    fields = [field.name for field in attrs.fields(SamplingParams)]
    unknown = sorted(set(params) - set(fields))
    if unknown:
        raise RequestError(
            f"{unknown[0]}: there is no such sampling parameter; allowed: {', '.join(fields)}", unknown[0]
        )
    values = dict(params)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    structure = values.get("structure")
    if isinstance(structure, Mapping):  # {"regex": "[0-9]+"}
        if len(structure) != 1:
            raise RequestError(f"structure takes one kind and its text, got {dict(structure)!r}", "structure")
        values["structure"] = Structure(*next(iter(structure.items())))
    return SamplingParams(**values)
