"""Random numbers by counter, as `torchcmdp.streams` has them, bit for bit."""

from __future__ import annotations

from torchcmdp.kernels.options import formula, kernel

MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
SLOTS = 2**16  # of each purpose


@formula
def mix(x0, x1, shift):
    """One round: x0 + x1, then x1 rotated and mixed with it; words of 32 bits held in int64."""
    x0 = (x0 + x1) & MASK
    return x0, (((x1 << shift) | (x1 >> (32 - shift))) & MASK) ^ x0


@formula
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
def uniform(seed, run, episode, slot):
    """The number of one step and purpose, in [0, 1) with 53 random bits; the slot is layer + SLOTS * purpose."""
    high, low = threefry2x32(seed, run, episode, slot)
    return float((high >> 5) * 67108864 + (low >> 6)) * (1.0 / 9007199254740992.0)
