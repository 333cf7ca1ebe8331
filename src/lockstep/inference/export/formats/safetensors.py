"""The unwrapped weights as one safetensors file, which holds no code."""

from lockstep.inference.export.formats._weights import DTYPES as DTYPES
from lockstep.inference.export.formats._weights import FILE as FILE
from lockstep.inference.export.formats._weights import read as read
from lockstep.inference.export.formats._weights import write as write

PROGRAM = None
