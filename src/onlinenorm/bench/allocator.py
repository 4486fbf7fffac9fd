"""Memory that is already mapped.

With glibc's defaults a large tensor is fresh memory from the kernel each time, and mapping its pages costs more than
normalising what is in them, for every peer alike. Training loops avoid this with a tuned or another allocator; so
does this benchmark, and it reports the default allocator's ratio beside it.
"""

import ctypes
import platform
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD = 64 << 20


def can_keep_mapped() -> bool:
    """Whether this C library can be told to keep its memory."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def keep_mapped(reserve: int) -> None:
    """Let malloc never return memory to the kernel, and map this many bytes now. It lasts until the process ends."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    libc.mallopt(_M_TOP_PAD, _TOP_PAD)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if block := libc.malloc(reserve):
        ctypes.memset(block, 1, reserve)
        libc.free(block)


def page_faults() -> int:
    """Page faults of this process so far, those served without a disk; 0 where the system does not count them."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
