"""jattn's compiled GPU kernels, executed instruction by instruction, against the oracle.

This checks what only a GPU would notice: alignment, swizzles, descriptors, phases, fences. Every
case is a small ragged batch; `-m extended` has every head size, block size, format and option.
Mistakes planted in the kernels must be found.
"""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from jattn import call as calls
from jattn.pallas.triton import needs as triton_needs
from tests.support import budget, mosaic_cases, problems, promises, ptx, ptx_kernels
from tests.support.mosaic_cases import ALL, LSE

LACKS = ptx_kernels.missing_compiler()
needs_compiler = pytest.mark.skipif(bool(LACKS), reason=f"compiling for GPUs: {LACKS}")
TRITON = triton_needs.packages_lack(*map(triton_needs._version, ("jax-triton", "triton", "x")))
needs_triton = pytest.mark.skipif(bool(TRITON), reason=f"Triton: {TRITON[:1]}")
pytestmark = needs_compiler


def problem(**changes):
    """Make a problem: an empty sequence, one token, a few, a prefill that ends within a block."""
    lens = {"query_lens": (0, 1, 3, 33), "seq_lens": (0, 1, 37, 45)}
    return problems.Problem(**(mosaic_cases.SMALL | lens | changes))


def decode(**changes):
    """Make a problem of up to three query tokens each; grid blocks share one sequence."""
    first = {"query_lens": (0, 1, 3), "seq_lens": (0, 1, 140), "num_heads": 8, "num_kv_heads": 1}
    return problem(**(first | changes))


def head(d, v=None):
    """Return both head sizes as fields of a problem."""
    return {"head_dim": d, "value_dim": v or d}


def stored(name, query="bfloat16"):
    """Return a cache format and a query dtype that fits it, as fields of a problem."""
    return {"format": name, "query_dtype": name if name in calls.QUERY_DTYPES else query}


HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512))
OPTIONS = sorted(set(calls.CORE_OPTIONS) - {"return_lse"})
MASKS = ("attention_chunk_size", "visible_end", "selected_blocks", "relative_bias")
DRAFTED = LSE | {"tree_mask", "sliding_window", "relative_bias", "sinks_per_token"}

TRITON_CASES = {"sm80-head64": (80, problem())}
TRITON_MORE = {"sm90-head128-all-options": (90, problem(**head(128), options=ALL))}
TRITON_MORE |= {
    f"sm{sm}-head{d}v{v}-block{size}-{name}-{'all' if every else 'plain'}": (
        sm, problem(**head(d, v), block_size=size, **stored(name), options=ALL if every else LSE),
    )
    for i, (d, v) in enumerate(HEADS)
    for j, name in enumerate(("bfloat16", "float16", "fp8_e4m3", "float32"))
    for sm in ((80, 86, 89, 90, 120)[(i + j) % 5], (90, 80)[j % 2])
    for size, every in (((8, 16, 528)[(i + j) % 3], (i + j) % 2),)
}  # fmt: skip
TRITON_MORE |= {
    "sm80-head96-split": (80, decode(**head(96), seq_lens=(0, 1, 400), options=LSE | {"sinks"})),
    "sm120-head80-block8-fp8_e5m2": (120, problem(**head(80), block_size=8, **stored("fp8_e5m2"))),
}
TRITON_MORE |= {  # codes of 8 and 4 bits, unpacked by integers, and their scales
    f"sm{sm}-head{d}v{v}-block{size}-{name}-{layout}": (
        sm, problem(**head(d, v), block_size=size, kv_layout=layout, **stored(name), options=LSE),
    )
    for sm, d, v, size, name, layout in (
        (80, 16, 16, 16, "nvfp4", "HND"), (80, 256, 256, 16, "nvfp4", "HND"),
        (80, 64, 64, 16, "nvfp4", "HND"), (90, 512, 512, 64, "nvfp4", "NHD"),
        (90, 512, 512, 16, "int4_zero", "HND"), (80, 512, 512, 16, "int8", "HND"),
        (80, 16, 16, 16, "int4", "NHD"), (80, 16, 16, 16, "int8", "HND"),
        (80, 64, 64, 8, "int4_zero", "HND"), (80, 64, 64, 16, "fp8_e5m2_token", "NHD"),
        (80, 96, 96, 16, "int8_zero", "NHD"), (90, 128, 128, 8, "int8", "HND"),
        (90, 192, 128, 16, "int4_zero", "HND"), (120, 128, 128, 16, "int4", "NHD"),
        (80, 80, 80, 16, "fp8_e4m3", "HND"), (89, 64, 64, 528, "fp8_e4m3_token", "HND"),
        (90, 576, 512, 16, "fp8_e5m2_block", "HND"), (80, 128, 128, 16, "fp8_e4m3_block", "NHD"),
    )
}  # fmt: skip
TRITON_MORE |= {  # pairs of formats that occur in no other case
    f"sm{sm}-head{d}v{d}-{query}-{key}-{value}": (
        sm,
        problem(**head(d), query_dtype=query, format=key, value_format=value, options=LSE),
    )
    for sm, d, query, key, value in (
        (80, 64, "bfloat16", "float32", "nvfp4"), (90, 16, "float16", "nvfp4", "int8"),
        (80, 64, "float16", "bfloat16", "nvfp4"), (90, 128, "bfloat16", "nvfp4", "bfloat16"),
        (80, 80, "bfloat16", "int8_zero", "nvfp4"), (80, 64, "float32", "nvfp4", "int4"),
        (80, 128, "float16", "nvfp4", "int8"),
    )
}  # fmt: skip
TRITON_MORE |= {
    f"sm{sm}-latent-{layout}": (
        sm,
        problem(
            **head(576, 512), num_kv_heads=1, kv_layout=layout, block_size=size,
            options=LSE | {"value_dim", "k_scale"},
        ),
    )
    for sm, layout, size in ((80, "NHD", 16), (90, "HND", 64))
}  # fmt: skip
TRITON_MORE |= {  # a value ends within a group
    f"sm{sm}-latent-{name}": (
        sm,
        problem(
            **head(64, 24), num_kv_heads=1, query_dtype="bfloat16", format=name,
            options=LSE | {"value_dim"},
        ),
    )
    for sm, name in ((80, "nvfp4"), (90, "int4"))
}  # fmt: skip
TRITON_MORE |= {
    f"sm{sm}-{option}": (sm, problem(options=LSE | {option}))
    for option in (*OPTIONS, *MASKS, "sinks_per_token", "tree_mask")
    for sm in (80, 90)
}
TRITON_MORE |= {  # masks together, trees of two words, blocks smaller and larger than tiles
    "sm80-head80-block8-drafted": (
        80, problem(**head(80), block_size=8, options=DRAFTED, tree_columns=40),
    ),
    "sm90-head128-block16-drafted": (90, problem(**head(128), options=DRAFTED)),
    "sm90-head512-block64-drafted-decode": (
        90, decode(**head(512), block_size=64, options=DRAFTED, query_lens=(0, 1, 4)),
    ),
    "sm80-head64-block8-selected": (
        80,
        problem(
            block_size=8, query_lens=(1, 33, 4), seq_lens=(70, 200, 9),
            options=LSE | {"selected_blocks", "relative_bias", "attention_chunk_size"},
        ),
    ),
    "sm90-head96-block64-selected": (
        90,
        decode(
            **head(96), block_size=64, query_lens=(1, 2, 3), seq_lens=(300, 64, 130),
            options=LSE | {"selected_blocks", "sliding_window", "sinks_per_token"},
        ),
    ),
    "sm80-head128-tree-of-eight-words": (
        80, problem(**head(128), options=DRAFTED, tree_columns=250, query_lens=(0, 1, 3, 40)),
    ),
    "sm90-head512-visible_end": (
        90,
        problem(
            **head(512), options=LSE | {"visible_end", "sliding_window", "is_causal_per_sequence"}
        ),
    ),
}  # fmt: skip


def _marks(name):
    """Large heads in float32 or large blocks take half a minute: CI runs them for one target."""
    large = any(f"head{d}v" in name for d in (192, 256, 512, 576))
    long = large and ("float32" in name or "block528" in name)
    case = name.split("-", 1)[1]
    first = next(other for other in TRITON_MORE if other.split("-", 1)[1] == case)
    return pytest.mark.slow if long and name != first else pytest.mark.extended


@needs_triton
@pytest.mark.rotated
@pytest.mark.parametrize(
    ("sm", "case"),
    [
        *(
            pytest.param(*case, id=name, marks=pytest.mark.extended)
            for name, case in TRITON_CASES.items()
        ),
        *(pytest.param(*case, id=name, marks=_marks(name)) for name, case in TRITON_MORE.items()),
    ],
)
def test_triton(sm, case):
    batch = problems.build(case)
    budget.of(batch).check(*ptx_kernels.TritonKernels.of(batch, sm).run())


@needs_triton
@pytest.mark.extended
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_triton_gives_nan_for_ids_out_of_range(kind):
    """Only the rows of sequences that use invalid ids are NaN."""
    case = decode(query_lens=(1, 3, 2, 1), seq_lens=(60, 140, 90, 20))
    if kind == "mixed":
        case = problem(query_lens=(2, 21, 33, 1), seq_lens=(60, 140, 90, 20))
    batch = problems.build(case)
    batch = dataclasses.replace(
        batch, kwargs=batch.kwargs | {"max_query_len": max(case.query_lens)}
    )
    broken, sequences = promises.some_broken(batch)
    promises.check(batch, *ptx_kernels.TritonKernels.of(broken, 90, cores=2).run(), sequences)


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """A batch for the Mosaic GPU kernels.

    Attributes:
      case: the problem.
      span: `max_query_len`; None for no bound, so that prefill runs.
      cluster: whether two blocks share their copies; only for prefill.
    """

    case: problems.Problem
    span: int | None = None
    cluster: bool | None = None

    def run(self, seed=0):
        """Run it, and return the batch and `(out, lse, kernels)`."""
        batch = problems.build(self.case)
        kernel = None
        if self.span is not None:
            kwargs = {**batch.kwargs, "max_query_len": self.span}
            batch = dataclasses.replace(batch, kwargs=kwargs)
        if self.cluster is not None:
            from jattn.pallas.mosaic_gpu.prefill import kernel as prefill

            def kernel(call, operands):
                counts = operands.query_start_loc[1:] - operands.query_start_loc[:-1]
                return prefill.run(call, operands, counts, cluster=self.cluster)

        return batch, ptx_kernels.mosaic(batch, kernel=kernel, seed=seed)


MOSAIC_CASES = {
    "decode-head64": Mosaic(decode(), 4),
    "mixed-head64": Mosaic(problem(query_lens=(0, 2, 33), seq_lens=(0, 37, 45))),
    "mixed-head80-block8": Mosaic(
        problem(**head(80), query_lens=(9, 21), seq_lens=(40, 21), num_kv_heads=1, block_size=8)
    ),
    "prefill-head512-cluster": Mosaic(
        problem(**head(512), query_lens=(9, 12), seq_lens=(9, 75), num_heads=2, num_kv_heads=1),
        cluster=True,
    ),
}
QUICK = ("decode-head64", "mixed-head64")
MOSAIC_MORE = {
    f"decode-head{d}v{v}-block{size}-{name}-{'all' if every else 'plain'}": Mosaic(
        decode(**head(d, v), block_size=size, **stored(name), options=ALL if every else LSE), 4
    )
    for i, (d, v) in enumerate(HEADS)
    for j, name in enumerate(("bfloat16", "float16", "fp8_e4m3"))
    if name != "fp8_e4m3" or (d, v) != (80, 80)  # whose parts are not multiples of 32
    for size, every in (((8, 16, 528)[(i + j) % 3], (i + j) % 2),)
}
MOSAIC_MORE |= {
    f"mixed-head{d}v{v}-block{size}-{name}-{'all' if every else 'plain'}": Mosaic(
        problem(**head(d, v), block_size=size, **stored(name), options=ALL if every else LSE)
    )
    for i, (d, v) in enumerate(HEADS)
    for j, name in enumerate(("bfloat16", "float16", "fp8_e4m3"))
    if name != "fp8_e4m3" or (d <= 256 and (d, v) != (80, 80))
    for size, every in (((8, 16, 528)[(i + j + 1) % 3], (i + j + 1) % 2),)
}
MOSAIC_MORE |= {  # groups whose rows are copied without padding, and two consumers of keys
    f"decode-group{group}-head{d}-{'all' if every else 'plain'}": Mosaic(
        decode(num_heads=group, **head(d), options=ALL if every else LSE), 4
    )
    for group, d, every in (
        *((4, 64, 1), (16, 64, 0), (24, 64, 1), (64, 64, 1), (32, 512, 0)),
        (16, 400, 0),  # 8 rows a consumer, of which there is one
    )
}
MOSAIC_MORE["decode-kv-heads-2"] = Mosaic(
    decode(num_heads=16, num_kv_heads=2, query_lens=(1, 2, 0), seq_lens=(30, 99, 5)), 4
)
PAIRS = {"kv_layout": "rows", "row_step": 64, "seed": 1}  # rows with room in between
LATENT = {**head(576, 512), "num_kv_heads": 1, "options": LSE | {"value_dim", "k_scale"}}
MOSAIC_MORE |= {  # one array for both
    "rows-mixed-head64": Mosaic(problem(**PAIRS)),
    "rows-mixed-head80-block8": Mosaic(problem(**head(80), block_size=8, **PAIRS)),
    "rows-mixed-head96-fp8_e4m3": Mosaic(problem(**head(96), **stored("fp8_e4m3"), **PAIRS)),
    "rows-decode-head192-values128": Mosaic(decode(**head(192, 128), **PAIRS), 4),
    "rows-prefill-head512-cluster": Mosaic(
        problem(**head(512), query_lens=(9, 12), seq_lens=(9, 75), num_heads=4, **PAIRS),
        cluster=True,
    ),
    "latent-mixed": Mosaic(problem(**LATENT, num_heads=8)),
    "latent-decode-nhd-fp8_e5m2": Mosaic(
        decode(**{**LATENT, "kv_layout": "NHD"}, **stored("fp8_e5m2")), 4
    ),
}
MOSAIC_MORE |= {
    f"{kind}-{option}": Mosaic(make(options=LSE | {option}), span)
    for option in OPTIONS
    for kind, make, span in (("decode", decode, 4), ("mixed", problem, None))
}


def _mosaic_marks(name):
    """Leave slow cases to `-m slow` if others in CI cover nearly the same.

    These are float16, which is like bfloat16, large blocks with large heads, and single options of
    prefill, which the cases of `all` have together.
    """
    if name in ("rows-mixed-head80-block8", "rows-decode-head192-values128", "latent-mixed"):
        return pytest.mark.slow
    large = any(f"head{d}v" in name for d in (256, 512, 576))
    float16 = "float16-" in name.replace("bfloat16", "")
    long = float16 or (large and "block528" in name) or name.removeprefix("mixed-") in OPTIONS
    return pytest.mark.slow if long else pytest.mark.extended


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@pytest.mark.rotated
@pytest.mark.parametrize(
    "given",
    [
        *(
            pytest.param(given, id=name, marks=() if name in QUICK else pytest.mark.extended)
            for name, given in MOSAIC_CASES.items()
        ),
        *(
            pytest.param(given, id=name, marks=_mosaic_marks(name))
            for name, given in MOSAIC_MORE.items()
        ),
    ],
)
def test_mosaic(given):
    batch, (out, lse, kernels) = given.run()
    assert kernels
    budget.of(batch).check(out, lse if "return_lse" in given.case.options else None)


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@pytest.mark.extended
def test_two_consumers_reduce_one_after_the_other(monkeypatch):
    """Mosaic gives a block memory for only one reduction over its warps at a time."""
    from jattn.pallas.mosaic_gpu import compat
    from jattn.pallas.mosaic_gpu.decode import kernel

    consume, wait, turns = kernel._consume, compat.barrier_wait, []

    def seen(*given):
        turns.append(given[-1]["turn"])
        consume(*given)

    def other(barrier):
        if not any(getattr(barrier, "ref", barrier) is turn for turn in turns):
            wait(barrier)

    monkeypatch.setattr(kernel, "_consume", seen)
    monkeypatch.setattr(compat, "barrier_wait", other)
    with pytest.raises(ptx.PtxError, match=r"race|order"):
        MOSAIC_MORE["decode-group64-head64-all"].run()


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@pytest.mark.extended
@pytest.mark.parametrize(("times", "format"), [(-0.7, "bfloat16"), (0.0, "fp8_e4m3")])
def test_scales_that_are_not_positive(times, format):
    """Tiles without hidden keys assume a positive scale in prefill: here none may be treated so."""
    case = problem(query_lens=(9,), seq_lens=(270,), num_heads=2, num_kv_heads=2, **stored(format))
    batch = problems.build(case.replace(explicit_scale=True, scale_times=times))
    budget.of(batch).check(*ptx_kernels.mosaic(batch)[:2])


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@pytest.mark.extended
@pytest.mark.parametrize("group", [8, 64])
def test_mosaic_gives_nan_for_ids_out_of_range(group):
    """In decode, which reads every id of a sequence; with 64 heads there are two consumers."""
    lens = {"query_lens": (1, 3, 2, 1), "seq_lens": (60, 140, 90, 20)}
    batch = problems.build(decode(num_heads=group, **lens))
    batch = dataclasses.replace(batch, kwargs=batch.kwargs | {"max_query_len": 4})
    broken, sequences = promises.some_broken(batch)
    out, lse, kernels = ptx_kernels.mosaic(broken)
    assert len(kernels) == 2
    promises.check(batch, out, lse, sequences)


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@pytest.mark.parametrize(
    "size",
    [
        80,
        *(pytest.param(d, marks=pytest.mark.extended) for d in (112, 256)),
        *(
            pytest.param(d, marks=pytest.mark.slow)
            for d in (64, 96, *range(128, 241, 16), 384, 512)
        ),
    ],
)
def test_boxes_lie_at_addresses_that_copies_support(size):
    """A tensor copy must start at a multiple of 128 bytes, and boxes follow each other in a buffer.

    A box whose bytes are not a multiple of 128 would misalign the next one.
    """
    batch = problems.build(problem(**head(size), num_kv_heads=1))
    hosts = ptx_kernels.mosaic_hosts(batch)
    assert len(hosts) == 3, "decode, merge, prefill"
    for descriptor in (d for host in hosts for d in host.descriptors):
        assert descriptor.tensor_map(0).bytes % 128 == 0, descriptor


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("name", MOSAIC_CASES)
def test_mosaic_in_other_orders(name, seed):
    batch, (out, lse, _) = MOSAIC_CASES[name].run(seed)
    budget.of(batch).check(out, lse)


def dropped(found):
    """Delete an instruction."""
    return ""


def without_barriers(found):
    """Delete the barriers in an instruction sequence."""
    return re.sub(r"bar\.sync[^\n]*", "", found[0])


def shifted(found):
    """Move an instruction's address by 16 bytes."""
    return re.sub(r"\[\s*([%\w]+)(?:\s*\+\s*(\d+))?\s*\]", _further, found[0], count=1)


def _further(found):
    return f"[{found[1]}+{int(found[2] or 0) + 16}]"


def flipped(found):
    """Make a wait use the other parity."""
    return f".reg .b32 other; xor.b32 other, {found[2]}, 1; {found[1]}other"


def unswizzled(d):
    """Remove a descriptor's swizzle."""
    return dataclasses.replace(d, swizzle=0)


def a_row_short(d):
    """Make a descriptor's box one row shorter."""
    return dataclasses.replace(d, box=(*d.box[:-2], d.box[-2] - 1, d.box[-1]))


# Planted mistakes: which instructions, how to change one of them, and the share of changes that may
# have no effect: a fence before reads by the warps themselves, a shifted address of data that is
# then set to zero.
NEXT = r"[^\n]*\n(?:\s*//[^\n]*\n|\s*\n|\s*\.loc[^\n]*\n)*\s*"  # up to the next instruction
ADDRESSES = (r"(?m)^\s*(?:ldmatrix|stmatrix|(?:ld|st)\.shared)\b[^\n]*", shifted, 0.3)
MOSAIC_PLANTED = {
    "barriers": (rf"fence\.proxy\.async{NEXT}bar\.sync[^\n]*", without_barriers, 0.0),
    "parity": (r"(try_wait\.parity\S* \S+, \[[^\]]*\], )(%\w+)", flipped, 0.0),
    "proxy fence": (r"fence\.proxy\.async[^\n]*", dropped, 0.3),
    # If two products wait in one place, drop both waits.
    "wait_group": (rf"wgmma\.wait_group[^\n]*(?:{NEXT}wgmma\.wait_group[^\n]*)?", dropped, 0.0),
    "address": ADDRESSES,
}
TRITON_PLANTED = {
    "barriers": (rf"(?:st\.shared|cp\.async\.wait){NEXT}bar\.sync[^\n]*", without_barriers, 0.2),
    "wait_group": (r"cp\.async\.wait_group[^\n]*", dropped, 0.0),
    "address": ADDRESSES,
}


def plantings(table):
    """By default try one instruction of one kind; with `-m extended`, all of every kind.

    Addresses are so many that they are `slow`.
    """
    marks = {"address": pytest.mark.slow}
    every = (
        pytest.param(name, None, marks=marks.get(name, pytest.mark.extended)) for name in table
    )
    return pytest.mark.parametrize(("name", "most"), [(next(iter(table)), 1), *every])


def check_planted(run, planted, text, most):
    """Check that mistakes planted in a kernel's text make it fail, or its results wrong.

    `run(text, lines)` returns arrays, and adds the lines of the kernel that it reached to `lines`.
    """
    pattern, change, spared = planted
    reached = set()
    want = run(text, reached)
    places = [
        found
        for found in re.finditer(pattern, text)
        if text.count("\n", 0, found.end()) + 1 in reached
    ]
    if most is not None:
        places = places[:: max(1, len(places) // most)][:most]
    assert places
    left = []
    for found in places:
        try:
            have = run(text[: found.start()] + change(found) + text[found.end() :], set())
        except ptx.PtxError:
            continue
        pairs = zip(have, want, strict=True)
        if all(np.allclose(a, b, 1e-3, 1e-3, equal_nan=True) for a, b in pairs):
            left.append((text.count("\n", 0, found.end()) + 1, found[0]))
    assert len(left) <= max(spared * len(places), spared > 0), left


@pytest.fixture(scope="module")
def mosaic_kernel():
    """The prefill kernel of 128 columns on two tiles of keys, with its operands."""
    given = Mosaic(problem(**head(128), query_lens=(33,), seq_lens=(140,), num_kv_heads=1))
    batch, (out, lse, kernels) = given.run()
    budget.of(batch).check(out, lse)
    return max(kernels, key=lambda kernel: len(kernel.text))


@mosaic_cases.needs_mosaic
def test_no_barrier_stands_between_copies(mosaic_kernel):
    """The producer's warps do not wait for each other before each copy."""
    expected = re.findall(rf"expect_tx\S*{NEXT}(\S+)", mosaic_kernel.text)
    assert expected
    assert "bar.sync" not in expected


@mosaic_cases.needs_mosaic
def test_several_ids_are_loaded_at_a_time(mosaic_kernel):
    """A tile of 128 keys in blocks of 16 is eight copies: four loads of ids, then four copies."""
    order = re.findall(
        r"(?m)^\s*(?:@%p\d+ )?(ld\.global|cp\.async\.bulk\.tensor)\b", mosaic_kernel.text
    )
    runs = [(kind, len(list(group))) for kind, group in itertools.groupby(order)]
    pairs = list(itertools.pairwise(runs))
    assert pairs.count((("ld.global", 4), ("cp.async.bulk.tensor", 4))) >= 2, runs


@mosaic_cases.needs_mosaic
@pytest.mark.newer
@plantings(MOSAIC_PLANTED)
def test_mistakes_in_a_mosaic_kernel(mosaic_kernel, name, most):
    def run(text, reached):
        lines = {}
        outs = mosaic_kernel.run(edit=lambda *_: text, lines=lines)
        reached |= lines[mosaic_kernel.name]
        return [x.astype(np.float32) for x in outs]

    check_planted(run, MOSAIC_PLANTED[name], mosaic_kernel.text, most)


@mosaic_cases.needs_mosaic
@pytest.mark.parametrize("change", [unswizzled, a_row_short])
def test_mistakes_in_descriptors(mosaic_kernel, change):
    want = [x.astype(np.float32) for x in mosaic_kernel.run()]
    for which in range(len(mosaic_kernel.host.descriptors)):

        def describe(found, which=which):
            return (*found[:which], change(found[which]), *found[which + 1 :])

        try:
            have = mosaic_kernel.run(describe=describe)
        except ptx.PtxError:
            continue
        assert any((a.astype(np.float32) != b).any() for a, b in zip(have, want, strict=True)), (
            which
        )


@needs_triton
@pytest.mark.extended
@plantings(TRITON_PLANTED)
def test_mistakes_in_a_triton_kernel(name, most):
    batch = problems.build(problem(query_lens=(1, 1), seq_lens=(37, 70), num_kv_heads=1))
    kernels = ptx_kernels.TritonKernels.of(batch, 80)
    text = kernels.compiled[0].ptx

    def run(text, reached):
        lines = {}
        found = kernels.run(edit=lambda name, old: text if name == "decode" else old, lines=lines)
        reached |= lines["decode"]
        return [x.astype(np.float32) for x in found]

    check_planted(run, TRITON_PLANTED[name], text, most)
