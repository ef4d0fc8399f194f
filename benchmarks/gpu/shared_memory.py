"""Count the shared memory of the Triton kernels before they are compiled.

The rule for tiles does not need the count, because its tables hold tiles that fit. Tests check the
tables against this count, and the count against the compiler's; tuning skips tiles that need more
than there is.
"""

from __future__ import annotations

from jattn import call as calls
from jattn.pallas.triton import tiles as triton_tiles
from jattn.pallas.triton.tiles import Tiles

# Bytes that a kernel may need beyond what `shared_bytes` can name. Compiled for sm_80, D = 192 and
# V = 128 over fp8 needs 128 (triton 3.6.0): a second buffer of 32 block ids for each of three
# tiles, less the room for reductions, which share memory with buffers no longer in use. The rest is
# a margin.
UNNAMED_BYTES = 256


def shared_bytes(call: calls.Call, tiles: Tiles) -> int:
    """Return the most bytes of shared memory that a kernel needs with `mma.sync`.

    That covers every GPU except Hopper and the larger Blackwells, whose matrix units read shared
    memory and need more there; they have more than twice as much. Tests check this against the
    compiler.
    """
    qk, pv = ({"float32": 4}.get(name, 2) for name in triton_tiles.dot_dtypes(call))
    query = tiles.rows * sum(triton_tiles.whole_parts(call, call.head_dim)) * qk
    buffers, widened = [4 * tiles.keys], 0  # block ids
    if call.num_selected:
        buffers.append(4 * tiles.keys)  # columns
    for format, size, dot in (
        (call.key_format, call.head_dim, qk),
        (call.value_format, call.value_dim, pv),
    ):
        columns = [tiles.keys * part for part in triton_tiles.whole_parts(call, size)]
        if format.narrow and format.triton_codes != "e5m2":
            # Unpacked in registers, and multiplied from this buffer.
            buffers += [count // format.values_per_word for count in columns]
            widened = max(widened, sum(columns) * dot)
        else:
            # Numbers multiplied in float32 are widened on the way; e5m2 is widened in registers.
            stored = 4 if dot == 4 else format.word_dtype.itemsize
            buffers += [count * stored for count in columns]
        if format.group:
            buffers += [count // format.group for count in columns]
        if format.per in ("block", "token"):
            buffers += [4 * tiles.keys] * (1 + format.zero_point)
    # Without a pipeline one buffer follows another; with it, a loop holds all buffers of a step,
    # once for every stage that is not the load of a block id.
    copies = max(1, (tiles.stages - 1) // 2)
    held = max(buffers) if tiles.stages == 1 else copies * sum(buffers)
    weights = tiles.rows * tiles.keys * pv
    if call.bias_columns:  # numbers of tables, on their way to the threads of their logits
        weights += (6 if call.tree_words else 2) * tiles.rows * tiles.keys
    reduced = 4 * tiles.rows * tiles.warps
    return query + held + widened + weights + reduced + UNNAMED_BYTES
