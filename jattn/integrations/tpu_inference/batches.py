"""Fixes for batches of which tpu-inference's runner computes something other than vLLM expects.

They concern requests that leave the batch and return, structured output of several requests,
sampling with draft tokens, and embeddings of prompts that take several steps. Fixes for requests
with images are in `jattn.integrations.tpu_inference.images`.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.integrations.tpu_inference import images
from jattn.integrations.tpu_inference.requests import GREEDY


def enable() -> None:
    """Fix what the host computes for some batches.

    Each hook replaces a function of tpu-inference, in processes whose engine runs jattn's backend:

    - `PersistentBatchManager.update_states`: with asynchronous scheduling, a request may leave the
      batch (preempted, or not scheduled in a step) while its next token is still being computed.
      The host keeps a 0 for that token when the request returns. The hook gives the request the
      tokens that vLLM sends for it.
    - `TPUModelRunner._execute_model`: if a request is preempted and resumed in the same step
      (`reset_prefix_cache(reset_running_requests=True)`), vLLM drops the token that is still being
      computed. The host overwrites the last token that vLLM kept with it, and raises if there is
      none. The hook drops it.
    - `PersistentBatchManager._reorder_batch`: with `enable_continue_decode`, the host decodes
      several tokens in a step that schedules one token per request. It mistakes a prompt chunk of
      one token for the last token so far, and generates from a prompt that it has read in part.
      The hook decodes several only if every request's token is its last so far, and no request
      asks for prompt log-probabilities.
    - `InputBatch.add_request`: the host allocates an array for prompt log-probabilities whenever it
      adds a request, and returns uninitialized memory for a request that returns. The hook keeps
      what was computed, and asks for no more once the request has output tokens.
    - `StructuredDecodingManager.prepare_structured_decoding_input`: vLLM sends grammar masks in the
      order in which it schedules requests, but the host expects them sorted by request id. The hook
      sorts them, so that each request gets its own mask, unless the host runs several replicas in
      one process.
    - `rejection_sampler._compute_probs`: if any request of the batch samples, the host divides the
      logits of greedy requests by -1, and it applies top-k and top-p before the temperature. The
      hook gives draft tokens the probabilities with which the host samples other tokens, and 0 or 1
      for a greedy request.
    - `TPUModelRunner.load_model`: the host returns an embedding in each step, and vLLM takes the
      first one, of a prompt's first chunk, for the whole prompt. The hook pools a prompt once all
      of it has been computed.

    Raises:
      ImportError: tpu-inference is not installed, or is another version.
    """
    from tpu_inference.layers.jax.sample import rejection_sampler
    from tpu_inference.runner.input_batch import InputBatch
    from tpu_inference.runner.persistent_batch_manager import PersistentBatchManager
    from tpu_inference.runner.structured_decoding_manager import StructuredDecodingManager
    from tpu_inference.runner.tpu_runner import TPUModelRunner

    if rejection_sampler._compute_probs is probabilities:
        return  # done before
    rejection_sampler._compute_probs = probabilities
    _recall_tokens(PersistentBatchManager)
    _finish_prompts_first(PersistentBatchManager)
    _keep_prompt_logprobs(InputBatch)
    _sort_masks(StructuredDecodingManager)
    _wait_for_prompts(TPUModelRunner)
    _forget_tokens(TPUModelRunner)
    images.enable(TPUModelRunner)


def _recall_tokens(manager: type[Any]) -> None:
    update = manager.update_states

    @functools.wraps(update)
    def recall_and_update(self: Any, scheduler_output: Any, *more: Any) -> Any:
        _recall_tokens_of(self.requests, scheduler_output)
        return update(self, scheduler_output, *more)

    manager.update_states = recall_and_update


def _recall_tokens_of(requests: dict[str, Any], scheduler_output: Any) -> None:
    """Give requests that return to the batch the output tokens that vLLM has for them."""
    cached = scheduler_output.scheduled_cached_reqs
    for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if name not in cached.all_token_ids:
            continue  # it was in the last step
        request = requests[name]
        answered = cached.all_token_ids[name][request.num_prompt_tokens :]
        if len(answered) == count:
            request.output_token_ids = list(answered)


def _finish_prompts_first(manager: type[Any]) -> None:
    reorder = manager._reorder_batch

    @functools.wraps(reorder)
    def reorder_batch(self: Any, scheduler_output: Any) -> Any:
        found = reorder(self, scheduler_output)
        batch = self.input_batch
        count = batch.num_reqs
        if count and batch.request_distribution[0] == count:  # the host sees only decodes
            scheduled = [
                scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids[:count]
            ]
            goes_on = batch.num_computed_tokens_cpu[:count] + scheduled < batch.num_tokens[:count]
            if batch.num_prompt_logprobs or goes_on.any():
                batch.request_distribution = [0, 0, count]
        return found

    manager._reorder_batch = reorder_batch


def _forget_tokens(runner: type[Any]) -> None:
    execute = runner._execute_model

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *more: Any, **options: Any) -> Any:
        before = self._pre_async_results
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if before is not None and resumed:
            before.request_seq_lens = [
                each for each in before.request_seq_lens if each[1].req_id not in resumed
            ]
            for name in resumed:
                before.placeholder_req_id_to_index.pop(name, None)
        return execute(self, scheduler_output, *more, **options)

    runner._execute_model = execute_model


def _keep_prompt_logprobs(batch: type[Any]) -> None:
    add = batch.add_request

    @functools.wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        so_far = request.in_progress_prompt_logprobs_cpu
        found = add(self, request, *args, **kwargs)
        if request.output_token_ids:
            self.num_prompt_logprobs.pop(request.req_id, None)
            request.in_progress_prompt_logprobs_cpu = None
        elif so_far is not None:
            request.in_progress_prompt_logprobs_cpu = so_far
        return found

    batch.add_request = add_request


def _sort_masks(manager: type[Any]) -> None:
    prepare = manager.prepare_structured_decoding_input

    @functools.wraps(prepare)
    def prepare_sorted(self: Any, logits: Any, grammar_output: Any) -> Any:
        rows = {
            name: row
            for row, name in enumerate(grammar_output.structured_output_request_ids)
            if name in self.runner.input_batch.req_id_to_index
        }
        names = sorted(rows)
        masks = grammar_output.grammar_bitmask[[rows[name] for name in names]]
        in_order = SimpleNamespace(structured_output_request_ids=names, grammar_bitmask=masks)
        return prepare(self, logits, in_order)

    manager.prepare_structured_decoding_input = prepare_sorted


def _wait_for_prompts(runner: type[Any]) -> None:
    load = runner.load_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        if self.is_pooling_model:
            self.pooler_fn = functools.partial(_pool_whole_prompts, self, self.pooler_fn)
        return found

    runner.load_model = load_model


def _pool_whole_prompts(
    runner: Any, pool: Any, hidden_states: Any, metadata: Any, lengths: Any, scheduled: np.ndarray
) -> list[Any]:
    """Return the pooler's result for each request, None if its prompt is not complete.

    The host's `lengths` are uninitialized memory: it allocates an array and never fills it.
    """
    del lengths
    batch = runner.input_batch
    lengths = batch.num_computed_tokens_cpu[: batch.num_reqs] + scheduled
    is_whole = lengths == batch.num_prompt_tokens[: batch.num_reqs]
    found = pool(hidden_states, metadata, lengths, scheduled)
    return [x if ready else None for x, ready in zip(found, is_whole, strict=True)]


def probabilities(logits: jax.Array, num_draft_tokens: jax.Array, sampling: Any) -> jax.Array:
    """Return each token's probability at the draft positions, `[tokens, vocabulary]` float32.

    A token that cannot be sampled has -1: the host accepts a draft token whose probability is at
    least a number drawn from [0, 1), which may be 0.

    Args:
      logits: at the draft positions, `[tokens, vocabulary]`.
      num_draft_tokens: of each request, `[requests]`.
      sampling: the host's `TPUSupportedSamplingMetadata`, per request.
    """
    from tpu_inference.layers.jax.sample import rejection_sampler
    from tpu_inference.layers.jax.sample.sampling import _apply_sampling_transforms

    request, _ = rejection_sampler._get_segment_info(num_draft_tokens, logits.shape[0])
    logits = logits.astype(jnp.float32)
    fields = {name: getattr(sampling, name)[request] for name in ("temperature", "top_k", "top_p")}
    of_tokens = dataclasses.replace(sampling, **fields)
    sampled = jax.nn.softmax(_apply_sampling_transforms(logits, of_tokens))
    likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    found = jnp.where(of_tokens.temperature[:, None] < GREEDY, likeliest, sampled)
    return jnp.where(found > 0, found, -1)
