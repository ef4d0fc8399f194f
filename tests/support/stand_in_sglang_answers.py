"""A stand-in for sglang-jax: the classes that take requests and send responses."""

from __future__ import annotations

import dataclasses
import types
from types import SimpleNamespace

import numpy as np


class Request:
    """`Req`."""

    def __init__(self, rid="a", prompt=(1, 2, 3), tokens=(), **changes):
        self.rid, self.origin_input_ids, self.output_ids = rid, list(prompt), list(tokens)
        self.sampling_params = SimpleNamespace(
            max_new_tokens=changes.pop("limit", 8),
            ignore_eos=changes.pop("ignore_eos", False),
            stop_token_ids=changes.pop("stop_token_ids", None),
        )
        self.stop_tokens = changes.pop("stop_tokens", ())
        self.finished_reason = self.finished_len = self.to_finish = None
        self.is_retracted = self.input_logprob_sent = False
        self.send_output_token_logprobs_offset = 0
        self.return_logprob = self.return_output_logprob_only = False
        self.top_logprobs_num, self.token_ids_logprob = 0, None
        for kind in ("token_", "top_", "token_ids_"):
            for part in ("val", "idx"):
                setattr(self, f"output_{kind}logprobs_{part}", [-float(t) for t in tokens])
        vars(self).update(changes)

    def finished(self):
        return self.finished_reason is not None

    def set_finish_with_abort(self, message):
        self.origin_input_ids, self.to_finish = [0], message

    def check_finished(self, new_accepted_len=1):
        if self.finished():
            return
        if self.to_finish:
            self.finished_reason = self.to_finish
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished_reason = "length"
        else:
            self._check_token_based_finish(self.output_ids[-new_accepted_len:])

    def _check_token_based_finish(self, new_accepted_tokens):
        if self.sampling_params.ignore_eos:
            return False
        for i, token in enumerate(new_accepted_tokens):
            if token in self.stop_tokens:
                self.finished_reason = token
                self.finished_len = len(self.output_ids) - len(new_accepted_tokens) + i + 1
                return True
        return False

    @property
    def answer(self):
        return self.output_ids[: self.finished_len]


class Batch:
    """`ScheduleBatch`: a list of requests for each device."""

    def __init__(self, *devices):
        requests = [request for device in devices for request in device]
        self.reqs_info = [Info(list(device)) for device in devices]
        self.return_logprob = any(one.return_logprob for one in requests)
        self.return_output_logprob_only = all(one.return_output_logprob_only for one in requests)
        if self.return_logprob:
            for info in self.reqs_info:
                info.top_logprobs_nums = [one.top_logprobs_num for one in info.reqs]
                info.token_ids_logprobs = [one.token_ids_logprob for one in info.reqs]

    @classmethod
    def init_new(cls, reqs):
        return cls(*reqs)

    def filter_batch(self):
        for info in self.reqs_info:
            kept = [i for i, one in enumerate(info.reqs) if not one.finished()]
            info.reqs = [info.reqs[i] for i in kept]
            if info.top_logprobs_nums is not None:
                info.top_logprobs_nums = [info.top_logprobs_nums[i] for i in kept]
                info.token_ids_logprobs = [info.token_ids_logprobs[i] for i in kept]
        requests = [one for info in self.reqs_info for one in info.reqs]
        self.return_logprob = any(one.return_logprob for one in requests)
        self.return_output_logprob_only = all(one.return_output_logprob_only for one in requests)

    def merge_batch(self, other):
        for mine, theirs in zip(self.reqs_info, other.reqs_info, strict=True):
            if self.return_logprob or other.return_logprob:
                mine.top_logprobs_nums.extend(theirs.top_logprobs_nums)
                mine.token_ids_logprobs.extend(theirs.token_ids_logprobs)
            mine.reqs.extend(theirs.reqs)
        self.return_logprob |= other.return_logprob
        self.return_output_logprob_only |= other.return_output_logprob_only


@dataclasses.dataclass
class Info:
    """`ScheduleReqsInfo`."""

    reqs: list
    top_logprobs_nums: list | None = None
    token_ids_logprobs: list | None = None
    extend_lens: list | None = None
    extend_logprob_start_lens: list | None = None


class Sender:
    """The part of `Scheduler` that sends responses."""

    def __init__(self):
        self.sent = []

    def stream_output_generation(self, requests, of_prompts, of_answers, skipped=None):
        found = []
        for one in requests:
            asks = of_prompts and one.return_logprob
            start = one.send_output_token_logprobs_offset
            found.append(one.output_token_logprobs_val[start:] if asks else [])
            if asks:
                one.send_output_token_logprobs_offset = len(one.output_token_logprobs_val)
        self.sent.append((of_prompts, of_answers, found))


def materialize(values, lens_per_dp=None):
    assert lens_per_dp is None
    return tuple(float(value) for value in np.asarray(values))


class Detokenizer:
    """`DetokenizerManager`, with bytes as tokens and 0 as a special one."""

    def __init__(self, module):
        self.module, self.decode_status, self.calls = module, {}, []
        self.tokenizer = SimpleNamespace(all_special_ids=[0])

    def _extract_routed_experts(self, received):
        return received.rids

    def trim_matched_stop(self, output, reason, no_stop_trim):
        matched = (reason or {}).get("matched")
        return output if no_stop_trim or not matched else output[:-1]

    def handle_batch_token_id_out(self, received):
        self.calls.append(received.rids)
        skips, texts, tokens = received.skip_special_tokens[0], [], []
        for i, rid in enumerate(received.rids):
            new = list(received.decode_ids[i])
            status = self.decode_status.setdefault(
                rid, SimpleNamespace(decode_ids=[], read_offset=0, text="", sent=0)
            )
            status.decode_ids += new
            read = self.trim_matched_stop(
                status.decode_ids, received.finished_reasons[i], received.no_stop_trim[i]
            )[status.read_offset :]
            shown = [token for token in read if token or not skips]
            text = bytes(shown).decode(errors="replace")
            if received.finished_reasons[i] is None and text and not text.endswith("\ufffd"):
                status.text, status.read_offset, text = (
                    status.text + text,
                    len(status.decode_ids),
                    "",
                )
            elif received.finished_reasons[i] is None:
                text = self.module.find_printable_text(text)
            whole = status.text + text
            texts.append(whole[status.sent :])
            status.sent = len(whole)
            tokens.append(
                self.module.process_special_tokens_spaces(
                    read, received.skip_special_tokens[i], self.tokenizer.all_special_ids
                )
            )
        return Sent(received.rids, received.finished_reasons, texts, tokens, None)


def without_special(tokens, skips, special):
    return [token for token in tokens if token not in special] if skips else tokens


@dataclasses.dataclass
class Received:
    """`BatchTokenIDOut`."""

    rids: list
    decode_ids: list
    finished_reasons: list
    skip_special_tokens: list
    spaces_between_special_tokens: list
    no_stop_trim: list
    decoded_texts: list
    read_offsets: list


@dataclasses.dataclass
class Sent:
    """`BatchStrOut`."""

    rids: list
    finished_reasons: list
    output_strs: list
    output_ids: list
    output_routed_experts: list | None


def received(**requests):
    """Receive requests by name: tokens, what ended them, whether special tokens are skipped."""
    rows = list(requests.values())
    count = len(rows)
    return Received(
        rids=list(requests),
        decode_ids=[row[0] for row in rows],
        finished_reasons=[row[1] for row in rows],
        skip_special_tokens=[row[2] for row in rows],
        spaces_between_special_tokens=[True] * count,
        no_stop_trim=[False] * count,
        decoded_texts=[""] * count,
        read_offsets=[0] * count,
    )


class Many:
    """`GenerateReqInput`, which leaves the key out."""

    def __init__(self, extra_key):
        self.extra_key = extra_key

    def __getitem__(self, i):
        return Many(None)


class Worker:
    """`ModelWorker`."""

    def __init__(self, max_running_requests, chunk):
        self.max_running_requests, self.chunk = max_running_requests, chunk

    def get_max_padded_size(self):
        return min(self.max_running_requests, self.chunk), self.chunk


class Compiler:
    """`CompilationManager`."""

    def __init__(self, dp_size, largest):
        self.dp_size, self.largest = dp_size, largest

    def _compute_bs_buckets(self, user_paddings):
        return [*(user_paddings or [1, 2, 4, 8]), self.largest]


class Loader:
    """`WeightLoader`, of a model of two layers."""

    def load_weights_from_safetensors(self, wanted, found):
        for name in wanted:
            if name not in found and not self._is_excluded_layer_weight(name):
                found.append(f"nothing for {name}")

    def _is_excluded_layer_weight(self, name):
        return name.startswith("model.layers.2.")


class Rotary:
    """`Llama3RotaryEmbedding`."""

    def __init__(self, factor, low, high, original):
        self.scaling_factor, self.low_freq_factor, self.high_freq_factor = factor, low, high
        self.orig_max_position = original
        self._inv_freq_np = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)


class Scheduler:
    """The part of `Scheduler` that reads its messages."""

    def __init__(self):
        self.pd, self.last_batch, self.done = "", None, []

    def pause_generation(self, asked):
        self.done.append(asked)

    def continue_generation(self, asked):
        self.done.append(asked)

    def process_input_requests(self, requests):
        for asked in requests:
            (self.continue_generation if asked == "continue" else self.pause_generation)(asked)


class Adapter:
    """`LoRAConfig`, which reads a file at its path; here the path itself is the content."""

    def __init__(self, path):
        self.hf_config = path


class Counter:
    """A penalizer and its counts, a row per request."""

    def __init__(self, count, name):
        self.name = name
        setattr(self, name, np.zeros((count, 1 if name == "len_output_tokens" else 8), int))

    def is_prepared(self):
        return True


class Sampling:
    """`SamplingBatchInfo` of one prefill."""

    kinds = None

    @classmethod
    def from_schedule_batch(cls, info, vocab_size):
        made = cls()
        made.penalizer_orchestrator = SimpleNamespace(
            penalizers={kind: kind(len(info.reqs), name) for kind, name in cls.kinds.items()}
        )
        return made


def modules(subclass):
    """Return modules by name, with new classes for each test."""
    batch, processor = types.ModuleType("schedule_batch"), types.ModuleType("processor")
    batch.Req, batch.ScheduleBatch = subclass("Req", Request), subclass("ScheduleBatch", Batch)
    batch.FINISH_MATCHED_TOKEN = lambda matched: matched
    batch.swa_eviction_peak_tokens = lambda window, page: 2 * window + 2 * page
    processor.SchedulerOutputProcessorMixin = subclass("Mixin", Sender)
    processor._input_logprob_lens_per_dp = lambda batch: None
    processor._materialize_input_token_logprobs = materialize
    detokenizer = types.ModuleType("detokenizer_manager")
    detokenizer.DetokenizerManager = subclass("DetokenizerManager", Detokenizer)
    detokenizer.find_printable_text = lambda text: text
    detokenizer.process_special_tokens_spaces = without_special
    detokenizer.run_detokenizer_process = lambda *arguments: arguments
    io_struct, tp_worker = types.ModuleType("io_struct"), types.ModuleType("tp_worker")
    io_struct.GenerateReqInput = subclass("GenerateReqInput", Many)
    tp_worker.ModelWorker = subclass("ModelWorker", Worker)
    compilation = types.ModuleType("compilation_manager")
    compilation.CompilationManager = subclass("CompilationManager", Compiler)
    weights = types.ModuleType("weight_utils")
    weights.WeightLoader = subclass("WeightLoader", Loader)
    embeddings = types.ModuleType("embeddings")
    embeddings.Llama3RotaryEmbedding = subclass("Llama3RotaryEmbedding", Rotary)
    scheduler = types.ModuleType("scheduler")
    scheduler.Scheduler = subclass("Scheduler", Scheduler)
    lora, lora_config = types.ModuleType("lora"), types.ModuleType("lora_config")
    lora_config.LoRAConfig = subclass("LoRAConfig", Adapter)
    sampling, penaltylib = types.ModuleType("sampling"), types.ModuleType("penaltylib")
    sampling.penaltylib, sampling_info = penaltylib, types.ModuleType("sampling_batch_info")
    counted = {
        "BatchedFrequencyPenalizer": "token_frequencies",
        "BatchedPresencePenalizer": "token_presence",
        "BatchedMinNewTokensPenalizer": "len_output_tokens",
    }
    for name in counted:
        setattr(penaltylib, name, subclass(name, Counter))
    kinds = {getattr(penaltylib, kind): name for kind, name in counted.items()}
    sampling_info.SamplingBatchInfo = subclass("SamplingBatchInfo", Sampling, kinds=kinds)
    managers = "sgl_jax.srt.managers"
    return {
        f"{managers}.schedule_batch": batch,
        f"{managers}.scheduler_output_processor_mixin": processor,
        f"{managers}.detokenizer_manager": detokenizer,
        f"{managers}.io_struct": io_struct,
        f"{managers}.scheduler": scheduler,
        f"{managers}.tp_worker": tp_worker,
        "sgl_jax.srt.layers.embeddings": embeddings,
        "sgl_jax.srt.utils.weight_utils": weights,
        "sgl_jax.srt.model_executor.compilation_manager": compilation,
        "sgl_jax.srt.lora": lora,
        "sgl_jax.srt.lora.lora_config": lora_config,
        "sgl_jax.srt.sampling": sampling,
        "sgl_jax.srt.sampling.penaltylib": penaltylib,
        "sgl_jax.srt.sampling.sampling_batch_info": sampling_info,
    }
