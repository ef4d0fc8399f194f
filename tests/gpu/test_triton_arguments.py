"""A launch passes buffers and numbers by position, so names and order of parameters must match."""

from __future__ import annotations

import inspect

from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch
from tests.support import problems, triton_numpy


def launches() -> tuple[triton_launch.Launch, ...]:
    """Return the launches of a call that needs every kernel."""
    call, _ = problems.build(problems.Problem(query_lens=(1, 40), seq_lens=(40, 57))).call()
    return triton_launch.launches(call, machine.Machine(sm=90, cores=7))


def parameters_for(launch: triton_launch.Launch) -> list[str]:
    """Return the names that a kernel's parameters must have; an aliased input has `_in`."""
    inputs = [
        f"{name}_in_ptr" if i in launch.aliases else f"{name}_ptr"
        for i, name in enumerate(launch.inputs)
    ]
    return [*inputs, *launch.numbers, *(f"{name}_ptr" for name, _, _ in launch.outputs), "C"]


def test_parameters_have_the_names_and_the_order_of_arguments():
    assert tuple(launch.kernel for launch in launches()) == triton_launch.Kernels._fields
    for launch in launches():
        kernel = getattr(triton_numpy.kernels(), launch.kernel)
        assert list(inspect.signature(kernel).parameters) == parameters_for(launch), launch.kernel


def test_an_output_continues_the_input_of_its_name():
    for launch in launches():
        for i, output in launch.aliases.items():
            assert launch.inputs[i] == launch.outputs[output][0], launch.kernel
