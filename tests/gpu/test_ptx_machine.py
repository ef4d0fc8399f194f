"""The PTX interpreter where warps interact: barriers, copies, products, clusters; and its errors.

Every kernel here is right as it stands; a mistake is the kernel with some of its text changed.
"""

import functools

import ml_dtypes
import numpy as np
import pytest

from tests.support import ptx
from tests.support.ptx_by_hand import run

LANE = np.arange(32, dtype=np.uint32)


def broken(text, changes, **given):
    """Run a body with some of its text replaced."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return run(text, **given)


# Two warps exchange numbers.
EXCHANGE = """
 shl.b32 %r4, %r0, 2;
 add.s32 %r6, %r1, %r4;
 st.shared.b32 [%r6], %r0;
 bar.sync 0;
 xor.b32 %r7, %r4, 128;
 add.s32 %r8, %r1, %r7;
 ld.shared.b32 %r2, [%r8];
 mad.wide.u32 %rd2, %r0, 4, %rd0;
 st.global.b32 [%rd2], %r2;
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.sync 3, 64;", "barrier.cta.sync 0;"])
def test_a_barrier(barrier, seed):
    found = broken(EXCHANGE, [("bar.sync 0;", barrier)], threads=64, out=64, seed=seed)
    np.testing.assert_array_equal(found, np.arange(64) ^ 32)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("bar.sync 0;", "", "race|before it is written"),
        ("bar.sync 0;", "bar.sync 1, 96;", "(?s)deadlock.*warp 0: waits for 64 more threads"),
        ("bar.sync 0;", "bar.sync 1, 33;", "not a multiple of 32"),
        ("bar.sync 0;", "bar.arrive 1, 64;", "race|before it is written"),
        ("bar.sync 0;", "setp.lt.u32 %p1, %r0, 9; @%p1 bar.sync 0;", "by only some lanes"),
        ("ld.shared.b32 %r2, [%r8];", "ld.shared.b32 %r2, [%r8]; st.shared.b32 [%r6], 1;", "race"),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_mistakes_at_a_barrier(old, new, error, seed):
    with pytest.raises(ptx.PtxError, match=error):
        broken(EXCHANGE, [(old, new)], threads=64, out=64, seed=seed)


def test_a_race_between_blocks():
    body = "mov.u32 %r2, %ctaid.x; st.global.b32 [%rd0], %r2;"
    with pytest.raises(ptx.PtxError, match=r"race: out is written where another block uses it"):
        run(body, grid=(2,))


def test_cp_async_that_is_not_waited_for():
    body = """
 shl.b32 %r4, %r0, 4;
 add.s32 %r6, %r1, %r4;
 mad.wide.u32 %rd2, %r0, 16, %rd1;
 cp.async.cg.shared.global [%r6], [%rd2], 16;
 cp.async.commit_group;
 cp.async.wait_group 0;
 ld.shared.b32 %r2, [%r6];
 mad.wide.u32 %rd3, %r0, 4, %rd0;
 st.global.b32 [%rd3], %r2;
"""
    operands = [np.arange(128, dtype=np.uint32)]
    np.testing.assert_array_equal(run(body, operands, out=32), 4 * LANE)
    for old, new, error in (
        ("wait_group 0", "wait_group 1", "copy into it is under way"),
        ("[%r6], [%rd2]", "[%r6+8], [%rd2]", "not a multiple of 16"),
        ("[%r6], [%rd2]", "[%r6], [%rd2+8]", "not a multiple of 16"),
        ("ld.shared.b32 %r2, [%r6];", "mov.u32 %r2, 7; cp.async.commit_group;", "wait_group|ends"),
    ):
        with pytest.raises(ptx.PtxError, match=error):
            broken(body, [(old, new)], operands=operands, out=32)


def tiles(at, shape, box, itemsize=2, swizzle=0):
    """Return a function that makes the tensor map of the array `addresses[at]`; 0 is the output."""

    def make(addresses):
        strides, total = [], itemsize
        for n in shape[:0:-1]:
            total *= n
            strides.append(total)
        return ptx.TensorMap(
            addresses[at], itemsize, shape[::-1], tuple(strides), box[::-1], swizzle
        )

    return make


# One warp loads a box of 8 rows of 64 two-byte numbers; the other waits and copies it out.
BRING = """
 setp.eq.u32 %p1, %r0, 0;
 @%p1 mbarrier.init.shared::cta.b64 [%r1+2048], 1;
 fence.mbarrier_init.release.cluster;
 bar.sync 0;
 @%p1 prefetch.tensormap [%rd8];
 add.s32 %r10, %r1, 2048;
 @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r10], 1024;
 mov.b32 %r11, -1;
 mov.b32 %r12, 8;
 @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
  [%r1], [%rd8, {%r11, %r12}], [%r10];
 setp.lt.u32 %p2, %r0, 32;
 @%p2 bra $END;
$WAIT:
 mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0, 10000;
 @!%p3 bra $WAIT;
 add.s32 %r13, %r0, -32;
 shl.b32 %r13, %r13, 5;
 add.s32 %r14, %r1, %r13;
 ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r14];
 ld.shared.v4.b32 {%r24, %r25, %r26, %r27}, [%r14+16];
 cvt.u64.u32 %rd3, %r13;
 add.s64 %rd4, %rd0, %rd3;
 st.global.v4.b32 [%rd4], {%r20, %r21, %r22, %r23};
 st.global.v4.b32 [%rd4+16], {%r24, %r25, %r26, %r27};
$END:
"""
TENSOR = np.arange(1, 20 * 100 + 1, dtype=np.uint16).reshape(20, 100)[:, :72].copy()
bring = functools.partial(
    broken, BRING, operands=[TENSOR], threads=64, out=256, maps=[tiles(1, (20, 72), (8, 64))]
)


def box_at(row, column):
    """Return the box of `BRING`, with zeros outside the tensor."""
    around = np.pad(TENSOR, 64)
    return around[64 + row : 72 + row, 64 + column : 128 + column]


@pytest.mark.parametrize("swizzle", [0, 128])
def test_a_box_arrives(swizzle):
    """With zeros outside the tensor, and runs of 16 bytes permuted within each row."""
    found = bring([], maps=[tiles(1, (20, 72), (8, 64), swizzle=swizzle)])
    found = found.view(np.uint16).reshape(8, 8, 8)
    want = box_at(8, -1).reshape(8, 8, 8)
    if swizzle:
        want = np.stack([row[np.arange(8) ^ i] for i, row in enumerate(want)])
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("swizzle", [32, 64])
def test_narrower_swizzles(swizzle):
    """Rows of 32 bytes XOR bit 4 with bit 7; rows of 64 bytes, bits 4 and 5 with 7 and 8."""
    columns = swizzle // 2
    maps = [tiles(1, (20, 72), (512 // columns, columns), swizzle=swizzle)]
    found = bring([("%r11, -1", "%r11, 0")], maps=maps).view(np.uint16).reshape(64, 8)
    rows = np.pad(TENSOR[8:, :columns], ((0, 32), (0, 0)))[: 512 // columns].reshape(64, 8)
    runs = np.arange(64)
    mask = swizzle // 16 - 1
    np.testing.assert_array_equal(found, rows[runs ^ (runs >> 3 & mask)])


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("@!%p3 bra $WAIT;", "", "under way|race|before it is written"),
        (
            " mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0, 10000;\n @!%p3 bra $WAIT;",
            "",
            "under way|race|before it is written",
        ),
        ("[%r10], 0, 10000", "[%r10], 1, 10000", "under way|race|before it is written"),
        ("_, [%r10], 1024", "_, [%r10], 1040", "(?s)deadlock.*16 bytes expected, 0 copies"),
        ("_, [%r10], 1024", "_, [%r10], 1008", "(?s)deadlock.*-16 bytes expected"),
        ("[%r1], [%rd8", "[%r1+64], [%rd8", "not a multiple of 128"),
        (", 1;\n fence", ", 2;\n fence", "(?s)deadlock.*1 of 2 arrivals pending"),
        (" fence.mbarrier_init.release.cluster;\n", "", "without a fence after its init"),
        (" bar.sync 0;\n", "", "without|no mbarrier"),
        ("[%r1], [%rd8", "[%r1+4096], [%rd8", "shared byte"),
        ("[%rd8, {%r11", "[%rd8+64, {%r11", "no tensor map is at"),
        ("[%r1+2048], 1;", "[%r1+2048], 0;", "initialised with 0 arrivals"),
        ("[%r1+2048], 1;", "[%r1+2052], 1;", "not a multiple of 8"),
        (" @%p2 bra $END;\n", " @%p2 mbarrier.arrive.shared.b64 _, [%r10], 1;\n", "arrivals where"),
        ("@%p1 prefetch", "@%p1 st.shared.b32 [%r1+2052], 1; @%p1 prefetch", "over an mbarrier"),
    ],
)
def test_mistakes_with_a_copy(old, new, error):
    def in_some_order():
        for seed in range(8):  # without a retry loop, a single wait may happen to suffice
            bring([(old, new)], seed=seed)

    with pytest.raises(ptx.PtxError, match=error):
        in_some_order()


def test_a_copy_without_a_wait():
    with pytest.raises(ptx.PtxError, match="ends with copies under way"):
        bring([(" @%p2 bra $END;", " bra $END;")])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"box": (8, 264)}, "boxes are 1 to 256"),
        ({"box": (8, 4)}, "the innermost box is a multiple of 16 bytes"),
        ({"shape": (20, 71)}, "strides are multiples of 16"),
        ({"swizzle": 64}, "the innermost box is within the swizzle"),
        ({"swizzle": 48}, "the swizzle is 32, 64 or 128 bytes"),
    ],
)
def test_maps_that_the_driver_refuses(changes, error):
    given = {"at": 1, "shape": (20, 72), "box": (8, 64)} | changes
    with pytest.raises(ptx.PtxError, match=error):
        bring([], maps=[tiles(**given)])


# A warp fills a box, and the copy engine writes the part of it that lies inside the tensor.
STORE = """
 shl.b32 %r4, %r0, 4;
 add.s32 %r5, %r1, %r4;
 add.s32 %r6, %r0, 1;
 st.shared.v4.b32 [%r5], {%r6, %r6, %r6, %r6};
 fence.proxy.async.shared::cta;
 bar.sync 0;
 setp.eq.u32 %p1, %r0, 0;
 mov.b32 %r7, 0;
 mov.b32 %r8, 2;
 @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd8, {%r7, %r8}], [%r1];
 cp.async.bulk.commit_group;
 cp.async.bulk.wait_group.read 0;
 st.shared.v4.b32 [%r5], {%r6, %r6, %r6, %r6};
"""
store = functools.partial(
    broken, STORE, out=np.zeros((6, 16), np.uint32),
    maps=[tiles(0, (6, 16), (8, 16), itemsize=4)],
)  # fmt: skip


def test_a_box_is_stored():
    found = store([])
    np.testing.assert_array_equal(found[2:], np.repeat(np.arange(1, 17), 4).reshape(4, 16))
    np.testing.assert_array_equal(found[:2], 0)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("fence.proxy.async.shared::cta;", "", "without a fence.proxy.async after it"),
        (
            "cp.async.bulk.wait_group.read 0;",
            "",
            "race: a write to shared memory is not ordered after a read by bulk copies",
        ),
        (
            "cp.async.bulk.wait_group.read 0;",
            "cp.async.bulk.wait_group 1;",
            "a read by bulk copies",
        ),
        ("cp.async.bulk.commit_group;", "", "a read by bulk copies"),
        ("], [%r1];", "], [%r1+16];", "not a multiple of 128"),
    ],
)
def test_mistakes_with_a_store(old, new, error):
    with pytest.raises(ptx.PtxError, match=error):
        store([(old, new)])


def test_bytes_are_stored():
    """`cp.async.bulk` without a tensor map: 16 bytes at a time."""
    line = "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], %r9;"
    tensor = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd8, {%r7, %r8}], [%r1];"
    changes = [(tensor, line), (" mov.b32 %r8, 2;", " mov.b32 %r9, 48;")]
    found = broken(STORE, changes, out=12)
    np.testing.assert_array_equal(found, np.repeat([1, 2, 3], 4))
    with pytest.raises(ptx.PtxError, match="not all multiples of 16"):
        broken(STORE, [*changes, ("%r9, 48", "%r9, 40")], out=12)


def wgmma_body(columns, kind, held, across):
    """Return PTX: the engine loads A, 64 by 64, and B, 64 by `columns`; a warpgroup multiplies."""
    sums = ", ".join(f"%f{i}" for i in range(columns // 2))
    text = f"""
 .reg .b32 %f<{columns // 2}>;
 .reg .b64 %da, %db;
 setp.eq.u32 %p1, %r0, 0;
 @%p1 mbarrier.init.shared::cta.b64 [%r1+32768], 1;
 fence.mbarrier_init.release.cluster;
 bar.sync 0;
 add.s32 %r10, %r1, 32768;
 @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r10], {8192 + 128 * columns};
 mov.b32 %r11, 0;
 add.s32 %r12, %r1, 8192;
 add.s64 %rd10, %rd8, 128;
 @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
  [%r1], [%rd8, {{%r11, %r11}}], [%r10];
 @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
  [%r12], [%rd10, {{%r11, %r11}}], [%r10];
$READY:
 mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0, 10000;
 @!%p3 bra $READY;
 shr.u32 %r13, %r1, 4;
 cvt.u64.u32 %rd3, %r13;
 // Rows of 128 bytes, swizzled, 8 of them in 1024 bytes: stride 64, leading 64 for columns.
 mov.b64 %rd4, 0x4000004000400000;
 or.b64 %da, %rd4, %rd3;
 add.s64 %db, %da, 512;
"""
    for i in range(columns // 2):
        text += f" mov.b32 %f{i}, 0f00000000;\n"
    # Fragments of A from ldmatrix, which takes 16 bytes of a row from each lane.
    text += """
 shr.u32 %r20, %r0, 5;
 and.b32 %r21, %r0, 31;
 and.b32 %r22, %r21, 15;
 shl.b32 %r23, %r20, 4;
 add.s32 %r22, %r22, %r23;
 shl.b32 %r24, %r22, 7;
 shr.u32 %r25, %r21, 4;
 and.b32 %r26, %r22, 7;
"""
    if held:
        for k in range(4):
            text += f"""
 add.s32 %r27, %r25, {2 * k};
 xor.b32 %r27, %r27, %r26;
 shl.b32 %r27, %r27, 4;
 add.s32 %r27, %r27, %r24;
 add.s32 %r27, %r27, %r1;
 ldmatrix.sync.aligned.m8n8.x4.shared.b16
  {{%r{30 + 4 * k}, %r{31 + 4 * k}, %r{32 + 4 * k}, %r{33 + 4 * k}}}, [%r27];
"""
    text += " setp.ne.b32 %p4, 1, 0;\n wgmma.fence.sync.aligned;\n"
    for k in range(4):
        left = "%da"
        if held:
            left = "{" + ", ".join(f"%r{30 + 4 * k + i}" for i in range(4)) + "}"
        text += (
            f" wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{sums}}}, {left}, "
            f"%db, %p4, 1, 1, {'' if held else '0, '}{int(across)};\n"
            f" add.s64 %da, %da, 2;\n add.s64 %db, %db, {128 if across else 2};\n"
        )
    text += """
 wgmma.commit_group.sync.aligned;
 wgmma.wait_group.sync.aligned 0;
"""
    # Registers 2 i, 2 i + 1 of lane 4 g + t: C[g + 8 (i odd), 8 (i // 2) + 2 t], and the next.
    text += " mul.lo.s32 %r24, %r0, " + str(4 * (columns // 2)) + ";\n cvt.u64.u32 %rd5, %r24;\n"
    text += " add.s64 %rd6, %rd0, %rd5;\n"
    for i in range(columns // 2):
        text += f" st.global.b32 [%rd6+{4 * i}], %f{i};\n"
    return text


def product_of(found, columns):
    """Assemble the matrix that `wgmma_body` stores fragment by fragment."""
    parts = found.view(np.float32).reshape(4, 8, 4, columns // 8, 2, 2)
    # warp, group, thread, tile of 8 columns, half, pair -> warp, half, group, tile, thread, pair
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(64, columns)


def multiply(changes=(), columns=32, kind="bf16", held=False, across=False):
    rng = np.random.default_rng(columns)
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    a, b = rng.integers(-4, 5, (64, 64)), rng.integers(-4, 5, (columns, 64))
    stored = b.T if across else b
    maps = [
        tiles(1, (64, 64), (64, 64), swizzle=128),
        tiles(2, stored.shape, stored.shape, swizzle=128),
    ]
    found = broken(
        wgmma_body(columns, kind, held, across),
        list(changes),
        operands=[a.astype(dtype), np.ascontiguousarray(stored).astype(dtype)],
        threads=128,
        shared=33000,
        out=64 * columns,
        maps=maps,
    )
    return product_of(found, columns), (a @ b.T).astype(np.float32)


@pytest.mark.parametrize(
    ("columns", "kind", "held", "across"),
    [(32, "bf16", False, False), (64, "f16", True, True), (64, "bf16", False, True)],
)
def test_wgmma(columns, kind, held, across):
    """With both operands in shared memory, or A in registers; with B as stored or transposed."""
    found, want = multiply(columns=columns, kind=kind, held=held, across=across)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (" wgmma.wait_group.sync.aligned 0;", "", "is read while a wgmma that writes it"),
        (" wgmma.wait_group.sync.aligned 0;", " wgmma.wait_group.sync.aligned 1;", "is read while"),
        (" wgmma.fence.sync.aligned;\n", "", "written after the last wgmma.fence"),
        (" wgmma.commit_group.sync.aligned;", "", "is read while"),
        (
            " wgmma.commit_group.sync.aligned;",
            " wgmma.commit_group.sync.aligned; st.shared.b32 [%r12], 1;",
            "race: a write to shared memory is not ordered after a read by wgmma",
        ),
        (
            " wgmma.commit_group.sync.aligned;",
            " wgmma.commit_group.sync.aligned; mov.b32 %f0, 1;",
            "written while a wgmma that writes it",
        ),
        (
            " wgmma.fence.sync.aligned;",
            " bar.sync 0; ld.shared.b32 %r40, [%r12]; @%p1 st.shared.b32 [%r12], %r40;"
            " bar.sync 0; wgmma.fence.sync.aligned;",
            "without a fence.proxy.async|race",
        ),
    ],
)
def test_mistakes_with_wgmma(old, new, error):
    with pytest.raises(ptx.PtxError, match=error):
        multiply([(old, new)])


def test_a_wrong_swizzle_is_a_wrong_product():
    found, want = multiply([("0x4000004000400000", "0x8000004000400000")])
    assert (found != want).any()


def test_registers_of_a_warpgroup():
    """Four warps go down to 88 registers, and only then do the others get up to 168."""
    body = """
 setp.lt.u32 %p1, %r0, 128;
 @%p1 bra $LESS;
 setmaxnreg.inc.sync.aligned.u32 168;
 bra $END;
$LESS:
 setmaxnreg.dec.sync.aligned.u32 88;
$END:
"""
    run(body, threads=256, registers=128, out=1)
    with pytest.raises(ptx.PtxError, match=r"(?s)deadlock.*registers, of which"):
        broken(body, [("u32 168", "u32 176")], threads=256, registers=128, out=1)
    with pytest.raises(ptx.PtxError, match="a multiple of 8 between 24 and 256"):
        broken(body, [("u32 88", "u32 16")], threads=256, registers=128, out=1)


# Each of two blocks waits for the other to arrive, and for a box that block 0 sends to both.
CLUSTER = """
 mov.u32 %r2, %cluster_ctarank;
 setp.eq.u32 %p1, %r0, 0;
 @%p1 mbarrier.init.shared::cta.b64 [%r1+2048], 1;
 @%p1 mbarrier.init.shared::cta.b64 [%r1+2056], 1;
 fence.mbarrier_init.release.cluster;
 barrier.cluster.arrive.relaxed.aligned;
 barrier.cluster.wait.aligned;
 add.s32 %r10, %r1, 2048;
 add.s32 %r15, %r1, 2056;
 xor.b32 %r3, %r2, 1;
 mapa.shared::cluster.u32 %r4, %r15, %r3;
 @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r4];
$PEER:
 mbarrier.try_wait.parity.shared.b64 %p3, [%r15], 0;
 @!%p3 bra $PEER;
 @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r10], 1024;
 mov.b32 %r11, 0;
 cvt.u16.u32 %rs1, 3;
 setp.eq.and.u32 %p2, %r2, 0, %p1;
 @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
  [%r1], [%rd8, {%r11, %r11}], [%r10], %rs1;
$READY:
 mbarrier.try_wait.parity.shared.b64 %p3, [%r10], 0;
 @!%p3 bra $READY;
 shl.b32 %r13, %r0, 2;
 add.s32 %r14, %r1, %r13;
 ld.shared.b32 %r20, [%r14];
 shl.b32 %r16, %r2, 7;
 add.s32 %r16, %r16, %r13;
 cvt.u64.u32 %rd3, %r16;
 add.s64 %rd4, %rd0, %rd3;
 st.global.b32 [%rd4], %r20;
 barrier.cluster.arrive.release.aligned;
 barrier.cluster.wait.acquire.aligned;
"""
clustered = functools.partial(
    broken, CLUSTER, operands=[TENSOR], out=64, grid=(2,), cluster=(2,),
    maps=[tiles(1, (20, 72), (8, 64))],
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster(seed):
    found = clustered([], seed=seed).view(np.uint16).reshape(2, 64)
    np.testing.assert_array_equal(found, np.stack([TENSOR[0, :64]] * 2))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "@%p1 mbarrier.arrive.shared::cluster.b64 _, [%r4];",
            "",
            "(?s)deadlock.*block \\(1, 0, 0\\)",
        ),
        ("%rs1, 3;", "%rs1, 1;", "(?s)deadlock.*1024 bytes expected"),
        ("%rs1, 3;", "%rs1, 5;", "of a smaller cluster"),
        ("%r4, %r15, %r3", "%r4, %r15, 2", "no block of the cluster has that rank"),
        (" barrier.cluster.wait.aligned;\n", "", "no mbarrier|without|arrives twice"),
        (
            " fence.mbarrier_init.release.cluster;\n",
            "",
            "without a (fence|barrier) after its init",
        ),
    ],
)
def test_mistakes_in_a_cluster(old, new, error):
    with pytest.raises(ptx.PtxError, match=error):
        clustered([(old, new)])


def test_shared_memory_of_another_block():
    """It is written there, and read after a cluster barrier."""
    body = """
 mov.u32 %r2, %cluster_ctarank;
 xor.b32 %r3, %r2, 1;
 shl.b32 %r4, %r0, 2;
 add.s32 %r5, %r1, %r4;
 mapa.shared::cluster.u32 %r6, %r5, %r3;
 add.s32 %r7, %r0, %r2;
 st.shared::cluster.b32 [%r6], %r7;
 barrier.cluster.arrive.release.aligned;
 barrier.cluster.wait.acquire.aligned;
 ld.shared.b32 %r8, [%r5];
 shl.b32 %r9, %r2, 7;
 add.s32 %r9, %r9, %r4;
 cvt.u64.u32 %rd3, %r9;
 add.s64 %rd4, %rd0, %rd3;
 st.global.b32 [%rd4], %r8;
"""
    given = {"out": 64, "grid": (2,), "cluster": (2,)}
    found = run(body, **given).reshape(2, 32)
    np.testing.assert_array_equal(found, np.stack([LANE + 1, LANE]))
    with pytest.raises(ptx.PtxError, match="race"):
        broken(body, [("arrive.release", "arrive.relaxed")], **given)


def test_an_mbarrier_invalidated():
    """Its memory may then hold anything again."""
    body = """
 setp.eq.u32 %p1, %r0, 0;
 @%p1 mbarrier.init.shared::cta.b64 [%r1], 32;
 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1], 1;
 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 0;
 mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
 @%p1 mbarrier.inval.shared.b64 [%r1];
 @%p1 st.shared.b64 [%r1], %rd0;
 selp.b32 %r4, 1, 0, %p2;
 mad.wide.u32 %rd3, %r0, 4, %rd0;
 st.global.b32 [%rd3], %r4;
"""
    np.testing.assert_array_equal(run(body, out=32), 1)
    # An arrival may return its state to a register, but no instruction may read that register.
    kept = body.replace("b64 _, [%r1], 1", "b64 %rd5, [%r1], 1")
    np.testing.assert_array_equal(run(kept, out=32), 1)
    read = kept.replace("mad.wide.u32 %rd3", "add.s64 %rd4, %rd5, 0;\n mad.wide.u32 %rd3")
    with pytest.raises(ptx.PtxError, match="%rd5"):
        run(read, out=32)
