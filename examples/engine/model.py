"""The interface between a model and the engine: its caches, and its input in every step.

A model is a record, `Model`: what each layer caches of a sequence, the parameters, and one function

    step(params, caches, batch) -> (logits, caches)

that runs T tokens of B sequences through all layers. It is pure: parameters and caches are
pytrees, and the engine jits it and donates the caches. A layer that caches keys and values calls

    out, caches = caches.attend(layer, query, batch, key=key, value=value, scale=...)

and a recurrent layer

    states = caches.read_states(layer, batch)            # one array [B, ...] per tensor
    caches = caches.write_states(layer, batch, states, after)   # after each sequence's last token

where `after(lengths)` returns the states after each sequence's first tokens of the step, because
draft tokens may be rejected (`examples/engine/caches.py`). The caches know about blocks, pools and
windows. A layer that attends to another layer's pages (Gemma 4's last ones) has no entry in
`Model.layers` and calls `attend` with the other layer's index and without key and value.

To add a family, write `load(checkpoint, dtype) -> Model` in `examples/models/FAMILY.py` and list
it in `FAMILIES` below.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import jattn
from examples.engine.mesh import DeviceMesh, Parameter
from examples.models.checkpoint import open_checkpoint
from jattn.blocks import StateLayout

# From model_type in config.json to the module with `load(checkpoint, dtype) -> Model`.
FAMILIES = {
    "deepseek_v3": "examples.models.deepseek",
    "gemma4": "examples.models.gemma4",
    "gemma4_text": "examples.models.gemma4",
    "gemma4_unified": "examples.models.gemma4",
    "gemma4_unified_text": "examples.models.gemma4",
    "gpt_oss": "examples.models.gpt_oss",
    "nemotron_h": "examples.models.nemotron_h",
    "qwen3": "examples.models.qwen3",
    "qwen3_next": "examples.models.qwen3_next",
}
HAVE_MTP = ("deepseek_v3", "qwen3_next")  # families whose `load` accepts `mtp=True`


@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """The cache of an attention layer: keys and values of every token its queries may still see.

    Layers with the same window form a cache group: they share block tables and slot mappings.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None: head_dim
    window: int | None = None  # keys a query sees, its own included; None: all
    values_in_keys: bool = False  # values are the first numbers of keys, stored in one array
    context: int = 1  # devices that tokens are distributed over, each of which keeps its share


@dataclasses.dataclass(frozen=True)
class StateCache:
    """The state of a recurrent layer: a few tensors per sequence, whatever its length.

    A state that was never written reads as zeros, which must mean "no token yet".
    """

    layout: StateLayout  # shapes and dtypes, e.g. from jattn.blocks.mamba2_state
    # Per tensor: sizes of the parts joined along the axis that devices split, if there are several.
    sections: tuple[tuple[int, ...], ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateIds:
    """Where the states of B sequences are: read before the step, written after it.

    The two differ after a checkpoint: a state kept for other sequences is never overwritten.
    """

    read: jax.Array  # int32 [B]; -1: the sequence begins with a state of zeros
    write: jax.Array  # int32 [B]; -1 in padded rows: nothing is written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One step's work: some tokens of every scheduled sequence, padded to a bucket.

    The tokens of sequence b are `query_start_loc[b] .. query_start_loc[b + 1] - 1`. Padded tokens
    belong to no sequence; padded sequences have no tokens.
    """

    tokens: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T], of each token in its sequence
    query_start_loc: jax.Array  # int32 [B + 1]
    # int32 [R], the tokens after which logits are returned: the last of each sequence (R = B), or
    # several of each when draft tokens are verified.
    logit_tokens: jax.Array
    attention: dict[str, jattn.AttentionMetadata]  # by cache group
    states: dict[str, StateIds]  # by cache group
    # bool [T, max_query_len], in steps with trees of draft tokens: which of its sequence's tokens
    # in this step a token follows. Positions are then depths in the tree. None: a token follows all
    # tokens before it.
    tree_mask: jax.Array | None = dataclasses.field(kw_only=True, default=None)
    # Static: the most tokens of a sequence in this step. 1 is a decode step: T == B, and token b
    # is the one token of sequence b.
    max_query_len: int = dataclasses.field(metadata={"static": True})
    # int32 [T], each token's adapter, 0 for none; None: the model has no room for adapters.
    adapters: jax.Array | None = dataclasses.field(kw_only=True, default=None)
    # int32 [], how many of the T tokens and of the R rows are real; padding follows them. None:
    # unknown, so all are computed.
    num_tokens: jax.Array | None = dataclasses.field(kw_only=True, default=None)
    num_logits: jax.Array | None = dataclasses.field(kw_only=True, default=None)


@dataclasses.dataclass(frozen=True)
class Mtp:
    """A model's MTP layer, which predicts the token after the next one (`models/mtp.py`).

    Its keys and values have a layer in `Model.layers`, which `Model.step` does not touch.
    """

    layer: int  # index in `Model.layers`; it attends to all tokens
    hidden_size: int  # E
    # Like `Model.step`, but also returns hidden states: (logits, hidden [T, E], caches).
    step: Callable[[Any, Any, Batch], tuple[jax.Array, jax.Array, Any]]
    # guess(params, caches, batch, hidden [T, E]) -> (logits, hidden of the next tokens, caches),
    # where each of `batch.tokens` follows the token of its hidden state.
    guess: Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model, ready to be served."""

    name: str
    vocab_size: int
    max_positions: int  # length of the longest sequence it was made for
    dtype: str  # what it computes in
    layers: Mapping[int, AttentionCache | StateCache]  # by index; without layers that cache nothing
    params: Any  # a pytree of arrays
    # step(params, caches: Caches, batch: Batch) -> (logits float32 [R, vocabulary], caches)
    step: Callable[[Any, Any, Batch], tuple[jax.Array, Any]]
    stop_tokens: tuple[int, ...] = ()  # tokens that end a text
    config: Any = None  # the family's own configuration
    # The devices that share it: `layers` and `step` then describe one device, `params` all of them.
    mesh: DeviceMesh | None = None
    # With a mesh: `layers` as they would be on a single device.
    whole_layers: Mapping[int, AttentionCache | StateCache] = dataclasses.field(
        default_factory=dict
    )
    # With a mesh: every parameter, whole and as one device holds it.
    parameters: Mapping[str, tuple[Parameter, Parameter]] = dataclasses.field(default_factory=dict)
    # Weights of linear layers, which adapters may change: whole, and as one device holds them.
    linears: Mapping[str, tuple[Parameter, Parameter]] = dataclasses.field(default_factory=dict)
    unused: frozenset[str] = frozenset()  # parameters in checkpoints that it does not need
    mtp: Mtp | None = None  # if it was loaded with its MTP layer


def load_model(
    directory: str | Path,
    dtype: str | None = None,
    mesh: DeviceMesh | None = None,
    *,
    mtp: bool = False,
    join: bool = False,
) -> Model:
    """Load a Hugging Face checkpoint directory.

    Args:
      directory: has config.json and safetensors.
      dtype: "float32" or "bfloat16" to compute in; None: config.json's, or float32.
      mesh: the devices that share the model; None: the default device has all of it.
      mtp: also load the layer that predicts the token after the next one.
      join: on one device, compute linear layers with the same input as one product, which is
        faster on CPUs.

    Raises:
      ValueError: a file is missing, no family here can run the model, or it cannot be divided among
        the devices of the mesh.
    """
    checkpoint = open_checkpoint(directory)
    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(
            f"{directory}: config.json: model_type is {family!r}, but must be one of "
            f"{', '.join(FAMILIES)}"
        )
    if mtp and family not in HAVE_MTP:
        raise ValueError(
            f"{directory}: model_type is {family!r}, but must be {' or '.join(HAVE_MTP)} to "
            "speculate with its own layers (MTP)"
        )
    options = {"join": join} | ({"mtp": True} if mtp else {})
    return importlib.import_module(FAMILIES[family]).load(checkpoint, dtype, mesh, **options)
