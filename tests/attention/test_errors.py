"""Wrong arguments: one ValueError names them all, before anything is read or written."""

from __future__ import annotations

import inspect
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import call as calls
from jattn import implementations, sharding
from jattn.call import arguments
from tests.support import matrix, problems

T, B, H, K, D, V, S, M, N = 6, 3, 4, 2, 8, 12, 4, 5, 7


def ones(shape: tuple, dtype=np.float32) -> jax.Array:
    return jax.device_put(np.ones(shape, dtype))  # compiles nothing


def zeros(shape: tuple, dtype=np.float32) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype))


def good() -> dict:
    """Return valid arguments."""
    return {
        "query": ones((T, H, D)),
        "key_cache": ones((N, K, S, D)),
        "value_cache": ones((N, K, S, V)),
        "block_tables": zeros((B, M), jnp.int32),
        "seq_lens": jax.device_put(np.array([3, 4, 5], np.int32)),
        "query_start_loc": jax.device_put(np.array([0, 2, 4, 6], np.int32)),
    }


def words(shape: tuple, format: str = "e4m3", scale=None) -> jattn.KVArray:
    return jattn.KVArray(zeros(shape, jnp.uint8), scale, jattn.Fp8(format))


def refused(where=jattn.paged_attention, **changes) -> str:
    """Return the message of the ValueError that `changes` to good arguments cause."""
    given = {**good(), **changes}
    with pytest.raises(ValueError, match=r"^paged_attention: \d+ wrong argument") as error:
        where(**given)
    with pytest.raises(ValueError, match=re.escape(str(error.value))):
        jattn.explain(**given)  # explain makes the same checks as the call
    return str(error.value)


def named(message: str) -> set[str]:
    """Return the arguments that a message names, one per line."""
    return set(re.findall(r"^  - ([\w.]+): ", message, flags=re.M))


def test_the_good_call_is_good():
    given = good()
    assert jattn.paged_attention(**given).shape == (T, H, V)


f32, i32 = jnp.float32, jnp.int32
WRONG = [  # an argument, its value, how the message describes it, what it must be
    ("query", ones((T, D)), "float32[6, 8]", "[T, H, D]"),
    ("query", ones((T, H, D), i32), "int32[6, 4, 8]", "one of"),
    ("query", None, "None", "[T, H, D]"),
    ("query", ones((0, H, D)), "float32[0, 4, 8]", "empty"),
    ("query", ones((T, H, 16)), "D = 16", "8, to match key_cache"),
    ("query", ones((T, 3, D)), "3 heads", "multiple of the 2 KV heads"),
    ("key_cache", ones((N, S, D)), "[7, 4, 8]", "[N, K, S, D]"),
    ("key_cache", ones((N, K, S, D), i32), "int32", "KVArray"),
    ("key_cache", "pool", "a str", "float array or a jattn.KVArray"),
    ("value_cache", ones((N, K, V)), "[7, 2, 12]", "S, V]"),
    ("value_cache", ones((N + 1, K, S, V)), "[8, 2, 4, 12]", "[7, 2, 4, 'V'], to match key_cache"),
    ("value_cache", ones((N, K, S + 1, V)), "[7, 2, 5, 12]", "[7, 2, 4, 'V'], to match key_cache"),
    ("value_cache", words((N, K, S, V)), "KVArray", "same kind"),
    ("kv_layout", "NHWC", "'NHWC'", "('HND', 'NHD')"),
    ("block_tables", zeros((B,), i32), "int32[3]", "int32["),
    ("block_tables", zeros((B, M), f32), "float32[3, 5]", "int32["),
    ("block_tables", [[0, 1]], "list [[0, 1]]", "int32["),
    ("block_tables", zeros((B, 0), i32), "[3, 0]", "empty"),
    ("seq_lens", zeros((B + 1,), i32), "int32[4]", "int32[3]"),
    ("seq_lens", zeros((B,), f32), "float32[3]", "int32[3]"),
    ("query_start_loc", zeros((B,), i32), "int32[3]", "int32[4]"),
    ("query_start_loc", None, "6 query tokens for 3 sequences", "int32[B + 1]"),
    ("max_query_len", 0, "int 0", "at least 1"),
    ("max_query_len", jnp.int32(3), "int32[]", "Python integer"),
    ("max_query_len", True, "bool True", "integer"),
    ("scale", "auto", "str 'auto'", "finite number"),
    ("scale", float("nan"), "float nan", "finite number"),
    ("scale", 1e39, "float 1e+39", "finite number in float32"),
    ("scale", 10**400, "int 1000", "finite number in float32"),
    ("scale", np.array(np.nan, np.float32), "float32[]", "finite number"),
    ("scale", ones((1,)), "float32[1]", "0-d float"),
    ("scale", jnp.int32(1), "int32[]", "0-d float"),
    ("is_causal", 1, "int 1", "bool"),
    ("is_causal", ones((B + 1,), bool), "bool[4]", "bool[B], B = 3"),
    ("is_causal", ones((B,), i32), "int32[3]", "bool[B]"),
    ("sliding_window", np.array(0), "int64[]", "an integer of at least 1"),
    ("sliding_window", 0, "int 0", "at least 1"),
    ("sliding_window", -1, "int -1", "at least 1"),
    ("sliding_window", 4.0, "float 4.0", "integer"),
    ("sliding_window", 2**31, "2147483648", "integer"),
    ("sliding_window", (3, 0), "tuple (3, 0)", "integer"),
    ("sliding_window", ones((2,), i32), "int32[2]", "0-d"),
    ("logits_soft_cap", 0.0, "float 0.0", "above 0"),
    ("logits_soft_cap", -30.0, "float -30.0", "above 0"),
    ("logits_soft_cap", 1e39, "float 1e+39", "finite number above 0 in float32"),
    ("logits_soft_cap", 1e-46, "float 1e-46", "above 0 in float32"),
    ("logits_soft_cap", np.array(0.0), "[]", "above 0"),
    ("logits_soft_cap", ones((H,)), "float32[4]", "0-d"),
    ("sinks", ones((K,)), "float32[2]", "[H] or [T, H], H = 4"),
    ("sinks", ones((T + 1, H)), "float32[7, 4]", "[H] or [T, H]"),
    ("sinks", ones((H,), i32), "int32[4]", "floating point"),
    ("sinks", 1.0, "float 1.0", "shape [H] or [T, H], H = 4"),
    ("alibi_slopes", ones((1, H)), "[1, 4]", "[H], H = 4"),
    ("relative_bias", ones((H, 8)), "float32[4, 8]", "[H, 2 E + 1], distances -E to E, H = 4"),
    ("relative_bias", ones((K, 9)), "[2, 9]", "H = 4"),
    ("attention_chunk_size", 0, "int 0", "at least 1"),
    ("attention_chunk_size", ones((B,), i32), "int32[3]", "0-d int32"),
    ("visible_end", ones((B,), i32), "int32[3]", "int32[6]"),
    ("visible_end", ones((T,)), "float32[6]", "int32[6]"),
    ("tree_mask", ones((T, 2), i32), "int32[6, 2]", "bool[T, Q], or uint32[T, W]"),
    ("tree_mask", ones((B, 2), bool), "bool[3, 2]", "T = 6"),
    ("selected_blocks", ones((T, 2), i32), "int32[6, 2]", "int32[3, M']"),
    ("selected_blocks", ones((B, 0), i32), "int32[3, 0]", "no empty axis"),
    ("value_dim", V, "int 12", "None: value_cache has V"),
    ("k_scale", ones((H,)), "float32[4]", "[K], K = 2"),
    ("k_scale", 0.0, "float 0.0", "finite and not 0 in float32"),
    ("k_scale", np.array([1.0, np.inf], np.float32), "[1.0, inf]", "finite and not 0"),
    ("v_scale", float("nan"), "float nan", "finite and not 0 in float32"),
    ("v_scale", 1e39, "float 1e+39", "finite and not 0 in float32"),
    ("v_scale", ones((K,), i32), "int32[2]", "floating point"),
    ("out_dtype", jnp.int8, "int8", "one of"),
    ("out_dtype", "wide", "'wide'", "one of"),
    ("return_lse", 1, "int 1", "a bool"),
]


@pytest.mark.parametrize(("argument", "value", "what_it_is", "what_it_must_be"), WRONG)
def test_one_wrong_argument(argument, value, what_it_is, what_it_must_be):
    message = refused(**{argument: value})
    lines = [line for line in message.splitlines() if line.startswith(f"  - {argument}")]
    assert len(lines) == 1, message
    assert what_it_is in lines[0]
    assert what_it_must_be in lines[0].split("but must be", 1)[1]
    assert named(message) == {argument}


def test_every_argument_is_tried():
    parameters = set(inspect.signature(jattn.paged_attention).parameters)
    assert {row[0] for row in WRONG} == parameters - {"implementation"}


def test_arguments_are_those_of_the_signature():
    """They agree in names, order and defaults."""

    def of(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert of(calls.Arguments) == of(jattn.paged_attention)


def test_every_argument_has_a_kind():
    """And each argument that is not static is an array among the operands."""
    parameters = inspect.signature(jattn.paged_attention).parameters.values()
    assert list(arguments.KINDS) == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    dynamic = {name for name, kind in arguments.KINDS.items() if not kind.static}
    caches = {"query", "key_cache", "value_cache", "k_quant_params", "v_quant_params"}
    assert dynamic == set(calls.Operands._fields) - caches


@pytest.mark.parametrize("format", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("options", [(), *((option,) for option in calls.OPTIONS)], ids="-".join)
def test_operands_hold_an_array_where_options_name_it(options, format):
    """So kernels may check either."""
    query_lens, seq_lens = (2, 1), (5, 3)
    problem = problems.Problem(query_lens, seq_lens, format=format, options=frozenset(options))
    call, operands = problems.build(problem).call()
    assert call.options >= set(options)
    found = {name for name in arguments.KINDS if getattr(operands, name, None) is not None}
    array_of = {"sinks_per_token": "sinks", "is_causal_per_sequence": "is_causal"}
    named = {array_of.get(option, option) for option in call.options}
    always = {"block_tables", "seq_lens", "query_start_loc", "scale"}
    assert found == always | named - {"not_causal", "return_lse", "value_dim"}


class Foreign:
    """A tensor of another library, with a dtype that NumPy does not know."""

    dtype = "fp32"

    def __init__(self, shape: tuple):
        self.shape = shape


def test_tensors_of_other_libraries_and_ragged_lists_are_named():
    wrong = {name: Foreign(x.shape) for name, x in good().items()}
    wrong |= dict.fromkeys(("scale", "sliding_window"), Foreign(()))
    wrong |= {"sinks": Foreign((H,)), "tree_mask": Foreign((T, 1)), "k_scale": Foreign((K,))}
    message = refused(**wrong)
    assert named(message) == set(wrong)
    assert "test_errors.Foreign of dtype fp32, but must be" in message
    caches = kvarrays(key_cache={"scale": Foreign(())}, value_cache={"data": Foreign((N, K, S, V))})
    assert named(refused(**caches)) == {"key_cache.scale", "value_cache.data"}
    rows = jattn.KVRows(Foreign((N, S, K, 2 * D)), K, D, 2 * D, D, D)
    assert named(refused(key_cache=rows, value_cache=None)) == {"key_cache.data"}
    new = {"key": Foreign((T, K, D)), "slot_mapping": [[1], [2, 3]]}
    with pytest.raises(ValueError, match=r"^update_kv_cache: ") as error:
        jattn.update_kv_cache(**(update_arguments() | new))
    assert named(str(error.value)) == {"key", "slot_mapping"}


def test_several_mistakes_are_all_named():
    message = refused(
        seq_lens=zeros((B + 1,), i32),
        scale="auto",
        sliding_window=0,
        logits_soft_cap=-1.0,
        sinks=ones((K,)),
        k_scale=ones((3,)),
        out_dtype=jnp.int8,
        return_lse=1,
        max_query_len=0,
        is_causal=1,
    )
    assert "10 wrong argument(s)" in message
    assert named(message) == {
        *("seq_lens", "scale", "sliding_window", "logits_soft_cap", "sinks", "k_scale"),
        *("out_dtype", "return_lse", "max_query_len", "is_causal"),
    }


@pytest.mark.parametrize(
    "broken",
    [
        {"query": ones((T, D))},
        {"block_tables": zeros((B,), i32)},
        {"key_cache": ones((N, S, D))},
        {"key_cache": ones((N, K, S, D), jnp.uint8)},
        {"kv_layout": "NHWC"},
    ],
    ids=["query", "block_tables", "key_cache", "uint8", "kv_layout"],
)
def test_a_mistake_does_not_hide_others(broken):
    """Arguments that can be checked without the broken one still are."""
    message = refused(
        **broken,
        scale="auto",
        sliding_window=0,
        logits_soft_cap=-1.0,
        max_query_len=0,
        sinks=1.0,
        alibi_slopes=ones((H,), i32),
        k_scale="k",
        v_scale=ones((K,), i32),
        seq_lens=zeros((B,), f32),
        is_causal=1,
    )
    wanted = {"scale", "sliding_window", "logits_soft_cap", "max_query_len", "sinks"}
    wanted |= {"alibi_slopes", "k_scale", "v_scale", "seq_lens", "is_causal", *broken}
    assert wanted <= named(message), wanted - named(message)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_one_byte_words_may_be_two_things(dtype):
    pool = zeros((N, K, S, D), dtype)
    message = refused(key_cache=pool, value_cache=pool)
    assert named(message) == {"key_cache", "value_cache"}
    for words_of_it in ("fp8", "NVFP4", "jattn.KVArray(data, scale, jattn.Fp8("):
        assert message.count(words_of_it) >= 2
    with pytest.raises(ValueError, match="NVFP4"):
        jattn.update_kv_cache(pool, pool, ones((1, K, D)), ones((1, K, D)), zeros((1,), i32))


def kvarrays(**changes) -> dict:
    shapes = {"key_cache": (N, K, S, D), "value_cache": (N, K, S, V)}
    made = {name: words(shape) for name, shape in shapes.items()}
    return {name: cache.replace(**changes.get(name, {})) for name, cache in made.items()}


def test_inconsistent_kvarrays_are_refused():
    message = refused(**kvarrays(key_cache={"data": zeros((N, K, S, D))}))
    assert named(message) == {"key_cache.data"}
    assert "float32[7, 2, 4, 8], but must be uint8 words" in message
    message = refused(**kvarrays(value_cache={"scale": ones((3,))}))
    assert named(message) == {"value_cache.scale"}
    message = refused(**kvarrays(value_cache={"scale": ones((), i32)}))
    assert named(message) == {"value_cache.scale"}
    dense = jattn.KVArray(zeros((N, K, S, D), jnp.uint16), ones(()), jattn.Dense())
    message = refused(**(kvarrays() | {"key_cache": dense}))
    assert named(message) == {"key_cache.scale"}
    assert "must be None" in message


def test_scales_are_number_0d_or_per_head():
    for scale in (
        2,
        0.5,
        np.float32(0.5),
        jnp.float32(0.5),
        ones((K,)),
        ones((K,), "bfloat16"),
    ):
        out = jattn.explain(**good(), k_scale=scale, v_scale=scale)
        assert {"k_scale", "v_scale"} <= out.call.options
    for scale in (ones((1,)), ones((K, 1)), ones((H,)), "1", True):
        assert named(refused(k_scale=scale, v_scale=scale)) == {"k_scale", "v_scale"}


def test_a_scale_given_twice():
    caches = kvarrays(key_cache={"scale": ones(())}, value_cache={"scale": ones((K,))})
    message = refused(**caches, k_scale=1.0, v_scale=ones((K,)))
    assert named(message) == {"k_scale", "v_scale"}
    assert message.count("None: the cache carries its own scale") == 2
    new = {"key": ones((1, K, D)), "value": ones((1, K, V))}
    with pytest.raises(ValueError, match="carries its own scale"):
        jattn.update_kv_cache(**caches, **new, slot_mapping=zeros((1,), i32), k_scale=1.0)


def test_unknown_implementation():
    for name in ("cuda", (), ("xla", "cuda"), 0, [["xla"]]):
        with pytest.raises(ValueError, match="implementation: ") as error:
            jattn.paged_attention(**good(), implementation=name)
        assert "mosaic_gpu" in str(error.value)


def test_slots_past_int32():
    struct = jax.ShapeDtypeStruct
    pool = struct((2**21, 1, 1024, 8), f32)
    with pytest.raises(ValueError, match=r"key_cache: .* since slots are int32"):
        jattn.explain(**(good() | {"key_cache": pool, "value_cache": pool}))
    with pytest.raises(ValueError, match=r"2147483648 slots, but must be at most 2097151"):
        jattn.init_kv_cache(2**21, 1, 1024, 8)


def test_init_kv_cache_names_everything():
    with pytest.raises(ValueError, match="init_kv_cache: 5 wrong") as error:
        jattn.init_kv_cache(0, 2.5, -1, 8, format="bfloat16", kv_layout="SND")
    names = {"num_blocks", "num_kv_heads", "block_size", "format", "kv_layout"}
    assert named(str(error.value)) == names
    with pytest.raises(ValueError, match="value_dim: int 0"):
        jattn.init_kv_cache(1, 1, 1, 8, value_dim=0)


def update_arguments() -> dict:
    return {
        "key_cache": zeros((N, K, S, D)),
        "value_cache": zeros((N, K, S, V)),
        "key": ones((T, K, D)),
        "value": ones((T, K, V)),
        "slot_mapping": jax.device_put(np.arange(T, dtype=i32)),
    }


UPDATE_WRONG = {
    "key_shape": ({"key": ones((T, H, D))}, {"key"}),
    "key_dtype": ({"key": ones((T, K, D), i32)}, {"key"}),
    "value_dim": ({"value": ones((T, K, D))}, {"value"}),
    "value_tokens": ({"value": ones((T + 1, K, V))}, {"value"}),
    "slots_dtype": ({"slot_mapping": zeros((T,), f32)}, {"slot_mapping"}),
    "slots_rank": ({"slot_mapping": zeros((T, 1), i32)}, {"slot_mapping"}),
    "layout": ({"kv_layout": "NHDS"}, {"kv_layout"}),
    "k_scale": ({"k_scale": ones((T,))}, {"k_scale"}),
    "scales_of_0": ({"k_scale": 0.0, "v_scale": float("inf")}, {"k_scale", "v_scale"}),
    "cache": ({"value_cache": zeros((N, K, V))}, {"value_cache"}),
    "several": (
        {"key": ones((T, K, V)), "slot_mapping": zeros((T,), f32), "v_scale": "x"},
        {"key", "slot_mapping", "v_scale"},
    ),
    "cache_and_slots": (
        {"value_cache": zeros((N, K, V)), "slot_mapping": zeros((T,), f32)},
        {"value_cache", "slot_mapping"},
    ),
}


@pytest.mark.parametrize("key", UPDATE_WRONG)
def test_update_refuses_and_writes_nothing(key):
    changes, names = UPDATE_WRONG[key]
    given = {**update_arguments(), **changes}
    with pytest.raises(ValueError, match=r"^update_kv_cache: ") as error:
        jattn.update_kv_cache(**given)
    assert named(str(error.value)) == names
    # Under jit with donation too: the error comes before the caches are donated.
    arrays = {name: x for name, x in given.items() if hasattr(x, "shape")}
    static = {name: x for name, x in given.items() if name not in arrays}
    donate = tuple(name for name in ("key_cache", "value_cache") if name in arrays)
    step = jax.jit(lambda **x: jattn.update_kv_cache(**x, **static), donate_argnames=donate)
    with pytest.raises(ValueError, match=r"^update_kv_cache: "):
        step(**arrays)
    for name in donate:
        assert not given[name].is_deleted()
        np.testing.assert_array_equal(np.asarray(given[name]), 0)


def test_merge_names_every_shape():
    out, lse = ones((2, 3, 4)), ones((2, 3))
    with pytest.raises(ValueError, match="merge_attention_states: 3 wrong") as error:
        jattn.merge_attention_states(out, lse.T, out[:1], lse.astype(i32))
    assert named(str(error.value)) == {"out_b", "lse_a", "lse_b"}
    with pytest.raises(ValueError, match=r"lse_a: list \[0.0\], but must be an array"):
        jattn.merge_attention_states(out, [0.0], out, lse)


def test_unsupported_names_every_reason():
    given = good()
    names = ("mosaic_gpu", "triton")
    with pytest.raises(jattn.UnsupportedError) as error:
        jattn.paged_attention(**given, implementation=names)
    message = str(error.value)
    assert "no implementation among ('mosaic_gpu', 'triton')" in message
    for name in names:
        assert f"\n  - {name}: " in message
    # D = 8 and S = 4 are too small for both, and one does not support float32.
    assert message.count("head size D is 8") == 2
    assert message.count("block size S is 4") == 2
    assert "query dtype is float32; it takes bfloat16, float16" in message
    assert not issubclass(jattn.UnsupportedError, ValueError)


def test_a_named_implementation_never_falls_back():
    with pytest.raises(jattn.UnsupportedError):
        jattn.paged_attention(**good(), implementation="triton")
    out = jattn.paged_attention(**good(), implementation=("triton", "xla"))
    np.testing.assert_array_equal(out, jattn.paged_attention(**good(), implementation="xla"))


def test_explain():
    why = jattn.explain(**good())
    assert why.taken in ("native", "xla")
    assert list(why.refusals) == ["mosaic_gpu", "triton", "native", "xla"]
    assert why.refusals["xla"] == ()
    text = str(why)
    assert re.search(r"^mosaic_gpu: refused: .*head size D is 8; it takes 64 to 576", text, re.M)
    assert re.search(rf"^{why.taken}: taken$", text, re.M)
    both = str(jattn.explain(**good(), implementation=("reference", "xla")))
    assert both == "reference: taken\nxla: could run it, but comes later"
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in good().items()}
    assert jattn.explain(**structs) == why
    query = jax.ShapeDtypeStruct((np.int64(T), np.int32(H), D), f32)
    assert jattn.explain(**{**structs, "query": query}) == why


@pytest.mark.parametrize("row", implementations.ROWS, ids=lambda row: row.implementation)
def test_results_of_a_row_are_committed(row):
    """Test results from real hardware are in a file that everyone can read."""
    folder = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
    if row.results is None:
        return
    lines = map(json.loads, (folder / row.results).read_text().splitlines())
    tests = [line for line in lines if line["kind"] == "test"]
    mine = [line for line in tests if f"[{row.implementation}-" in line["name"]]
    newer = {*row.newer}
    shown = [c for c in matrix.default(row) if not {c.kv_layout, c.format, *c.option} & newer]
    assert len(mine) >= len(shown)
    assert {line["outcome"] for line in mine} == {"passed"}


def test_explain_says_where_words_are_faster():
    pools = {
        "key_cache": ones((N, K, S, D), jnp.bfloat16),
        "value_cache": ones((N, K, S, V), jnp.bfloat16),
    }
    for name in ("xla", "native", None):
        why = jattn.explain(**(good() | pools), implementation=name)
        assert ("KVArray" in str(why)) == (why.taken == "xla")
    assert "KVArray" not in str(jattn.explain(**good(), implementation="xla"))
    assert "KVArray" not in str(jattn.explain(**(good() | kvarrays()), implementation="xla"))


def test_support_table():
    table, _, below = jattn.support_table().partition("\n\n")
    lines = table.splitlines()
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert lines[0] == "|  | `mosaic_gpu` | `triton` | `native` | `xla` | `reference` |"
    cells = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines}
    assert cells["| options"] == ["core, value_dim", "all", "all", "all", "all |"]
    assert "sliding_window" in below
    for name, one in implementations.BY_NAME.items():
        assert f"- `{name}`: {one.row.summary}. Needs" in " ".join(below.split())


def test_wide_and_foreign_integers_are_never_cut():
    """Concrete NumPy integers are checked before conversion to int32."""
    good = {"block_tables": np.zeros((1, 1), np.int64), "seq_lens": np.ones(1, np.int64)}
    query, pool = ones((1, 1, 8)), ones((2, 1, 4, 8))
    assert np.isfinite(np.asarray(jattn.paged_attention(query, pool, pool, **good))).all()
    for name, wide in (("block_tables", np.full((1, 1), 2**32)), ("seq_lens", np.array([2**32]))):
        with pytest.raises(ValueError, match=rf"{name}: values 4294967296 .*within int32"):
            jattn.paged_attention(query, pool, pool, **{**good, name: wide})
    for name in ("sliding_window", "attention_chunk_size"):
        for wrong in (np.int64(2**32 + 5), np.int64(0), np.int32(-1), np.array(2**32 + 5)):
            with pytest.raises(ValueError, match=rf"{name}: .*must be an integer of at least 1"):
                jattn.paged_attention(query, pool, pool, **good, **{name: wrong})
    with pytest.raises(ValueError, match=r"format: type <class 'numpy.float32'>"):
        jattn.init_kv_cache(4, 1, 16, 64, format=np.float32)
    with pytest.raises(ValueError, match=r"seq_lens: of byte order '>i4', but must be native"):
        jattn.paged_attention(query, pool, pool, **{**good, "seq_lens": np.ones(1, ">i4")})
    with pytest.raises(ValueError, match=r"slot_mapping: values 4294967297 .*within int32"):
        jattn.update_kv_cache(pool, pool, query, query, np.array([2**32 + 1]))
    batch = {**good, "query_start_loc": np.array([0, 1]), "num_tokens": 1, "block_size": 4}
    jattn.AttentionMetadata.from_arrays(**batch, num_seqs=np.array([1]))
    for name, wide in (
        ("block_tables", np.array([[2**32 + 3]])),
        ("block_tables", np.array([2**32 + 3])),
        ("num_seqs", np.array(2**32 + 1)),
        ("num_seqs", np.array([2**32 + 1])),
        ("distribution", np.array([0, 0, 2**32 + 1])),
    ):
        with pytest.raises(ValueError, match=rf"{name}: values .* 429496729\d, .*within int32"):
            jattn.AttentionMetadata.from_arrays(**{**batch, name: wide})
    for wide in (2**32, 2**32 + 1, -1):
        with pytest.raises(ValueError, match=r"num_shared_blocks: .*an integer from 0 to 1"):
            jattn.cascade_attention(query, pool, pool, num_shared_blocks=np.array(wide), **good)


def with_mesh(**options):
    mesh = jax.make_mesh((1,), ("heads",))
    return sharding.paged_attention(**good(), mesh=mesh, axis_name="heads", **options)


def explained(**options):
    return jattn.explain(**good(), **options)


def seen() -> jattn.Calibration:
    return jattn.Calibration(ones((K,)), ones((K,)), zeros((), jnp.int32))


lengths = jattn.AttentionMetadata.from_lengths


def explained_words(format):
    cache = jattn.KVArray(zeros((N, K, S, D), jnp.uint8), None, format)
    return jattn.explain(**{**good(), "key_cache": cache, "value_cache": None}, value_dim=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: seen().scales((jattn.Fp8(),)), "format: tuple .* or a pair of them"),
        (lambda: seen().scales((jattn.Fp8(),) * 3), "format: tuple .* or a pair of them"),
        (lambda: lengths([1], [1], None, 16), r"1 wrong .*\n  - block_tables: NoneType None"),
        (lambda: lengths([1], [1], np.array(1), 16), r"block_tables: int64\[\] 1, but must be"),
        (
            lambda: lengths([1], [1], [[0]], 16).check(num_blocks="4", block_size=0),
            "num_blocks: '4",
        ),
        (lambda: jattn.KVRows.pairs([[1]]), r"data: list \[\[1\]\], but must be an array"),
        (
            lambda: jattn.merge_attention_states(*[ones(())] * 4),
            r"out_a: float32\[\], but must be of shape \[..., V\]",
        ),
        (lambda: with_mesh(implementation=[["xla"]]), r"implementation: \[\['xla'\]\], but must"),
        (
            lambda: explained_words("fp8"),
            r"key_cache.format: str 'fp8', but must be a jattn.Dense",
        ),
    ],
)
def test_errors_of_python_and_numpy_are_not_shown(call, message):
    with pytest.raises(ValueError, match=re.compile(message, re.S)):
        call()


def test_misspelt_and_missing_options_are_named_by_the_public_function():
    for call, where in ((with_mesh, "paged_attention"), (explained, "explain")):
        with pytest.raises(TypeError, match=rf"^{where}\(\) got an unexpected .* 'sinkz'"):
            call(sinkz=1)
    query, cache, _, *_ = good().values()
    with pytest.raises(TypeError, match=r"^explain\(\) missing 2 required .*'block_tables'"):
        jattn.explain(query, cache, cache)


def test_long_values_are_cut_in_messages():
    query = np.ones((64, 8, 64)).tolist()
    with pytest.raises(ValueError, match=r"query: list \[") as error:
        jattn.paged_attention(query, query, query, block_tables=query, seq_lens=query)
    assert len(str(error.value)) < 1000


def structs(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_shapes_without_numbers_are_named():
    struct, (out, lse) = structs(ones((T, H, D))), (ones((T, H)), ones((T,)))
    words = jax.ShapeDtypeStruct((N, K, S, D), jnp.uint16)
    words = jattn.KVArray(words, None, jattn.Dense("bfloat16"))
    new, slots = ones((T, K, D)), zeros((T,), jnp.int32)
    starts, batch = good()["query_start_loc"], {"num_tokens": T, "block_size": S}
    for call, name in (
        (lambda: jattn.paged_attention(**{**good(), "query": struct}), "query"),
        (
            lambda: jattn.paged_attention(**{**good(), "key_cache": words, "value_cache": words}),
            "key_cache.data",
        ),
        (lambda: jattn.paged_attention(**good(), sinks=structs(ones((H,)))), "sinks"),
        (
            lambda: jattn.cascade_attention(**{**good(), "query": struct}, num_shared_blocks=0),
            "query",
        ),
        (lambda: jattn.update_kv_cache(out, out, struct, new, slots), "key"),
        (lambda: jattn.merge_attention_states(out, structs(lse), out, lse), "lse_a"),
        (
            lambda: jattn.AttentionMetadata.from_arrays(struct, starts[1:], starts, **batch),
            "block_tables",
        ),
        (lambda: jattn.calibrate(struct, new, slots), "key"),
    ):
        with pytest.raises(ValueError, match=rf"{name}: ShapeDtypeStruct\(.*must be an array"):
            call()


def test_symbolic_shapes_are_named():
    (tokens,) = jax.export.symbolic_shape("T")
    query = jax.ShapeDtypeStruct((tokens, H, D), f32)
    with pytest.raises(ValueError, match=r"query: of the symbolic shape \[T, 4, 8\], but must"):
        jax.eval_shape(lambda query: jattn.paged_attention(**{**good(), "query": query}), query)
    with pytest.raises(ValueError, match=r"key: of the symbolic shape \[T, 4, 8\], but must"):
        jax.eval_shape(lambda key: jattn.update_kv_cache(key, key, key, key, key), query)


def test_numbers_of_numpy_are_shown():
    for value, shown in (
        (np.float64(np.inf), "numpy.float64 inf"),
        (np.array(np.nan), r"float64\[\] nan"),
        (np.True_, r"numpy.bool_? True"),
    ):
        with pytest.raises(ValueError, match=f"scale: {shown}, but must be a finite number"):
            jattn.paged_attention(**good(), scale=value)
    swapped = np.ones((T, H, D), ">f4")
    assert "query: of byte order '>f4', but must be native" in refused(query=swapped)
