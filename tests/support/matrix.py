"""The test matrix, made from the capability rows: a new head size there is a new column here."""

from __future__ import annotations

import dataclasses
import functools
import zlib

from jattn import call as calls
from jattn import capability, formats
from tests.support import covering, problems

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
OPTION_NAMES = {
    "not_causal": "bidirectional",
    "is_causal_per_sequence": "causalarray",
    "sliding_window": "window",
    "logits_soft_cap": "cap",
    "sinks": "sinks",
    "alibi_slopes": "alibi",
    "k_scale": "kscale",
    "v_scale": "vscale",
    "return_lse": "lse",
    "attention_chunk_size": "chunk",
    "visible_end": "visibleend",
    "tree_mask": "tree",
    "selected_blocks": "selected",
    "relative_bias": "relative",
    "sinks_per_token": "tokensinks",
    "value_dim": "mla",
}
# Options that go together and all have an effect: the window is shorter than a chunk would be.
EVERYTHING = set(calls.CORE_OPTIONS) - {"not_causal"}
DRAFTED = {"tree_mask", "sliding_window", "relative_bias", "sinks_per_token", "return_lse"}
MASKS = {*calls.MASK_OPTIONS, "sinks_per_token", "value_dim"}
GROUPS = ((4, 2), (2, 2), (6, 2), (5, 1), (16, 2), (16, 1))  # H, K: G of 2, 1, 3, 5, 8, 16
SCALED = tuple(name for name, f in problems.FORMATS.items() if f.per == "token" or f.group)
SCALED += tuple(name for name, f in problems.FORMATS.items() if f.per == "block")
PACKED = ("int4_zero", "nvfp4", "fp8_e4m3_block")  # of SCALED, what MLA meets
FEW = {  # what the formats in SCALED meet
    "head": ((512, 512), (80, 80), (192, 128)),
    "block_size": (1, 16, 48),
    "option": ((), ("sliding_window",), ("k_scale",), ("v_scale",)),
    "query_dtype": ("float32", "bfloat16"),
}
FULL_SIZE = 512  # the head size that meets every level of every other factor
# Masks do not depend on how numbers are stored, and hardly on blocks, so they meet only these.
MASKS_MEET = {
    "head": ((FULL_SIZE, FULL_SIZE),),
    "block_size": (16,),
    "kind": ("mixed", "decode"),
}
# Likewise, options that change logits need not meet every format: the same code handles them all.
LOGITS = {
    *("not_causal", "is_causal_per_sequence", "logits_soft_cap", "sinks", "alibi_slopes"),
    "return_lse",
}
LOGITS_MEET = {"block_size": FEW["block_size"], "format": ("float32", "bfloat16")}
MIXED_SIZES = ((192, 128), (576, 512))  # D, V: MLA before and after absorption


@dataclasses.dataclass(frozen=True)
class Case:
    """One test of the matrix."""

    implementation: str
    head: tuple[int, int]
    block_size: int
    format: str
    query_dtype: str
    option: tuple[str, ...]
    kv_layout: str
    kind: str
    heads: tuple[int, int]
    storage: str

    @property
    def id(self) -> str:
        """Like `xla-head512-block16-bf16-window-hnd-group2-mixed-words`."""
        stored = SHORT.get(self.format, self.format)
        query = SHORT[self.query_dtype]
        parts = (
            self.implementation,
            head_name(self.head),
            f"block{self.block_size}",
            query if query == stored else f"{query}-{stored}",
            option_name(self.option),
            self.kv_layout.lower(),
            f"group{self.heads[0] // self.heads[1]}",
            self.kind,
            self.storage,
        )
        return "-".join(parts)

    def problem(self) -> problems.Problem:
        """The batch this case runs."""
        ragged = self.kind == "mixed"
        query_lens, seq_lens = problems.lengths(self.block_size, ragged)
        seed = zlib.crc32(self.id.encode())
        options = set(self.option)
        if self.query_dtype != "float32":
            # An output rounded to 16 bits may hide a scale that is off by a percent; the float32
            # lse does not.
            options.add("return_lse")
        return problems.Problem(
            query_lens=query_lens,
            seq_lens=seq_lens,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.head[0],
            value_dim=self.head[1],
            block_size=self.block_size,
            query_dtype=self.query_dtype,
            format=self.format,
            plain=self.storage == "plain",
            kv_layout=self.kv_layout,
            row_step=64 if self.implementation == "mosaic_gpu" else 1,
            options=frozenset(options),
            ragged=ragged,
            # Some windows end within a block, others span several. The longer one is used only if
            # enough rows see past it: in a few, the key at its edge may weigh too little to show.
            window=11 if seed % 2 or not ragged or sum(n > 45 for n in seq_lens) < 2 else 45,
            explicit_scale=seed % 3 == 0,
            seed=seed,
        )


def head_name(head: tuple[int, int]) -> str:
    """Return the word for D and V in an id."""
    d, v = head
    return f"head{d}" if d == v else f"head{d}v{v}"


def option_name(option: tuple[str, ...]) -> str:
    """Return the option's word in an id."""
    if not option:
        return "causal"
    if len(option) == 1:
        return OPTION_NAMES[option[0]]
    return "drafted" if "tree_mask" in option else "everything"


def factors(row: capability.Row) -> dict[str, list]:
    """The claims of a row, as factors and levels."""
    heads = [(d, d) for d in row.head_dims.tested if d in row.value_dims]
    heads += [(d, v) for d, v in MIXED_SIZES if d in row.head_dims and v in row.value_dims]
    options = [(), *((option,) for option in row.options)]
    options += [tuple(sorted(b)) for b in (EVERYTHING, DRAFTED) if b <= {*row.options}]
    return {
        "head": heads,
        "block_size": list(row.block_sizes.tested),
        "format": list(row.formats),
        "query_dtype": list(row.query_dtypes),
        "option": options,
        "kv_layout": list(row.layouts),
        "kind": ["mixed", "decode"],
        "heads": list(GROUPS),
        "storage": ["words", "plain"],
    }


def possible(case: dict) -> bool:
    """Whether the format can hold these head sizes, and the storage and layout this format."""
    format = problems.FORMATS[case.get("format", "float32")]
    if any(dim % format.dim_multiple for dim in case.get("head", ())):
        return False
    if case.get("kv_layout") == formats.ROWS_LAYOUT and (
        format.name not in problems.IN_ROWS or case.get("option") == ("value_dim",)
    ):
        return False
    plain = case.get("storage") == "plain"
    return not plain or formats.plain_format(format.value_dtype) == format


@functools.cache
def sample(row: capability.Row) -> tuple[Case, ...]:
    """Return a few cases of `default` that hold every level, and every level at `FULL_SIZE`.

    One has values that are the first numbers of longer keys. Decode-only cases are preferred: they
    take half as long as mixed ones.
    """
    names, chosen = tuple(factors(row)), []

    def levels(case: Case) -> set[tuple]:
        here = {(name, getattr(case, name)) for name in names}
        if case.head == (FULL_SIZE, FULL_SIZE):
            here |= {("full", *level) for level in here}
        # Where V is D, the keys' first V numbers are also their last.
        if "value_dim" in case.option and case.head[1] < case.head[0]:
            here.add(("values", "shorter than keys"))
        return here

    def new_levels(case: Case) -> float:
        return len(cases[case] & left) / (1.3 if case.kind == "mixed" else 1)

    cases = {case: levels(case) for case in default(row)}
    left = set().union(*cases.values())
    while left:
        best = max(cases, key=new_levels)
        chosen.append(best)
        left -= cases[best]
    return tuple(chosen)


@functools.cache
def default(row: capability.Row) -> tuple[Case, ...]:
    """Return the cases of CI, and of `-m slow` where they take long.

    They cover all pairs of levels, with these exceptions. Head size x block size, x option and
    x group meet only at head size 512. Group x block size and group x option never have to meet.
    Masks meet what `MASKS_MEET` says. Formats with scales per token, group or block (`SCALED`)
    differ from the others only in how they are read, so they meet few levels of anything else
    (`FEW`). A row for any device runs the same code for all head sizes: there formats meet only the
    head sizes of `FEW`, and options that change logits what `LOGITS_MEET` says. The slow sweep has
    the other cases.
    """
    one_code = row.devices == ("any",)

    def wanted(a: str, x, b: str, y) -> bool:
        option, other, level = (x, b, y) if a == "option" else (y if b == "option" else (), a, x)
        if set(option) & MASKS and level not in MASKS_MEET.get(other, ()):
            # Values inside keys do depend on the format, the blocks and both sizes.
            if option != ("value_dim",):
                return False
            stored = other == "format" and (level not in SCALED or level in PACKED)
            return stored or level in MIXED_SIZES
        if one_code and len(option) == 1 and {*option} <= LOGITS and other in LOGITS_MEET:
            return level in LOGITS_MEET[other]
        if "format" in (a, b):
            format, other, level = (x, b, y) if a == "format" else (y, a, x)
            if format in SCALED:
                few = FEW.get(other)
                return other != "heads" if few is None else level in few
        if a == "head" and x != (FULL_SIZE, FULL_SIZE):
            few = ("kv_layout", "kind", "query_dtype", "storage")
            return b in few or (b == "format" and (not one_code or x in FEW["head"]))
        return {a, b} not in ({"block_size", "heads"}, {"option", "heads"})

    return tuple(_case(row, case) for case in covering.pairwise(factors(row), wanted, possible))


def thorough(row: capability.Row) -> list[Case]:
    """Return a pairwise design of all other factors for every head size.

    It covers every triple that includes a head size. (The full product of a row's claims has more
    than a million cases.)
    """
    levels = factors(row)
    heads = levels.pop("head")
    rest = covering.pairwise(levels, lambda a, x, b, y: True, possible)
    cases = [{"head": head, **case} for head in heads for case in rest]
    return [_case(row, case) for case in cases if possible(case)]


def _case(row: capability.Row, case: dict) -> Case:
    return Case(implementation=row.implementation, **case)


assert set(OPTION_NAMES) == set(calls.OPTIONS), "an option without a name in test ids"
