"""Random numbers of samples by Philox4x32-10, on any device the same.

Block ``b`` of the sample at position ``s`` is ``philox(counter=(b, b >> 32, s, s >> 32), key)``, four words of 32 bits;
number ``i`` of the sample is word ``i % 4`` of block ``i // 4``. So it depends on nothing but key, sample and ``i``.

Source:
    Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import sys
from ctypes import byref
from functools import lru_cache

import torch
from torch import Tensor

from counterpoint.fabric.shm.native import PhiloxArgs, native

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_words(key: int, first_sample: int, num_samples: int, width: int, device: torch.device) -> Tensor:
    """Return the first numbers of consecutive samples, uniform in ``[0, 2**32)``.

    Args:
        key: of 64 bits.
        first_sample: position of the first sample.
        num_samples: how many.
        width: numbers of each.
        device: of the result.

    Returns:
        ``(num_samples, width)``, int64.
    """
    out = torch.empty(num_samples, width, dtype=torch.int64, device=device)
    if not _fill_natively(out, key, first_sample):
        out.copy_(_torch_words(key, first_sample, num_samples, width, device))
    return out


def philox_select(out: Tensor, key: int, first_sample: int, p: float, value: float) -> None:
    """Fill a tensor with 0, where a number is below ``p * 2**32``, and ``value`` elsewhere.

    Args:
        out: ``(num_samples, width)``, contiguous.
        key: of 64 bits.
        first_sample: position of the first sample.
        p: probability of 0, between 0 and 1.
        value: what the other elements are.
    """
    bound = min(max(round(p * 2**32), 1), _LOW)
    if not _fill_natively(out, key, first_sample, bound, value):
        num_samples, width = out.shape
        words = _torch_words(key, first_sample, num_samples, width, out.device)
        out.zero_().masked_fill_(words >= bound, value)


def _fill_natively(out: Tensor, key: int, first_sample: int, bound: int = 0, value: float = 0.0) -> bool:
    """Fill a tensor by the native library; return False where there is none for it."""
    library = native().library
    if library is None or out.device.type != "cpu":
        return False
    bits = _bits(value, out.dtype) if bound else 0
    library.cp_philox_fill(
        byref(
            PhiloxArgs(
                out.data_ptr(), out.element_size(), *out.shape, first_sample, key, bound, bits, torch.get_num_threads()
            )
        )
    )
    return True


@lru_cache(64)
def _bits(value: float, dtype: torch.dtype) -> int:
    """Return a value of a dtype as bits."""
    return int.from_bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes(), sys.byteorder)


def _torch_words(key: int, first_sample: int, num_samples: int, width: int, device: torch.device) -> Tensor:
    """Compute the same numbers with torch's operations, as few as possible; products of 64 bits wrap around.

    Two words each are one tensor, and change places in every round::

        even = x0, x2    product = even * M    even = high(product), swapped, ^ odd ^ keys
        odd  = x1, x3                          odd  = low(product), swapped
    """
    num_blocks = -(-width // 4)
    lane = torch.arange(2, device=device).view(2, 1, 1)
    blocks = torch.arange(num_blocks, device=device).expand(num_samples, -1)
    samples = torch.arange(first_sample, first_sample + num_samples, device=device)[:, None].expand_as(blocks)
    even, odd = torch.stack((blocks & _LOW, samples & _LOW)), torch.stack((blocks >> 32, samples >> 32))
    multipliers = [lane * (second - first) + first for first, second in (_MULTIPLIERS, _MULTIPLIERS[::-1])]
    rounds = torch.arange(_ROUNDS, device=device).view(-1, 1, 1, 1)
    keys, weyl = ((lane * (high - low) + low) for low, high in ((key & _LOW, key >> 32 & _LOW), _WEYL))
    for number, round_key in enumerate((keys + rounds * weyl & _LOW).unbind()):
        product = even * multipliers[number % 2]
        even = (product >> 32).bitwise_and_(_LOW).bitwise_xor_(odd.flip(0))
        even.bitwise_xor_(round_key if number % 2 else round_key.flip(0))
        odd = product.bitwise_and_(_LOW)
    words = torch.stack((even[0], odd[0], even[1], odd[1]), -1)
    return words.reshape(num_samples, -1)[:, :width]
