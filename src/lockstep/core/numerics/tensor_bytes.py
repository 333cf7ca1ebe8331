"""The bytes of a tensor without a copy."""

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, valid while the tensor lives.

    Not tensor.numpy(): the storage of a tensor that was one could not be resized again, as FSDP does with gathered
    weights, which modules may get as inputs.
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(b"")  # its address is NULL, for which zlib.crc32 forgets what came before
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
