"""Test which model types of the installed transformers are right on jattn, and say why not.

    python -m tests.tools.transformers_census [--types llama,t5] [--share 12] [--out FILE] [--page]

Needs torch and transformers (`pip install '.[conformance]'`). All types take a quarter of an hour.
Every type that transformers' auto classes know is built with a small random configuration. The
model reads random inputs twice, with transformers' eager attention and with jattn's. A fault sets
the limit: outputs may differ by a thousandth of the difference that attention to keys in the
opposite order makes. A model that reads text also reads it with padding, and one with a cache also
reads or writes it in parts. An encoder-decoder is judged as a whole.

Each worker process judges a few types, and each type has a time limit, so a crash or a stall costs
one type. `--page` writes docs/transformers-models.md from the results.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
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

from tests.support.census_models import BATCH, build, candidates

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "data" / "transformers-census.jsonl"
PAGE = ROOT / "docs" / "transformers-models.md"

RIGHT, REFUSED, WRONG, NOT_BUILT = "right", "refused", "wrong", "not judged"
CRASHED = "crashed"  # with an error other than a refusal
# Beginnings of reasons that have their own heading on the page.
BUILD, INPUTS = "cannot be built small", "takes none of the census's inputs"
ELSEWHERE = "does not call transformers' attention interface"
PART, WRITTEN_PART = 18, 6  # tokens of the first part, if it is read, and if it is written
MOST_MEMORY = 8 << 30
# As a share of the fault's difference; float32 rounding makes a hundredth of this limit.
LIMIT = 1e-3


# -- judging -------------------------------------------------------------------------------------


def tensors(torch: Any, output: Any) -> list[Any]:
    """Return the float tensors of an output, except those of caches and attention weights."""
    if isinstance(output, torch.Tensor):
        return [output.double()] if output.is_floating_point() else []
    if isinstance(output, dict):
        # jattn returns no attention weights.
        kept = (name for name in output if name != "past_key_values" and "attention" not in name)
        output = [output[name] for name in kept]
    if isinstance(output, (list, tuple)):
        return [x for part in output for x in tensors(torch, part)]
    return []


def compare(torch: Any, ours: list[Any], theirs: list[Any], masks: Sequence[Any] = ()) -> float:
    """Return the largest RMS difference of a pair of tensors, relative to the RMS of `theirs`.

    With masks [B, n], compare only tensors [B, n, ...] that fit one of them, where it is not 0.
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
    """A model to run with eager attention and with jattn's."""

    torch: Any
    model: Any

    def forward(self, implementation: str, inputs: dict[str, Any]) -> Any:
        """Run the model with an attention implementation, and return its output."""
        self.model.set_attn_implementation(implementation)
        self.torch.manual_seed(3)
        with self.torch.no_grad():
            return self.model(**inputs)

    def run(self, implementation: str, inputs: dict[str, Any]) -> list[Any]:
        """Run the model, and return the tensors of its output."""
        return tensors(self.torch, self.forward(implementation, inputs))

    def read(self, implementation: str, inputs: dict[str, Any]) -> list[Any]:
        """Read or write a text in three parts, the second of one token, and return the logits."""
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
    """The result of one model type: a line of the results file."""

    model_type: str
    status: str
    reason: str = ""
    inputs: str = ""
    error: float = 0.0
    also: tuple[str, ...] = ()  # what else was compared
    of: str = ""  # the model's class


def first_that_runs(subject: Subject) -> tuple[str, dict[str, Any], list[Any]]:
    """Return the first inputs that run with eager attention: their name, themselves, the outputs.

    Raises:
      ValueError: no inputs run; it says why the first ones did not.
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
    """Apply `change` to the keys of jattn's attention; yield a list with an entry per call."""
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
    """Return an error's text, shortened, without local folders and what would break a table."""
    text = re.sub(r"[\w./-]*/site-packages/", "", " ".join(str(error).split()))
    text = text.replace("|", "/") or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def status_of(error: Exception) -> tuple[str, str]:
    """Return the status and the reason for an error that a model raises on jattn."""
    import jattn

    if isinstance(error, jattn.UnsupportedError):
        return REFUSED, one_line(error)
    return CRASHED, f"{type(error).__name__}: {one_line(error)}"


def judge(model_type: str) -> Verdict:
    """Build a model of a type, run it with both attention implementations, and compare."""
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
    """Run a model with both attention implementations, and compare."""
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
    """Compare on the same text with padding, if that runs with eager attention."""
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
    """Compare on the same text in parts with a cache, if that runs with eager attention."""
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
    """Add a comparison that raised: a refusal only adds a note, a crash changes the status."""
    status, reason = status_of(error)
    status = verdict.status if status == REFUSED else status
    notes = (verdict.reason, f"with {what}: {reason}")
    return dataclasses.replace(verdict, status=status, reason="; ".join(filter(None, notes)))


def conclude(verdict: Verdict, error: float, fault: float, what: str) -> Verdict:
    """Add a comparison to the verdict."""
    if error > LIMIT * fault:
        reason = f"with {what}: differs by {error:.1e} of its output"
        return dataclasses.replace(verdict, status=WRONG, reason=reason, error=error)
    return dataclasses.replace(verdict, error=max(verdict.error, error), also=(*verdict.also, what))


# -- workers and the page ------------------------------------------------------------------------


def all_types() -> list[str]:
    """Return the model types for which transformers' auto classes build a model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    return sorted({*auto.MODEL_MAPPING_NAMES, *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})


def work(types: list[str], out: pathlib.Path) -> None:
    """Judge types one after another in this process, and append the verdicts to `out`."""
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
        except BaseException as error:  # a worker must report which type ended it
            reason = f"{type(error).__name__}: {one_line(error)}"
            verdict = Verdict(model_type, NOT_BUILT, reason)
        with out.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")


def census(types: list[str], out: pathlib.Path, seconds: float, share: int) -> None:
    """Judge types in workers of `share` types each; one that dies or stalls costs one type."""
    left = collections.deque(types)
    while left:
        batch = [left.popleft() for _ in range(min(share, len(left)))]
        while batch:
            before = len(_lines(out))
            command = [sys.executable, "-m", "tests.tools.transformers_census", "--out", str(out)]
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
    """Return the verdicts in a file, and the versions that they are for."""
    head, *rest = (json.loads(line) for line in _lines(path))
    return [Verdict(**{**row, "also": tuple(row["also"])}) for row in rest], head


def _by_reason(verdicts: list[Verdict]) -> list[str]:
    """List types by reason, with headings for reasons that many types share."""
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
    """Return the page of results."""
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
        "Generated by `python -m tests.tools.transformers_census --page`, whose docstring says",
        f"how a type is judged. Run with transformers {versions['transformers']},",
        f"torch {versions['torch']}, JAX {versions['jax']}, on a CPU, {versions['date']}.",
        "",
        f"Of {len(verdicts)} model types, {counts[RIGHT]} are right, {counts[WRONG]} are wrong,",
        f"{counts[REFUSED]} are refused, {counts[CRASHED]} crash with another error, and",
        f"{counts[NOT_BUILT]} could not be judged, mostly because the census cannot build a small",
        "model of the type or has no inputs for it, or because the model does not call",
        "transformers' attention interface.",
    ]
    for status, title in kinds.items():
        chosen = sorted((v for v in verdicts if v.status == status), key=lambda v: v.model_type)
        if not chosen:
            continue
        lines += ["", f"## {title}", ""]
        if status == RIGHT:
            lines += ["| type | class | inputs | also tested with |", "|---|---|---|---|"]
            for v in chosen:
                cells = (f"`{v.model_type}`", f"`{v.of}`", v.inputs, ", ".join(v.also))
                lines.append(f"| {' | '.join(cells)} |")
            if any(v.reason for v in chosen):
                lines += ["", "Some of these were not compared in every way:", ""]
        lines += _by_reason([v for v in chosen if v.reason])
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.transformers_census", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--types", help="comma-separated model types (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=180, help="time limit of a type (%(default)s)"
    )
    parser.add_argument(
        "--share", type=int, default=12, help="types per worker process (%(default)s)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=RESULTS, help="file to append results to"
    )
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
