"""Large tensors in 2 MB pages, where Linux lets a process ask for them (``transparent_hugepage`` at ``madvise``).

Decoding streams weights and KV from memory, and with 4 kB pages a good part of that time goes into address translation:
a plain sum over 755 MB ran at 17.7 GB/s in large pages and 11.2 GB/s in small ones (one thread, in a virtual machine),
the paged attention kernel at 9.4 and 6.8.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import torch

LOG = logging.getLogger(__name__)
HUGE = 2 * 2**20
PAGE = 4096
MADV_HUGEPAGE = 14


def ask_for_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same CPU tensor; its pages that were not touched yet will be large ones if the system agrees. Never fails."""
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return tensor
    start = tensor.data_ptr()
    first = -(-start // HUGE) * HUGE
    size = (start + tensor.nbytes) // HUGE * HUGE - first
    if size > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE):
            LOG.debug("no large pages for %d bytes: errno %d", size, ctypes.get_errno())
    return tensor


def touch(tensor: torch.Tensor) -> torch.Tensor:
    """The same fresh contiguous CPU tensor, with every page of it there: a byte of each is written.

    Memory that is touched later is paid for later: in a virtual machine whose host gives it on the first use, 1.3 ms a MB
    within a decode step, and a service that is out of memory after hours instead of at its start.
    """
    if tensor.device.type == "cpu" and tensor.numel():
        pages = tensor.view(-1).view(torch.uint8)
        pages[::PAGE].fill_(0)
        pages[-1] = 0  # the last page, if the first byte does not begin one
    return tensor


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor that begins on a large page, and has its last one to itself, where it fills at least half of one."""
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    if size < HUGE // 2:
        return torch.empty(shape, dtype=dtype)
    room = ask_for_huge_pages(torch.empty(-(-size // HUGE) * HUGE + HUGE, dtype=torch.uint8))
    skip = -room.data_ptr() % HUGE
    return room[skip : skip + size].view(dtype).view(shape)
