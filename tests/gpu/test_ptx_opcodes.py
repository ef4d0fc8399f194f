"""Each opcode of the PTX interpreter on handwritten PTX, against NumPy.

`test_ptx_machine.py` covers several warps, barriers and the copy engine.
"""

import pathlib
import re

import ml_dtypes
import numpy as np
import pytest

from tests.support import ptx
from tests.support.ptx import numbers
from tests.support.ptx.program import HANDLERS
from tests.support.ptx_by_hand import kernel, lanes, run

LANE = np.arange(32, dtype=np.uint32)
RNG = np.random.default_rng(0)
A, B, C = RNG.integers(0, 2**32, (3, 32), np.uint32)
S, T = A.view(np.int32), B.view(np.int32) % 1000 - 500
X, Y, Z = RNG.standard_normal((3, 32)).astype(np.float32)
WIDE = RNG.integers(0, 2**64, 32, np.uint64)
TINY = np.full(32, 1e-40, np.float32)
NAN = np.where(LANE % 3 == 0, np.nan, X).astype(np.float32)


def exact(function, *inputs):
    """Evaluate a function in float64, and round to float32."""
    with np.errstate(all="ignore"):
        return function(*(x.astype(np.float64) for x in inputs)).astype(np.float32)


def bits(x):
    """Return the bits of float32 numbers."""
    return x.astype(np.float32).view(np.uint32)


def pairs(x, dtype=None):
    """Pack [32, 2] numbers of 16 bits into 32 registers."""
    return np.ascontiguousarray(x if dtype is None else x.astype(dtype)).view(np.uint32)[:, 0]


# (PTX, result, inputs ...)
CASES = [
    ("add.s32 %d, %a, %b;", A + B, A, B),
    ("add.s64 %d, %a, %a;", WIDE + WIDE, WIDE),
    ("add.rn.f32 %d, %a, %b;", X + Y, X, Y),
    ("add.rm.f32 %d, %a, 0f33000000;", np.float32([1] * 32), np.ones(32, np.float32)),
    ("add.ftz.f32 %d, %a, %a;", 0 * TINY, TINY),
    ("sub.u32 %d, %a, %b;", A - B, A, B),
    ("sub.f32 %d, %a, %b;", X - Y, X, Y),
    (
        "mov.b64 %rd5, {%a, %b}; mov.b64 %rd6, {%b, %a}; sub.f32x2 %rd5, %rd5, %rd6;"
        "mov.b64 {%r2, %r3}, %rd5; mov.b32 %d, %r3;",
        Y - X,
        X,
        Y,
    ),
    ("mul.lo.s32 %d, %a, %b;", A * B, A, B),
    ("mul.hi.u32 %d, %a, %b;", ((A.astype(np.uint64) * B) >> 32).astype("u4"), A, B),
    ("mul.hi.s32 %d, %a, %b;", ((S.astype(np.int64) * T) >> 32).astype(np.int32), S, T),
    (
        "mul.hi.u64 %d, %a, -6148914691236517205;",
        np.array([int(x) * (2**64 - 6148914691236517205) >> 64 for x in WIDE], np.uint64),
        WIDE,
    ),
    (
        "mul.hi.s64 %d, %a, -6148914691236517205;",
        np.array([int(x) * -6148914691236517205 >> 64 for x in WIDE.view(np.int64)], np.int64),
        WIDE.view(np.int64),
    ),
    ("mul.wide.s32 %d, %a, %b;", S.astype(np.int64) * T, S, T),
    ("mul.f32 %d, %a, %b;", X * Y, X, Y),
    ("mad.lo.s32 %d, %a, %b, %c;", A * B + C, A, B, C),
    ("mad.wide.u32 %d, %a, %b, %c;", A.astype(np.uint64) * B + WIDE, A, B, WIDE),
    ("fma.rn.f32 %d, %a, %b, %c;", exact(lambda a, b, c: a * b + c, X, Y, Z), X, Y, Z),
    (
        "fma.rm.f32 %d, %a, 0f3F800000, 0f4B400001;",
        np.floor(X.astype(np.float64) + 12582913).astype(np.float32),
        X,
    ),
    ("div.s32 %d, %a, %b;", np.trunc(S / T).astype(np.int32), S, T),
    ("div.u32 %d, %a, %b;", A // B, A, B),
    ("div.full.f32 %d, %a, %b;", X / Y, X, Y),
    ("rem.s32 %d, %a, %b;", np.fmod(S, T), S, T),
    ("min.s32 %d, %a, %b;", np.minimum(S, T), S, T),
    ("min.u64 %d, %a, 77;", np.minimum(WIDE, np.uint64(77)), WIDE),
    ("max.u32 %d, %a, %b;", np.maximum(A, B), A, B),
    ("min.relu.s32 %d, %a, %b;", np.maximum(np.minimum(S, T), 0), S, T),
    ("max.f32 %d, %a, %b;", np.fmax(NAN, Y), NAN, Y),
    ("max.NaN.f32 %d, %a, %b;", np.maximum(NAN, Y), NAN, Y),
    ("neg.f32 %d, %a;", -X, X),
    ("neg.s32 %d, %a;", -T, T),
    (
        "cvt.u16.u32 %rs1, %a; abs.bf16 %rs1, %rs1; neg.f16 %rs1, %rs1; cvt.u32.u16 %d, %rs1;",
        A & 0x7FFF | 0x8000,
        A,
    ),
    (
        "cvt.u16.u32 %rs1, %a; cvt.u16.u32 %rs2, %b; max.bf16 %rs1, %rs1, %rs2;"
        "cvt.f32.bf16 %d, %rs1;",
        np.maximum(*((bits(x) & 0xFFFF0000).view(np.float32) for x in (X, Y))),
        bits(X) >> 16,
        bits(Y) >> 16,
    ),
    ("abs.f32 %d, %a;", np.abs(X), X),
    *(
        (f"{op}.{kind} %d, %a, %b;", pairs(function(*two), two[0].dtype), *map(pairs, two))
        for kind, dtype in (("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16))
        for two in [[np.stack([x, y], 1).astype(dtype) for x, y in ((X, Y), (Y, X[::-1]))]]
        for op, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply))
    ),
    (
        "cvt.u16.u32 %rs1, %a; cvt.u16.u32 %rs2, %b; mul.f16 %rs1, %rs1, %rs2;"
        "cvt.f32.f16 %d, %rs1;",
        (X.astype(np.float16) * Y.astype(np.float16)).astype(np.float32),
        X.astype(np.float16).view("u2").astype("u4"),
        Y.astype(np.float16).view("u2").astype("u4"),
    ),
    (  # the product is halfway between two bfloat16s, and the sum below that
        "fma.rn.bf16x2 %d, %a, %b, %c;",
        *(
            pairs(np.full((32, 2), x, ml_dtypes.bfloat16))
            for x in (1.5 + 2.0**-7, 1.5, 1 + 2.0**-7, -(2.0**-40))
        ),
    ),
    ("copysign.f32 %d, %a, %b;", np.copysign(Y, X), X, Y),
    ("ex2.approx.ftz.f32 %d, %a;", np.exp2(X), X),
    ("lg2.approx.ftz.f32 %d, %a;", np.log2(np.abs(X)), np.abs(X)),
    ("rcp.approx.ftz.f32 %d, %a;", 1 / X, X),
    ("sqrt.approx.f32 %d, %a;", np.sqrt(np.abs(X)), np.abs(X)),
    ("rsqrt.approx.f32 %d, %a;", 1 / np.sqrt(np.abs(X)), np.abs(X)),
    ("tanh.approx.f32 %d, %a;", np.tanh(X), X),
    ("sin.approx.f32 %d, %a;", np.sin(X), X),
    ("cos.approx.f32 %d, %a;", np.cos(X), X),
    ("popc.b32 %d, %a;", np.bitwise_count(A).astype(np.uint32), A),
    ("shr.u32 %r2, -1, %a; clz.b32 %d, %r2;", LANE, LANE),
    ("bfe.u32 %d, %a, 5, 9;", A >> 5 & 511, A),
    ("bfe.s32 %d, %a, 4, 3;", (A << 25).view(np.int32) >> 29, A),
    ("and.b32 %d, %a, %b;", A & B, A, B),
    ("or.b32 %d, %a, %b;", A | B, A, B),
    ("xor.b32 %d, %a, %b;", A ^ B, A, B),
    ("not.b32 %d, %a;", ~A, A),
    ("shl.b32 %d, %a, %b;", np.where(LANE < 16, A << (LANE * 2 % 32), 0), A, LANE * 2),
    ("shr.u32 %d, %a, %b;", np.where(LANE < 16, A >> (LANE * 2 % 32), 0), A, LANE * 2),
    ("shr.s32 %d, %a, %b;", S >> np.minimum(LANE * 2, 31).astype(np.int32), S, LANE * 2),
    ("shf.l.wrap.b32 %d, %a, %b, 8;", B << 8 | A >> 24, A, B),
    ("shf.r.clamp.b32 %d, %a, %b, 8;", A >> 8 | B << 24, A, B),
    ("lop3.b32 %d, %a, %b, %c, 0x96;", A ^ B ^ C, A, B, C),
    ("lop3.b32 %d, %a, %b, %c, 0xEA;", A & B | C, A, B, C),
    ("prmt.b32 %d, %a, %b, 0x5410;", A & 0xFFFF | B << 16, A, B),
    ("prmt.b32 %d, %a, 0, 0xBA98;", (A.view(np.int8).reshape(32, 4) >> 7).view(np.uint32)[:, 0], A),
    ("setp.lt.s32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", (S < T).astype("u4"), S, T),
    (
        "setp.lt.u32 %p1, %a, %b; setp.gt.and.u32 %p2, %b, %c, %p1; selp.b32 %d, %a, %b, %p2;",
        np.where((A < B) & (B > C), A, B),
        A,
        B,
        C,
    ),
    (
        "setp.num.f32 %p1, %a, %b; selp.f32 %d, %a, %b, %p1;",
        np.where(np.isnan(NAN), Y, NAN),
        NAN,
        Y,
    ),
    ("setp.neu.f32 %p1, %a, %a; selp.b32 %d, 1, 0, %p1;", np.isnan(NAN).astype("u4"), NAN),
    ("setp.ne.f32 %p1, %a, %b; selp.b32 %d, 1, 0, %p1;", (~np.isnan(NAN)).astype("u4"), NAN, Y),
    ("setp.eq.s32 %p1|%p2, %a, 3; selp.b32 %d, 1, 0, %p2;", (LANE != 3).astype("u4"), LANE),
    ("mov.b32 %d, 0f3F800000;", np.ones(32, np.float32)),
    ("mov.b64 %d, {%a, %b};", B.astype(np.uint64) << np.uint64(32) | A, A, B),
    ("mov.b64 {%r2, %d}, %a;", (WIDE >> np.uint64(32)).astype("u4"), WIDE),
    ("cvt.s64.s32 %d, %a;", T.astype(np.int64), T),
    ("cvt.u64.u32 %d, %a;", A.astype(np.uint64), A),
    ("cvt.u32.u64 %d, %a;", WIDE.astype(np.uint32), WIDE),
    ("cvt.rn.f32.s32 %d, %a;", T.astype(np.float32), T),
    ("cvt.rzi.s32.f32 %d, %a;", np.trunc(X * 9).astype(np.int32), X * 9),
    ("cvt.rni.s32.f32 %d, %a;", np.where(X > 0, 2**31 - 1, -(2**31)).astype("i4"), X * 1e20),
    ("cvt.sat.f32.f32 %d, %a;", np.clip(X, 0, 1), X),
    (
        "cvt.rn.bf16x2.f32 %d, %a, %b;",
        np.stack([Y, X], 1).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0],
        X,
        Y,
    ),
    ("cvt.rn.f16x2.f32 %d, %a, %b;", np.stack([Y, X], 1).astype(np.float16).view("u4")[:, 0], X, Y),
    (
        "cvt.u16.u32 %rs1, %a; cvt.f32.bf16 %d, %rs1;",
        (bits(X) >> 16 << 16).view("f4"),
        bits(X) >> 16,
    ),
    (
        "cvt.u16.u32 %rs1, %a; cvt.rn.f16x2.e4m3x2 %d, %rs1;",
        (A % 64).astype("u1").view(ml_dtypes.float8_e4m3fn).astype("f2").view("u2").astype("u4"),
        A % 64,
    ),
    (
        "cvt.u16.u32 %rs1, %a; cvt.bf16.f16 %rs1, %rs1; cvt.f32.bf16 %d, %rs1;",
        X.astype(np.float16).astype(ml_dtypes.bfloat16).astype(np.float32),
        X.astype(np.float16).view("u2").astype("u4"),
    ),
    ("cvta.shared.u64 %rd2, 1024; cvta.to.shared.u64 %d, %rd2;", np.full(32, 1024, np.uint64)),
    ("shfl.sync.bfly.b32 %d, %a, 5, 31, -1;", A[LANE ^ 5], A),
    ("shfl.sync.up.b32 %d|%p1, %a, 3, 0, -1;", A[np.where(LANE < 3, LANE, LANE - 3)], A),
    ("shfl.sync.down.b32 %d, %a, 3, 31, -1;", A[np.where(LANE > 28, LANE, LANE + 3)], A),
    ("shfl.sync.idx.b32 %d, %a, %b, 31, -1;", A[LANE // 2], A, LANE // 2),
    ("shfl.sync.idx.b32 %d, %a, 1, 0x181F, -1;", A[LANE // 8 * 8 + 1], A),
    ("redux.sync.max.s32 %d, %a, -1;", np.full(32, S.max()), S),
    ("setp.lt.u32 %p1, %a, 7; vote.sync.ballot.b32 %d, %p1, -1;", np.full(32, 127, "u4"), LANE),
    (
        "setp.lt.u32 %p1, %a, 7; vote.sync.any.pred %p2, %p1, -1; selp.b32 %d, 1, 0, %p2;",
        np.ones(32, "u4"),
        LANE,
    ),
    ("elect.sync %d|%p1, -1; selp.b32 %d, 7, 0, %p1;", np.where(LANE == 0, 7, 0).astype("u4")),
    (
        "mov.b32 %d, 0; setp.lt.u32 %p1, %a, 4; @!%p1 bra $E; activemask.b32 %d; $E:",
        np.where(LANE < 4, 15, 0).astype("u4"),
        LANE,
    ),
    (
        "mov.b32 %d, 0; mov.b32 %r3, 0; $L: add.s32 %d, %d, %r3; add.s32 %r3, %r3, 1;"
        "setp.le.s32 %p1, %r3, %a; @%p1 bra $L;",
        np.cumsum(LANE).astype(np.uint32),
        LANE,
    ),
    ("griddepcontrol.wait; mov.b32 %d, 1;", np.ones(32, np.uint32)),
    ("membar.gl; fence.acq_rel.gpu; mov.b32 %d, 1;", np.ones(32, np.uint32)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_one_warp(case):
    text, want, *inputs = case
    with np.errstate(all="ignore"):
        found = lanes(text, *inputs, dtype=want.dtype)
    np.testing.assert_array_equal(found, want)


def test_every_opcode_has_a_test():
    """In this file or in `test_ptx_machine.py`."""
    here = pathlib.Path(__file__)
    text = here.read_text() + here.with_name("test_ptx_machine.py").read_text()
    assert not {name for name in HANDLERS if not re.search(rf"\b{name}[.; ]", text)}


def test_every_opcode_has_a_docstring():
    assert all(handler.__doc__ for handler in HANDLERS.values())


ADDRESS = "shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; mad.wide.u32 %rd4, %r0, 4, %rd0;"


def test_loads_and_stores_of_vectors():
    found = run(
        """
 mad.wide.u32 %rd4, %r0, 16, %rd1;
 ld.global.nc.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4];
 shl.b32 %r6, %r0, 4;
 add.s32 %r7, %r1, %r6;
 st.shared.v2.b32 [%r7], {%r5, %r4};
 st.shared.v2.b32 [%r7+8], {%r3, %r2};
 ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r7];
 mad.wide.u32 %rd5, %r0, 16, %rd0;
 st.global.v4.b32 [%rd5], {%r8, %r9, %r10, %r11};
""",
        [np.arange(128, dtype=np.uint32)],
        out=128,
    )
    np.testing.assert_array_equal(found.reshape(32, 4), np.arange(128).reshape(32, 4)[:, ::-1])


def test_generic_addresses():
    """`ld` and `st` without a space take addresses of shared and of global memory."""
    body = (
        ADDRESS
        + """
 cvt.u64.u32 %rd5, %r3;
 cvta.shared.u64 %rd6, %rd5;
 st.b32 [%rd6], %r0;
 ld.shared.b32 %r4, [%r3];
 ld.b32 %r5, [%rd6];
 add.s32 %r4, %r4, %r5;
 st.b32 [%rd4], %r4;
"""
    )
    np.testing.assert_array_equal(run(body, out=32), 2 * LANE)


def test_atomics():
    """All lanes add at one address, and each sees a different sum."""
    body = (
        ADDRESS
        + """
 setp.eq.u32 %p1, %r0, 0;
 @%p1 st.shared.b32 [%r1], 5;
 atom.shared.add.u32 %r4, [%r1], 2;
 st.global.b32 [%rd4], %r4;
 red.shared.max.u32 [%r1], 70;
 @%p1 atom.shared.cas.b32 %r5, [%r1], 70, 1000;
 @%p1 ld.shared.b32 %r6, [%r1];
 @%p1 st.global.b32 [%rd0+128], %r6;
"""
    )
    found = run(body, out=33)
    np.testing.assert_array_equal(np.sort(found[:32]), 5 + 2 * LANE)
    assert found[32] == 1000


def test_cp_async():
    """Groups land in order; a copy with a shorter source is filled up with zeros."""
    body = (
        ADDRESS
        + """
 mad.wide.u32 %rd5, %r0, 4, %rd1;
 setp.lt.u32 %p1, %r0, 16;
 selp.b32 %r5, 4, 0, %p1;
 cp.async.ca.shared.global [%r3], [%rd5], 4, %r5;
 cp.async.commit_group;
 cp.async.ca.shared.global [%r3+128], [%rd5], 0x4, 2;
 cp.async.commit_group;
 cp.async.wait_group 1;
 ld.shared.b32 %r6, [%r3];
 st.global.b32 [%rd4], %r6;
 cp.async.wait_all;
 ld.shared.b32 %r6, [%r3+128];
 st.global.b32 [%rd4+128], %r6;
"""
    )
    found = run(body, [A], out=64)
    np.testing.assert_array_equal(found[:32], np.where(LANE < 16, A, 0))
    np.testing.assert_array_equal(found[32:], A & 0xFFFF)


def test_ldmatrix_and_stmatrix():
    """Four 8 by 8 matrices are loaded, and stored transposed."""
    body = """
 mad.wide.u32 %rd4, %r0, 16, %rd1;
 ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd4];
 shl.b32 %r6, %r0, 4;
 add.s32 %r7, %r1, %r6;
 st.shared.v4.b32 [%r7], {%r2, %r3, %r4, %r5};
 bar.warp.sync -1;
 ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r8, %r9, %r10, %r11}, [%r7];
 stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r7+512], {%r8, %r9, %r10, %r11};
 ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r7+512];
 mad.wide.u32 %rd5, %r0, 16, %rd0;
 st.global.v4.b32 [%rd5], {%r2, %r3, %r4, %r5};
"""
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    found = run(body, [matrices], out=128).view(np.uint16).reshape(4, 8, 8)
    np.testing.assert_array_equal(found, matrices.transpose(0, 2, 1))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma(kind):
    """A 16 by 8 by 16 product, with each operand's fragment filled element by element."""
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    rng = np.random.default_rng(1)
    a, b = rng.integers(-4, 5, (16, 16)), rng.integers(-4, 5, (16, 8))
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    registers = np.zeros((32, 10), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        pairs = [a[g, 2 * t :][:2], a[g + 8, 2 * t :][:2], a[g, 2 * t + 8 :][:2]]
        pairs += [a[g + 8, 2 * t + 8 :][:2], b[2 * t :, g][:2], b[2 * t + 8 :, g][:2]]
        for i, pair in enumerate(pairs):
            registers[lane, i] = pair.astype(dtype).view(np.uint32)[0]
        sums = [c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1]]
        registers[lane, 6:] = np.float32(sums).view(np.uint32)
    names = [f"%r{10 + i}" for i in range(10)]
    loads = "".join(f" ld.global.b32 {name}, [%rd4+{4 * i}];" for i, name in enumerate(names))
    body = f"""
 mad.wide.u32 %rd4, %r0, 40, %rd1;{loads}
 mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
 {{%r2, %r3, %r4, %r5}}, {{{", ".join(names[:4])}}}, {{%r14, %r15}}, {{{", ".join(names[6:])}}};
 mad.wide.u32 %rd5, %r0, 16, %rd0;
 st.global.v4.b32 [%rd5], {{%r2, %r3, %r4, %r5}};
"""
    found = run(body, [registers], out=128).view(np.float32).reshape(8, 4, 2, 2)
    found = found.transpose(2, 0, 1, 3).reshape(16, 8)  # half, group, thread, pair
    np.testing.assert_array_equal(found, a @ b + c)


def test_small_floats():
    codes = np.arange(256, dtype=np.uint8)
    tables = ((numbers.E4M3, ml_dtypes.float8_e4m3fn), (numbers.E5M2, ml_dtypes.float8_e5m2))
    for table, kind in tables:
        assert np.array_equal(table, codes.view(kind).astype(np.float16), equal_nan=True)
    x = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    want = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(numbers.f32_to_bf16(x), want)


def test_fma_is_rounded_once():
    """When the exact sum is just above or below the midpoint of two float32 numbers."""
    one = np.float32([1.0])
    a, b = np.float32([1 + 2.0**-12]), np.float32([1 + 2.0**-12])  # 1 + 2^-11 + 2^-24
    assert numbers.fma32(a, b, np.float32([2.0**-80]))[0] == np.float32(1 + 2.0**-11 + 2.0**-23)
    assert numbers.fma32(a, b, np.float32([-(2.0**-80)]))[0] == np.float32(1 + 2.0**-11)
    assert numbers.fma32(one, one, np.float32([2.0**-80]), "rp")[0] > 1
    assert numbers.fma32(one, one, np.float32([2.0**-80]), "rm")[0] == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("frobnicate.b32 %r1, %r2;", "opcode frobnicate.b32 is not known"),
        ("add.s32.sat %r1, %r2, %r3;", "not known in this form"),
        ("add.sat.f16 %rs1, %rs2, %rs3;", "not known in this form"),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd1}, {%rd1}, {%rd1}, {%rd1};", "form"),
        ("ld.global.b32 %r3, [%rd9];", "%rd9 is read before it is written"),
        ("mov.u32 %r3, %smid;", "special register %smid is not modelled"),
        ("trap;", "the kernel traps"),
        ("ld.global.b32 %r3, [%rd0];", "out is read before it is written"),
        ("ld.global.b32 %r3, [%rd0+4096];", "bytes up to 4100 of 1024"),
        ("ld.global.b32 %r3, [%rd0+2];", "not a multiple of 4"),
        ("mov.b64 %rd1, 64; st.global.b32 [%rd1], %r0;", "in no buffer"),
        ("shfl.sync.bfly.b32 %r3, %r0, 1, 31, 0xFFFF;", "member mask 0xffff"),
        ("setp.lt.u32 %p1, %r0, 7; @%p1 bra $E; bar.sync 0; $E:", "divergent|deadlock"),
        ("st.shared.b32 [%r1], %r0;", "lanes of a warp write different values"),
        (
            "shl.b32 %r2, %r0, 1; add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], 1;",
            "not a multiple of 4",
        ),
        ("ld.shared.b32 %r3, [%r1+4096];", "shared byte 4096 of 4096"),
        ("ld.shared.b32 %r3, [%r1];", "read before it is written"),
        ("bfe.u32 %r3, %r0, 30, 9;", "outside of its operand"),
    ],
)
def test_refused(line, error):
    with pytest.raises(ptx.PtxError, match=error):
        run(line)


def test_lanes_that_end():
    """Some lanes end, and the others go on."""
    body = """
 mad.wide.u32 %rd4, %r0, 4, %rd0;
 st.global.b32 [%rd4], 1;
 setp.lt.u32 %p1, %r0, 5;
 @%p1 exit;
 st.global.b32 [%rd4], 2;
 setp.lt.u32 %p1, %r0, 9;
 @%p1 ret;
 st.global.b32 [%rd4], 3;
"""
    want = np.where(LANE < 5, 1, np.where(LANE < 9, 2, 3))
    np.testing.assert_array_equal(run(body, out=32), want)


def test_names_in_inner_scopes():
    """Labels and registers of inline assembly are local to it."""
    parsed = kernel(
        "{ .reg .pred q; L: setp.ne.b32 q, 1, 0; @q bra D; bra L; D: }\n"
        "{ .reg .pred q; L: setp.ne.b32 q, 1, 0; @q bra D; bra L; D: }",
        ["out"],
    )
    assert len(parsed.labels) == 4
    ptx.launch(parsed, ptx.Memory(), (1,), [0])
