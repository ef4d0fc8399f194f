"""A PTX interpreter: compiled GPU kernels executed on a CPU, with NumPy. See README.md."""

from tests.support.ptx.launching import Executed, launch
from tests.support.ptx.memory import Memory
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.parser import Kernel, parse
from tests.support.ptx.tensor_map import TensorMap

__all__ = ["Executed", "Kernel", "Memory", "PtxError", "TensorMap", "launch", "parse"]
