"""What jattn fixes in the outputs of sglang-jax, with a stand-in for the host.

`tests/integrations/test_sglang_jax_requests.py` sends requests to the real host.
"""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from jattn.integrations import sglang_jax
from tests.support import stand_in_sglang
from tests.support.stand_in_sglang_answers import received

host = stand_in_sglang.host  # the fixture


def test_rotary_frequencies_are_scaled_as_in_llama_3(host):
    """Frequencies with few turns in the original length are divided; those with many are not."""
    sglang_jax.install()
    plain = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
    found = host.embeddings.Llama3RotaryEmbedding(8.0, 1.0, 4.0, 64)._inv_freq_np
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_array_equal(found[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(found[turns < 1], plain[turns < 1] / 8, 1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert (found[between] < plain[between]).all()
    assert (found[between] > plain[between] / 8).all()
    found = host.embeddings.Llama3RotaryEmbedding(8.0, 2.0, 2.0, 64)._inv_freq_np
    np.testing.assert_allclose(found, np.where(turns > 2, plain, plain / 8), 1e-6)


def requests(host, *kinds, **changes):
    """Make requests that ask for prompt (p) or only output (a) log-probabilities, or none (n)."""
    return [
        host.batch.Req(
            rid=f"{kind}{i}",
            tokens=(i + 1, i + 2),
            return_logprob=kind == "p",
            return_output_logprob_only=kind == "a",
            top_logprobs_num=3 if kind == "p" else 0,
            **changes,
        )
        for i, kind in enumerate(kinds)
    ]


def test_each_request_is_sent_its_own_logprobs_once(host):
    sglang_jax.install()
    sender = host.processor.SchedulerOutputProcessorMixin()
    asked = requests(host, "n", "a", "p", "a")
    for tokens in ((), (9,)):
        for one in asked:
            one.output_token_logprobs_val += [-float(token) for token in tokens]
        sender.stream_output_generation(asked, True, False)
    assert sender.sent[0] == (True, False, [[], [-2.0, -3.0], [-3.0, -4.0], [-4.0, -5.0]])
    assert sender.sent[1] == (True, False, [[], [-9.0], [-9.0], [-9.0]])
    assert [(one.return_logprob, one.return_output_logprob_only) for one in asked] == [
        (False, False), (False, True), (True, False), (False, True),
    ]  # fmt: skip
    sender.stream_output_generation(requests(host, "n"), False, False)
    assert sender.sent[2] == (False, False, [[]])


def test_an_empty_output_has_no_logprobs(host):
    sglang_jax.install()
    sender = host.processor.SchedulerOutputProcessorMixin()
    asked = requests(host, "p", finished_len=0)
    sender.stream_output_generation(asked, True, False)
    assert sender.sent == [(True, False, [[]])]


def test_batches_know_what_their_requests_ask_for(host):
    """This holds after requests that asked have ended, and others have joined."""
    sglang_jax.install()
    make = host.batch.ScheduleBatch
    asks, plain, late = (requests(host, kind)[0] for kind in "pnn")
    batch = make.init_new([[asks, plain]])
    assert isinstance(batch, make)
    asks.finished_reason = "length"
    batch.filter_batch()
    batch.merge_batch(make.init_new([[late]]))
    plain.finished_reason = "length"
    batch.filter_batch()
    assert [one.rid for one in batch.reqs_info[0].reqs] == [late.rid]
    asks = requests(host, "p")[0]
    batch.merge_batch(make.init_new([[asks]]))
    assert batch.reqs_info[0].top_logprobs_nums == [0, 3]


@pytest.mark.parametrize(("kinds", "want"), [("an", True), ("nn", False), ("pa", True)])
def test_output_logprobs_are_computed_if_any_request_asks(host, kinds, want):
    """The unpatched host computes them only if all requests ask."""
    sglang_jax.install()
    batch = host.batch.ScheduleBatch.init_new([requests(host, *kinds), []])
    assert batch.return_output_logprob_only == want
    batch.filter_batch()
    assert batch.return_output_logprob_only == want


@pytest.mark.parametrize("is_padded", [True, False])
def test_rows_of_requests_that_do_not_ask_are_left_out(host, is_padded):
    """On two devices; one request is retracted, and one asks for rows from its third token on."""
    sglang_jax.install()
    batch = host.batch.ScheduleBatch(requests(host, "n", "p", "p"), requests(host, "p", "a"))
    first, second = batch.reqs_info
    first.extend_lens, first.extend_logprob_start_lens = [2, 5, 1], [1, 2, 0]
    second.extend_lens, second.extend_logprob_start_lens = [2, 1], [0, 0]
    first.reqs[2].is_retracted = True
    batch.forward_mode = SimpleNamespace(is_extend=lambda: True)
    rows = host.processor._input_logprob_lens_per_dp(batch)
    assert rows == [[(1, False), (3, True), (1, False)], [(2, True), (1, False)]]
    values = [1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 0, 0, 0, 0] if is_padded else [1, 2, 3, 4, 5, 6, 7, 8]
    found = host.processor._materialize_input_token_logprobs(np.array(values), rows)
    assert found == (2.0, 3.0, 4.0, 6.0, 7.0)
    assert host.processor._materialize_input_token_logprobs(np.array([1]), None) == (1.0,)
    batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
    assert host.processor._input_logprob_lens_per_dp(batch) is None


def test_lists_of_top_tokens_for_openai_clients_are_present_and_in_order(host):
    sglang_jax.install()
    found: dict = {}
    host.TokenizerManager(host.ServerArgs()).convert_logprob_style(found, None)
    assert found["output_top_logprobs"] == []
    assert host.Chat()._process_logprobs_tokens(None, use_token_index=False) is True


def test_requests_that_the_scheduler_refuses_wait_for_no_room(host):
    """They also need no length limit."""
    sglang_jax.install()
    request = host.batch.Req(limit=None)
    request.set_finish_with_abort("too long")
    assert request.sampling_params.max_new_tokens == 1
    request.check_finished()
    assert request.finished_reason == "too long"


def test_requests_that_are_aborted_in_the_queue_are_forgotten(host):
    sglang_jax.install()
    manager = host.TokenizerManager(host.ServerArgs())
    state = manager.rid_to_state["a"] = SimpleNamespace(finished=False)
    for _ in range(2):  # the second time, its client is gone
        manager._handle_abort_req(SimpleNamespace(rid="a"))
    assert state.finished
    assert manager.told == [state]
    assert not manager.rid_to_state


ENDS = {  # tokens so far, how many are new, the limit, the output, and the reason why it ends
    "in time": ([1, 2, 3], 1, 8, [1, 2, 3], None),
    "at the limit": ([1, 2, 3], 1, 3, [1, 2, 3], "length"),
    "past it": ([1, 2, 3, 4], 3, 2, [1, 2], "length"),
    "with a stop token": ([1, 2, 7, 4], 3, 8, [1, 2, 7], 7),
    "with a stop token before the limit": ([1, 7, 3, 4], 3, 3, [1, 7], 7),
    "with a stop token, in the step that passes the limit": ([1, 7, 3], 2, 3, [1, 7], 7),
    "before a stop token": ([1, 2, 3, 7], 3, 2, [1, 2], "length"),
    "before it starts": ([7], 1, 0, [], "length"),
}


@pytest.mark.parametrize("name", ENDS)
def test_outputs_end_where_they_should(host, name):
    tokens, new, limit, answer, reason = ENDS[name]
    sglang_jax.install()
    request = host.batch.Req(tokens=tokens, limit=limit, stop_tokens=(7,))
    request.check_finished(new)
    assert (request.answer, request.finished_reason) == (answer, reason)
    assert request.output_ids == tokens  # all tokens have slots in pages
    request.check_finished(new)
    assert (request.answer, request.finished_reason) == (answer, reason)


def test_an_output_ends_with_a_stop_token_that_its_request_names(host):
    """With `ignore_eos` only by those, while the unpatched host ignores them too."""
    sglang_jax.install()
    named = {"ignore_eos": True, "stop_token_ids": {9}}
    for tokens, answer in (([1, 7, 9, 4], [1, 7, 9]), ([1, 7, 4], [1, 7, 4])):
        request = host.batch.Req(tokens=tokens, stop_tokens=(7,), **named)
        request.check_finished(3)
        assert request.answer == answer
        assert request.finished() == (9 in tokens)


SMILE = list("😀".encode())


def test_characters_are_sent_whole_and_their_tokens_once(host):
    sglang_jax.install()
    manager = host.detokenizer.DetokenizerManager(host.detokenizer)
    texts, tokens = [], []
    for part, reason in (
        ([97, 0, *SMILE[:1]], None), (SMILE[1:3], None), ([*SMILE[3:], 98], None),
        ([0, *SMILE[:2]], None), (SMILE[2:], {"type": "length"}),
    ):  # fmt: skip
        sent = manager.handle_batch_token_id_out(received(a=(part, reason, True)))
        texts += sent.output_strs
        tokens += sent.output_ids[0]
    assert texts == ["a", "", "😀b", "", "😀"]
    assert tokens == [97, *SMILE, 98, *SMILE]
    assert not manager.decode_status


def test_an_incomplete_character_at_the_end_is_sent(host):
    """An output may end in the middle of a character."""
    sglang_jax.install()
    manager = host.detokenizer.DetokenizerManager(host.detokenizer)
    sent = manager.handle_batch_token_id_out(received(a=(SMILE[:2], {"type": "length"}, True)))
    assert sent.output_strs == ["\ufffd"]


def test_each_request_is_detokenized_with_its_own_settings(host):
    sglang_jax.install()
    manager = host.detokenizer.DetokenizerManager(host.detokenizer)
    given = received(
        a=([97, 0], {"type": "length"}, True),
        b=([98, 0], {"type": "length"}, False),
        c=([99, 0], {"type": "length"}, True),
    )
    sent = manager.handle_batch_token_id_out(given)
    assert sent.rids == sent.output_routed_experts == ["a", "b", "c"]
    assert sent.output_strs == ["a", "b\0", "c"]
    assert sent.output_ids == [[97], [98, 0], [99]]
    assert manager.calls == [["a", "c"], ["b"]]
    manager.handle_batch_token_id_out(received(d=([97], None, True), e=([98], None, True)))
    assert manager.calls[2:] == [["d", "e"]]


def test_a_stop_token_with_id_0_is_cut(host):
    sglang_jax.install()
    manager = host.detokenizer.DetokenizerManager(host.detokenizer)
    reason = {"type": "stop", "matched": 0}
    assert manager.trim_matched_stop([5, 0], reason, False) == [5]
    assert manager.trim_matched_stop([5, 0], reason, True) == [5, 0]
    assert manager.trim_matched_stop([5, 0], None, False) == [5, 0]


def test_the_detokenizers_process_has_the_fixes_too(host):
    """A spawned process finds a function by its module and name."""
    sglang_jax.install()
    run = pickle.loads(pickle.dumps(host.engine.run_detokenizer_process))
    manager = host.detokenizer.DetokenizerManager
    plain = manager.handle_batch_token_id_out
    while hasattr(plain, "__wrapped__"):
        plain = plain.__wrapped__
    manager.handle_batch_token_id_out = plain  # as in a new process
    seen = []
    host.detokenizer.run_detokenizer_process = lambda *arguments: seen.append(
        (arguments, manager.handle_batch_token_id_out is not plain)
    )
    run("arguments", "ports")
    assert seen == [(("arguments", "ports"), True)]


def test_a_request_id_in_use_is_refused(host):
    sglang_jax.install()
    manager = host.TokenizerManager(host.ServerArgs())
    manager.rid_to_state["a"] = "state"
    with pytest.raises(ValueError, match="rid: a, but must be unused: the host"):
        manager._send_one_request(None, SimpleNamespace(rid="a"))
    manager._send_one_request(None, SimpleNamespace(rid="b"))
    assert manager.sent == ["b"]


def test_requests_of_a_batch_keep_their_key(host):
    sglang_jax.install()
    make = host.io_struct.GenerateReqInput
    assert [make("x")[i].extra_key for i in range(2)] == ["x", "x"]
    assert [make(["x", "y"])[i].extra_key for i in range(2)] == ["x", "y"]


@pytest.mark.parametrize("name", sglang_jax.requests.UNSERVED)
def test_calls_that_the_scheduler_does_not_implement_are_refused(host, name):
    sglang_jax.install()
    manager = host.TokenizerManager(host.ServerArgs())
    with pytest.raises(ValueError, match=f"/{name}: called, but must not be"):
        asyncio.run(getattr(manager, name)("request", None))


def test_no_more_requests_run_than_are_compiled_for(host):
    sglang_jax.install()
    few, many = host.tp_worker.ModelWorker(8, 64), host.tp_worker.ModelWorker(100, 64)
    assert (few.get_max_padded_size(), few.max_running_requests) == ((8, 64), 8)
    assert (many.get_max_padded_size(), many.max_running_requests) == ((64, 64), 64)


def test_penalties_count_the_output_of_requests_that_start_again(host):
    sglang_jax.install()
    info = SimpleNamespace(reqs=[host.batch.Req(tokens=(3, 5, 3)), host.batch.Req()])
    made = host.sampling_info.SamplingBatchInfo.from_schedule_batch(info, 8)
    found = {
        one.name: getattr(one, one.name).tolist()
        for one in made.penalizer_orchestrator.penalizers.values()
    }
    assert found["token_frequencies"] == [[0, 0, 0, 2, 0, 1, 0, 0], [0] * 8]
    assert found["token_presence"] == [[0, 0, 0, 1, 0, 1, 0, 0], [0] * 8]
    assert found["len_output_tokens"] == [[3], [0]]


def test_a_pause_waits_for_requests_whose_prompts_were_just_computed(host):
    sglang_jax.install()
    prefill, decode = (
        SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda is_extend=is_extend: is_extend)
        )
        for is_extend in (True, False)
    )
    scheduler = host.scheduler.Scheduler()
    steps = [  # the last batch, what the scheduler is sent, and what it does
        (prefill, ["retract"], []),
        (prefill, [], []),
        (decode, [], ["retract"]),
        (decode, ["continue"], ["continue"]),
        (decode, [], []),
        (decode, ["in_place"], ["in_place"]),
        (None, ["in_place"], ["in_place"]),
        (prefill, ["in_place", "continue"], ["continue"]),
        (decode, [], []),
    ]
    for last, sent, done in steps:
        scheduler.last_batch, scheduler.done = last, []
        scheduler.process_input_requests(sent)
        assert scheduler.done == done
    scheduler.pd, scheduler.last_batch, scheduler.done = "pathways", prefill, []
    scheduler.process_input_requests(["in_place"])
    assert scheduler.done == ["in_place"]


ADAPTERS = {
    "use_rslora": True,
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "bias": "all",
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_would_be_loaded_in_part_are_refused(host, name):
    sglang_jax.install()
    plain = dict.fromkeys(ADAPTERS) | {"use_rslora": False, "bias": "none", "rank_pattern": {}}
    host.lora.LoRAConfig(plain)
    host.lora.LoRAConfig({})
    with pytest.raises(ValueError, match=f"--lora-paths: .* whose {name} is .*, but must be an"):
        host.lora.LoRAConfig({**plain, name: ADAPTERS[name]})


def test_batch_sizes_are_divisible_by_the_devices(host):
    sglang_jax.install()
    make = host.compilation.CompilationManager
    assert make(3, 9)._compute_bs_buckets(None) == [9]
    assert make(2, 10)._compute_bs_buckets([3, 4, 7]) == [4, 10]
    assert make(1, 10)._compute_bs_buckets(None) == [1, 2, 4, 8, 10]


def test_checkpoints_without_a_weight_of_a_layer_are_refused(host):
    """Other missing weights may be unused, like those of a layer that the model does not have."""
    sglang_jax.install()
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)]
    load = host.weights.WeightLoader().load_weights_from_safetensors
    load([*names, "lm_head.weight", "model.layers.0.self_attn.q_proj.bias"], names[:2])
    message = r"--model-path: a checkpoint without model.layers.1.self_attn.q_proj.weight \(1 such"
    with pytest.raises(ValueError, match=message):
        load(names, names[:1])


WINDOWS = {  # settings of a runner whose windows and chunks take 64 tokens each; is there room?
    "enough": ({"swa_max_total_num_tokens": 144}, True),
    "one page too few": ({"swa_max_total_num_tokens": 128}, False),
    "two devices": ({"swa_max_total_num_tokens": 288, "dp_size": 2}, True),
    "two devices, a page too few on each": ({"swa_max_total_num_tokens": 256, "dp_size": 2}, False),
    "longer chunks": (
        {"swa_max_total_num_tokens": 176, "chunked_prefill_size": 112, "context_len": 256},
        False,
    ),
    "no chunks": ({"swa_max_total_num_tokens": 128, "chunked_prefill_size": -1}, False),
    "no chunks, and a short context": (
        {"swa_max_total_num_tokens": 80, "chunked_prefill_size": -1, "context_len": 32},
        True,
    ),
    "a draft model": ({"swa_max_total_num_tokens": 0, "is_draft_worker": True}, True),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_pools_of_layers_with_windows_have_room_for_a_request(host, name):
    changes, is_enough = WINDOWS[name]
    sglang_jax.install()
    runner = host.ModelRunner(**changes)
    if is_enough:
        runner.set_num_token_hybrid()
    else:
        with pytest.raises(ValueError, match=r"--max-total-tokens .*: room for \d+ tokens in lay"):
            runner.set_num_token_hybrid()
