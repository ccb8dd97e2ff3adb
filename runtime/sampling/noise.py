"""Random numbers by counter: what is drawn depends on (seed, position, token id) and on nothing else.

So a token id gets the same number whatever else is drawn, in whatever order, for one row or for nine, alone or in a
batch. A 64-bit key is made of seed, stream, round and position by BLAKE2b (RFC 7693); number ``t`` of that key is
output ``t`` of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17)
started at the key, whose state is a counter and so can be entered anywhere.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S12, _S27, _S30, _S31 = (np.uint64(shift) for shift in (12, 27, 30, 31))
_MASK = 2**64 - 1
_BITS = 52  # of a uniform number: with the half behind them they fill a double


class Stream(IntEnum):
    """What a number is for; numbers of different streams are independent."""

    TARGET = 0  # the target's choice; with the exact rule the draft's too, so that likely tokens coincide
    DRAFT = 1  # a draft token, where the acceptance rule wants it drawn on its own
    ACCEPT = 2  # whether a draft token stands


def stream_key(seed: int, position: int, stream: Stream = Stream.TARGET, round_number: int = 0) -> int:
    """The 64-bit key of a stream at a position (tokens before the one that is drawn).

    ``round_number`` parts the draws of a position that is drafted again: under block verification, whether an earlier
    token stood tells something about the numbers drawn behind it.
    """
    packed = struct.pack("<QQQQ", seed, position, stream, round_number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def raw_numbers(key: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """SplitMix64 outputs number ``indices`` (from 0) of the generator started at ``key``."""
    state = indices.astype(np.uint64)
    state *= _GAMMA
    state += np.uint64((key + int(_GAMMA)) & _MASK)
    state ^= state >> _S30
    state *= _MIX_1
    state ^= state >> _S27
    state *= _MIX_2
    state ^= state >> _S31
    return state


def log_uniforms(key: int, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """log(u) with u uniform in (0, 1), the middle of one of 2**52 equal intervals."""
    numbers = (raw_numbers(key, indices) >> _S12).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-_BITS
    return np.log(numbers, out=numbers)


def uniform(key: int, index: int = 0) -> float:
    """Number ``index`` of the key, in (0, 1): the same as above, for one number and in less time."""
    state = (key + (index + 1) * int(_GAMMA)) & _MASK
    state = ((state ^ (state >> 30)) * int(_MIX_1)) & _MASK
    state = ((state ^ (state >> 27)) * int(_MIX_2)) & _MASK
    state ^= state >> 31
    return ((state >> 12) + 0.5) * 2.0**-_BITS
