# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that chooses a token for each row of logits: greedily, or drawn by temperature, top_k,
top_p, min_p and a number in [0, 1). No row is sorted.

top_k, top_p and min_p each keep a beginning of the tokens in the order of their logits (equal ones in the
order of their ids), so all of them together keep the shortest; only its mass K must be known:

    likeliest |=============== kept, mass K ===============|--------------- dropped ---------------| rarest
                          ^ the token at which the running mass passes number * K is the one drawn

Rows with neither top_k nor top_p are drawn in the order of ids. In loops:

    m        = max(x)
    key[i]   = bits of m - x[i]                        # floats of one sign: the smaller, the likelier
    mass[i]  = round(2 ** 42 * exp((x[i] - m) / temperature))       # integers: their sums have no order
    K        = sum(mass)
    if top_k:   key_k = the k-th smallest key;  K = mass of the k tokens up to it
    if top_p:   key_p = the smallest key whose tokens up to it have top_p * K;  K = mass up to the first one
                        that reaches it
    if min_p:   K = min(K, mass of tokens above it)
    draw:       the first token in the order of keys, then ids, whose running mass is above number * K

The likeliest tokens of a row are found beside its maximum: a row is read in lanes, each with its own maximum,
and the `_LISTED`-th of these bounds a list of about as many tokens. All searches are bisections of the list,
in registers. Where the list does not reach far enough (a flat row, many equal logits, a large top_k), the row
itself is searched, among `_PARTS` parts at a time, which reads it eight times for each search.

    read of a row      1: maximum, lanes      2: K, and the list      (flat rows: 8 for each search)

Masks are bits, applied as the row is read. A row's token depends on nothing but the row and its settings.
"""

# Triton types its own source.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Lanes of a row, the least number of listed tokens, and the most.
_LANES, _LISTED, _LIST = 4096, 1024, 2048
#: Parts among which one reading of a row decides.
_PARTS = 16
WARPS = 16

#: Status of a row: a token is chosen; the model's row is not a number; nothing is left of the row.
CHOSEN, NOT_A_NUMBER, NOTHING_LEFT = range(3)

#: Numbers of a row's settings.
COLUMNS = 8

LOG2E = tl.constexpr(1.4426950408889634)
#: Mass of a row's likeliest token.
UNIT = tl.constexpr(float(2**42))
#: Key of -inf.
RULED_OUT = tl.constexpr(0x7F800000)


@triton.jit
def logits_at(row, at):
    """Logits of a row (see `sample_kernel`); -inf beyond it, and where masked."""
    _, x_ptr, x_size, y_ptr, y_size, words_ptr, masked_size = row
    x = tl.load(x_ptr + at, mask=at < x_size, other=float("-inf")).to(tl.float32)
    y = tl.load(y_ptr + at, mask=at < y_size, other=float("-inf"))
    word = tl.load(words_ptr + (at >> 5), mask=at < masked_size, other=-1)
    return tl.where(((word >> (at & 31)) & 1) == 1, tl.where(x_size > 0, x, y), float("-inf"))


@triton.jit
def keys_of(x, top):
    """Bits of the distance to the highest logit; those of -inf are the largest."""
    return tl.abs(top - x).to(tl.int32, bitcast=True)  # 0 may be -0.0


@triton.jit
def mass_of(key, rate):
    """The mass of tokens, by their key."""
    return (tl.exp2(key.to(tl.float32, bitcast=True) * -rate) * UNIT + 0.5).to(tl.int64)


@triton.jit
def amount_of(key, rate, by_count):
    """What is added up of tokens: one each, or their mass."""
    return tl.where(by_count, (key < RULED_OUT).to(tl.int64), mass_of(key, rate))


@triton.jit
def search_list(key, amount, above):
    """The smallest key whose tokens up to it amount to more than `above`; RULED_OUT if none does."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), RULED_OUT, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = tl.sum(tl.where(key <= middle, amount, 0), 0) > above
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle)
    return high


@triton.jit
def search_row(row, top, rate, by_count, above, LANES: tl.constexpr, PARTS: tl.constexpr):
    """The same for all of a row, read once for each part of the search."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), RULED_OUT, tl.int32)
    part = tl.arange(0, PARTS)
    while high - low > 1:
        step = tl.maximum((high - low) // PARTS, 1)
        bounds = low + (part + 1) * step
        sums = tl.zeros((PARTS,), tl.int64)
        for start in range(0, row[0], LANES):
            key = keys_of(logits_at(row, start + tl.arange(0, LANES)), top)
            amount = amount_of(key, rate, by_count)
            for i in range(PARTS - 1):
                sums += tl.where(part == i, tl.sum(tl.where(key <= low + (i + 1) * step, amount, 0), 0), 0)
        is_tried = (part < PARTS - 1) & (bounds < high)
        is_enough = is_tried & (sums > above)
        new_high = tl.min(tl.where(is_enough, bounds, high), 0)
        low = tl.max(tl.where(is_tried & (bounds < new_high), bounds, low), 0)
        high = new_high
    return high


@triton.jit
def row_amount(row, top, rate, by_count, below, LANES: tl.constexpr):
    """What all tokens of a row with smaller keys than `below` amount to."""
    total = tl.zeros((), tl.int64)
    for start in range(0, row[0], LANES):
        key = keys_of(logits_at(row, start + tl.arange(0, LANES)), top)
        total += tl.sum(tl.where(key < below, amount_of(key, rate, by_count), 0), 0)
    return total


@triton.jit
def find_in_row(row, top, wanted, skipped, LANES: tl.constexpr):
    """The token of a key after so many others of that key."""
    token = tl.zeros((), tl.int32)
    for start in range(0, row[0], LANES):
        key = keys_of(logits_at(row, start + tl.arange(0, LANES)), top)
        is_equal = (key == wanted).to(tl.int32)
        count = tl.sum(is_equal, 0)
        if (skipped >= 0) & (skipped < count):
            token = start + tl.sum((tl.cumsum(is_equal, 0) <= skipped).to(tl.int32), 0)
        skipped -= count
    return token


@triton.jit
def sample_kernel(
    x_ptr, y_ptr, words_ptr, settings_ptr, list_ptr, token_ptr, status_ptr, x_stride, y_stride, words_stride,
    V, TILES: tl.constexpr, LANES: tl.constexpr, LISTED: tl.constexpr, LIST: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (rows,); see `sample_rows`.

    TILES: a power of two, at least V / LANES. list: int32 [rows, 2, LIST], keys and tokens.
    """
    index = tl.program_id(0).to(tl.int64)
    settings_ptr += index * COLUMNS
    x_ptr += tl.load(settings_ptr).to(tl.int64) * x_stride
    changed = tl.load(settings_ptr + 1).to(tl.int64)
    masked = tl.load(settings_ptr + 2).to(tl.int64)
    number = tl.load(settings_ptr + 3)
    temperature = tl.load(settings_ptr + 4).to(tl.float32)
    top_k = tl.load(settings_ptr + 5).to(tl.int64)
    top_p = tl.load(settings_ptr + 6)
    # Of the rarest token that min_p keeps.
    last_key = tl.load(settings_ptr + 7).to(tl.float32).to(tl.int32, bitcast=True)
    y_ptr += tl.maximum(changed, 0) * y_stride
    words_ptr += tl.maximum(masked, 0) * words_stride
    x_size = tl.where(changed < 0, V, 0)
    row = (V, x_ptr, x_size, y_ptr, V - x_size, words_ptr, tl.where(masked < 0, 0, V))
    lane = tl.arange(0, LANES)

    # The highest logit, the first token that has it, and the highest of each lane.
    best = tl.full((LANES,), float("-inf"), tl.float32)
    best_at = lane
    is_nan = lane < 0
    for start in range(0, V, LANES):
        x = logits_at(row, start + lane)
        is_nan = is_nan | (x != x)
        best_at = tl.where(x > best, start + lane, best_at)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    likeliest = tl.min(tl.where(best == top, best_at, V - 1), 0)
    tl.store(token_ptr + index, likeliest.to(tl.int64))
    if (tl.max(is_nan.to(tl.int32), 0) > 0) | (tl.abs(top) == float("inf")):
        is_broken = lane < 0  # of the model's own row
        highest = tl.full((LANES,), float("-inf"), tl.float32)
        for start in range(0, V, LANES):
            x = tl.load(x_ptr + start + lane, mask=start + lane < V, other=float("-inf")).to(tl.float32)
            is_broken = is_broken | (x != x)
            highest = tl.where(x > highest, x, highest)
        is_model = (tl.max(is_broken.to(tl.int32), 0) > 0) | (tl.abs(tl.max(highest, 0)) == float("inf"))
        tl.store(status_ptr + index, tl.where(is_model, 1, 2))
        return
    tl.store(status_ptr + index, 0)
    if temperature <= 0:
        return

    # All mass, by tiles; and a list of the likeliest tokens, up to a bound that so many lanes reach.
    is_filtered = (top_k > 0) | (top_p < 1.0)
    rate = LOG2E / temperature
    best_key = keys_of(best, top)
    bound = search_list(best_key, (best_key < RULED_OUT).to(tl.int32), LISTED - 1)
    list_ptr += index * (2 * LIST)
    tile_mass = tl.zeros((TILES,), tl.int64)
    size = tl.zeros((), tl.int32)
    for start in range(0, V, LANES):
        key = keys_of(logits_at(row, start + lane), top)
        mass = mass_of(key, rate)
        if is_filtered:
            is_listed = (key <= bound) & (key < RULED_OUT)
            ends = size + tl.cumsum(is_listed.to(tl.int32), 0)
            stores = is_listed & (ends <= LIST)
            tl.store(list_ptr + ends - 1, key, mask=stores)
            tl.store(list_ptr + LIST + ends - 1, start + lane, mask=stores)
            size = tl.max(ends, 0)
        else:
            mass = tl.where(key > last_key, 0, mass)
        tile_mass += tl.where(tl.arange(0, TILES) == start // LANES, tl.sum(mass, 0), 0)
    kept = tl.sum(tile_mass, 0)

    if is_filtered == 0:
        above = tl.minimum((number * kept.to(tl.float64)).to(tl.int64), kept - 1)
        tile_ends = tl.cumsum(tile_mass, 0)
        start = tl.sum((tile_ends <= above).to(tl.int32), 0) * LANES
        above -= tl.max(tl.where(tile_ends <= above, tile_ends, 0), 0)
        key = keys_of(logits_at(row, start + lane), top)
        mass = tl.where(key > last_key, 0, mass_of(key, rate))
        place = tl.sum((tl.cumsum(mass, 0) <= above).to(tl.int32), 0)
        tl.store(token_ptr + index, (start + place).to(tl.int64))
        return

    tl.debug_barrier()  # threads read what others have listed
    entry = tl.arange(0, LIST)
    is_entry = entry < tl.where(size <= LIST, size, 0)
    key = tl.load(list_ptr + entry, mask=is_entry, other=RULED_OUT)
    mass = mass_of(key, rate)
    listed_mass = tl.sum(mass, 0)
    listed = tl.sum(is_entry.to(tl.int64), 0)
    if (bound == RULED_OUT) & (listed > 0):  # there are no others
        top_k = tl.minimum(top_k, listed)
    # What top_k keeps, what top_p does, and the token.
    for search in range(tl.where(top_k > 0, 0, tl.where(top_p < 1.0, 1, 2)), 3):
        if (search != 1) | (top_p < 1.0):
            by_count = search == 0
            above = tl.minimum(top_k, V).to(tl.int64) - 1
            if search == 1:
                # The tokens up to the first one that reaches top_p, its own mass included.
                share = top_p * kept.to(tl.float64)
                above = share.to(tl.int64)
                above = tl.where((above.to(tl.float64) == share) & (above > 0), above - 1, above)
            elif search == 2:
                if last_key < RULED_OUT:
                    above_min_p = tl.sum(tl.where(key <= last_key, mass, 0), 0)
                    if (listed == 0) | ((last_key > bound) & (listed_mass < kept)):
                        above_min_p = row_amount(row, top, rate, False, last_key + 1, LANES)
                    kept = tl.minimum(kept, above_min_p)
                above = (number * kept.to(tl.float64)).to(tl.int64)
            if search > 0:
                above = tl.minimum(above, kept - 1)
            is_in_list = tl.where(by_count, listed, listed_mass) > above
            if is_in_list:
                amount = tl.where(by_count, is_entry.to(tl.int64), mass)
                found = search_list(key, amount, above)
                below = tl.sum(tl.where(key < found, amount, 0), 0)
                mass_below = tl.sum(tl.where(key < found, mass, 0), 0)
            else:
                found = search_row(row, top, rate, by_count, above, LANES, PARTS)
                below = row_amount(row, top, rate, by_count, found, LANES)
                mass_below = below
                if by_count:
                    mass_below = row_amount(row, top, rate, False, found, LANES)
            each = mass_of(found, rate)
            if by_count:
                kept = tl.minimum(kept, mass_below + (above + 1 - below) * each)
            else:
                skipped = ((above - below) // tl.maximum(each, 1)).to(tl.int32)
                kept = tl.minimum(kept, below + (skipped + 1) * each)
                if search == 2:
                    if is_in_list:
                        seen = tl.cumsum((key == found).to(tl.int32), 0)
                        token = tl.load(list_ptr + LIST + tl.sum((seen <= skipped).to(tl.int32), 0))
                    else:
                        token = find_in_row(row, top, found, skipped, LANES)
                    tl.store(token_ptr + index, token.to(tl.int64))


def sample_rows(
    logits: torch.Tensor, changed: torch.Tensor, masks: torch.Tensor, settings: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row. One launch, which waits for nothing.

    Args:
        logits: [S, V], any float dtype; rows may be apart.
        changed: float32 [N, V], contiguous rows; N may be 0.
        masks: int32 [M, ceil(V / 32)]: bit i % 32 of word i // 32 says whether token i is allowed.
        settings: float64 [R, 8] on the logits' device. Of each row: its row of `logits`; its row of
            `changed`, which is read instead, or -1; its row of `masks`, or -1; a number in [0, 1);
            temperature (0: the likeliest token, whatever follows); top_k (0: all); top_p (1: all); by how
            much logits that min_p keeps are below the highest at most (inf: all).

    Returns:
        Tokens int64 [R], and int32 [R], CHOSEN where they are. Of other rows, the token is any that exists.
    """
    rows, vocabulary = len(settings), logits.shape[1]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    status = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens, status
    listed = torch.empty(rows, 2, _LIST, dtype=torch.int32, device=logits.device)
    sample_kernel[(rows,)](
        logits,
        changed,
        masks,
        settings,
        listed,
        tokens,
        status,
        logits.stride(0),
        changed.stride(0),
        masks.stride(0),
        vocabulary,
        **sampling_constants(vocabulary),
        num_warps=WARPS,
    )
    return tokens, status


def sampling_constants(vocabulary: int) -> dict[str, int]:
    """Return the constants for which the kernel is specialised."""
    return {
        "TILES": triton.next_power_of_2(-(-vocabulary // _LANES)),
        "LANES": _LANES,
        "LISTED": _LISTED,
        "LIST": _LIST,
        "PARTS": _PARTS,
        "COLUMNS": COLUMNS,
    }
