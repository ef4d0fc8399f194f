"""The interface between a model and the engine: what it keeps, and its input in every step.

A model is a record, `Model`: what each layer keeps of a sequence, the parameters, and one function

    step(params, caches, batch) -> (logits, caches)

that runs T tokens of B sequences through all layers. It is pure: parameters and caches are
pytrees, the engine jits it and donates the caches. A layer that keeps keys and values calls

    out, caches = caches.attend(layer, query, batch, key=key, value=value, scale=...)

and a recurrent layer

    states = caches.read_states(layer, batch)            # one array [B, ...] per tensor
    caches = caches.write_states(layer, batch, states, after)   # after each sequence's last token

where `after(lengths)` finds the states after its first tokens, since drafts may be refused
(`examples/engine/caches.py`). The caches know blocks, pools and windows. A layer that
attends to another layer's pages (Gemma 4's last ones) has no entry in `Model.layers` and calls
`attend` with the other layer's index and without key and value.

To add a family: write `load(checkpoint, dtype) -> Model` in `examples/models/FAMILY.py` and name
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

# model_type in config.json: the module that has `load(checkpoint, dtype) -> Model`.
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
HAVE_MTP = ("deepseek_v3", "qwen3_next")  # whose `load` takes `mtp=True`


@dataclasses.dataclass(frozen=True)
class AttentionCache:
    """The cache of an attention layer: keys and values of every token its queries may still see.

    Layers of one window form a cache group: they share block tables and slot mappings.
    """

    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None: head_dim
    window: int | None = None  # keys a query sees, its own included; None: all
    values_in_keys: bool = False  # values are the first numbers of keys: there is one array
    context: int = 1  # devices that the tokens are dealt to, each of which keeps its share


@dataclasses.dataclass(frozen=True)
class StateCache:
    """The state of a recurrent layer: a few tensors per sequence, whatever its length.

    A state that was never written reads as zeros, which must mean "no token yet".
    """

    layout: StateLayout  # shapes and dtypes, e.g. from jattn.blocks.mamba2_state
    # Of each tensor: sizes of what lies one after another along the axis that devices split, if it
    # is several things.
    sections: tuple[tuple[int, ...], ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateIds:
    """Where the states of B sequences lie: read before the step, written after it.

    The two differ after a checkpoint: a state kept for other sequences is never written again.
    """

    read: jax.Array  # int32 [B]; -1: the sequence begins, its state is zeros
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
    # int32 [R], which of the T tokens to return logits after: the last of each sequence, R = B, or
    # several of each where drafts are verified.
    logit_tokens: jax.Array
    attention: dict[str, jattn.AttentionMetadata]  # by cache group
    states: dict[str, StateIds]  # by cache group
    # bool [T, max_query_len], which of its sequence's tokens of this step a token follows, in steps
    # with trees of drafts; None: all that come before it. Then positions are depths in the tree.
    tree_mask: jax.Array | None = dataclasses.field(kw_only=True, default=None)
    # Static: no sequence has more tokens in this step. 1 is a decode step: T == B, and token b is
    # the one token of sequence b.
    max_query_len: int = dataclasses.field(metadata={"static": True})
    # int32 [T], each token's adapter, 0 for none; None: the model has no room for any.
    adapters: jax.Array | None = dataclasses.field(kw_only=True, default=None)
    # int32 [], how many of the T tokens and of the R rows are no padding: the first ones. None: not
    # known, and all are computed.
    num_tokens: jax.Array | None = dataclasses.field(kw_only=True, default=None)
    num_logits: jax.Array | None = dataclasses.field(kw_only=True, default=None)


@dataclasses.dataclass(frozen=True)
class Mtp:
    """A layer of a model's own that guesses the token after the next one (`models/mtp.py`).

    Its keys and values are those of a layer in `Model.layers`, which `Model.step` leaves alone.
    """

    layer: int  # attends to everything
    hidden_size: int  # E
    # As `Model.step`, with hidden states of all tokens: (logits, hidden [T, E], caches).
    step: Callable[[Any, Any, Batch], tuple[jax.Array, jax.Array, Any]]
    # guess(params, caches, batch, hidden [T, E]) -> (logits, hidden of the next tokens, caches),
    # where `batch.tokens` are those after the hidden states'.
    guess: Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model, ready to be served."""

    name: str
    vocab_size: int
    max_positions: int  # tokens of the longest sequence it was made for
    dtype: str  # what it computes in
    layers: Mapping[int, AttentionCache | StateCache]  # by index; without those that keep nothing
    params: Any  # a pytree of arrays
    # step(params, caches: Caches, batch: Batch) -> (logits float32 [R, vocabulary], caches)
    step: Callable[[Any, Any, Batch], tuple[jax.Array, Any]]
    stop_tokens: tuple[int, ...] = ()  # what ends a text
    config: Any = None  # the family's own description
    # The devices that share it: layers and step are then those of one device, params of them all.
    mesh: DeviceMesh | None = None
    # What `layers` are on one device, if there is a mesh.
    whole_layers: Mapping[int, AttentionCache | StateCache] = dataclasses.field(
        default_factory=dict
    )
    # All of its parameters, if there is a mesh: the whole ones, and a device's.
    parameters: Mapping[str, tuple[Parameter, Parameter]] = dataclasses.field(default_factory=dict)
    # The weights of its linear layers, which adapters may change: the whole ones, and a device's.
    linears: Mapping[str, tuple[Parameter, Parameter]] = dataclasses.field(default_factory=dict)
    unused: frozenset[str] = frozenset()  # parameters that checkpoints have and it does without
    mtp: Mtp | None = None  # if it was loaded with it


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
      dtype: "float32" or "bfloat16" to compute in; None: what config.json says, or float32.
      mesh: the devices that share the model; None: the default one has all of it.
      mtp: load the layer that guesses the token after the next one, too.
      join: compute layers with the same input as one product, on one device: faster on CPUs.

    Raises:
      ValueError: the directory lacks something, or no family here can run it, or the
        mesh has more devices than it can be divided among.
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
            f"{directory}: model_type is {family!r}, but must be {' or '.join(HAVE_MTP)} to guess "
            "with layers of its own (MTP)"
        )
    options = {"join": join} | ({"mtp": True} if mtp else {})
    return importlib.import_module(FAMILIES[family]).load(checkpoint, dtype, mesh, **options)
