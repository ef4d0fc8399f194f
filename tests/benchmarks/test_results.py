"""The pages' prose quotes committed results correctly, and every result is used or linked."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable

import pytest

from benchmarks import pages
from benchmarks.cpu import prose, report, tables
from benchmarks.gpu import tables as gpu_tables
from benchmarks.serving import rollback

ROOT = pathlib.Path(__file__).parents[2]


def words(page: str) -> str:
    return " ".join((ROOT / "docs" / page).read_text().split())


def paths(value: object) -> Iterable[pathlib.Path]:
    """Yield the paths in a constant of a module."""
    if isinstance(value, pathlib.Path):
        yield value
    elif isinstance(value, dict):
        yield from paths(tuple(value.values()))
    elif isinstance(value, tuple):
        for each in value:
            yield from paths(each)


def test_every_result_is_read_or_linked():
    read = {
        path
        for module in (pages, tables, gpu_tables)
        for path in paths(tuple(vars(module).values()))
    }
    texts = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.py")]
    text = "".join(path.read_text() for path in texts)
    files = {path for path in tables.RESULTS.iterdir() if path.is_file()}
    assert [path.name for path in sorted(files - read) if path.name not in text] == []


def test_figures_in_prose_leave_out_disturbed_rows():
    rows = [
        {
            "name": f"{group}-{dtype}-{n}",
            "group": group,
            "dtype": dtype,
            "ratio": ratio,
            "median_ms": 1.0,
            "min_ms": least,
            "peer_median_ms": 1.0,
            "peer_min_ms": 1.0,
            "share_of_ceiling": 0.4 + 0.1 * n,
            "bound": "matrix",
            "kv_gb_per_s": 10.0 + n,
            "num_heads": 16,
            "num_kv_heads": 16,
            "share_of_random_reads": None,
        }
        for dtype in tables.DTYPES
        for group in ("prefill", "mixed", "window", "short")
        for n, (ratio, least) in enumerate(((0.5, 1.0), (2.0, 1.0), (99.0, 0.5)))
    ]
    text = prose.summary({"0.12": rows})
    text = " ".join(text.split())
    assert "jattn is 1.00 times as fast as vLLM (geometric mean of 16 rows): 1.00 times in " in text
    assert "bfloat16 and 1.00 times in float32. Below 1 are `" in text
    assert "prefill 0.50 to 2.00 (at 40 to 50 % of the matrix peak), mixtures 0.50 to 2.00" in text
    assert "99" not in text


def test_speeds_of_xla():
    rows = tables.read_rows(tables.XLA_FILES)
    calm = tables.calm(rows)
    mean, without = (
        f"{report.geometric_mean(row['ratio'] for row in these):.2f}" for these in (rows, calm)
    )
    text = words("performance-cpu.md")
    assert f"Geometric mean of these {len(rows)}: {mean}." in text
    assert f"in {len(rows) - len(calm)} the median of a side" in text
    assert f"Without the {len(rows) - len(calm)} the mean would be {without}." in text

    def peaks(group: str) -> str:
        """The least and the largest share of the matrix peak that vLLM reaches."""
        these = [row for row in rows if (row["group"], row["dtype"]) == (group, "float32")]
        return prose.span([row["share_of_ceiling"] / row["ratio"] for row in these], prose.percent)

    assert f"runs prefill at {peaks('prefill')} %" in text
    assert f"and mixtures at {peaks('mixed')} %" in text


@pytest.mark.parametrize("machine", pages.ARITHMETIC)
def test_shares_of_multiply_adds(machine):
    file = pages.ARITHMETIC[machine]
    run = json.loads(file.read_text().splitlines()[0])
    rows = tables.read_lines(file)
    cores = run["cores"]

    def shares(dtype: str, least: int = 0) -> str:
        found = [
            row["share_of_ceiling"]
            for row in rows
            if row["dtype"] == dtype and row["head_dim"] >= least
        ]
        return prose.span(found, prose.percent)

    peaks = [f"{run['loop'][dtype] / cores / 1e9:.0f}" for dtype in ("float32", "bfloat16")]
    dots = [f"{100 * run['dot'][dtype] / run['loop'][dtype]:.0f} %" for dtype in run["loop"]]
    dot = f"{dots[0]} of either" if dots[0] == dots[1] else f"{dots[0]} and {dots[1]} of that"
    text = words("performance-cpu.md")
    assert f"reaches {peaks[0]} GFLOP/s a core in float32 and {peaks[1]} in bfloat16" in text
    assert f"and `jax.numpy.dot` {dot}" in text
    assert (
        f"reaches {shares('bfloat16')} % of the loop's rate in bfloat16 (the goal is 60 %), and in "
        f"float32 {shares('float32')} %, from D = 128 on {shares('float32', 128)} %"
    ) in text


def test_cascades():
    def times(version: str, head_dim: int) -> str:
        rows = tables.read_lines(pages.CASCADE[version])
        return f"{next(row['ratio'] for row in rows if row['head_dim'] == head_dim):.1f}"

    assert (
        f"are {times('0.12', 128)} times as fast as plain calls at D = 128 with JAX 0.12 "
        f"({times('0.10', 128)} with 0.10) and {times('0.12', 512)} times at D = 512 "
        f"({times('0.10', 512)})"
    ) in words("performance-serving.md")


def test_decodes_of_formats_with_both_versions_of_jax():
    def mean(machine: str) -> str:
        """JAX 0.10's time over JAX 0.12's."""
        older, newer = (
            tables.read_lines(pages.FORMAT_SPEED[machine, version]) for version in ("0.10", "0.12")
        )
        times = [[row["decode_ms"] for row in rows] for rows in (older, newer)]
        return f"{report.geometric_mean(old / new for old, new in zip(*times, strict=True)):.2f}"

    assert (
        f"with JAX 0.10 the decodes take {mean('Zen 5')} times as long in the geometric mean on "
        f"the Zen 5, {mean('Zen 4')} times on the Zen 4, {mean('Xeon with AMX')} times on the Xeon "
        f"and {mean('Zen 3')} times on the Zen 3"
    ) in words("performance-formats.md")


def test_decodes_of_formats_with_avx512_bf16():
    zen5, rows = (
        [
            row
            for version in ("0.10", "0.12")
            for row in tables.read_lines(pages.FORMAT_SPEED[machine, version])
        ]
        for machine in ("Zen 5", "Zen 4")
    )

    def span(stem: str, rows: list[dict] = rows) -> str:
        """bfloat16's time over the format's, least and most."""
        found = [row["ratio"] for row in rows if row["format"].startswith(stem)]
        return f"{min(found):.1f} to {max(found):.1f}"

    wide = [
        f"{older['decode_ms']:.1f} and {newer['decode_ms']:.1f}"
        for older, newer in zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
        if older["format"] == newer["format"] == "bfloat16"
    ]
    assert (
        f"on the Zen 4, with JAX 0.10 and 0.12, bfloat16 took {wide[0]} ms at D = 128, {wide[1]} "
        f"at 256, {wide[2]} at 512"
    ) in words("performance-formats.md")
    assert (
        f"on a Zen 4 fp8 {span('fp8')} times as fast, int8 {span('int8')} times, int4 "
        f"{span('int4')} times, NVFP4 {span('nvfp4')} times; on a Zen 5 fp8 {span('fp8', zen5)} "
        f"times, int8 {span('int8', zen5)} times, int4 {span('int4', zen5)} times, NVFP4 "
        f"{span('nvfp4', zen5)} times."
    ) in words("performance-formats.md")


def test_goals_of_formats():
    goals = {"fp8": 1.7, "int4": 2.5, "nvfp4": 2.5}
    shared = {
        machine: tables.read_lines(pages.FORMAT_SPEED[machine, "0.12"])
        for machine in ("Zen 5", "Zen 4", "Xeon with AMX", "Zen 3")
    }
    alone = {
        machine: tables.read_lines(file)
        for machine in ("zen5", "zen4", "zen3")
        for file in tables.RESULTS.glob(f"*-format-speed-16-kv-heads-{machine}-*.jsonl")
    }

    def met(rows: list[dict], stem: str) -> list[bool]:
        found = [row for row in rows if row["format"].startswith(stem)]
        assert found
        return [row["ratio"] >= goals[stem] for row in found]

    fp8 = {machine: met(rows, "fp8") for machine, rows in shared.items()}
    assert {machine: each.count(True) for machine, each in fp8.items() if any(each)} == {
        "Zen 5": 9,
        "Zen 4": 8,
    }
    assert {len(each) for each in fp8.values()} == {9}
    assert met(shared["Zen 5"], "int4") == [False, True, True]  # D = 128, 256, 512
    assert not any(met(rows, "int4")[0] for rows in shared.values())
    assert not any(any(met(shared[each], "int4")) for each in shared if each != "Zen 5")
    assert not any(any(met(rows, "nvfp4")) for rows in shared.values())
    assert set(alone) == {"zen5", "zen4", "zen3"}
    for machine, rows in alone.items():
        assert all(met(rows, "int4"))
        assert set(met(rows, "nvfp4")) == {machine == "zen5"}
        assert all(met([row for row in rows if not row["format"].endswith("token")], "fp8"))
    mib = {row["format"]: row["kv_mib"] for row in alone["zen4"]}
    promised = [mib["bfloat16"] / mib[name] for name in ("fp8_e4m3", "int4_zero", "nvfp4")]
    assert "whose bytes alone would allow {:.0f}, {:.1f} and {:.1f}.".format(*promised) in words(
        "performance-formats.md"
    )
    assert "fp8 meets its goal in every row on the Zen 5 and in 8 of 9 on the Zen 4" in words(
        "performance-formats.md"
    )


def test_decodes_of_formats_without_avx512():
    rows = tables.read_lines(pages.FORMAT_SPEED["Zen 3", "0.12"])
    times = {(row["format"], row["head_dim"]): row["decode_ms"] for row in rows}

    def span(*stems: str) -> str:
        """The least and the most of bfloat16's time, over the head sizes."""
        found = [
            ms / times["bfloat16", dim]
            for (name, dim), ms in times.items()
            if name.startswith(stems)
        ]
        return f"{min(found):.2f} to {max(found):.2f}"

    assert (
        f"decode from fp8 and int8 takes {span('fp8', 'int8')} of the time that it takes from "
        f"bfloat16, from int4 {span('int4')} and from NVFP4 {span('nvfp4')}."
    ) in words("performance-formats.md")


def test_decodes_of_formats_with_avx512_only():
    rows = tables.read_lines(pages.FORMAT_SPEED_AVX512)
    wide = [row for row in rows if row["format"] == "bfloat16"]
    narrow = [row["ratio"] for row in rows if row["format"] != "bfloat16"]
    assert (
        f"decode from the narrow formats is {min(narrow):.2f} to {max(narrow):.2f} times as fast "
        f"as from bfloat16, which reads at {min(row['of_read'] for row in wide):.0%} of".replace(
            "%", " %"
        )
    ) in words("performance-formats.md")


def test_steps_of_transformers():
    rows = tables.read_lines(pages.TRANSFORMERS)
    spreads = [100 * row[f"{name}_spread"] for row in rows for name in ("sdpa", "jattn")]
    low, high = round(min(spreads)), round(max(spreads))
    assert f"the steps of one side differ by {low} to {high} %" in words("transformers.md")
    taken = [row["jattn_ms"] / row["sdpa_ms"] for row in rows]
    changes = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"takes {min(taken):.2f} to {max(taken):.2f} times as long as sdpa's" in changes


def test_transfers_of_the_small_model():
    rows = tables.read_lines(pages.TRANSFER["byte-gemma"])
    here, shares, kib = (
        [f"{each(row):.0f}" for row in (rows[0], rows[-1])]
        for each in (
            lambda row: row["here_ms"],
            lambda row: 100 * row["share"],
            lambda row: row["bytes"] / row["tokens"] / 1024,
        )
    )
    assert (
        f"byte-gemma, whose prompts are read in {here[0]} to {here[1]} ms, spends {shares[0]} to "
        f"{shares[1]} % of that on moving {kib[1]} to {kib[0]} KiB a token"
    ) in words("disaggregation.md")


def test_the_mean_of_xla_on_the_machine_with_amx():
    rows = tables.read_rows([tables.XLA_QUICK_FILE])
    first = json.loads(tables.XLA_QUICK_FILE.read_text().splitlines()[0])
    assert "Xeon" in first["cpu"]
    mean = report.geometric_mean(row["ratio"] for row in rows)
    said = f"over the {len(rows)} rows of `--quick`, `xla` has {mean:.2f}"
    assert said in words("performance-cpu.md")


def test_layers_in_a_loop():
    ms = {(row["way"], row["tokens"]): row["ms"] for row in tables.read_lines(pages.SCAN)}

    def both(tokens: int) -> tuple[str, str]:
        return f"{ms['scan', tokens]:.0f}", f"{ms['unrolled', tokens]:.0f}"

    (many, apart), (one, alone) = both(16), both(1)
    assert (
        f"take {many} ms for 16 tokens in a scan and {apart} ms one by one, {one} and {alone} ms "
        "for one token"
    ) in words("performance-serving.md")


def test_states_after_accepted_drafts():
    rows = tables.read_lines(pages.ROLLBACK)
    ms = {(row["way"], row["sequences"]): row["ms"] for row in rows}
    text = words("performance-serving.md")
    assert (
        f"{ms['again', 1]:.1f} ms for one sequence and {ms['again', 8]:.0f} ms for 8, where one "
        f"run over all tokens takes {ms['once', 1]:.1f} and {ms['once', 8]:.0f} ms."
    ) in text
    assert (
        f"**Keep a state per draft token and pick one**: {ms['kept', 1]:.1f} and "
        f"{ms['kept', 8]:.0f} ms"
    ) in text
    brought = [
        f"{rollback.brought(right, in_next_step=in_next_step):.1f}"
        for right in (0.6, 0.8)
        for in_next_step in (True, False)
    ]
    assert (
        f"right with probability 0.6, a step brings {brought[0]} tokens that way and {brought[1]} "
        f"the engine's way; at 0.8, {brought[2]} and {brought[3]}."
    ) in text


def test_first_tokens_next_to_vllms():
    def slowest(file: pathlib.Path) -> list[float]:
        """Each row's p99 of jattn's time to the first token over vLLM's."""
        return [
            row["jattn"]["first_p99_ms"] / row["vLLM"]["first_p99_ms"]
            for row in tables.read_lines(file)
        ]

    zen4, xeon, zen3 = map(slowest, (pages.HTTP_ZEN4, pages.HTTP, pages.HTTP_ZEN3))
    sooner = [sum(ratio < 1 for ratio in ratios) for ratios in (zen4, xeon, zen3)]
    older = max(*xeon, *zen3) - 1
    assert (
        f"sooner than vLLM's in {sooner[0]} of the Zen 4's {len(zen4)} rows, and in the others up "
        f"to {max(zen4) - 1:.0%}".replace("%", " %")
    ) in words("performance-serving.md")
    assert (
        f"sooner in {sooner[1]} of {len(xeon)} rows and in {sooner[2]} of {len(zen3)}, and in the "
        f"others up to {older:.0%} later".replace("%", " %")
    ) in words("performance-serving.md")
    rows = tables.read_lines(pages.HTTP_ZEN4)
    firsts = sum(row["jattn"]["first_ms"] < row["vLLM"]["first_ms"] for row in rows)
    later = {
        row["concurrent"]: row["jattn"]["each_ms"] / row["vLLM"]["each_ms"] - 1
        for row in rows
        if row["jattn"]["each_ms"] > row["vLLM"]["each_ms"]
    }
    assert set(later) == {64}
    assert f"sooner than vLLM's in {firsts} of the {len(rows)} rows" in words(
        "performance-serving.md"
    )
    assert f"at once, where they are up to {later[64]:.0%}".replace("%", " %") in words(
        "performance-serving.md"
    )


def test_mixtures_of_experts():
    rows = tables.read_lines(pages.EXPERTS)
    tiled = [row["ragged_ms"] / row["grouped_ms"] for row in rows]
    again = [row["grouped_ms"] / row["native_ms"] for row in rows]
    text = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"{min(tiled):.0f} to {max(tiled):.0f} times as fast as by `jax.lax.ragged_dot`" in text
    assert f"in C++, {min(again):.1f} to {max(again):.1f} times as fast again" in text


def test_work_of_the_host():
    lines = map(json.loads, pages.SERVING_ZEN4.read_text().splitlines())
    shares: dict[bool, list[float]] = {True: [], False: []}
    small = False
    for row in lines:
        small = row.get("checkpoint", "gemma4" if small else "").startswith("gemma4")
        shares[small] += [100 * row["host_share"]] if "host_share" in row else []
    xeon = [float(x) for x in re.findall(r"host (\d+\.\d)%", pages.SERVING.read_text())]
    table = re.findall(r" (\d+\.\d)% +\d+\.\d$", pages.SERVING.read_text(), re.MULTILINE)
    shares[True] += [xeon[0], *map(float, table)]
    shares[False] += xeon[1:]
    assert min(shares[False]) + 0.05 >= 1.5
    assert max(shares[False]) < 3.5
    assert len(table) > 2
    assert min(shares[True]) > 7
    assert max(shares[True]) < 10
    assert (
        "takes 1.5 to 3 % of the time with the layers of Qwen3-0.6B and 7 to 10 % with the small "
        "model"
    ) in words("performance-serving.md")


def test_first_tokens_of_another_hour():
    row = next(r for r in tables.read_lines(pages.PADDING) if r["case"] == "16 at once")
    pair = " and ".join(
        f"{row[key]['first_ms']:.0f} ms (p99 {row[key]['first_p99_ms']:.0f}) from {name}"
        for key, name in (("new", "jattn"), ("vLLM", "vLLM"))
    )
    assert f"got theirs after {pair}" in words("performance-serving.md")


def test_padding():
    rows = {row["case"]: row for row in tables.read_lines(pages.PADDING)}
    gains = {
        f"{rows[case]['new']['tokens_per_s'] / rows[case]['old']['tokens_per_s'] - 1:.0%}"
        for case in ("16 at once", "64 at once")
    }
    late = [f"{rows['80%'][name]['first_p99_ms']:.0f}" for name in ("new", "old")]
    assert gains == {"9%"}
    assert (
        "16 and 64 requests at once got 9 % more tokens a second, and at 80 % of capacity the "
        f"slowest first token came after {late[0]} ms in place of {late[1]}"
    ) in words("performance-serving.md")


def test_serving_next_to_transformers():
    """With Qwen3-0.6B's layers in both dtypes, and with the 31B-shaped model."""
    lines = map(json.loads, pages.SERVING_ZEN4.read_text().splitlines())
    found = [row for row in lines if row["kind"] == "peer"]
    ratios = [
        [f"{row[f'ratio_to_{way}']:.1f}" for way in ("single", "batch", "continuous")[:n]]
        for row, n in zip(found, (3, 3, 2), strict=True)
    ]
    speeds = [f"{row['ours_tokens_per_s']:,.0f}" for row in found]
    bf16, f32, small = ratios
    text = words("performance-serving.md")
    assert (
        f"{speeds[0]} tokens a second in bfloat16, {', '.join(bf16[:2])} and {bf16[2]} times"
        in text
    )
    assert f"{speeds[1]} in float32, {', '.join(f32[:2])} and {f32[2]} times" in text
    assert f"The 31B-shaped model gets {speeds[2]}, {small[0]} times and {small[1]} times" in text
    assert min(row["ratio_to_single"] for row in found) > 5
    assert [row["turns"] for row in found[:2]] == [3, 2]
    assert "(medians of three and of two turns)" in text
    for row in found[1:]:  # float32 gives the same tokens
        assert row["same_as_single"] == row["same_as_batch"] == 1


def test_kernels_on_an_h100():
    lines = gpu_tables.read()
    cases = [line for line in lines if line["kind"] == "test" and "[" in line["name"]]
    cases = [line for line in cases if re.search(r"\[(mosaic_gpu|triton)-head\d", line["name"])]
    text = words("performance-gpu.md")
    assert f"All {len(cases)} cases of the test matrix" in text
    assert {line["outcome"] for line in cases} == {"passed"}
    rows = gpu_tables.by_workload(lines)
    wide = rows["gemma4-31b-q8k"]

    def times(name: str) -> str:
        return f"{wide[name]['median'] / wide['mosaic_gpu']['median']:.1f} times"

    assert (
        f"prefill has {times('flash-attention-4')} the speed of FlashAttention 4 and "
        f"{times('flashinfer-hnd')} FlashInfer's, and decode "
        f"{100 * rows['gemma4-31b-64q1s8k']['mosaic_gpu']['share']:.0f} % of the read rate"
    ) in text
    front = " ".join((ROOT / "README.md").read_text().split())
    assert f"prefill has {times('flash-attention-4')} the speed of FlashAttention 4" in front
    decode = rows["gemma4-31b-64q1s8k"]
    longer = decode["mosaic_gpu"]["median"] / decode["flash-attention-4"]["median"] - 1
    assert f"takes {100 * longer:.0f} % longer" in front
    drafted = rows["gemma4-31b-64q4s8k"]["mosaic_gpu"]["median"] * 1e6
    assert f"takes {drafted:,.0f} microseconds in place of 2,945" in text
    speeds = []  # where jattn is slower than the best peer, in percent of that peer's
    for found in rows.values():
        if (mine := found.get("mosaic_gpu")) is None or not set(found) & set(gpu_tables.PAGED):
            continue
        others = set(found) - {*gpu_tables.OURS, gpu_tables.LAYERS}
        best = min(found[name]["median"] for name in others)
        speeds.append(100 * best / mine["median"])
    speeds = [speed for speed in speeds if speed < 100]
    assert f"has {min(speeds):.0f} to {max(speeds):.0f} % of the best one's speed" in text


def test_speculative_decoding():
    rows = tables.read_lines(pages.SPECULATION)

    def span(key: str, *, scale: float = 1, **wanted: float) -> str:
        found = [r[key] * scale for r in rows if all(r[k] == v for k, v in wanted.items())]
        digits = 2 if wanted["temperature"] and key == "ratio" else 1
        return f"{min(found):.{digits}f} to {max(found):.{digits}f}"

    text = words("performance-serving.md")
    alone, eight = (span("ratio", temperature=0.0, requests=count) for count in (1, 8))
    assert f"it is {alone} times for one request and {eight} for eight" in text
    ratio = {
        (r["text"], r["requests"], r["drafts"]): r["ratio"] for r in rows if not r["temperature"]
    }
    gains = [r / ratio[text, count, "8"] for (text, count, d), r in ratio.items() if d == "8x2"]
    more, less = (f"{100 * abs(gain - 1):.0f} %" for gain in (max(gains), min(gains)))
    assert f"brings between {more} more and {less} less than a chain" in text
    trees = span("ratio", temperature=1.0, drafts="8x2")
    drawn = span("ratio", temperature=1.0)
    assert f"the ratio is {drawn} on the Zen 4 (trees {trees})" in text
    share = span("own", scale=100, temperature=1.0)
    assert f"guessing and deciding takes {share} % of the time" in text


def test_the_summary_of_what_formats_cost():
    """Every figure in it comes from committed rows."""
    costs = {
        row["format"]: row
        for row in tables.read_lines(tables.FORMAT_FILE)
        if row["model"] == "byte-gemma"
    }
    bits = {name: row["bits_per_byte"] for name, row in costs.items()}
    more = {name: 100 * (bits[name] / bits["float32"] - 1) for name in bits}
    fp8 = max(more[name] for name in more if name.startswith(("e4m3", "e5m2")))
    keys = costs["int8-int4"]["rms_error"] / costs["int4-int8"]["rms_error"]
    bytes_of = {name: row["bytes_per_token"] / 8192 for name, row in costs.items()}
    of_one = [name for name, size in bytes_of.items() if 0.24 < size < 0.27]
    best = min(of_one, key=lambda name: costs[name]["rms_error"])

    def ratios(file: pathlib.Path, stem: str = "") -> list[float]:
        rows = tables.read_lines(file)
        return [
            r["ratio"] for r in rows if r["format"] != "bfloat16" and r["format"].startswith(stem)
        ]

    fast = [x for jax in ("0.10", "0.12") for x in ratios(pages.FORMAT_SPEED["Zen 4", jax], "int4")]
    shared = [1 / ratio for ratio in ratios(pages.FORMAT_SPEED["Zen 3", "0.12"])]
    alone = max(ratios(tables.RESULTS / "2026-11-27-format-speed-16-kv-heads-zen3-jax0.12.jsonl"))
    sentences = (
        f"int4 costs {more['int4']:.1f} % and fp8 at most {fp8:.1f} %",
        f"int8 keys with int4 values have {keys:.1f} times the error of int4 keys with int8 values",
        f"from int4 {min(fast):.1f} to {max(fast):.1f} times on a Zen 4",
        f"decode takes {min(shared):.2f} to {max(shared):.2f} of bfloat16's time where four query",
        f"is up to {alone:.2f} times as fast where each has its own",
    )
    summary = words("formats.md").partition("## What they cost")[2].partition("## Gradients")[0]
    assert [each for each in sentences if each not in summary] == []
    assert best.startswith("int8")
    figures = re.findall(r"\d+\.\d+", summary)
    assert set(figures) <= set(re.findall(r"\d+\.\d+", " ".join(sentences)))


@pytest.mark.parametrize(
    ("name", "words_before"),
    [
        ("2026-11-27-format-speed-16-kv-heads-zen3", "decode from fp8 is then"),
        ("2026-11-28-format-speed-16-kv-heads-zen4", "On the Zen 4 decode from fp8 is then"),
    ],
)
def test_formats_with_a_kv_head_for_each_query_head(name, words_before):
    lines = tables.read_lines(tables.RESULTS / f"{name}-jax0.12.jsonl")
    rows = [row for row in lines if row["kind"] == "row"]
    assert {(row["head_dim"], row["num_kv_heads"]) for row in rows} == {(128, 16)}
    ratio = {row["format"]: f"{row['ratio']:.2f}" for row in rows}
    assert (
        f"{words_before} {ratio['fp8_e4m3']} (e4m3) and {ratio['fp8_e5m2']} times (e5m2) as fast "
        f"as from bfloat16, from int8 {ratio['int8']} times, from int4 {ratio['int4_zero']} times "
        f"and from NVFP4 {ratio['nvfp4']} times"
    ) in words("performance-formats.md")


def test_speculative_decoding_of_text_that_repeats_itself():
    name = "2026-11-27-speculation-zen3-jax0.12.jsonl"
    ratios = {
        (row["text"], row["drafts"]): row["ratio"]
        for row in tables.read_lines(tables.RESULTS / name)
        if row["kind"] == "row" and row["temperature"] == 0
    }
    few, many = (f"{ratios['repetitive', drafts]:.2f}" for drafts in ("4", "8"))
    loop = " and ".join(f"{ratios['loop', drafts]:.1f}" for drafts in ("4", "8"))
    text = words("performance-serving.md")
    assert f"gets {few} times as many tokens a second with 4 draft tokens and {many} times" in text
    assert f"it gets {loop} times as many" in text


def test_decode_with_few_kv_heads_on_the_xeon_measured_again():
    file = tables.RESULTS / "2026-12-01-cpu-native-few-kv-heads-xeon-jax0.12.jsonl"
    now = {row["name"]: row for row in tables.read_rows([file])}
    rows = tables.read_rows(tables.XEON_FILES.values())
    before = {row["name"]: row for row in rows if row["name"] in now}
    assert tables.calm(list(now.values())) == list(now.values())

    means, below = {}, {}
    for group in ("decode-block128", "window", "short"):
        each = [
            [row["ratio"] for row in rows.values() if row["group"] == group]
            for rows in (now, before)
        ]
        assert [len(ratios) for ratios in each] == [8, 8]
        means[group] = [f"{report.geometric_mean(ratios):.2f}" for ratios in each]
        below[group] = [sum(ratio < 1 for ratio in ratios) for ratios in each]

    decode, window, short = means.values()
    now_below, then_below = (
        "{}, {} and {}".format(*(counts[i] for counts in below.values())) for i in (0, 1)
    )
    text = words("performance-cpu.md")
    assert (
        f"is {decode[0]} in the geometric mean of the 8 decodes from blocks of 128 ({decode[1]} in"
        f" the record above), {window[0]} in the windows ({window[1]}) and {short[0]} in the short"
        f" decodes ({short[1]})."
    ) in text
    assert (
        f"Below 1 are {now_below} of these {len(now)} rows; in the record they are {then_below}."
        in text
    )
