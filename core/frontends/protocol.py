"""The requests of the API, read strictly: what arrives is served as asked, or refused with the parameter's name.

* Types are not guessed: ``"0.7"`` and ``true`` are no temperatures, ``NaN`` is no JSON. ``null`` is the same as absent.
* What OpenAI's API (or vLLM's) knows and this server does not serve is refused, unless its value is that API's default.
* Fields that cannot change an answer (``user``, ``metadata`` ...) are accepted and ignored; unknown ones are refused by name.

docs/api.md has every field beside what other servers make of it; a test holds it and these classes together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import attrs
from pydantic import Field, ValidationError, model_validator

from core.frontends.fields import (
    MAX_BAD_WORDS,
    MAX_STALL_S,
    MAX_STOP_TOKEN_IDS,
    ApiError,
    BadWord,
    Biases,
    Content,
    Name,
    NotYet,
    Prompts,
    Salt,
    Stops,
    Strict,
    TokenId,
    explain,
    read_object,
    served_fields,
)
from core.frontends.structured import ResponseFormat, StructuredOutputs, structure_of
from core.params import MAX_BEAMS, MAX_LOGPROBS, MAX_N
from core.types import SamplingParams

__all__ = ["ApiError", "ChatRequest", "CompletionRequest", "Generation", "read_chat", "read_completion"]

IGNORED = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)

_NOT_YET: NotYet = {
    "spaces_between_special_tokens": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "store": (False,),
}
NOT_YET_COMPLETION: NotYet = _NOT_YET | {"suffix": ("",)}
NOT_YET_CHAT: NotYet = _NOT_YET | {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
NOT_YET_MESSAGE: NotYet = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
    "reasoning_content": (),
    "reasoning": (),
}
NOT_YET_STREAM_OPTIONS: NotYet = {"include_obfuscation": (False,)}


class StreamOptions(Strict):
    """What a stream carries beside the text."""

    include_usage: bool = Field(False, description="a last chunk with usage; null usage on the others")
    continuous_usage_stats: bool = Field(False, description="with include_usage: usage so far on every chunk")


class Message(Strict):
    """One turn of a chat. ``developer`` is what ``system`` is called now; templates know the old name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None

    def rendered(self) -> dict[str, str]:
        """As chat templates want it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class Generation(Strict):
    """What completions and chats have in common."""

    model: str
    max_tokens: int | None = Field(None, ge=1, lt=2**53)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**53)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_N)
    use_beam_search: bool = Field(False, description="n beams (best_of, where it is given), and their n best answers")
    length_penalty: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)
    stop: Stops = ()
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**31)
    repetition_penalty: float = Field(1.0, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Biases = Field({})
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[BadWord] = Field([], max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**53)
    return_token_ids: bool = False
    echo: bool = False
    cache_salt: Salt | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    session_id: Name | None = Field(
        None, description="whose next turn this is; with stall_s its KV may be kept for the next one"
    )
    stall_s: float | None = Field(
        None, ge=0, le=MAX_STALL_S, allow_inf_nan=False, description="seconds until the session's next turn, about"
    )
    service_class: Name | None = Field(None, description="one of the server's slo.classes")
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is allowed only with stream=true", param="stream_options")
        if self.truncate_prompt_tokens == 0:
            raise ApiError(
                400, "truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens"
            )
        structure_of(self.response_format, self.structured_outputs)
        self._check_beams()
        self._check_session()
        return self

    def _check_session(self) -> None:
        """The next turn goes on from one answer."""
        if self.stall_s is None:
            return
        if self.session_id is None:
            raise ApiError(400, "stall_s is allowed only with session_id", param="stall_s")
        if self.num_branches > 1 or self.use_beam_search:
            message = f"stall_s={self.stall_s:g} is for one answer, which the session goes on from: n must be 1, without beam search"
            raise ApiError(400, message, param="stall_s")

    def _check_beams(self) -> None:
        """What can be told without the engine: ``core.params`` checks the rest."""
        if not self.use_beam_search:
            if self.length_penalty != 1:
                raise ApiError(400, "length_penalty is allowed only with use_beam_search=true", param="length_penalty")
            return
        if self.stream:
            raise ApiError(400, "use_beam_search cannot be streamed: its answers are known at the end", param="stream")
        if self.n > MAX_BEAMS:
            raise ApiError(400, f"n={self.n}: use_beam_search takes at most {MAX_BEAMS} beams", param="n")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_branches(self) -> int:
        """Answers that are made for each prompt."""
        return self.n

    @property
    def beam_width(self) -> int | None:
        """Beams of a beam search; None: there is none."""
        return self.n if self.use_beam_search else None

    def params(self) -> SamplingParams:
        """For the engine; bad words are added where a tokenizer is (``prepare``)."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(self.top_k, 2**31 - 1),  # more than any vocabulary: off
            min_p=self.min_p,
            seed=self.seed,
            n=self.num_branches,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logprobs=self.num_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            structure=structure_of(self.response_format, self.structured_outputs),
        )

    @property
    def num_logprobs(self) -> int | None:
        """How many log probabilities each token of the answer has beside its own; None: not even that."""
        raise NotImplementedError


class CompletionRequest(Generation):
    """``POST /v1/completions``. ``max_tokens`` is 16 unless given, as in OpenAI's API; 0 is for ``echo``."""

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0, lt=2**53)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=20)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: must be at least 1, or 0 with echo=true, got 0", param="max_tokens")
        if self.stall_s is not None and len(self.prompt) > 1:
            message = (
                f"stall_s={self.stall_s:g} is for one prompt, which the session goes on from, got {len(self.prompt)}"
            )
            raise ApiError(400, message, param="stall_s")
        if self.best_of is not None and self.best_of < self.n:
            raise ApiError(400, f"best_of={self.best_of} must be at least n={self.n}", param="best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ApiError(400, "best_of above n cannot be streamed: the best is known at the end", param="best_of")
        return self

    @property
    def num_branches(self) -> int:
        return self.n if self.use_beam_search else self.best_of or self.n

    @property
    def beam_width(self) -> int | None:
        return (self.best_of or self.n) if self.use_beam_search else None

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_branches > self.n else self.logprobs

    def params(self) -> SamplingParams:
        """For the engine: ``echo`` with ``logprobs`` scores the prompt, and no answer is shorter than one token there."""
        params = super().params()
        if self.max_tokens == 0:
            params = attrs.evolve(params, max_tokens=1)
        if self.echo and self.logprobs is not None:
            params = attrs.evolve(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params


class ChatRequest(Generation):
    """``POST /v1/chat/completions``. Without ``max_tokens`` an answer may fill what ``max_model_len`` leaves."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**53)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(
                400,
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} are the same limit: "
                "give one",
                param="max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is allowed only with logprobs=true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt contradict each other"
            raise ApiError(400, message, param="continue_final_message")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def params(self) -> SamplingParams:
        """For the engine."""
        params = super().params()
        if self.max_completion_tokens is not None:
            params = attrs.evolve(params, max_tokens=self.max_completion_tokens)
        return params


# ------------------------------------------------------------------------------------------------ other routes


class TokenizeRequest(Strict):
    """``POST /tokenize``: of a prompt, or of a chat through the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            given = "neither" if self.prompt is None else "both"
            raise ApiError(400, f"give prompt or messages, one of them, got {given}", param="prompt")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt contradict each other"
            raise ApiError(400, message, param="continue_final_message")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


# ------------------------------------------------------------------------------------------------ reading

Shape = TypeVar("Shape", bound=Strict)


def read_completion(body: bytes) -> CompletionRequest:
    """The request in a body; ``ApiError`` (400) names what is wrong with it."""
    return read(CompletionRequest, served_fields(read_object(body), NOT_YET_COMPLETION))


def read_chat(body: bytes) -> ChatRequest:
    """The request in a body; ``ApiError`` (400) names what is wrong with it."""
    return read(ChatRequest, served_fields(read_object(body), NOT_YET_CHAT))


def read_tokenize(body: bytes) -> TokenizeRequest:
    """The request in a body; ``ApiError`` (400) names what is wrong with it."""
    return read(TokenizeRequest, read_object(body))


def read_detokenize(body: bytes) -> DetokenizeRequest:
    """The request in a body; ``ApiError`` (400) names what is wrong with it."""
    return read(DetokenizeRequest, read_object(body))


def read(shape: type[Shape], data: dict[str, Any]) -> Shape:
    """A request of this shape from a JSON object."""
    if data.get("stream_options") is not None:
        data["stream_options"] = served_fields(data["stream_options"], NOT_YET_STREAM_OPTIONS, "stream_options.")
    if isinstance(data.get("messages"), list):
        data["messages"] = [
            served_fields(message, NOT_YET_MESSAGE, f"messages[{index}].")
            for index, message in enumerate(data["messages"])
        ]
    try:
        return shape.model_validate({name: value for name, value in data.items() if name not in IGNORED})
    except ValidationError as error:
        raise explain(error, shape) from error
