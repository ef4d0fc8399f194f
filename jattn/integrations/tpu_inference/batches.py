"""What tpu-inference's runner does to the requests of a batch otherwise than vLLM means it.

A request that left the batch and returns, grammars of several requests, sampled drafts, and
embeddings of prompts that take several steps. Those with images are in
`jattn.integrations.tpu_inference.images`.
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
    """Mend what the host computes for some batches.

    Each hook takes the place of a function of tpu-inference, in processes whose engine attends by
    jattn:

    - `PersistentBatchManager.update_states`: a request that was preempted, or was not scheduled in
      a step, returns with the tokens that vLLM sends for it. With asynchronous scheduling the host
      keeps a 0 for a token that was still computed as the request left.
    - `TPUModelRunner._execute_model`: of a request that is preempted and resumed in the same step
      (`reset_prefix_cache(reset_running_requests=True)`) vLLM drops the token that is still
      computed. The host puts it in the place of the last one that vLLM kept, and raises if there
      is none.
    - `PersistentBatchManager._reorder_batch`: a step of one token each decodes several
      (`enable_continue_decode`) only if each of them ends what its request has said so far, and
      none asks for log-probabilities of its prompt. The host takes a chunk of one token for an
      answer's last one, and answers a prompt that it has read in part.
    - `InputBatch.add_request`: a request that returns keeps the log-probabilities of its prompt
      that it has so far; one that has answered is asked for no more. The host makes an array of
      its own for them, and returns whatever memory has.
    - `StructuredDecodingManager.prepare_structured_decoding_input`: each request is masked by its
      own grammar, unless the host has several replicas in one process. vLLM has the masks in the
      order in which requests are scheduled; the host takes them for sorted by the requests' names.
    - `rejection_sampler._compute_probs`: the probabilities of drafted tokens are those that the
      host samples other tokens by, and 0 or 1 for a request that does not sample. The host divides
      such a request's logits by -1 where another request of the batch samples, and chooses among
      tokens before it divides by the temperature.
    - `TPUModelRunner.load_model`: a prompt is pooled when all of it was computed. The host returns
      an embedding in each step, and vLLM takes the first one, of the prompt's beginning, for all.

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
    """Give requests that return to the batch the tokens that they have answered with."""
    cached = scheduler_output.scheduled_cached_reqs
    for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if name not in cached.all_token_ids:
            continue  # the last step had it, too
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
        if count and batch.request_distribution[0] == count:  # or it is no such step
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
    """What the model's pooler finds for each request, and None for one whose prompt goes on.

    `lengths` are whatever memory has: the host sets apart an array for them, and fills none.
    """
    del lengths
    batch = runner.input_batch
    lengths = batch.num_computed_tokens_cpu[: batch.num_reqs] + scheduled
    is_whole = lengths == batch.num_prompt_tokens[: batch.num_reqs]
    found = pool(hidden_states, metadata, lengths, scheduled)
    return [x if ready else None for x, ready in zip(found, is_whole, strict=True)]


def probabilities(logits: jax.Array, num_draft_tokens: jax.Array, sampling: Any) -> jax.Array:
    """The probability of each token where one is drafted, `[tokens, vocabulary]` float32.

    A token that cannot be sampled has -1: a draft is kept if its probability is at least a number
    drawn from [0, 1), which may be 0.

    Args:
      logits: of the positions that have drafts, `[tokens, vocabulary]`.
      num_draft_tokens: of each request, `[requests]`.
      sampling: the host's `TPUSupportedSamplingMetadata`, of requests.
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
