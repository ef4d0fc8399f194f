"""What jattn mends of batches in tpu-inference, with a stand-in for the host.

`tests/integrations/test_vllm_batches.py` asks the real one.
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
    """The host's modules, after an engine began that attends by jattn."""
    tpu_inference.register()
    for _ in range(2):  # once is enough
        host.start()
    return SimpleNamespace(
        **{
            name.rpartition(".")[2]: sys.modules[f"tpu_inference.{name}"]
            for name in (
                "layers.jax.sample.rejection_sampler",
                "runner.input_batch",
                "runner.persistent_batch_manager",
                "runner.structured_decoding_manager",
            )
        }
    )


def test_an_engine_of_another_backend_is_left_alone(host):
    tpu_inference.register()
    sampler = sys.modules["tpu_inference.layers.jax.sample.rejection_sampler"]
    assert sampler._compute_probs is None


RETURNS = {  # what a request has said: by the host, by vLLM, how many vLLM counts, and then
    "preempted as a token was computed": ([8, 0], [8, 9], 2, [8, 9]),
    "not scheduled in one step": ([8, 9], [8, 9], 2, [8, 9]),
    "before its first token": ([], [], 0, []),
    "with a token that vLLM does not have yet": ([8, 0], [8], 2, [8, 0]),
    "in the last step, too": ([8, 0], None, 2, [8, 0]),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_request_that_returns_has_said_what_vllm_says(started, name):
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


@pytest.mark.parametrize(
    ("said", "so_far", "asked", "kept"),
    [
        ([], None, True, "whatever memory has"),
        ([], "the first chunk's", True, "the first chunk's"),
        ([8], None, False, None),
    ],
    ids=["new", "between two chunks", "that has answered"],
)
def test_log_probabilities_of_a_prompt_are_found_once(started, said, so_far, asked, kept):
    batch = started.input_batch.InputBatch()
    request = stand_in_host.Request("a", [1, 2, 3], said, so_far)
    assert batch.add_request(request, dp_rank=5) == 5
    assert ("a" in batch.num_prompt_logprobs) == asked
    assert request.in_progress_prompt_logprobs_cpu == kept


def test_each_request_is_masked_by_its_own_grammar(started):
    """Sorted by their names, the third comes first; the second has left the batch."""
    batch = SimpleNamespace(req_id_to_index={"9": 0, "plain": 1, "10": 2})
    runner = SimpleNamespace(input_batch=batch)
    manager = started.structured_decoding_manager.StructuredDecodingManager(runner)
    masks = np.array([[9], [4], [10]])
    output = SimpleNamespace(structured_output_request_ids=["9", "4", "10"], grammar_bitmask=masks)
    found = manager.prepare_structured_decoding_input(None, output)
    assert found == {"9": [9], "10": [10]}


def test_drafts_are_kept_as_often_as_their_tokens_are_sampled(started):
    """Of three requests: a greedy one, one of two tokens at half the temperature, one without."""
    logits = jnp.log(jnp.array([[1.0, 4, 3], [4, 1, 3], [1, 2, 4], [5, 4, 1]]) / 8)
    counts = jnp.array([2, 1, 0, 1])
    sampling = stand_in_host.SamplingOfBatch(
        jnp.array([-1.0, 0.5, 1, 1]), jnp.array([0, 2, 1, 0]), jnp.ones(4)
    )
    find = jax.jit(started.rejection_sampler._compute_probs)
    want = [[-1, 1, -1], [1, -1, -1], [-1, 0.2, 0.8], [0.5, 0.4, 0.1]]
    np.testing.assert_allclose(find(logits, counts, sampling), want, rtol=1e-5)
