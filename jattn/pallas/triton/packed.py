"""Triton kernels as XLA takes them: compiled, and packed into a call of its FFI.

`jax_triton.triton_call` makes a custom call of the older kind, which XLA leaves out of command
buffers, so that each kernel is a separate launch. The FFI target that jaxlib registers for Pallas
takes the same packed kernel, and a step's kernels become one graph. jax-triton 0.4 makes such calls
as well, but an output that aliases an input is then not an argument of the kernel. This file calls
the internal functions of jax-triton 0.3.1 and 0.4.1 that compile a kernel.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

TARGET = "triton_kernel_call_ffi"
# Triton would write PTX for its own ptxas, which may be newer than the one that XLA finds. This
# version is CUDA 12.8's; it has all that the kernels need, and supports these targets. Only
# jax-triton 0.4 passes it on.
PTX_VERSION, PTX_TARGETS = 87, (80, 86, 87, 89, 90, 100, 101, 120)
ALIGNED = ["tt.divisibility", 16]


def call(
    kernel: Any,
    inputs: Sequence[jax.Array],
    numbers: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    compute_capability: int,
    aliases: Mapping[int, int],
    constants: dict[str, Any],
) -> Sequence[jax.Array]:
    """Compile a kernel and return its outputs.

    Args:
      kernel: a `triton.JITFunction` of inputs, numbers, outputs and constants, in this order.
      inputs, numbers, outputs: arrays, integers, what to allocate.
      name: shown in profiles.
      grid: programs, in up to three dimensions.
      num_warps, num_stages, compute_capability: what it is compiled for.
      aliases: outputs that are written over an input, `{input: output}`.
      constants: static arguments.
    """
    from jax_triton import triton_lib

    lib = triton_lib.triton_kernel_call_lib
    given: list[Any] = [*inputs, *numbers, *outputs]
    arguments = [x if isinstance(x, int) else jax.core.ShapedArray(x.shape, x.dtype) for x in given]
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "num_ctas": 1,
        "enable_fp_fusion": True,
    }
    compiled, types, attributes = _compile(
        triton_lib, kernel, arguments, compute_capability, options, constants
    )
    parameters = []
    for i, (x, kind) in enumerate(zip(arguments, types, strict=True)):
        if not isinstance(x, int):
            aligned = 16 if ALIGNED in attributes[(i,)] else 0
            parameters.append(lib.create_array_parameter(0, aligned))
        elif x != 1:  # 1 is a constant of the compiled kernel
            parameters.append(lib.create_scalar_parameter(x, kind))
    packed = lib.TritonKernelCall(compiled, *(*grid, 1, 1)[:3], parameters).to_proto(name, b"")
    run = jax.ffi.ffi_call(TARGET, list(outputs), input_output_aliases=dict(aliases))
    return run(*inputs, name=name, opaque=zlib.compress(packed))


def _compile(
    triton_lib: Any,
    kernel: Any,
    arguments: Sequence[Any],
    compute_capability: int,
    options: dict[str, Any],
    constants: dict[str, Any],
) -> tuple[Any, Sequence[str], Mapping[tuple[int], Any]]:
    """Return the kernel, and each argument's type and what the compiler assumed about it."""
    if hasattr(triton_lib, "TritonFunction"):  # jax-triton 0.4
        types = [triton_lib.get_type_id(x) for x in arguments]
        if compute_capability in PTX_TARGETS:
            options = {**options, "ptx_version": PTX_VERSION}
        compiled, attributes, _ = triton_lib.TritonFunction(kernel).get_or_create_kernel(
            triton_lib.make_cuda_target,
            "cuda",
            arguments,
            types,
            in_tree=jax.tree.structure(types),
            objpaths=[(i,) for i in range(len(arguments))],
            compute_capability=compute_capability,
            backend_options=options,
            metaparams=constants,
        )
        return compiled, types, attributes
    types = [triton_lib.get_triton_type(x) for x in arguments]
    scalars = ((i, types[i], x) for i, x in enumerate(arguments) if isinstance(x, int))
    compiled, attributes = triton_lib.get_or_create_triton_kernel(
        triton_lib.get_cuda_backend,
        "cuda",
        kernel,
        types,
        tuple(scalars),
        compute_capability=compute_capability,
        metaparams=constants,
        dump=False,
        **options,
    )
    return compiled, types, attributes
