"""What jattn fixes in batches of tpu-inference, with a stand-in for the host.

`tests/integrations/test_vllm_batches.py` runs the real host.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.integrations import tpu_inference
from tests.support import stand_in_host

host = stand_in_host.host  # the fixture


@pytest.fixture
def started(host):
    """Start an engine with jattn's backend, and return the host's modules."""
    tpu_inference.register()
    for _ in range(2):  # the second time changes nothing
        host.start()
    return SimpleNamespace(
        **{
            name.rpartition(".")[2]: sys.modules[f"tpu_inference.{name}"]
            for name in (
                "layers.jax.sample.rejection_sampler",
                "runner.input_batch",
                "runner.persistent_batch_manager",
                "runner.structured_decoding_manager",
                "runner.tpu_runner",
            )
        }
    )


def test_an_engine_of_another_backend_is_left_alone(host):
    tpu_inference.register()
    sampler = sys.modules["tpu_inference.layers.jax.sample.rejection_sampler"]
    assert sampler._compute_probs is None


# A request's output tokens in the host and in vLLM, how many vLLM counts, and the tokens wanted.
RETURNS = {
    "preempted while a token was computed": ([8, 0], [8, 9], 2, [8, 9]),
    "not scheduled in one step": ([8, 9], [8, 9], 2, [8, 9]),
    "before its first token": ([], [], 0, []),
    "with a token that vLLM does not have yet": ([8, 0], [8], 2, [8, 0]),
    "in the last step": ([8, 0], None, 2, [8, 0]),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_request_that_returns_has_the_output_tokens_that_vllm_has(started, name):
    said, sent, count, want = RETURNS[name]
    request = stand_in_host.Request("a", [1, 2, 3], list(said))
    manager = started.persistent_batch_manager.PersistentBatchManager({"a": request})
    cached = SimpleNamespace(
        req_ids=["a"],
        num_output_tokens=[count],
        all_token_ids={} if sent is None else {"a": [1, 2, 3, *sent]},
    )
    step = SimpleNamespace(scheduled_cached_reqs=cached)
    assert manager.update_states(step, None) == {"a": want}


# Of two requests: tokens computed, scheduled and known, requests that ask for prompt
# log-probabilities; and the distribution that the step must have.
STEPS = {
    "that decodes": ([7, 9], [1, 1], [8, 10], {}, [2, 2, 2]),
    "with the last token of a prompt": ([7, 0], [1, 1], [8, 1], {}, [2, 2, 2]),
    "with one token of a prompt": ([7, 3], [1, 1], [8, 40], {}, [0, 0, 2]),
    "with prompt log-probabilities": ([7, 0], [1, 1], [8, 1], {"b": 1}, [0, 0, 2]),
    "with a chunk of a prompt": ([7, 3], [1, 8], [8, 40], {}, "mixed"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_decodes_several_tokens_only_after_all_prompts(started, name):
    computed, scheduled, known, asking, want = STEPS[name]
    batch = SimpleNamespace(
        num_reqs=2,
        req_ids=["a", "b", "of a request that left"],
        num_computed_tokens_cpu=np.array([*computed, 0]),
        num_tokens=np.array([*known, 99]),
        num_prompt_logprobs=asking,
        request_distribution="mixed",
    )
    manager = started.persistent_batch_manager.PersistentBatchManager({}, batch)
    step = SimpleNamespace(num_scheduled_tokens=dict(zip("ab", scheduled, strict=True)))
    assert manager._reorder_batch(step) == "swaps"
    assert batch.request_distribution == want


def test_a_token_that_vllm_dropped_is_dropped(started):
    """It is the token of a request that is preempted and resumed in one step; others are kept."""
    runner = started.tpu_runner.TPUModelRunner(None)
    a, b = (stand_in_host.Request(name, [1, 2, 3]) for name in "ab")
    resumed = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"a", "c"}))
    assert runner._execute_model(resumed, "hidden states") == "hidden states"
    runner._pre_async_results = SimpleNamespace(
        request_seq_lens=[(0, a, 4), (1, b, 4)], placeholder_req_id_to_index={"a": 0, "b": 1}
    )
    goes_on = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()))
    runner._execute_model(goes_on)
    assert len(runner._pre_async_results.request_seq_lens) == 2
    runner._execute_model(resumed)
    assert runner._pre_async_results.request_seq_lens == [(1, b, 4)]
    assert runner._pre_async_results.placeholder_req_id_to_index == {"b": 1}


@pytest.mark.parametrize(
    ("said", "so_far", "asked", "kept"),
    [
        ([], None, True, "whatever memory has"),
        ([], "the first chunk's", True, "the first chunk's"),
        ([8], None, False, None),
    ],
    ids=["new", "between two chunks", "with output tokens"],
)
def test_prompt_log_probabilities_are_computed_once(started, said, so_far, asked, kept):
    batch = started.input_batch.InputBatch()
    request = stand_in_host.Request("a", [1, 2, 3], said, so_far)
    assert batch.add_request(request, dp_rank=5) == 5
    assert ("a" in batch.num_prompt_logprobs) == asked
    assert request.in_progress_prompt_logprobs_cpu == kept


def test_each_request_is_masked_by_its_own_grammar(started):
    """Sorted by request id, the third comes first; the second has left the batch."""
    batch = SimpleNamespace(req_id_to_index={"9": 0, "plain": 1, "10": 2})
    runner = SimpleNamespace(input_batch=batch)
    manager = started.structured_decoding_manager.StructuredDecodingManager(runner)
    masks = np.array([[9], [4], [10]])
    output = SimpleNamespace(structured_output_request_ids=["9", "4", "10"], grammar_bitmask=masks)
    found = manager.prepare_structured_decoding_input(None, output)
    assert found == {"9": [9], "10": [10]}


def test_draft_tokens_are_accepted_as_often_as_they_would_be_sampled(started):
    """Four requests: greedy, top-k 2 at temperature 0.5, without draft tokens, plain sampling."""
    logits = jnp.log(jnp.array([[1.0, 4, 3], [4, 1, 3], [1, 2, 4], [5, 4, 1]]) / 8)
    counts = jnp.array([2, 1, 0, 1])
    sampling = stand_in_host.SamplingOfBatch(
        jnp.array([-1.0, 0.5, 1, 1]), jnp.array([0, 2, 1, 0]), jnp.ones(4)
    )
    find = jax.jit(started.rejection_sampler._compute_probs)
    want = [[-1, 1, -1], [1, -1, -1], [-1, 0.2, 0.8], [0.5, 0.4, 0.1]]
    np.testing.assert_allclose(find(logits, counts, sampling), want, rtol=1e-5)


def test_a_prompt_is_pooled_when_all_of_it_was_computed(started):
    """Three requests: a whole prompt, the first chunk of a prompt, and the last of another."""
    plain = stand_in_host.config().model_config
    runner = started.tpu_runner.TPUModelRunner(plain, is_pooling_model=True)
    runner.load_model()
    runner.input_batch = SimpleNamespace(
        num_reqs=3,
        num_computed_tokens_cpu=np.array([0, 0, 32, 99]),
        num_prompt_tokens=np.array([5, 40, 40, 99]),
    )
    found = runner.pooler_fn([1, 2, 3], None, "whatever memory has", np.array([5, 32, 8]))
    assert found == ["of 1", None, "of 3"]
    assert runner.pooled == ([5, 32, 40], [5, 32, 8])


def test_a_model_that_generates_keeps_its_pooler(started):
    runner = started.tpu_runner.TPUModelRunner(stand_in_host.config().model_config)
    runner.load_model()
    assert runner.pooler_fn == runner.pool
