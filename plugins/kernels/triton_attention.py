"""The Triton kernels of ``kernel=triton``; ``plugins.kernels.triton`` launches them and says which sizes.

Paged attention with the online softmax of Milakov and Gimelshein (2018), tiled as in FlashAttention-2 (Dao, 2023); for
decode, sequences are cut and merged as in Flash-Decoding (Dao et al., 2023).

* The query heads that share a key head, times query tokens, are the M rows of ``tl.dot``: row r is token ``r // GROUP``
  and head ``r % GROUP``. So each key is loaded once for all heads of its group.
* A tile of keys does not depend on the block size: the block table is looked up for each key.
* Offsets into the pool are int64; a block id is widened before it is multiplied by a stride.
* A key that is not seen is never loaded: what lies in an unused slot, NaN included, cannot reach a result.
* ``FORMAT`` is how the cache stores a value: 0 a float type, 1 int8, 2 e4m3 bytes; 1 and 2 have a float32 scale for each
  token and key head (``core.kernel.scales_of``). e4m3 is coded with integer arithmetic, the same on every GPU and in the
  interpreter: half precision with eight exponents fewer is e4m3 times 2**-8.
* ``UPCAST`` makes ``tl.dot`` multiply in float32: the interpreter multiplies the bit patterns of bfloat16.

No autotuning and no libdevice, so that every kernel also runs in the interpreter and compiles ahead of time.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# ------------------------------------------------------------------------------------------------ one value


@triton.jit
def decoded(x, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Stored values as ``dtype``, without their scale; e4m3 comes out times 2**-8."""
    if FORMAT == 2:
        bits = x.to(tl.int32) & 0xFF
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(dtype)
    if FORMAT == 1:  # by way of float32, as compilers do: the interpreter has no int8 to bfloat16
        return x.to(tl.float32).to(dtype)
    return x.to(dtype)


@triton.jit
def full_scale(scale, FORMAT: tl.constexpr):
    """What a ``decoded`` value is multiplied by, from the scale as it is stored."""
    if FORMAT == 2:
        return scale * 256.0
    return scale


@triton.jit
def encoded(x, scale, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """float32 values over their full scale, as they are stored."""
    if FORMAT == 1:
        return tl.floor(x / scale + 0.5).to(tl.int8)
    if FORMAT == 2:
        half = (x / scale).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = half & 0x7FFF
        magnitude = tl.minimum((magnitude + 0x3F + ((magnitude >> 7) & 1)) >> 7, 0x7E)  # to the nearest, ties to even
        return (((half >> 8) & 0x80) | magnitude).to(tl.int8)
    return x.to(dtype)


@triton.jit
def scale_for(x, AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """What to divide float32 ``x`` by so that it fits: its largest magnitude over the format's. NaN if any of x is."""
    peak = tl.max(tl.abs(x), AXIS)
    if FORMAT == 1:
        peak = peak / 127.0
    else:
        peak = peak / 448.0
    return tl.where(peak > 0.0, peak, 1.0) + tl.sum(x * 0.0, AXIS)  # the sum is 0 or NaN: max may drop a NaN


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


# ------------------------------------------------------------------------------------------------ one tile of keys


@triton.jit
def load_tile(
    cache, scales, table, head, positions, seen, block_stride, token_stride, head_stride, scale_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys (or values) of ``positions`` [TILE] as [TILE, D_PAD] of ``dtype``, and their scales [TILE]; 0 where not seen."""
    block = tl.load(table + positions // S, mask=seen, other=0).to(tl.int64)
    offset = (positions % S).to(tl.int64)
    dims = tl.arange(0, D_PAD)
    wanted = seen[:, None] & (dims < D)[None, :]
    rows = block * block_stride + offset * token_stride + head * head_stride
    x = tl.load(cache + rows[:, None] + dims[None, :], mask=wanted, other=0)
    scale = tl.full(positions.shape, 1.0, tl.float32)
    if FORMAT != 0:
        scale = tl.load(scales + block * scale_stride + offset * KV_HEADS + head, mask=seen, other=0.0)
    return decoded(x, FORMAT, dtype), full_scale(scale, FORMAT)


@triton.jit
def scored(s, k_scale, visible, scale, soft_cap, CAP: tl.constexpr, FORMAT: tl.constexpr):
    """Raw products [M, TILE] to scores in base 2; -inf where not visible. tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    if FORMAT != 0:
        s = s * k_scale[None, :]
    s = s * scale
    if CAP:
        s = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * s / soft_cap) + 1.0))
    return tl.where(visible, s * LOG2E, float("-inf"))


@triton.jit
def fold(s, v, v_scale, peak, total, acc, FORMAT: tl.constexpr, UPCAST: tl.constexpr):
    """One step of the online softmax: scores [M, TILE] and values [TILE, D_PAD] into (peak [M], total [M], acc)."""
    new_peak = tl.maximum(peak, tl.max(s, 1))
    base = tl.where(new_peak > float("-inf"), new_peak, 0.0)  # a row that has seen no key yet
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(p, 1)
    if FORMAT != 0:
        p = p * v_scale[None, :]
    acc = acc * shrink[:, None] + dot(p.to(v.dtype), v, UPCAST)
    return new_peak, total, acc


# ------------------------------------------------------------------------------------------------ write


@triton.jit
def store_rows(
    cache, scales, x, slot, heads, here, block_stride, token_stride, head_stride, scale_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store x [heads, D_PAD] at one slot and give it back as float32, as a reader of the cache will see it."""
    block, offset = (slot // S).to(tl.int64), (slot % S).to(tl.int64)
    dims = tl.arange(0, D_PAD)
    rows = block * block_stride + offset * token_stride + heads * head_stride
    where = cache + rows[:, None] + dims[None, :]
    mask = here[:, None] & (dims < D)[None, :]
    if FORMAT == 0:
        stored = x.to(cache.dtype.element_ty)
        tl.store(where, stored, mask=mask)
        return stored.to(tl.float32)
    x = x.to(tl.float32)
    scale = scale_for(x, 1, FORMAT)
    full = full_scale(scale, FORMAT)[:, None]
    stored = encoded(x, full, FORMAT, cache.dtype.element_ty)
    tl.store(where, stored, mask=mask)
    tl.store(scales + block * scale_stride + offset * KV_HEADS + heads, scale, mask=here)
    return decoded(stored, FORMAT, tl.float32) * full


@triton.jit
def write_kv(
    k, v, k_cache, v_cache, k_scales, v_scales, slots, k_token, k_head, v_token, v_head,
    block_stride, token_stride, head_stride, scale_stride,
    KV_HEADS: tl.constexpr, KV_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Program t stores K and V of token t, all heads, at ``slots[t]``; a slot of -1 stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads, dims = tl.arange(0, KV_PAD), tl.arange(0, D_PAD)
    here = heads < KV_HEADS
    mask = here[:, None] & (dims < D)[None, :]
    x = tl.load(k + token * k_token + heads[:, None] * k_head + dims[None, :], mask=mask, other=0.0)
    store_rows(k_cache, k_scales, x, slot, heads, here, block_stride, token_stride, head_stride, scale_stride,
               KV_HEADS, D, D_PAD, S, FORMAT)  # fmt: skip
    y = tl.load(v + token * v_token + heads[:, None] * v_head + dims[None, :], mask=mask, other=0.0)
    store_rows(v_cache, v_scales, y, slot, heads, here, block_stride, token_stride, head_stride, scale_stride,
               KV_HEADS, D, D_PAD, S, FORMAT)  # fmt: skip


# ------------------------------------------------------------------------------------------------ prefill and chunks


@triton.jit
def attend_chunks(
    q, out, k_cache, v_cache, k_scales, v_scales, starts, kv_lens, tables, num_seqs, table_stride,
    scale, soft_cap, window, q_token, q_head, out_token, out_head,
    block_stride, token_stride, head_stride, scale_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    FORMAT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sequences with several new tokens, whose K and V are in the cache: QUERIES tokens of one key head a program.

    The grid is an upper bound, ``num_tokens // QUERIES + num_seqs``: sequence i begins at program
    ``starts[i] // QUERIES + i``. Sequences with one new token are left to ``attend_one``."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a prompt first
    head = tl.program_id(1)
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(starts + middle) // QUERIES + middle
        low = tl.where(begins <= index, middle, low)
        high = tl.where(begins <= index, high, middle)
    seq = low
    begin = tl.load(starts + seq)
    num_new = tl.load(starts + seq + 1) - begin
    first_query = (index - begin // QUERIES - seq) * QUERIES
    if (num_new < 2) | (first_query >= num_new):
        return
    kv_len = tl.load(kv_lens + seq)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, TILE)
    query = first_query + rows // GROUP
    real = (rows < QUERIES * GROUP) & (query < num_new)
    place = kv_len - num_new + query  # position of the row's token
    token = (begin + query).to(tl.int64)
    q_heads = head * GROUP + rows % GROUP
    wanted = real[:, None] & (dims < D)[None, :]
    asked = tl.load(q + (token * q_token + q_heads * q_head)[:, None] + dims[None, :], mask=wanted, other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    end = tl.minimum(kv_len - num_new + first_query + QUERIES, kv_len)
    first = 0
    if WINDOW:  # the window bounds the loop, not only the mask
        first = tl.maximum(0, kv_len - num_new + first_query - window + 1) // TILE * TILE
    table = tables + seq.to(tl.int64) * table_stride  # type: ignore[attr-defined]
    for start in range(first, end, TILE):
        positions = start + keys
        seen = positions < end
        k, k_scale = load_tile(k_cache, k_scales, table, head, positions, seen, block_stride, token_stride, head_stride,
                               scale_stride, KV_HEADS, D, D_PAD, S, FORMAT, asked.dtype)  # fmt: skip
        v, v_scale = load_tile(v_cache, v_scales, table, head, positions, seen, block_stride, token_stride, head_stride,
                               scale_stride, KV_HEADS, D, D_PAD, S, FORMAT, asked.dtype)  # fmt: skip
        visible = (positions[None, :] <= place[:, None]) & seen[None, :]
        if WINDOW:
            visible = visible & (positions[None, :] > place[:, None] - window)
        s = scored(dot(asked, tl.trans(k), UPCAST), k_scale, visible, scale, soft_cap, CAP, FORMAT)
        peak, total, acc = fold(s, v, v_scale, peak, total, acc, FORMAT, UPCAST)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (token * out_token + q_heads * out_head)[:, None] + dims[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=wanted)


# ------------------------------------------------------------------------------------------------ decode


@triton.jit
def cut(kv_len, window, TILE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr):
    """(first key, keys a piece, number of pieces) of a sequence with one query: by its own length alone, so that its result
    does not depend on its company. PIECE keys each, more where that would give over PIECES pieces."""
    first = kv_len * 0
    if WINDOW:
        first = tl.maximum(kv_len - window, 0) // TILE * TILE
    tiles = (kv_len - first + TILE - 1) // TILE
    wanted = tl.minimum((kv_len - first + PIECE - 1) // PIECE, PIECES)
    each = (tiles + tl.maximum(wanted, 1) - 1) // tl.maximum(wanted, 1)
    each = tl.maximum(each, 1)
    return first, each * TILE, tl.maximum((tiles + each - 1) // each, 1)


@triton.jit
def plan_pieces(
    work, starts, kv_lens, num_seqs, window,
    TILE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The work list of ``attend_one``, made on the device once a step: ``work[0]`` pieces, then each as sequence *
    PIECES + piece. Sequences with more or fewer than one new token have none. One program.
    """
    count = 0
    pieces = tl.arange(0, PIECES)
    for start in range(0, num_seqs, BLOCK):
        seq = start + tl.arange(0, BLOCK)
        here = seq < num_seqs
        kv_len = tl.load(kv_lens + seq, mask=here, other=0)
        new = tl.load(starts + seq + 1, mask=here, other=0) - tl.load(starts + seq, mask=here, other=0)
        _, _, number = cut(kv_len, window, TILE, PIECE, PIECES, WINDOW)
        number = tl.where(here & (new == 1), number, 0)
        at = count + tl.cumsum(number, 0) - number
        tl.store(
            work + 1 + at[:, None] + pieces[None, :],
            (seq * PIECES)[:, None] + pieces[None, :],
            mask=pieces[None, :] < number[:, None],
        )
        count += tl.sum(number, 0)
    tl.store(work, count)


@triton.jit
def attend_one(
    q, k, v, out, k_cache, v_cache, k_scales, v_scales, work, starts, kv_lens, slots, tables, table_stride,
    part_acc, part_peak, part_total, scale, soft_cap, window,
    q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head,
    block_stride, token_stride, head_stride, scale_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, S: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Sequences with one new token: the pieces of the work list times key heads, taken in turn by a fixed grid.

    A sequence of one piece is written to ``out``; of more, to ``part_*`` [B, PIECES, H(, D)] for ``merge_pieces``. With
    ``WRITE`` the last piece also stores the new token's K and V and takes them from its registers, since what it wrote
    cannot be read back in the same kernel; without, they are in the cache already.
    """
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, TILE)
    real = rows < GROUP
    wanted = real[:, None] & (dims < D)[None, :]
    items = tl.load(work) * KV_HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        code = tl.load(work + 1 + item // KV_HEADS)
        head = item % KV_HEADS
        seq, piece = code // PIECES, code % PIECES
        kv_len = tl.load(kv_lens + seq)
        token = tl.load(starts + seq).to(tl.int64)
        first, length, number = cut(kv_len, window, TILE, PIECE, PIECES, WINDOW)
        q_heads = head * GROUP + rows
        asked = tl.load(q + token * q_token + q_heads[:, None] * q_head + dims[None, :], mask=wanted, other=0.0)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        last = kv_len
        if WRITE:
            last = kv_len - 1
            slot = tl.load(slots + token)
            if (piece == number - 1) & (slot >= 0) & (kv_len > 0):
                one = tl.arange(0, 1)
                new_heads = head + one
                new_k = tl.load(k + token * k_token + new_heads[:, None] * k_head + dims[None, :],
                                mask=(dims < D)[None, :], other=0.0)  # fmt: skip
                new_k = store_rows(k_cache, k_scales, new_k, slot, new_heads, one == 0, block_stride, token_stride,
                                   head_stride, scale_stride, KV_HEADS, D, D_PAD, S, FORMAT)  # fmt: skip
                new_v = tl.load(v + token * v_token + new_heads[:, None] * v_head + dims[None, :],
                                mask=(dims < D)[None, :], other=0.0)  # fmt: skip
                new_v = store_rows(v_cache, v_scales, new_v, slot, new_heads, one == 0, block_stride, token_stride,
                                   head_stride, scale_stride, KV_HEADS, D, D_PAD, S, FORMAT)  # fmt: skip
                s = tl.sum(asked.to(tl.float32) * new_k, 1)
                peak = tl.sum(scored(s[:, None], s, True, scale, soft_cap, CAP, 0), 1)
                total = 1.0 + s * 0.0  # NaN if the score is
                acc += new_v
        table = tables + seq.to(tl.int64) * table_stride
        begin = first + piece * length
        end = tl.minimum(begin + length, last)
        for start in range(begin, end, TILE):
            positions = start + keys
            seen = positions < end
            if WINDOW:
                seen = seen & (positions >= kv_len - window)
            tile_k, k_scale = load_tile(k_cache, k_scales, table, head, positions, seen, block_stride, token_stride,
                                        head_stride, scale_stride, KV_HEADS, D, D_PAD, S, FORMAT, asked.dtype)  # fmt: skip
            tile_v, v_scale = load_tile(v_cache, v_scales, table, head, positions, seen, block_stride, token_stride,
                                        head_stride, scale_stride, KV_HEADS, D, D_PAD, S, FORMAT, asked.dtype)  # fmt: skip
            s = scored(dot(asked, tl.trans(tile_k), UPCAST), k_scale, seen[None, :], scale, soft_cap, CAP, FORMAT)
            peak, total, acc = fold(s, tile_v, v_scale, peak, total, acc, FORMAT, UPCAST)
        if number == 1:
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            at = token * out_token + q_heads[:, None] * out_head + dims[None, :]
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=wanted)
        else:
            part = (seq.to(tl.int64) * PIECES + piece) * (KV_HEADS * GROUP) + q_heads
            tl.store(part_acc + part[:, None] * D + dims[None, :], acc, mask=wanted)
            tl.store(part_peak + part, peak, mask=real)
            tl.store(part_total + part, total, mask=real)


@triton.jit
def merge_pieces(
    out, part_acc, part_peak, part_total, starts, kv_lens, window, out_token, out_head,
    HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One head of one sequence a program: its pieces, weighted by their share of the softmax. One piece: nothing to do."""
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + seq).to(tl.int64)
    new = tl.load(starts + seq + 1).to(tl.int64) - token
    _, _, number = cut(tl.load(kv_lens + seq), window, TILE, PIECE, PIECES, WINDOW)
    if (number < 2) | (new != 1):
        return
    pieces, dims = tl.arange(0, PIECES), tl.arange(0, D_PAD)
    there = pieces < number
    part = (seq.to(tl.int64) * PIECES + pieces) * HEADS + head
    peaks = tl.load(part_peak + part, mask=there, other=float("-inf"))
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(weights * tl.load(part_total + part, mask=there, other=0.0), 0)
    wanted = there[:, None] & (dims < D)[None, :]
    acc = tl.load(part_acc + part[:, None] * D + dims[None, :], mask=wanted, other=0.0)
    merged = tl.sum(acc * weights[:, None], 0) / total
    tl.store(out + token * out_token + head * out_head + dims, merged.to(out.dtype.element_ty), mask=dims < D)


# ------------------------------------------------------------------------------------------------ moves


@triton.jit
def copy_pieces(
    source, destination, pairs, source_block, source_piece, target_block, target_piece, num_words, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (m, p, c): part c of piece p of block ``pairs[m, 0]`` to block ``pairs[m, 1]``; all in 4-byte words."""
    move, piece = tl.program_id(0), tl.program_id(1).to(tl.int64)
    old = tl.load(pairs + 2 * move).to(tl.int64)
    new = tl.load(pairs + 2 * move + 1).to(tl.int64)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    here = words < num_words
    x = tl.load(source + old * source_block + piece * source_piece + words, mask=here)
    tl.store(destination + new * target_block + piece * target_piece + words, x, mask=here)
