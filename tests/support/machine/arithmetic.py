"""Arithmetic that numpy does not have: shifts, fields, fused multiply-add, and the steps of a division."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
f32, f64, u32, u64 = np.float32, np.float64, np.uint32, np.uint64
QUIET = 0x0040_0000


def fma(a: Array, b: Array, c: Array) -> Array:
    """a · b + c of float32, rounded once. The product is exact in float64; the sum is rounded there to odd, which keeps
    the second rounding from being a double one (Boldo and Melquiond 2008)."""
    product, addend = a.astype(f64) * b.astype(f64), c.astype(f64)
    total = np.atleast_1d(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, step, 0)).view(f64).astype(f32)


def quiet(a: Array) -> Array:
    bits = a.view(u32)
    return np.where(np.isnan(a), bits | u32(QUIET), bits).view(f32)


def signals(a: Array) -> Array:
    return np.isnan(a) & ((a.view(u32) & u32(QUIET)) == 0)


def larger(a: Array, b: Array) -> Array:
    """V_MAX_F32: the number where one of the two is none; +0 is larger than -0."""
    a, b = np.broadcast_arrays(a, b)
    zeros = (a == 0) & (b == 0)
    found = np.where(zeros, (a.view(u32) & b.view(u32)).view(f32), np.where(a > b, a, b))
    return np.where(np.isnan(a), quiet(b), np.where(np.isnan(b), a, found)).astype(f32)


def smaller(a: Array, b: Array) -> Array:
    return -larger(-a, -b)


def flush(a: Array) -> Array:
    """Subnormal numbers become zeros of their sign."""
    return np.where(np.abs(a) < f32(2.0**-126), np.copysign(f32(0), a), a).astype(f32)


def exp2(a: Array) -> Array:
    return flush(np.exp2(flush(a).astype(f64)).astype(f32))


def log2(a: Array) -> Array:
    return np.log2(flush(a).astype(f64)).astype(f32)


def reciprocal(a: Array) -> Array:
    return (1.0 / a.astype(f64)).astype(f32)


def root(a: Array) -> Array:
    return np.sqrt(flush(a).astype(f64)).astype(f32)


def ldexp(a: Array, by: Array) -> Array:
    return np.ldexp(a.astype(f64), np.clip(by, -400, 400)).astype(f32)


def exponent(a: Array) -> Array:
    return ((a.view(u32) >> u32(23)) & u32(255)).astype(np.int32)


def subnormal(a: Array) -> Array:
    return (a != 0) & (np.abs(a) < f32(2.0**-126))


def div_scale(s0: Array, s1: Array, s2: Array) -> tuple[Array, Array]:
    """V_DIV_SCALE_F32 of RDNA3's ISA, 16.12: s0 (one of the other two) scaled where s2 / s1 would leave the range on
    the way, and whether V_DIV_FMAS_F32 has to scale back. Two of its rules ask whether 1 / s1 is subnormal in float64,
    which no float32 is."""
    s0, s1, s2 = (np.ascontiguousarray(part) for part in np.broadcast_arrays(s0, s1, s2))
    up = ldexp(s0, np.int32(64))
    nothing = (s2 == 0) | (s1 == 0)
    huge = exponent(s2) - exponent(s1) >= 96
    tiny_quotient = subnormal((s2 / s1).astype(f32))
    denominator, numerator = s0.view(u32) == s1.view(u32), s0.view(u32) == s2.view(u32)
    rules = [
        (nothing, f32(np.nan), False),
        (huge, np.where(denominator, up, s0), True),
        (subnormal(s1), up, False),
        (tiny_quotient, np.where(numerator, up, s0), True),
        (exponent(s2) <= 23, up, False),
    ]
    conditions = [rule[0] for rule in rules]
    scaled = np.select(conditions, [rule[1] for rule in rules], s0).astype(f32)
    return scaled, np.select(conditions, [np.full(s0.shape, rule[2]) for rule in rules], False)


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """V_DIV_FMAS_F32 of RDNA3's ISA, 16.12: scaled back after the sum, down where the numerator was scaled up."""
    plain = fma(a, b, c)
    away = ldexp(plain, np.where(exponent(np.ascontiguousarray(c)) > 127, np.int32(64), np.int32(-64)))
    return np.where(scaled, away, plain).astype(f32)


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """V_DIV_FIXUP_F32 of RDNA3's ISA, 16.12: the special cases of a division, and its sign."""
    q, d, n = (np.ascontiguousarray(part) for part in np.broadcast_arrays(quotient, denominator, numerator))
    sign = np.where(np.signbit(d) ^ np.signbit(n), f32(-1), f32(1))
    invalid = np.full(q.shape, 0xFFC0_0000, u32).view(f32)
    return np.select(
        [
            np.isnan(n), np.isnan(d), (d == 0) & (n == 0), np.isinf(d) & np.isinf(n),
            (d == 0) | np.isinf(n), np.isinf(d) | (n == 0), exponent(n) - exponent(d) < -150,
        ],
        [quiet(n), quiet(d), invalid, invalid, sign * f32(np.inf), sign * f32(0), sign * f32(0)],
        sign * np.abs(q),
    ).astype(f32)  # fmt: skip


# --- integers --------------------------------------------------------------------------------------


def shift(value: Array, by: Array, left: bool) -> Array:
    bits = value.dtype.itemsize * 8
    by = (by & by.dtype.type(bits - 1)).astype(value.dtype)
    return value << by if left else value >> by


def field(value: Array, at: Array, size: Array) -> Array:
    """V_BFE: bits `at` to `at` + `size`, zero- or sign-extended by the type of `value`."""
    at, size = (at & u32(31)).astype(np.int64), (size & u32(31)).astype(np.int64)
    cut = (value.astype(np.int64) >> at) & ((np.int64(1) << size) - 1)
    if value.dtype == np.int32:
        sign = np.where(size > 0, np.int64(1) << np.maximum(size - 1, 0), np.int64(0))
        cut = (cut ^ sign) - sign
    return cut.astype(value.dtype)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """V_PERM_B32: each byte of the selector picks one of {a, b}, a sign, 0x00 or 0xff."""
    both = (a.astype(u64) << u64(32)) | b.astype(u64)
    found = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), u32)
    for place in range(4):
        pick = (selector >> u32(8 * place)) & u32(0xFF)
        plain = (both >> (u64(8) * np.minimum(pick, u32(7)).astype(u64))) & u64(0xFF)
        sign_at = (u64(16) * (np.clip(pick, 8, 11) - u32(8)).astype(u64)) + u64(15)
        sign = ((both >> sign_at) & u64(1)) * u64(0xFF)
        byte = np.select([pick >= 13, pick == 12, pick >= 8], [u64(0xFF), u64(0), sign], plain)
        found |= byte.astype(u32) << u32(8 * place)
    return found


def reverse(a: Array) -> Array:
    found = np.zeros_like(a)
    for place in range(32):
        found |= ((a >> u32(place)) & u32(1)) << u32(31 - place)
    return found
