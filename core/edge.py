"""Where requests come in: each is checked once, what it leaves open is settled, and the engine gets a ``Request`` that it can trust."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from core.levels import ServiceLevels
from core.params import check_labels, check_request, check_salt
from core.structure import Grammars
from core.types import Limits, ModelInfo, Request, SamplingParams


class Edge:
    """The checks of one engine. Any thread may call it; ``tokenizer`` is for grammars alone."""

    def __init__(self, model: ModelInfo, limits: Limits, tokenizer: Any = None, levels: ServiceLevels | None = None):
        self.model, self.limits = model, limits
        self.levels = levels or ServiceLevels()
        self.grammars = Grammars(tokenizer, model)

    def request(
        self,
        next_id: Callable[[], int],
        prompt_token_ids: Iterable[int],
        params: SamplingParams | None,
        arrival_s: float,
        labels: Mapping[str, Any],
    ) -> Request:
        """A checked request, which takes the next id; ``RequestError`` names what is wrong with it. See ``Engine.submit``."""
        token_ids = tuple(prompt_token_ids)
        params = check_request(token_ids, params or SamplingParams(), self.model, self.limits)
        check_salt(labels.get("cache_salt", ""))
        labels = check_labels(labels, self.levels, arrival_s)
        if params.structure is not None:
            labels["grammar"] = self.grammars.compile(params.structure)
        id = next_id()
        if params.prompt_logprobs is not None:
            # a namespace of its own: what another request computed has no logits to score
            labels["cache_salt"] = f"{labels.get('cache_salt', '')}\0{id}"
        return Request(id=id, prompt_token_ids=token_ids, params=params, arrival_s=arrival_s, **labels)
