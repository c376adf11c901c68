"""Exact search of the k-th best key of a set that is held in registers.

Scores are compared as integers in the order of select_from_scores, so ties stay exact and NaN
ranks highest. The search keeps a bracket of the k-th key and guesses inside it from the counts at
its ends; some steps bisect, so that bad guesses cost a constant factor and no more.
"""

import triton
import triton.language as tl

# Order keys of "no key here", -infinity, and NaN, which is just above infinity.
NONE = tl.constexpr(-(2**31))
MINUS_INFINITY = tl.constexpr(-(2**31) + 0x7FFFFF)
NAN = tl.constexpr(0x7F800001)
_MAGNITUDE = tl.constexpr(2**31 - 1)
_UNLIMITED = tl.constexpr(2**30)


@triton.jit
def order_keys(scores):
    bits = scores.to(tl.int32, bitcast=True)
    # Negative floats are sign and magnitude: flipping the magnitude makes their bits ascend.
    keys = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    # -0.0 equals 0.0, and NaN is above every number.
    return tl.where(scores != scores, NAN, tl.where(scores == 0.0, 0, keys))


@triton.jit
def value_of(key):
    return tl.where(key < 0, key ^ _MAGNITUDE, key).to(tl.float32, bitcast=True)


@triton.jit
def normal_fit(keys, num_keys, topk):
    """The score that topk of num_keys normally distributed scores reach, and its density."""
    values = tl.where(keys != NONE, value_of(keys), 0.0)
    mean = tl.sum(values) / num_keys
    deviation = tl.sqrt(tl.maximum(tl.sum(values * values) / num_keys - mean * mean, 0.0))
    fraction = topk / num_keys
    # Rational approximation of the normal quantile (Abramowitz and Stegun, 26.2.22).
    t = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.minimum(fraction, 1.0 - fraction), 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)
    density = 0.39894 * tl.exp(-0.5 * z * z) / deviation
    return mean + deviation * tl.where(fraction > 0.5, -z, z), density


@triton.jit
def extremes(keys):
    """Lowest valid key, and the highest plus one, which no key reaches."""
    return tl.min(tl.where(keys == NONE, NAN, keys)), tl.max(keys) + 1


@triton.jit
def inside(pivot, low, high):
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@triton.jit
def next_pivot(low, high, num_low, num_high, low_value, high_value, target, step):
    """A key inside (low, high) that about target keys reach."""
    part = (num_low - target - 0.5) / (num_low - num_high)
    guess = order_keys(low_value + part * (high_value - low_value))
    # The mean without overflow. Where guessing does not help, every second step bisects.
    middle = (low & high) + ((low ^ high) >> 1)
    bisects = (step % 6 == 5) | ((step > 12) & (step % 2 == 1))
    return inside(tl.where(bisects, middle, guess), low, high)


@triton.jit
def kth_key(keys, num_keys, topk, slack, guess, low, high):
    """Threshold and room: the selection is all keys above and the first room keys equal to it.

    keys [n] int32, of which num_keys > topk are valid, in [low, high). It may also be a threshold
    that topk to topk + slack keys reach; then there is room for all of them.
    """
    num_low, num_high = num_keys, num_keys * 0
    pivot = inside(order_keys(guess), low, high)
    step = 0
    while (num_low > topk + slack) & (low + 1 < high):
        num_pivot = tl.sum((keys >= pivot).to(tl.int32))
        if num_pivot >= topk:
            low, num_low = pivot, num_pivot
        else:
            high, num_high = pivot, num_pivot
        pivot = next_pivot(
            low, high, num_low, num_high, value_of(low), value_of(high - 1), topk, step
        )
        step += 1
    return low, tl.where(num_low <= topk + slack, _UNLIMITED, topk - num_high)
