"""Random numbers by counter, as `torchcmdp.streams` has them, bit for bit."""

from __future__ import annotations

from torchcmdp.kernels.options import kernel

MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA


@kernel
def mix(x0, x1, shift):
    """One round: x0 + x1, then x1 rotated and mixed with it; words of 32 bits held in int64."""
    x0 = (x0 + x1) & MASK
    return x0, (((x1 << shift) | (x1 >> (32 - shift))) & MASK) ^ x0


@kernel
def threefry2x32(key0, key1, counter0, counter1):
    """Threefry-2x32 with 20 rounds on words in [0, 2^32)."""
    key2 = key0 ^ key1 ^ PARITY
    x0, x1 = (counter0 + key0) & MASK, (counter1 + key1) & MASK
    for injection in range(1, 6):
        if injection % 2 == 1:
            x0, x1 = mix(x0, x1, 13)
            x0, x1 = mix(x0, x1, 15)
            x0, x1 = mix(x0, x1, 26)
            x0, x1 = mix(x0, x1, 6)
        else:
            x0, x1 = mix(x0, x1, 17)
            x0, x1 = mix(x0, x1, 29)
            x0, x1 = mix(x0, x1, 16)
            x0, x1 = mix(x0, x1, 24)
        # the schedule moves on by one key an injection
        key0, key1, key2 = key1, key2, key0
        x0, x1 = (x0 + key0) & MASK, (x1 + key1 + injection) & MASK
    return x0, x1


@kernel
def uniform(seed, run, episode, purpose, layer):
    """The number of one purpose in one step, in [0, 1) with 53 random bits."""
    high, low = threefry2x32(seed, run, episode, layer + 65536 * purpose)
    return float((high >> 5) * 67108864 + (low >> 6)) * (1.0 / 9007199254740992.0)
