"""Measuring a machine once: link and prefill speed for break-even preemption, kept in the cache folder; and made-up
batches to run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from attrs.validators import gt, instance_of

from core.cache import KVCache, KVShape
from core.fetch import cache_dir
from core.kernel import Layout
from core.machines import Company, machine_name, write_json
from core.types import Batch, Move, MoveKind, SamplingBatch, SamplingParams

LOG = logging.getLogger(__name__)
LINK_BYTES = 64 * 2**20  # copied each way: more than a CPU keeps in its caches
BUSY = 0.1  # share of the processors' time, by others, from which a measurement is not kept
LINK_BLOCKS = 512  # most blocks, for models so small that the bytes would take very many
_POSITIVE: list[Any] = [instance_of(float), gt(0)]


@attrs.frozen(slots=True, kw_only=True)
class Calibration:
    """What was measured of one set-up."""

    link_bytes_per_s: float = attrs.field(validator=_POSITIVE)  # device blocks to the host pool and back
    prefill_flop_per_s: float = attrs.field(validator=_POSITIVE)


def recorded(key: Mapping[str, Any], measure: Callable[[], Calibration]) -> Calibration:
    """The calibration kept under this machine and ``key`` (JSON values); measured and kept where there is none.

    A file that cannot be read is measured again, one that cannot be written costs only the next start's time, and what was
    measured while others used the processors is not kept, or every later start would believe it; all are logged.
    """
    full = json.dumps({"machine": machine_name(), **key}, sort_keys=True)
    path = cache_dir() / "cost" / f"{hashlib.sha256(full.encode()).hexdigest()[:20]}.json"
    try:
        return Calibration(**json.loads(path.read_text(encoding="utf-8"))["measured"])
    except FileNotFoundError:
        LOG.debug("not measured yet: %s", full)
    except (OSError, ValueError, TypeError, KeyError) as error:
        LOG.warning("%s cannot be used (%s): measuring again", path, error)
    company = Company()
    found = measure()
    if (others := company.share() or 0.0) > BUSY:
        LOG.warning("costs were measured while other processes used %.0f %% of the processors: not kept", 100 * others)
        return found
    try:
        write_json(path, {"key": json.loads(full), "measured": attrs.asdict(found)})
    except OSError as error:
        LOG.warning("cannot keep the measured costs in %s: %s", path, error)
    return found


def best_of(times: int, run: Callable[[], Any], device: torch.device, limit_s: float = 2.0) -> float:
    """Seconds of the fastest of several runs, after one that is not counted; at least one, no more once ``limit_s`` is up."""
    best = float("inf")
    begun = time.perf_counter()
    for i in range(times + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if i:
            best = min(best, ended - started)
            if ended - begun > limit_s:
                break
    return best


def split_link(shape: KVShape, block_size: int, layout: Layout, device: torch.device) -> tuple[float, float]:
    """(bytes a second, seconds a block) of moving blocks: from whole blocks and from blocks of one token.

    Together they give what ``measure_link`` does for ``block_size``; where that is 1, or small blocks are no slower, a
    block by itself costs nothing.
    """
    whole = measure_link(shape, block_size, layout, device)
    if block_size == 1:
        return whole, 0.0
    whole_bytes, token_bytes = shape.token_bytes * block_size, shape.token_bytes
    whole_s, token_s = whole_bytes / whole, token_bytes / measure_link(shape, 1, layout, device)
    rate = (whole_bytes - token_bytes) / max(whole_s - token_s, whole_s / 1000)
    fixed_s = token_s - token_bytes / rate
    return (rate, fixed_s) if fixed_s > 0 and rate < 10 * whole else (whole, 0.0)


def measure_link(shape: KVShape, block_size: int, layout: Layout, device: torch.device) -> float:
    """Bytes a second of swap, out and in: whole scattered blocks, between pools made for this. Takes about 0.1 s."""
    count = min(LINK_BLOCKS, max(2, LINK_BYTES // (shape.token_bytes * block_size)))
    cache = KVCache(
        shape, num_blocks=count, num_swap_blocks=count, block_size=block_size, layout=layout, device=device, zero=True
    )
    order = np.random.default_rng(0).permutation(count).tolist()
    kinds: tuple[MoveKind, ...] = ("swap_out", "swap_in")
    moves = [Move(kind, source, target) for kind in kinds for target, source in enumerate(order)]
    seconds = best_of(5, lambda: cache.run_moves(moves), device)
    cache.close()
    return len(moves) * cache.block_bytes / seconds


def one_sequence(
    num_tokens: int, block_size: int, vocab_size: int, seed: int, logit_tokens: np.ndarray | None = None
) -> Batch:
    """A prompt of random tokens in blocks 0, 1, ...; logits for its last token, or for ``logit_tokens``."""
    arange = np.arange(num_tokens, dtype=np.int32)
    rows = np.array([num_tokens - 1]) if logit_tokens is None else logit_tokens
    return Batch(
        token_ids=np.random.default_rng(seed).integers(0, vocab_size, num_tokens, dtype=np.int32),
        positions=arange,
        slot_mapping=arange.copy(),
        query_start=np.array([0, num_tokens], dtype=np.int32),
        kv_lens=np.array([num_tokens], dtype=np.int32),
        block_tables=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
        logit_tokens=rows.astype(np.int32),
        sequence_ids=(0,),
        block_size=block_size,
        max_query_len=num_tokens,
        max_kv_len=num_tokens,
    )


def sampling_of(num_rows: int, params: SamplingParams) -> SamplingBatch:
    """One draw from each row, all with the same parameters."""
    return SamplingBatch(
        rows=range(num_rows),
        params=[params] * num_rows,
        seeds=[0] * num_rows,
        branches=[0] * num_rows,
        positions=range(num_rows),
        histories=[()] * num_rows,
        num_prompt_tokens=[0] * num_rows,
        recorded_output_tokens=[None] * num_rows,
    )
