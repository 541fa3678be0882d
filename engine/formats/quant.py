"""
Encode and decode weights in ggml's quantised block formats. A block of 32 values has one scale. A
block of 256 values has 8 or 16 parts, each with an integer scale, and one half-precision unit that
multiplies these integers.
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""
import numpy as np

# Fields of a block. d: the scale, or the unit of the integer scales; m: the minimum, which is
# added; dmin: the unit of the integer minimums, which are subtracted; q: the lower four bits of
# each quantised value, two values per byte (in Q8_0 all eight bits); high: the upper bits. In the
# formulas, q is the whole value.

# 32 values: x = d q
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
# 32 values: x = d (q - 8). The first 16 are in the low nibbles and the others in the high nibbles,
# as in the next three formats.
Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", 16)])
# 32 values: x = d q + m
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
# 32 values: x = d (q - 16). Bit i of `high` is the fifth bit of value i.
Q5_0 = np.dtype([("d", "<f2"), ("high", "<u4"), ("q", "u1", 16)])
# 32 values: x = d q + m
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "<u4"), ("q", "u1", 16)])
# 256 values in 8 parts: x = d scale q - dmin min. scale and min have 6 bits each; to_k packs them
# into `scales`. Of each 64 values the first 32 are in the low nibbles.
# Bit p of byte i of Q5_K's `high` is the fifth bit of value i of part p.
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", (4, 32))])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32),
                 ("q", "u1", (4, 32))])
# 256 values in 16 parts: x = d scale (q - 32).
# Of each 128 values the first 64 are in the low nibbles; byte i of `high` has the upper two bits of
# values i, i + 32, i + 64 and i + 96, from its lowest bits up.
Q6_K = np.dtype([("q", "u1", (2, 64)), ("high", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")])

CHUNK = 1 << 16  # values to quantise at a time: they stay in the processor's cache


def in_chunks(encode, *options):
    """Return a function that encodes a long array in chunks with encode(chunk, *options)."""
    return lambda x: np.concatenate([encode(x[at:at + CHUNK], *options)
                                     for at in range(0, len(x), CHUNK)])


def reciprocal(d):
    """
    Return 1 / d, or 0 where d is so small that 1 / d could overflow. The 0 is harmless: half
    precision rounds such a d to 0, too.
    """
    return np.divide(1, d, out=np.zeros_like(d), where=np.abs(d) > 1e-38)


def furthest_from_zero(x, axis):
    """Return the value of greatest magnitude along an axis, with its sign; the axis is kept."""
    at = np.expand_dims(np.abs(x).argmax(axis=axis), axis)
    return np.take_along_axis(x, at, axis=axis)


# ---- blocks of 32 values; the encoders return the same bytes as ggml's

def to_q8_0(x, dtype):
    """Encode float32 (32 n,) as n blocks of Q8_0."""
    blocks = x.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(d)
    whole = np.trunc(scaled)
    out = np.empty(len(blocks), dtype)
    out["d"] = d[:, 0]
    out["q"] = whole + np.sign(scaled) * (np.abs(scaled - whole) >= 0.5)  # ties away from 0
    return out


def from_q8_0(raw, dtype):
    """Decode blocks of Q8_0 to float32 (n, 32)."""
    blocks = raw.view(dtype)
    return blocks["q"] * blocks["d"].astype(np.float32)[:, None]


def pack_nibbles(out, q):
    """
    Store q (n, 32) in n blocks and return these: the lower four bits in `q`, and the fifth in
    `high` of the types that have this field.
    """
    out["q"] = q[:, :16] & 15 | q[:, 16:] << 4
    if "high" in out.dtype.names:
        out["high"] = np.packbits(q >> 4, axis=1, bitorder="little").view("<u4")[:, 0]
    return out


def to_symmetric(x, dtype, zero):
    """
    Encode float32 (32 n,) as Q4_0 (zero 8) or Q5_0 (zero 16), x = d (q - zero). The value of
    greatest magnitude, whatever its sign, becomes q = 0.
    """
    blocks = x.reshape(-1, 32)
    d = furthest_from_zero(blocks, axis=1) / np.float32(-zero)
    q = np.trunc(blocks * reciprocal(d) + np.float32(zero + 0.5))
    out = np.empty(len(blocks), dtype)
    out["d"] = d[:, 0]
    return pack_nibbles(out, np.minimum(q, 2 * zero - 1).astype(np.uint8))


def to_affine(x, dtype, q_max):
    """
    Encode float32 (32 n,) as Q4_1 (q_max 15) or Q5_1 (q_max 31), x = d q + m. The smallest value
    becomes q = 0, the largest q_max.
    """
    blocks = x.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    d = (blocks.max(axis=1, keepdims=True) - low) / np.float32(q_max)
    q = np.trunc((blocks - low) * reciprocal(d) + np.float32(0.5))
    out = np.empty(len(blocks), dtype)
    out["d"], out["m"] = d[:, 0], low[:, 0]
    return pack_nibbles(out, np.minimum(q, q_max).astype(np.uint8))


def from_32(raw, dtype, zero):
    """
    Decode Q4_0, Q5_0, Q4_1 or Q5_1 to float32 (n, 32). zero: the q of Q4_0 and Q5_0 that stands for
    0; unused for Q4_1 and Q5_1, whose blocks have a minimum m.
    """
    blocks = raw.view(dtype)
    q = np.concatenate((blocks["q"] & 15, blocks["q"] >> 4), axis=1)
    if "high" in dtype.names:
        high = np.ascontiguousarray(blocks["high"]).view(np.uint8).reshape(-1, 4)
        q |= np.unpackbits(high, axis=1, bitorder="little") << 4
    d = blocks["d"].astype(np.float32)[:, None]
    if "m" in dtype.names:
        return q * d + blocks["m"].astype(np.float32)[:, None]
    return (q.astype(np.float32) - zero) * d


# ---- blocks of 256 values

# best_scale and best_scale_and_min take n parts of w values as x (w, n), one part per column, so
# that numpy sums over w by adding whole rows, which are contiguous.

def best_scale(x, zero):
    """
    Return the scales (n,) with the least squared error of x (w, n) = scale q, q integers from -zero
    to zero - 1, among 19 candidates. Each candidate has a `position` from zero - 0.9 to zero + 0.9:
    it scales each part so that the value of greatest magnitude becomes -position, rounds the part
    to q, and takes the least-squares scale for these q.
    """
    extreme = furthest_from_zero(x, axis=0)[0]
    inverse = reciprocal(extreme)
    q, products = np.empty_like(x), np.empty_like(x)
    scale, best_gain = np.zeros_like(extreme), np.zeros_like(extreme)
    for position in np.arange(-9, 10, dtype=np.float32) / 10 + zero:
        np.rint(np.multiply(x, -position * inverse, out=q), out=q)
        np.clip(q, -zero, zero - 1, out=q)
        xq = np.multiply(x, q, out=products).sum(axis=0)
        qq = np.multiply(q, q, out=products).sum(axis=0)
        candidate = xq * reciprocal(qq)  # the least-squares scale for these q
        gain = candidate * xq            # the squared error of scale 0 minus that of this scale
        better = gain > best_gain
        scale = np.where(better, candidate, scale)
        best_gain = np.where(better, gain, best_gain)
    return scale


def best_scale_and_min(x, q_max):
    """
    Return scale and minimum (n,), neither negative, with the least squared error of
    x (w, n) = scale q - minimum, q integers from 0 to q_max, among 21 candidates. Each candidate
    maps min(smallest value, 0) of each part to 0 and the largest value to a `position` near q_max,
    rounds the part to q, and fits scale and minimum to these q.
    """
    width = len(x)
    low = np.minimum(x.min(axis=0), 0)
    unit = (x - low) * reciprocal(x.max(axis=0) - low)
    sum_x = x.sum(axis=0)
    q, products = np.empty_like(x), np.empty_like(x)
    scale, minimum, min_error = np.zeros_like(low), -low, np.full_like(low, np.inf)
    # Positions: 14 to 16 if q_max is 15, 29.6 to 32.4 if it is 31.
    for position in np.arange(-10, 11, dtype=np.float32) / 10 * (q_max / 15) ** 0.5 + q_max:
        np.rint(np.multiply(unit, position, out=q), out=q)
        np.minimum(q, q_max, out=q)  # q is never below 0: unit is at least 0
        xq = np.multiply(x, q, out=products).sum(axis=0)
        qq = np.multiply(q, q, out=products).sum(axis=0)
        sum_q = q.sum(axis=0)
        # Least squares of x = s q + m for these q, or of x = s q where m would be positive.
        inverse = reciprocal(width * qq - sum_q * sum_q)
        m = np.minimum((qq * sum_x - sum_q * xq) * inverse, 0)
        has_minimum = (inverse > 0) & (m < 0)
        s = np.where(has_minimum, (width * xq - sum_x * sum_q) * inverse, xq * reciprocal(qq))
        # The squared error, without the sum of x squared, which all candidates share.
        error = s * s * qq + width * m * m - 2 * (s * xq + m * sum_x - s * m * sum_q)
        better = (error < min_error) & (s > 0)
        scale = np.where(better, s, scale)
        minimum = np.where(better, -m, minimum)
        min_error = np.where(better, error, min_error)
    return scale, minimum


def to_integers(values, first, last):
    """
    Return (half-precision unit (n, 1), integers from `first` to `last`) whose products are close to
    values (n, parts). In each row the value of greatest magnitude becomes the integer `first` or
    `last`, whichever is further from 0.
    """
    limit = last if last > -first else first
    unit = (furthest_from_zero(values, axis=1) / np.float32(limit)).astype("<f2")
    scaled = values * reciprocal(unit.astype(np.float32))
    return unit, np.clip(np.rint(scaled), first, last)


def to_k(x, dtype, q_max):
    """Encode float32 (256 n,) as n blocks of 8 parts in Q4_K (q_max 15) or Q5_K (q_max 31)."""
    blocks = x.reshape(-1, 8, 32)
    by_column = np.ascontiguousarray(blocks.reshape(-1, 32).T)
    scale, minimum = best_scale_and_min(by_column, q_max)
    d, scales = to_integers(scale.reshape(-1, 8), 0, 63)
    dmin, mins = to_integers(minimum.reshape(-1, 8), 0, 63)
    # Compute q from the rounded scales and minimums, which the decoder will use.
    step, low = d.astype(np.float32) * scales, dmin.astype(np.float32) * mins
    q = np.rint((blocks + low[:, :, None]) * reciprocal(step)[:, :, None])
    q = np.clip(q, 0, q_max).astype(np.uint8)
    a, b = scales.astype(np.uint8), mins.astype(np.uint8)
    out = np.empty(len(blocks), dtype)
    out["d"], out["dmin"] = d[:, 0], dmin[:, 0]
    # Bytes 0 to 3: lower six bits: the scales of parts 0 to 3; upper two bits: the upper two bits
    # of the scales of parts 4 to 7. Bytes 4 to 7: the same for the minimums. Bytes 8 to 11: lower
    # four bits: the lower four bits of the scales of parts 4 to 7; upper four: of their minimums.
    out["scales"] = np.concatenate((
        a[:, :4] | a[:, 4:] >> 4 << 6,
        b[:, :4] | b[:, 4:] >> 4 << 6,
        a[:, 4:] & 15 | b[:, 4:] << 4), axis=1)
    out["q"] = q[:, ::2] & 15 | q[:, 1::2] << 4
    if "high" in dtype.names:
        bits = q >> 4 << np.arange(8, dtype=np.uint8)[:, None]
        out["high"] = np.bitwise_or.reduce(bits, axis=1)
    return out


def from_k(raw, dtype, q_max):
    """
    Decode Q4_K or Q5_K to float32 (n, 8, 32). q_max is unused: layout.block_type passes the same
    options to the encoder and the decoder.
    """
    blocks = raw.view(dtype)
    a, b, c = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)
    scales = scales * blocks["d"].astype(np.float32)[:, None]
    mins = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)
    mins = mins * blocks["dmin"].astype(np.float32)[:, None]
    q = np.stack((blocks["q"] & 15, blocks["q"] >> 4), axis=2).reshape(-1, 8, 32)
    if "high" in dtype.names:
        q |= (blocks["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return q * scales[:, :, None] - mins[:, :, None]


def to_q6_k(x, dtype):
    """Encode float32 (256 n,) as n blocks of 16 parts in Q6_K."""
    blocks = x.reshape(-1, 16, 16)
    by_column = np.ascontiguousarray(blocks.reshape(-1, 16).T)
    d, scales = to_integers(best_scale(by_column, 32).reshape(-1, 16), -128, 127)
    step = d.astype(np.float32) * scales
    q = np.clip(np.rint(blocks * reciprocal(step)[:, :, None]), -32, 31) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    out = np.empty(len(blocks), dtype)
    out["d"], out["scales"] = d[:, 0], scales
    out["q"] = (q[:, :, :2] & 15 | q[:, :, 2:] << 4).reshape(-1, 2, 64)
    bits = q >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out["high"] = np.bitwise_or.reduce(bits, axis=2)
    return out


def from_q6_k(raw, dtype):
    """Decode Q6_K to float32 (n, 16, 16)."""
    blocks = raw.view(dtype)
    low = blocks["q"].reshape(-1, 2, 2, 32)
    q = np.concatenate((low & 15, low >> 4), axis=2)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    q |= (blocks["high"][:, :, None] >> shifts & 3) << 4
    scales = blocks["scales"] * blocks["d"].astype(np.float32)[:, None]
    return (q.reshape(-1, 16, 16).astype(np.float32) - 32) * scales[:, :, None]
