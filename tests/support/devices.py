"""Code that runs in a process with eight devices: models over a mesh, and their collectives."""

from tests.support import processes

PRELUDE = """
import collections, re
import jax, numpy as np
from examples.engine.mesh import make_mesh, local_part
from examples.engine.model import load_model
from tests.support import checkpoints

def collectives(program):
    # XLA may combine collectives that run at the same time: their result is then a tuple.
    found = re.findall(r"= (\\(.*?\\)|\\S+) ([a-z-]+?)(?:-start)?\\(", program.as_text())
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter",
             "collective-broadcast", "ragged-all-to-all", "send", "recv")
    return dict(collections.Counter(
        (name, shape)
        for result, name in found if name in names
        for shape in re.findall(r"\\w+\\[[\\d,]*\\]", result)))

def check_tokens(name, axes, num_new=6, **options):
    wanted = checkpoints.reference(name)
    model = load_model(checkpoints.CHECKPOINTS / name, mesh=make_mesh(axes))
    engine = checkpoints.make_engine(model, **options)
    tokens, error = checkpoints.serve(engine, wanted, num_new)
    np.testing.assert_array_equal(tokens, wanted["tokens"][:, :num_new])
    assert error.max() <= checkpoints.MAX_ERROR, error.max()
    return engine
"""


def on_eight_devices(code: str) -> str:
    """Run `code` in a process with eight devices and return what it printed."""
    return processes.python(PRELUDE + code, JAX_NUM_CPU_DEVICES="8")
