"""Which model types of the installed transformers are right on jattn, and which are not and why.

    python -m tests.transformers_census [--types llama,t5] [--share 12] [--out FILE] [--page]

Needs torch and transformers (`pip install '.[conformance]'`), and a quarter of an hour for all
types. Every type that transformers' auto classes know is built with a small random configuration
and reads random inputs twice, with transformers' eager attention and with jattn's. Judge is a
fault: the difference may be a thousandth of what attention to keys in the opposite order makes.
Where a type reads text, it reads it padded, too, and a model with a cache reads or writes it in
parts. An encoder-decoder is judged as a whole.

Workers take a few types each and have a time limit, so that a crash costs one type. `--page` writes
docs/transformers-models.md from the results.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import inspect
import json
import pathlib
import re
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "data" / "transformers-census.jsonl"
PAGE = ROOT / "docs" / "transformers-models.md"

RIGHT, REFUSED, WRONG, NOT_BUILT = "right", "refused", "wrong", "not judged"
CRASHED = "crashed"  # by an error that is no refusal
# What reasons begin with that have a heading of the page for themselves.
BUILD, INPUTS = "cannot be built small", "takes none of the census's inputs"
ELSEWHERE = "does not call transformers' attention interface"
TOKENS, PART, BATCH = 24, 18, 2
WRITTEN, WRITTEN_PART = 9, 6  # tokens of a decoder that an encoder feeds
VOCABULARY = 96
MOST_PARAMETERS = 40e6
MOST_MEMORY = 8 << 30
# Of what the fault changes; float32 makes a hundredth of it.
LIMIT = 1e-3

# What a size is called, and its small value. The first pattern that matches wins.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|.*codebook.*|.*num_labels.*", 0),  # as they are
    (r"(.*_)?vocab_size|n_vocab|vocab_size_per_layer_input|n_words", VOCABULARY),
    (r"(num_|n_)(experts|local_experts|routed_experts)|moe_num_experts|num_local_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|experts_top_k", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"(.*_)?(num_)?(hidden_|encoder_|decoder_|n_)?layers|n_layer|depth|num_hidden_groups", 2),
    (r"n_encoder_layers|n_decoder_layers|num_(encoder|decoder)_layers", 2),
    (r"num_key_value_heads|n_kv_heads|num_kv_heads|num_global_key_value_heads", 2),
    (r"(.*_)?(num_)?(attention_)?heads|n_heads?|num_attention_heads", 4),
    (r"qk_nope_head_dim|v_head_dim|d_kv|kv_channels|head_dim|attention_head_dim", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"global_head_dim", 32),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|index_head_dim", 16),
    (r"(.*_)?(intermediate_size|ffn_dim|mlp_dim|ffn_hidden_size)|d_ff|n_inner|d_inner|dff", 96),
    (r"(.*_)?intermediate_size_mlp|expert_ffn_hidden_size", 96),
    (r"(.*_)?(hidden_size|d_model|hidden_dim|embed_dim|embedding_size|emb_dim|model_dim)", 64),
    (r"n_embd|dim|width|projection_dim|word_embed_proj_dim|hidden_sizes?|decoder_dim", 64),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"sliding_window|attention_chunk_size|local_attention|window_size|local_window_size", 8),
    (r"hidden_size_per_layer_input|embedding_dim", 16),
)
# Settings that follow from others, of the large configuration.
DERIVED = ("per_layer_config", "out_features", "out_indices", "stage_names")


# -- building ------------------------------------------------------------------------------------


def small(name: str, value: Any, ids: Iterator[int], sizes: dict[str, Any]) -> Any:
    """A setting of a configuration, smaller."""
    if isinstance(value, dict) and "model_type" in value:
        return shrunk(value, ids)
    if isinstance(value, dict):
        sections = {"mrope_section": [2, 3, 3]}  # of the half of a head
        return {key: sections.get(key, x) for key, x in value.items()}
    if name == "head_dim" and "qk_rope_head_dim" in sizes:
        return 8 if value else value
    if name == "vocab_size" and value is None:
        return VOCABULARY
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("_token_id", "_token_index", "_start_id", "_end_id", "_token_ids")):
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(
            name, next(ids) if value >= VOCABULARY else value
        )
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            if not size:
                return value
            if size == 2 and "heads" in name:  # as many as query heads, or fewer
                heads = sizes.get("num_attention_heads", sizes.get("n_heads"))
                return value if value < 2 else 4 if value == heads else 2
            return min(value, size) if value > 0 else value
    return value


def shrunk(settings: dict[str, Any], ids: Iterator[int]) -> dict[str, Any]:
    """A configuration's settings, smaller, and its nested configurations'."""
    settings = {name: x for name, x in settings.items() if name not in DERIVED}
    if isinstance(settings.get("depths"), list):  # widths that grow with the stages
        return settings
    found = {name: small(name, x, ids, settings) for name, x in settings.items()}
    layers = next(
        (n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in settings), None
    )
    if layers is None or not isinstance(settings[layers], int):
        return found
    kinds = settings.get("layer_types") or settings.get("layers_block_type")
    keep = list(range(min(2, settings[layers])))
    if isinstance(kinds, list) and len(kinds) == settings[layers]:
        keep = sorted({kinds.index(kind) for kind in kinds} | {0, len(kinds) - 1})[:4]
    for name, x in settings.items():
        if isinstance(x, list) and len(x) == settings[layers] > 2:
            found[name] = [x[i] for i in keep]
    found[layers] = len(keep)
    return found


def configuration(transformers: Any, model_type: str) -> Any:
    """A small configuration of a type: shrunk, or what is written for it."""
    from tests.support.families import FAMILIES

    for family in FAMILIES:
        if family.model_type == model_type:
            return transformers.AutoConfig.for_model(model_type, **family.settings)
    default = transformers.AutoConfig.for_model(model_type)
    settings = shrunk(default.to_dict(), iter(range(VOCABULARY - 1, 80, -1)))
    for name in ("model_type", "transformers_version", "architectures", "dtype"):
        settings.pop(name, None)
    return type(default)(**settings)


def model_class(transformers: Any, config: Any) -> Any:
    """The class for causal or sequence-to-sequence language models, or the bare model's.

    An encoder-decoder's is that of the whole, though its decoder may be a language model, too.
    """
    auto = transformers.models.auto.modeling_auto
    mappings = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    if getattr(config, "is_encoder_decoder", False):
        mappings = [mappings[1], auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, mappings[0]]
    for mapping in (*mappings, auto.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise LookupError("transformers' auto classes have no model for it")


def build(torch: Any, transformers: Any, model_type: str) -> Any:
    """A random model: weights of unit gain, so that attention is neither flat nor one-hot."""
    config = configuration(transformers, model_type)
    cls = model_class(transformers, config)
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"its smallest configuration here has {count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and not re.search("conv|A_log|embed_positions|position_emb", name):
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise / weight[0].numel() ** 0.5)
    return model


def candidates(torch: Any, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Inputs that the model may take, the likeliest first."""
    config = model.config
    generator = torch.Generator().manual_seed(2)

    def find(*names: str, default: Any = None) -> Any:
        for part in (config, *(getattr(config, sub, None) for sub in config.sub_configs)):
            for name in names:
                found = getattr(part, name, None)
                if found is not None:
                    return found
        return default

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    ids = torch.randint(3, 80, (BATCH, TOKENS), generator=generator)
    size = find("image_size", "img_size", default=32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = find("num_channels", default=3)
    pixels = normal(BATCH, channels, height, width)
    video = normal(BATCH, find("num_frames", "frames_per_clip", default=2), channels, height, width)
    mel = find("num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    frames = 2 * find("max_source_positions", default=64)
    text = {"input_ids": ids}
    written = {"decoder_input_ids": ids[:, :WRITTEN]}
    both = {**text, **written}
    options: list[tuple[str, dict[str, Any]]] = [
        ("text", text),
        ("text, text", both),
        ("picture", {"pixel_values": pixels}),
        ("text, picture", {**text, "pixel_values": pixels}),
        ("picture, text", {"pixel_values": pixels, **written}),
        ("video", {"pixel_values": video}),
        ("video", {"pixel_values_videos": video}),
        ("sound", {"input_values": normal(BATCH, 4000)}),
        ("sound, text", {"input_values": normal(BATCH, 4000), **written}),
        *(
            (words, {"input_features": normal(BATCH, *shape), **more})
            for shape in ((mel, frames), (64, mel))
            for words, more in (
                ("sound", {}),
                ("sound, text", written),
                ("text, sound", text),
            )
        ),
        ("text, sound", {**text, "input_values": normal(BATCH, 4000)}),
    ]
    side = find("patch_size", default=8)
    side = side[0] if isinstance(side, (list, tuple)) else side
    patch = 3 * find("temporal_patch_size", default=1) * side**2
    grid = torch.tensor([[1, 8, 8], [1, 4, 4]])
    rows = normal(80, patch)
    options += [
        ("pictures", {"hidden_states": rows, "grid_thw": grid}),
        ("pictures", {"pixel_values": rows, "grid_thw": grid}),
        ("pictures", {"pixel_values": rows, "image_grid_thw": grid}),
    ]
    if getattr(config, "is_encoder_decoder", False):  # may write what it reads, if asked for less
        options.sort(key=lambda option: "decoder_input_ids" not in option[1])
    taken = inspect.signature(model.forward).parameters
    for words, inputs in options:
        if set(inputs) <= set(taken):
            yield words, inputs


# -- judging -------------------------------------------------------------------------------------


def tensors(torch: Any, output: Any) -> list[Any]:
    """The float tensors of an output that no cache holds."""
    if isinstance(output, torch.Tensor):
        return [output.double()] if output.is_floating_point() else []
    if isinstance(output, dict):
        # jattn returns no weights of attention.
        kept = (name for name in output if name != "past_key_values" and "attention" not in name)
        output = [output[name] for name in kept]
    if isinstance(output, (list, tuple)):
        return [x for part in output for x in tensors(torch, part)]
    return []


def compare(torch: Any, ours: list[Any], theirs: list[Any], masks: Sequence[Any] = ()) -> float:
    """The largest root mean square of a difference, as a share of the tensor's own.

    With masks [B, n], only of tensors [B, n, ...] of one of them, where it is not 0.
    """
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if masks:
            mask = next((x for x in masks if a.ndim >= 3 and a.shape[:2] == x.shape), None)
            if mask is None:
                continue
            a, b = a[mask.bool()], b[mask.bool()]
        if not torch.equal(b.isfinite(), a.isfinite()):
            return float("inf")
        a, b = (x.where(x.isfinite(), 0) for x in (a, b))
        size = b.square().mean().sqrt()
        if a.numel() and size > 0:
            largest = max(largest, float((a - b).square().mean().sqrt() / size))
    return largest


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that both attentions run."""

    torch: Any
    model: Any

    def forward(self, implementation: str, inputs: dict[str, Any]) -> Any:
        """Its output."""
        self.model.set_attn_implementation(implementation)
        self.torch.manual_seed(3)
        with self.torch.no_grad():
            return self.model(**inputs)

    def run(self, implementation: str, inputs: dict[str, Any]) -> list[Any]:
        """The tensors of its output."""
        return tensors(self.torch, self.forward(implementation, inputs))

    def read(self, implementation: str, inputs: dict[str, Any]) -> list[Any]:
        """The logits of a text that is read or written in three parts, the second one token."""
        name, part = "input_ids", PART
        if "decoder_input_ids" in inputs:
            name, part = "decoder_input_ids", WRITTEN_PART
        ids, found, cache = inputs[name], [], None
        for start, end in ((0, part), (part, part + 1), (part + 1, ids.shape[1])):
            step = {**inputs, name: ids[:, start:end], "use_cache": True}
            if name == "input_ids":
                step["position_ids"] = self.torch.arange(start, end).expand(BATCH, -1)
            output = self.forward(implementation, {**step, "past_key_values": cache})
            cache = output["past_key_values"]
            found.append(output["logits"].double())
        return found


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A line of the results."""

    model_type: str
    status: str
    reason: str = ""
    inputs: str = ""
    error: float = 0.0
    also: tuple[str, ...] = ()  # what else was compared
    of: str = ""  # the model's class


def first_that_runs(subject: Subject) -> tuple[str, dict[str, Any], list[Any]]:
    """Inputs that eager attention takes, in words and themselves, and what it makes of them.

    Raises:
      ValueError: it takes none; says why not the first.
    """
    failure: Exception | None = None
    for words, inputs in candidates(subject.torch, subject.model):
        try:
            wanted = subject.run("eager", inputs)
        except Exception as error:
            failure = failure or error
            continue
        if wanted:
            return words, inputs, wanted
    raise ValueError(str(failure) if failure else "it has other arguments")


@contextlib.contextmanager
def attending(module: Any, change: Any) -> Iterator[list[int]]:
    """Count the calls of jattn's attention, and change its keys."""
    original, calls = module.attend, []

    def attend(query: Any, key: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(query, change(key), *args, **options)

    module.attend = attend
    try:
        yield calls
    finally:
        module.attend = original


def one_line(error: BaseException, limit: int = 220) -> str:
    """An error's text, cut, without folders of this machine and what breaks a table."""
    text = re.sub(r"[\w./-]*/site-packages/", "", " ".join(str(error).split()))
    text = text.replace("|", "/") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def status_of(error: Exception) -> tuple[str, str]:
    """The status and the reason of what a model raises on jattn."""
    import jattn

    if isinstance(error, jattn.UnsupportedError):
        return REFUSED, one_line(error)
    return CRASHED, f"{type(error).__name__}: {one_line(error)}"


def judge(model_type: str) -> Verdict:
    """Build a type, run it with both attentions, and compare."""
    import torch
    import transformers

    package = "jattn.integrations.transformers"
    importlib.import_module(package).register()
    module = importlib.import_module(f"{package}.attention")
    try:
        model = build(torch, transformers, model_type)
    except Exception as error:
        kind = type(error).__name__
        return Verdict(model_type, NOT_BUILT, f"{BUILD}: {kind}: {one_line(error)}")

    verdict = judge_model(torch, module, model_type, model)
    return dataclasses.replace(verdict, of=type(model).__name__)


def judge_model(torch: Any, module: Any, model_type: str, model: Any) -> Verdict:
    """Run a model with both attentions, and compare."""
    subject = Subject(torch, model)
    run = subject.run
    try:
        words, inputs, wanted = first_that_runs(subject)
    except ValueError as error:
        reason = f"{INPUTS}: {one_line(error)}"
        return Verdict(model_type, NOT_BUILT, reason)
    if any(not bool(x.isfinite().any()) for x in wanted):
        return Verdict(model_type, NOT_BUILT, "returns NaN with random weights", words)
    try:
        with attending(module, lambda key: key) as calls:
            ours = run("jattn", inputs)
        if not calls:
            return Verdict(model_type, NOT_BUILT, ELSEWHERE, words)
        with attending(module, lambda key: key.flip(2)):
            fault = compare(torch, run("jattn", inputs), wanted)
    except Exception as error:
        return Verdict(model_type, *status_of(error), words)
    if compare(torch, run("eager", inputs), wanted) > LIMIT * fault:
        return Verdict(model_type, NOT_BUILT, "eager attention differs from itself", words)
    error = compare(torch, ours, wanted)
    if fault < 1e-4:
        return Verdict(model_type, NOT_BUILT, "its output does not show attention", words)
    if error > LIMIT * fault:
        reason = f"differs by {error:.1e} of its output, a fault by {fault:.1e}"
        return Verdict(model_type, WRONG, reason, words, error)
    verdict = Verdict(model_type, RIGHT, "", words, error)
    if "input_ids" in inputs and words in ("text", "text, text"):
        verdict = padded(subject, inputs, fault, verdict, "padding")
    if words == "text" or "decoder_input_ids" in inputs:
        verdict = in_parts(subject, inputs, fault, verdict, "a cache")
    return verdict


def padded(
    subject: Subject, inputs: dict[str, Any], fault: float, verdict: Verdict, what: str
) -> Verdict:
    """The same text with padding, if eager attention can."""
    mask = subject.torch.ones_like(inputs["input_ids"])
    mask[0, -7:] = 0
    masks = [mask]
    if "decoder_input_ids" in inputs:
        masks.append(subject.torch.ones_like(inputs["decoder_input_ids"]))
    inputs = {**inputs, "attention_mask": mask}
    try:
        wanted = subject.run("eager", inputs)
    except Exception:
        return verdict
    if not any(x.ndim >= 3 and x.shape[:2] == masks[-1].shape for x in wanted):
        return verdict
    try:
        error = compare(subject.torch, subject.run("jattn", inputs), wanted, masks)
    except Exception as raised:
        return with_failure(verdict, raised, what)
    return conclude(verdict, error, fault, what)


def in_parts(
    subject: Subject, inputs: dict[str, Any], fault: float, verdict: Verdict, what: str
) -> Verdict:
    """The same text in parts with a cache, if eager attention can."""
    try:
        wanted = subject.read("eager", inputs)
    except Exception:
        return verdict
    try:
        error = compare(subject.torch, subject.read("jattn", inputs), wanted)
    except Exception as raised:
        return with_failure(verdict, raised, what)
    return conclude(verdict, error, fault, what)


def with_failure(verdict: Verdict, error: Exception, what: str) -> Verdict:
    """The verdict where one more comparison raises: a refusal is a note, a crash is not."""
    status, reason = status_of(error)
    status = verdict.status if status == REFUSED else status
    notes = (verdict.reason, f"with {what}: {reason}")
    return dataclasses.replace(verdict, status=status, reason="; ".join(filter(None, notes)))


def conclude(verdict: Verdict, error: float, fault: float, what: str) -> Verdict:
    """The verdict with one more comparison."""
    if error > LIMIT * fault:
        reason = f"with {what}: differs by {error:.1e} of its output"
        return dataclasses.replace(verdict, status=WRONG, reason=reason, error=error)
    return dataclasses.replace(verdict, error=max(verdict.error, error), also=(*verdict.also, what))


# -- workers and the page ------------------------------------------------------------------------


def all_types() -> list[str]:
    """The model types that transformers' auto classes build a model for."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return sorted({*auto.MODEL_MAPPING_NAMES, *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})


def work(types: list[str], out: pathlib.Path) -> None:
    """Judge types one after another, in this process."""
    import warnings

    import jax
    import torch
    import transformers

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    jax.config.update("jax_disable_most_optimizations", True)  # hundreds of small programs
    for model_type in types:
        try:
            verdict = judge(model_type)
        except BaseException as error:  # a worker must say of which type it died
            reason = f"{type(error).__name__}: {one_line(error)}"
            verdict = Verdict(model_type, NOT_BUILT, reason)
        with out.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")


def census(types: list[str], out: pathlib.Path, seconds: float, share: int) -> None:
    """Judge types by workers of `share` types each; one that dies or stalls costs one type."""
    left = collections.deque(types)
    while left:
        batch = [left.popleft() for _ in range(min(share, len(left)))]
        while batch:
            before = len(_lines(out))
            command = [sys.executable, "-m", "tests.transformers_census", "--out", str(out)]
            worker = subprocess.Popen(
                [*command, "--work", ",".join(batch)],
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            judged, since = 0, time.monotonic()
            while worker.poll() is None and time.monotonic() - since < seconds:
                time.sleep(0.5)
                if len(_lines(out)) - before > judged:
                    judged, since = len(_lines(out)) - before, time.monotonic()
            stalled = worker.poll() is None
            worker.kill()
            worker.wait()
            batch = batch[len(_lines(out)) - before :]
            if batch:
                reason = f"no answer in {seconds:.0f} s" if stalled else "its process died"
                verdict = Verdict(batch.pop(0), NOT_BUILT, reason)
                with out.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def read(path: pathlib.Path = RESULTS) -> tuple[list[Verdict], dict[str, str]]:
    """The verdicts of a file, and the versions they are for."""
    head, *rest = (json.loads(line) for line in _lines(path))
    return [Verdict(**{**row, "also": tuple(row["also"])}) for row in rest], head


def _by_reason(verdicts: list[Verdict]) -> list[str]:
    """A list of types by reason; a reason that many share, or begin with, is a heading."""
    groups: dict[str, dict[str, list[str]]] = {}
    for v in verdicts:
        kind, _, rest = v.reason.partition(": ")
        kind, rest = (kind, rest) if kind in (ELSEWHERE, BUILD, INPUTS) else ("", v.reason)
        of = f" (`{v.of}`)" if v.of else ""
        groups.setdefault(kind, {}).setdefault(rest, []).append(f"`{v.model_type}`{of}")
    lines: list[str] = []
    for kind, reasons in sorted(groups.items()):
        if kind:
            lines += ["", f"### {kind[0].upper()}{kind[1:]}", ""]
        for reason, types in reasons.items():
            why = re.sub(r"[<>`*_]|(?<= )[-+](?= )", lambda found: "\\" + found.group(), reason)
            text = ", ".join(types) + (f": {why}" if why else "")
            lines += textwrap.wrap(
                f"- {text}", 120, subsequent_indent="  ", break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
    return lines


def page(verdicts: list[Verdict], versions: dict[str, str]) -> str:
    """The page of results."""
    kinds = {
        RIGHT: "Right",
        WRONG: "Wrong",
        CRASHED: "Crashed",
        REFUSED: "Refused",
        NOT_BUILT: "Not judged",
    }
    counts = collections.Counter(v.status for v in verdicts)
    lines = [
        "# transformers' models",
        "",
        "Generated by `python -m tests.transformers_census --page`; the script's first lines say",
        f"how a type is judged. transformers {versions['transformers']},",
        f"torch {versions['torch']}, JAX {versions['jax']}, on a CPU, {versions['date']}.",
        "",
        f"Of {len(verdicts)} model types, {counts[RIGHT]} are right, {counts[WRONG]} wrong,",
        f"{counts[REFUSED]} refused, {counts[CRASHED]} crashed with another error, and",
        f"{counts[NOT_BUILT]} could not be judged: they are not built small by the census's rules,",
        "or do not call transformers' attention interface.",
    ]
    for status, title in kinds.items():
        chosen = sorted((v for v in verdicts if v.status == status), key=lambda v: v.model_type)
        if not chosen:
            continue
        lines += ["", f"## {title}", ""]
        if status == RIGHT:
            lines += ["| type | class | reads | also with |", "|---|---|---|---|"]
            for v in chosen:
                cells = (f"`{v.model_type}`", f"`{v.of}`", v.inputs, ", ".join(v.also))
                lines.append(f"| {' | '.join(cells)} |")
            if any(v.reason for v in chosen):
                lines += ["", "Of these, some were not compared in every way:", ""]
        lines += _by_reason([v for v in chosen if v.reason])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.transformers_census", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--types", help="some of them, with commas; all if not given")
    parser.add_argument("--seconds", type=float, default=180, help="of a type (%(default)s)")
    parser.add_argument("--share", type=int, default=12, help="types of a worker (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="results, appended to")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work.split(","), args.out)
        return
    if args.page:
        PAGE.write_text(page(*read(args.out)))
        return
    if not args.out.exists():
        import jax
        import torch
        import transformers

        head = {"date": time.strftime("%Y-%m-%d"), "transformers": transformers.__version__}
        head |= {"torch": torch.__version__, "jax": jax.__version__}
        args.out.write_text(json.dumps(head) + "\n")
    done = {json.loads(line).get("model_type") for line in _lines(args.out)}
    types = args.types.split(",") if args.types else all_types()
    census([name for name in types if name not in done], args.out, args.seconds, args.share)


if __name__ == "__main__":
    main()
