"""The recurrent states of state-space, linear-attention and convolution layers: shapes and bytes.

One layer keeps, per sequence and tensor-parallel rank, a convolution state (the last `k - 1` inputs
of a causal convolution of width k, plus one per speculative token, which may be rolled back) and
a recurrent state. With `tp` ranks:

    Mamba-1           conv (k-1, I/tp)                 state (I/tp, N)
    Mamba-2           conv (k-1+s, (I + 2 G' N)/tp)    state (H/tp, P, N)    G' = G or tp
    gated delta net   conv (k-1+s, (2 Hk Dk + Hv Dv)/tp)    state (Hv/tp, Dv, Dk)
    KDA               conv (k-1+s, (H D + 2 Hk Dk)/tp)      state (H/tp, D, D)
    short convolution conv (k-1+s, I/tp)
    linear attention                                   state (H // tp, D, D)

Shapes and dtypes are those of vLLM 0.32. (0.23 ignores the speculative tokens of KDA and short
convolutions; pass 0 to get its sizes.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jattn.checks import checking
from jattn.formats.token_bytes import ITEM_BYTES
from jattn.integers import python_int, require_int, require_ints, with_python_ints

MODES = ("none", "align", "all")  # which states a sequence keeps: planning/align.py


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The tensors that one layer keeps of one sequence.

    Attributes:
      shapes: the shape of each tensor.
      dtypes: the name of each tensor's dtype.

    Raises: `ValueError` if there are no shapes, or more or fewer dtypes than shapes, for a negative
      size, or for an unknown dtype.

    >>> layout = StateLayout(((3, 6144), (64, 64, 128)), ("bfloat16", "float32"))
    >>> layout.tensor_bytes, layout.nbytes
    ((36864, 2097152), 2134016)
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        shapes = tuple(tuple(map(python_int, shape)) for shape in self.shapes)
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "dtypes", tuple(self.dtypes))
        with checking("StateLayout") as problems:
            problems.require(bool(shapes), "shapes", "empty", "one shape or more")
            problems.require(
                len(self.shapes) == len(self.dtypes),
                "dtypes",
                f"{len(self.dtypes)} dtypes",
                f"as many as shapes, {len(self.shapes)}",
            )
            for i, shape in enumerate(self.shapes):
                for axis, size in enumerate(shape):
                    require_int(problems, f"shapes[{i}][{axis}]", size, 0)
            for i, dtype in enumerate(self.dtypes):
                problems.require(
                    dtype in ITEM_BYTES, f"dtypes[{i}]", f"{dtype!r}", f"one of {[*ITEM_BYTES]}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of one state, all tensors together."""
        return sum(self.tensor_bytes)

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(
            math.prod(shape) * ITEM_BYTES[dtype]
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def state_dtypes(
    kind: str, model_dtype: str, *, cache_dtype: str = "auto", state_dtype: str = "auto"
) -> tuple[str, ...]:
    """Return the dtypes of a layer's states by vLLM's rules.

    Args:
      kind: "mamba1", "mamba2", "gated_delta_net", "kda", "short_conv" or "linear_attention".
      model_dtype: what "auto" means for the convolution state.
      cache_dtype: dtype of the convolution state (for linear attention, of its only state).
      state_dtype: dtype of the recurrent state. "auto": float32 for KDA, otherwise that of the
        convolution state. (The configurations of Nemotron-H and Qwen3.5 ask for float32.)

    Returns: the dtype of the convolution state, then that of the recurrent state. A short
      convolution and linear attention have one state only.
    Raises: `ValueError` for an unknown kind, or a recurrent dtype that KDA does not support.

    >>> state_dtypes("kda", "bfloat16"), state_dtypes("mamba2", "bfloat16", state_dtype="float32")
    (('bfloat16', 'float32'), ('bfloat16', 'float32'))
    """
    kinds = ("mamba1", "mamba2", "gated_delta_net", "kda", "short_conv", "linear_attention")
    with checking("state_dtypes") as problems:
        problems.require(kind in kinds, "kind", f"{kind!r}", f"one of {list(kinds)}")
        problems.require(
            kind != "kda" or state_dtype in ("auto", "float32", "bfloat16"),
            "state_dtype",
            f"{state_dtype!r}",
            "'auto', 'float32' or 'bfloat16' for KDA",
        )
    conv = model_dtype if cache_dtype == "auto" else cache_dtype
    if kind in ("short_conv", "linear_attention"):
        return (conv,)
    if state_dtype == "auto":
        state_dtype = "float32" if kind == "kda" else conv
    return conv, state_dtype


@with_python_ints
def mamba1_state(
    *,
    intermediate_size: int,
    state_size: int,
    conv_kernel: int,
    dtypes: tuple[str, str],
    tensor_parallel: int = 1,
    channels_first: bool = False,
) -> StateLayout:
    """Return the states of a Mamba-1 layer: conv [k-1, I/tp], state [I/tp, N].

    Args:
      intermediate_size: I, channels of the layer.
      state_size: N, numbers of the recurrent state per channel.
      conv_kernel: k, the width of the convolution.
      dtypes: of the convolution state and of the recurrent state (`state_dtypes`).
      tensor_parallel: tp, ranks that share the layer.
      channels_first: store the convolution state as [channels, length].

    Returns: `StateLayout` of one rank.
    Raises: `ValueError` if `tensor_parallel` is below 1, for each size that it does not divide, and
      as `StateLayout`.

    >>> mamba1_state(intermediate_size=1024, state_size=16, conv_kernel=4, tensor_parallel=2,
    ...              dtypes=("bfloat16", "float32")).shapes
    ((3, 512), (512, 16))
    """
    (inner,) = _split("mamba1_state", tensor_parallel, intermediate_size=intermediate_size)
    return _layout(conv_kernel - 1, inner, [(inner, state_size)], dtypes, channels_first)


@with_python_ints
def mamba2_state(
    *,
    intermediate_size: int,
    num_groups: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    dtypes: tuple[str, str],
    tensor_parallel: int = 1,
    num_speculative_tokens: int = 0,
    channels_first: bool = False,
) -> StateLayout:
    """Return the states of a Mamba-2 layer: conv [k-1+s, (I + 2 G' N)/tp], state [H/tp, P, N].

    G' is `num_groups` if tp divides it. Otherwise groups are replicated so that every rank has one,
    and G' = tp.

    Args:
      intermediate_size: I, channels of the layer.
      num_groups: groups of heads that share B and C.
      num_heads: H.
      head_dim: P.
      state_size: N, numbers of the recurrent state per channel.
      conv_kernel: k, the width of the convolution.
      dtypes: of the convolution state and of the recurrent state (`state_dtypes`).
      tensor_parallel: tp, ranks that share the layer.
      num_speculative_tokens: s, tokens that may be rolled back.
      channels_first: store the convolution state as [channels, length].

    Returns: `StateLayout` of one rank.
    Raises: `ValueError` if `tensor_parallel` is below 1, for each size that it does not divide,
      for a negative `num_groups`, and as `StateLayout`.

    >>> nemotron = mamba2_state(intermediate_size=4096, num_groups=8, num_heads=64, head_dim=64,
    ...                         state_size=128, conv_kernel=4, dtypes=("bfloat16", "float32"))
    >>> nemotron.shapes, nemotron.nbytes
    (((3, 6144), (64, 64, 128)), 2134016)
    """
    with checking("mamba2_state") as problems:
        require_int(problems, "tensor_parallel", tensor_parallel, 1)
        require_int(problems, "num_groups", num_groups, 0)
    whole = num_groups % tensor_parallel == 0
    groups = num_groups if whole else tensor_parallel
    sizes = {
        "intermediate_size + 2 * groups * state_size": intermediate_size + 2 * groups * state_size,
        "num_heads": num_heads,
    }
    channels, heads = _split("mamba2_state", tensor_parallel, **sizes)
    length = conv_kernel - 1 + num_speculative_tokens
    return _layout(length, channels, [(heads, head_dim, state_size)], dtypes, channels_first)


@with_python_ints
def gated_delta_net_state(
    *,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_kernel: int,
    dtypes: tuple[str, str],
    tensor_parallel: int = 1,
    num_speculative_tokens: int = 0,
    channels_first: bool = False,
) -> StateLayout:
    """Return a gated delta net's states: conv [k-1+s, C/tp], state [Hv/tp, Dv, Dk].

    The convolution has C = 2 Hk Dk + Hv Dv channels.

    Args:
      num_k_heads: Hk, heads of queries and of keys.
      num_v_heads: Hv, heads of values.
      head_k_dim: Dk.
      head_v_dim: Dv.
      conv_kernel: k, the width of the convolution.
      dtypes: of the convolution state and of the recurrent state (`state_dtypes`).
      tensor_parallel: tp, ranks that share the layer.
      num_speculative_tokens: s, tokens that may be rolled back.
      channels_first: store the convolution state as [channels, length].

    Returns: `StateLayout` of one rank.
    Raises: `ValueError` if `tensor_parallel` is below 1, for each size that it does not divide, and
      as `StateLayout`.

    >>> gated_delta_net_state(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128,
    ...                       conv_kernel=4, dtypes=("bfloat16", "float32")).shapes
    ((3, 8192), (32, 128, 128))
    """
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    sizes = {
        "2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim": channels,
        "num_v_heads": num_v_heads,
    }
    channels, heads = _split("gated_delta_net_state", tensor_parallel, **sizes)
    length = conv_kernel - 1 + num_speculative_tokens
    return _layout(length, channels, [(heads, head_v_dim, head_k_dim)], dtypes, channels_first)


@with_python_ints
def kda_state(
    *,
    num_heads: int,
    head_dim: int,
    conv_kernel: int,
    dtypes: tuple[str, str],
    num_k_heads: int | None = None,
    head_k_dim: int | None = None,
    tensor_parallel: int = 1,
    num_speculative_tokens: int = 0,
    channels_first: bool = False,
) -> StateLayout:
    """Return the states of Kimi delta attention: conv [k-1+s, C/tp], state [H/tp, D, D].

    The convolution has C = H D + 2 Hk Dk channels.

    Args:
      num_heads: H.
      head_dim: D.
      conv_kernel: k, the width of the convolution.
      dtypes: of the convolution state and of the recurrent state (`state_dtypes`).
      num_k_heads: Hk. None: `num_heads`.
      head_k_dim: Dk. None: `head_dim`.
      tensor_parallel: tp, ranks that share the layer.
      num_speculative_tokens: s, tokens that may be rolled back.
      channels_first: store the convolution state as [channels, length].

    Returns: `StateLayout` of one rank.
    Raises: `ValueError` if `tensor_parallel` is below 1, for each size that it does not divide, and
      as `StateLayout`.

    >>> kda_state(num_heads=32, head_dim=128, conv_kernel=4, tensor_parallel=4,
    ...           dtypes=("bfloat16", "float32")).shapes
    ((3, 3072), (8, 128, 128))
    """
    k_heads = num_heads if num_k_heads is None else num_k_heads
    k_dim = head_dim if head_k_dim is None else head_k_dim
    channels = num_heads * head_dim + 2 * k_heads * k_dim
    sizes = {
        "num_heads * head_dim + 2 * num_k_heads * head_k_dim": channels,
        "num_heads": num_heads,
    }
    channels, heads = _split("kda_state", tensor_parallel, **sizes)
    length = conv_kernel - 1 + num_speculative_tokens
    return _layout(length, channels, [(heads, head_dim, head_dim)], dtypes, channels_first)


@with_python_ints
def short_conv_state(
    *,
    intermediate_size: int,
    conv_kernel: int,
    dtypes: tuple[str],
    tensor_parallel: int = 1,
    num_speculative_tokens: int = 0,
    channels_first: bool = False,
) -> StateLayout:
    """Return the state of a gated short convolution (LFM2): conv [k-1+s, I/tp].

    Args:
      intermediate_size: I, channels of the layer.
      conv_kernel: k, the width of the convolution.
      dtypes: of the convolution state.
      tensor_parallel: tp, ranks that share the layer.
      num_speculative_tokens: s, tokens that may be rolled back.
      channels_first: store the convolution state as [channels, length].

    Returns: `StateLayout` of one rank.
    Raises: `ValueError` if `tensor_parallel` is below 1, for each size that it does not divide, and
      as `StateLayout`.

    >>> lfm2 = short_conv_state(intermediate_size=2048, conv_kernel=3, dtypes=("bfloat16",))
    >>> lfm2.shapes, lfm2.nbytes
    (((2, 2048),), 8192)
    """
    (inner,) = _split("short_conv_state", tensor_parallel, intermediate_size=intermediate_size)
    length = conv_kernel - 1 + num_speculative_tokens
    return _layout(length, inner, [], dtypes, channels_first)


@with_python_ints
def linear_attention_state(
    *, num_heads: int, head_dim: int, dtypes: tuple[str], tensor_parallel: int = 1
) -> StateLayout:
    """Return the state of linear (lightning) attention: [H // tp, D, D].

    Args:
      num_heads: H.
      head_dim: D.
      dtypes: of the state.
      tensor_parallel: tp, ranks that share the layer.

    Returns: `StateLayout` of one rank.
    Raises: `ValueError` if `num_heads` or `tensor_parallel` is below 1, and as `StateLayout`.

    >>> linear_attention_state(
    ...     num_heads=64, head_dim=128, tensor_parallel=8, dtypes=("float32",)).shapes
    ((8, 128, 128),)
    """
    with checking("linear_attention_state") as problems:
        require_ints(problems, 1, tensor_parallel=tensor_parallel, num_heads=num_heads)
    return StateLayout(((num_heads // tensor_parallel, head_dim, head_dim),), dtypes)


def _split(where: str, tensor_parallel: int, **sizes: int) -> tuple[int, ...]:
    """Return each size on one rank, or raise an error naming every size that does not divide."""
    with checking(where) as problems:
        if require_int(problems, "tensor_parallel", tensor_parallel, 1):
            for argument, size in sizes.items():
                problems.require(
                    size % tensor_parallel == 0,
                    argument,
                    f"{size}",
                    f"divisible by tensor_parallel={tensor_parallel}",
                )
    return tuple(size // tensor_parallel for size in sizes.values())


def _layout(
    length: int,
    channels: int,
    states: Sequence[tuple[int, ...]],
    dtypes: tuple[str, ...],
    channels_first: bool,
) -> StateLayout:
    conv = (channels, length) if channels_first else (length, channels)
    return StateLayout((conv, *states), dtypes)
