"""
Types of weights in blocks, as ggml lays them out: blocks of 32 values that share a scale, and blocks of 256 whose eight or
sixteen parts have scales of their own, which are whole numbers in units of the block's.
"""
import numpy as np

Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])  # 32 values: x = d q
Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", 16)])  # 32 values: x = d (q - 8); the first 16 in the low nibbles
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])                   # x = d q + m
Q5_0 = np.dtype([("d", "<f2"), ("high", "<u4"), ("q", "u1", 16)])                # x = d (q - 16); the fifth bit of q in high
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "<u4"), ("q", "u1", 16)])  # x = d q + m
# 256 values: x = d scale q - dmin min, both of 6 bits and for 32 values; of 64 values, the first 32 in the low nibbles
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", (4, 32))])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", (4, 32))])
# 256 values: x = d scale (q - 32), the scale for 16 values; of 128 values, the first 64 in the low nibbles
Q6_K = np.dtype([("q", "u1", (2, 64)), ("high", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")])
PIECE = 1 << 16  # values quantised at once, so that they stay in the processor's cache


def reciprocal(d):
    """1 / d; 0 where that would overflow, which is where half precision stores d as 0."""
    return np.divide(1, d, out=np.zeros_like(d), where=np.abs(d) > 1e-38)


# ---- blocks of 32, bit for bit as ggml rounds

def to_q8_0(x, kind):
    blocks = x.reshape(-1, 32)
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * reciprocal(d)
    whole = np.trunc(scaled)
    out = np.empty(len(blocks), kind)
    out["d"], out["q"] = d[:, 0], whole + np.sign(scaled) * (np.abs(scaled - whole) >= 0.5)  # ties away from 0, as ggml
    return out


def from_q8_0(raw, kind):
    blocks = raw.view(kind)
    return blocks["q"] * blocks["d"].astype(np.float32)[:, None]


def put_bits(out, q):
    """q (n, 32) into the nibbles of blocks and, where they have one, the fifth bit."""
    out["q"] = q[:, :16] & 15 | q[:, 16:] << 4
    if "high" in out.dtype.names:
        out["high"] = np.packbits(q >> 4, axis=1, bitorder="little").view("<u4")[:, 0]
    return out


def to_symmetric(x, kind, zero):
    """Q4_0, Q5_0: the value of greatest magnitude, whatever its sign, becomes q = 0."""
    blocks = x.reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    d = extreme / np.float32(-zero)
    q = np.minimum(np.trunc(blocks * reciprocal(d) + np.float32(zero + 0.5)), 2 * zero - 1).astype(np.uint8)
    out = np.empty(len(blocks), kind)
    out["d"] = d[:, 0]
    return put_bits(out, q)


def to_affine(x, kind, most):
    """Q4_1, Q5_1: the least value becomes q = 0, the largest `most`."""
    blocks = x.reshape(-1, 32)
    low = blocks.min(axis=1, keepdims=True)
    d = (blocks.max(axis=1, keepdims=True) - low) / np.float32(most)
    q = np.minimum(np.trunc((blocks - low) * reciprocal(d) + np.float32(0.5)), most).astype(np.uint8)
    out = np.empty(len(blocks), kind)
    out["d"], out["m"] = d[:, 0], low[:, 0]
    return put_bits(out, q)


def from_32(raw, kind, zero):
    """Q4_0, Q4_1, Q5_0, Q5_1; the latter of each have a minimum instead of a zero."""
    blocks = raw.view(kind)
    q = np.concatenate((blocks["q"] & 15, blocks["q"] >> 4), axis=1)
    if "high" in kind.names:
        q |= np.unpackbits(np.ascontiguousarray(blocks["high"]).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little") << 4
    d = blocks["d"].astype(np.float32)[:, None]
    return q * d + blocks["m"].astype(np.float32)[:, None] if "m" in kind.names else (q.astype(np.float32) - zero) * d


# ---- blocks of 256; x (w, n) has the values of a part in a column, so that sums over parts run along memory

def best_scale(x, zero):
    """scale (n,) of least squares in x = scale q with whole q from -zero to zero - 1."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    scale, gain = np.zeros_like(extreme), np.zeros_like(extreme)
    inverse, q, squares = reciprocal(extreme), np.empty_like(x), np.empty_like(x)
    for reach in np.arange(-9, 10, dtype=np.float32) / 10 + zero:  # where the extreme goes
        np.clip(np.rint(np.multiply(x, -reach * inverse, out=q), out=q), -zero, zero - 1, out=q)
        xq, qq = np.multiply(x, q, out=squares).sum(axis=0), np.multiply(q, q, out=squares).sum(axis=0)
        best = xq * reciprocal(qq)
        better = best * xq > gain
        scale, gain = np.where(better, best, scale), np.where(better, best * xq, gain)
    return scale


def best_scale_and_min(x, most):
    """scale and min (n,), neither negative, of least squares in x = scale q - min with whole q from 0 to `most`."""
    n, low = len(x), np.minimum(x.min(axis=0), 0)
    inverse = reciprocal(x.max(axis=0) - low)
    unit, q, squares, sum_x = (x - low) * inverse, np.empty_like(x), np.empty_like(x), x.sum(axis=0)
    scale, minimum, least = np.zeros_like(low), -low, np.full_like(low, np.inf)
    for reach in np.arange(-10, 11, dtype=np.float32) / 10 * (most / 15) ** 0.5 + most:  # where the largest value goes
        np.minimum(np.rint(np.multiply(unit, reach, out=q), out=q), most, out=q)
        xq, qq, sum_q = np.multiply(x, q, out=squares).sum(axis=0), np.multiply(q, q, out=squares).sum(axis=0), q.sum(axis=0)
        inverse = reciprocal(n * qq - sum_q * sum_q)
        m = np.minimum((qq * sum_x - sum_q * xq) * inverse, 0)
        s = np.where((inverse > 0) & (m < 0), (n * xq - sum_x * sum_q) * inverse, xq * reciprocal(qq))
        error = s * s * qq + n * m * m - 2 * (s * xq + m * sum_x - s * m * sum_q)
        better = (error < least) & (s > 0)
        scale, minimum, least = np.where(better, s, scale), np.where(better, -m, minimum), np.where(better, error, least)
    return scale, minimum


def whole_units(values, first, last):
    """
    (unit in half precision, whole numbers from `first` to `last`) for values (n, parts). The one of greatest magnitude among the
    parts becomes the limit that is farther from 0.
    """
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    unit = (extreme / np.float32(last if last > -first else first)).astype("<f2")
    return unit, np.clip(np.rint(values * reciprocal(unit.astype(np.float32))), first, last)


def to_k(x, kind, most):
    """Q4_K, Q5_K: blocks of 256 values in 8 parts."""
    blocks = x.reshape(-1, 8, 32)
    scale, minimum = best_scale_and_min(np.ascontiguousarray(blocks.reshape(-1, 32).T), most)
    out = np.empty(len(blocks), kind)
    (d, scales), (dmin, mins) = (whole_units(v.reshape(-1, 8), 0, 63) for v in (scale, minimum))
    out["d"], out["dmin"] = d[:, 0], dmin[:, 0]
    step, low = d.astype(np.float32) * scales, dmin.astype(np.float32) * mins
    q = np.clip(np.rint((blocks + low[:, :, None]) * reciprocal(step)[:, :, None]), 0, most).astype(np.uint8)
    a, b = scales.astype(np.uint8), mins.astype(np.uint8)
    out["scales"] = np.concatenate((a[:, :4] | a[:, 4:] >> 4 << 6, b[:, :4] | b[:, 4:] >> 4 << 6, a[:, 4:] & 15 | b[:, 4:] << 4), 1)
    out["q"] = q[:, ::2] & 15 | q[:, 1::2] << 4
    if "high" in kind.names:
        out["high"] = np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return out


def from_k(raw, kind, most):
    blocks = raw.view(kind)
    a, b, c = np.split(blocks["scales"], 3, axis=1)
    scales = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1) * blocks["d"].astype(np.float32)[:, None]
    mins = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1) * blocks["dmin"].astype(np.float32)[:, None]
    q = np.stack((blocks["q"] & 15, blocks["q"] >> 4), axis=2).reshape(-1, 8, 32)
    if "high" in kind.names:
        q |= (blocks["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return q * scales[:, :, None] - mins[:, :, None]


def to_q6_k(x, kind):
    blocks = x.reshape(-1, 16, 16)
    out = np.empty(len(blocks), kind)
    d, scales = whole_units(best_scale(np.ascontiguousarray(blocks.reshape(-1, 16).T), 32).reshape(-1, 16), -128, 127)
    step = d.astype(np.float32) * scales
    q = (np.clip(np.rint(blocks * reciprocal(step)[:, :, None]), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    out["d"], out["scales"] = d[:, 0], scales
    out["q"] = (q[:, :, :2] & 15 | q[:, :, 2:] << 4).reshape(-1, 2, 64)
    out["high"] = np.bitwise_or.reduce(q >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    return out


def from_q6_k(raw, kind):
    blocks = raw.view(kind)
    low = blocks["q"].reshape(-1, 2, 2, 32)
    q = np.concatenate((low & 15, low >> 4), axis=2)
    q |= (blocks["high"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    scales = blocks["scales"] * blocks["d"].astype(np.float32)[:, None]
    return (q.reshape(-1, 16, 16).astype(np.float32) - 32) * scales[:, :, None]


def in_pieces(encode, *args):
    """A function that encodes a long array in pieces."""
    return lambda x: np.concatenate([encode(x[i:i + PIECE], *args) for i in range(0, len(x), PIECE)])
