"""A `PagedCache` for transformers' models: keys that stay in pools, generation, beams, refusals.

Needs torch and transformers, as tests/transformers/test_generation.py does.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import os
import pickle
import subprocess
import sys

import jax
import pytest

import jattn
from tests.support import transformers_models as support
from tests.support.families import FAMILIES
from tests.support.transformers_models import BRIDGE, make_model

pytestmark = support.MARKS
libraries = support.libraries  # the fixture

# Families that a PagedCache cannot hold: layers with both states and keys, or latents.
NOT_PAGED = {
    "zamba2": "must have one that caches the keys of full or sliding attention and nothing else",
    "deepseek_v2": "caches latents",
    "deepseek_v3": "caches latents",
    "minicpm3": "caches latents",
}


def generate(torch, model, text, mask, cache, **options):
    """Return the tokens and logits of a greedy continuation."""
    torch.manual_seed(0)
    out = model.generate(
        text, attention_mask=mask, past_key_values=cache, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, dim=1).double()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.model_type}-{f.features}")
def test_a_paged_cache_generates_what_transformers_does(family, libraries):
    torch, transformers, _ = libraries
    model = make_model(torch, transformers, family)
    text = torch.randint(3, 96, (3, 14), generator=torch.Generator().manual_seed(10))
    mask = torch.ones_like(text)
    mask[0, :3], mask[2, :7] = 0, 0
    if model._supports_sdpa and family.model_type != "gpt_oss":  # sdpa does not support sinks
        model.set_attn_implementation("sdpa")
    tokens, logits = generate(torch, model, text, mask, None, max_new_tokens=24)
    model.set_attn_implementation("jattn")
    package = importlib.import_module(BRIDGE)
    reason = NOT_PAGED.get(family.model_type)
    with (
        pytest.raises((ValueError, jattn.UnsupportedError), match=reason)
        if reason
        else (contextlib.nullcontext())
    ):
        cache = package.PagedCache(model.config, max_cache_len=37, block_size=8)
        assert reason is None
        ours, our_logits = generate(torch, model, text, mask, cache, max_new_tokens=24)
        assert torch.equal(ours, tokens)
        assert (our_logits - logits).abs().max() <= 2e-4


def paged_llama(torch, transformers, **options):
    model = make_model(torch, transformers, FAMILIES[0])
    model.set_attn_implementation("jattn")
    return model, importlib.import_module(BRIDGE).PagedCache(model.config, 64, **options)


def test_a_decode_step_copies_no_pool(libraries):
    torch, transformers, _ = libraries
    from jattn import testing

    module = importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers, block_size=4)
    text = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        model(text, past_key_values=cache)
        lowered = []

        def program(structure, *static):
            def lower(leaves, *args):
                large = jattn.init_kv_cache(4096, 2, 4, 16, format=jattn.Dense("float32"))
                of_large = make(jax.tree.structure(large), *static)
                lowered.append((of_large.lower(jax.tree.leaves(large), *args).compile(), large))
                return make(structure, *static)(leaves, *args)

            return lower

        make, module._program = module._program, program
        try:
            words = [layer.caches[0].data.unsafe_buffer_pointer() for layer in cache.layers]
            model(text[:, :1], past_key_values=cache)
        finally:
            module._program = make
    assert words == [layer.caches[0].data.unsafe_buffer_pointer() for layer in cache.layers]
    assert len(lowered) == 2
    for compiled, pools in lowered:
        testing.assert_nothing_pool_sized(compiled, pools)


def test_arrays_are_on_the_device_of_the_tensors(libraries):
    """This runs in a new process, in which the default device is not that of the tensors."""
    program = (
        "import jax, torch, transformers\n"
        "import jattn.integrations.transformers as package\n"
        "package.register()\n"
        "from jattn.integrations.transformers import attention, batches\n"
        "first, second = jax.devices()\n"
        "jax.config.update('jax_default_device', second)\n"
        "run, made = attention._write_and_attend, []\n"
        "def spy(*args, **options):\n"
        "    out = run(*args, **options)\n"
        "    made.append([options['slots'], *options['batch'].values(), out])\n"
        "    return out\n"
        "attention._write_and_attend = spy\n"
        "x = torch.randn(1, 4, 9, 16)\n"
        "attend = attention.Attention()\n"
        "attend(torch.nn.Linear(1, 1), x, x, x, is_causal=False)\n"
        "sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96)\n"
        "config = transformers.LlamaConfig(**sizes, intermediate_size=64)\n"
        "model = transformers.LlamaForCausalLM._from_config(config, attn_implementation='jattn')\n"
        "cache = package.PagedCache(config, 32)\n"
        "model.generate(torch.ones(1, 3, dtype=int), past_key_values=cache, max_new_tokens=3,"
        " num_beams=2)\n"
        "made.append(cache.layers[0]._leaves)\n"
        "print(all(y.devices() == {first} for made in made for y in made))\n"
        "try: attend(torch.nn.Linear(1, 1), *[x.to('meta')] * 3, is_causal=False)\n"
        "except Exception as error: print(error)\n"
    )
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=flags)
    good, refusal = done.stdout.splitlines()[-2:]
    assert good == "True", done.stderr
    assert refusal.startswith("tensors are on meta, but JAX's devices are [CpuDevice"), done.stderr


def test_a_second_decode_step_compiles_nothing(libraries):
    torch, transformers, _ = libraries
    module = importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        for count in (9, 1):
            model(text[:, :count], past_key_values=cache)
        programs = {p for layer in cache.layers for p in layer._programs.values()}
        assert len(programs) == 2  # for the prompt and for a step, shared by both layers
        before = module._program.cache_info().misses, [p._cache_size() for p in programs]
        for _ in range(20):
            model(text[:, :1], past_key_values=cache)
        after = module._program.cache_info().misses, [p._cache_size() for p in programs]
        assert after == before


def test_a_paged_cache_is_rewound_reordered_and_reused(libraries):
    torch, transformers, _ = libraries
    model, cache = paged_llama(torch, transformers, kv_layout="NHD", block_size=5)
    text = torch.randint(3, 96, (3, 30), generator=torch.Generator().manual_seed(11))
    mask = torch.ones_like(text)
    mask[1, :4] = 0
    rows = torch.tensor([2, 1, 1])

    def read_on(cache):
        with torch.no_grad():
            model(text[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
            cache.crop(-6)
            cache.reorder_cache(rows)
            return model(
                text[:, 14:], attention_mask=torch.cat([mask[rows, :14], mask[:, 14:]], dim=1),
                past_key_values=cache,
            ).logits  # fmt: skip

    wanted = read_on(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    cache.reset()
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    words = "batch of 2, but must have one of 3, like"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        model(text[:2, :5], past_key_values=cache)
    cache.reset()
    text, mask, rows = text[:2], mask[:2], rows[:2] - 1
    wanted = read_on(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    one = text[:1, :12]
    beams = {"num_beams": 3, "max_new_tokens": 10}
    ones = torch.ones_like(one)
    tokens, _ = generate(torch, model, one, ones, None, **beams)
    _, cache = paged_llama(torch, transformers, block_size=4)
    assert torch.equal(generate(torch, model, one, ones, cache, **beams)[0], tokens)


def test_beams_copy_the_blocks_that_hold_tokens(libraries, monkeypatch):
    torch, transformers, _ = libraries
    module = importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers, block_size=4)
    text = torch.randint(3, 96, (3, 9), generator=torch.Generator().manual_seed(13))
    mask = torch.ones_like(text)
    mask[2, :2] = 0
    copied, copy = [], module._copy_blocks

    def spy(structure, leaves, source, target):
        copied.append((source >= 0).sum())
        before = [x.unsafe_buffer_pointer() for x in leaves]
        leaves = copy(structure, leaves, source, target)
        assert [x.unsafe_buffer_pointer() for x in leaves] == before
        return leaves

    monkeypatch.setattr(module, "_copy_blocks", spy)

    def read_on(cache):
        seen, steps = mask, [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 0, 0]]
        with torch.no_grad():
            logits = [model(text, attention_mask=mask, past_key_values=cache).logits[:, -1:]]
            for rows in steps:
                cache.reorder_cache(torch.tensor(rows))
                seen = torch.nn.functional.pad(seen[rows], (0, 1), value=1)
                out = model(text[:, :1], attention_mask=seen, past_key_values=cache)
                logits.append(out.logits)
        return torch.cat(logits, dim=1)

    wanted = read_on(transformers.DynamicCache(config=model.config))
    torch.testing.assert_close(read_on(cache), wanted, atol=2e-5, rtol=2e-5)
    # Three blocks in both layers: a row has 11 tokens, not counting padding, and then 12.
    assert copied == [3, 3, 3, 3]


@pytest.mark.parametrize("model_type", ["bart", "t5", "whisper"])
def test_encoder_decoders_take_two_paged_caches(model_type, libraries):
    torch, transformers, _ = libraries
    package = importlib.import_module(BRIDGE)
    sizes = {"vocab_size": 96, "d_model": 64, "max_position_embeddings": 64}
    sizes |= {"max_source_positions": 32, "max_target_positions": 64, "num_mel_bins": 16}
    sizes |= {"num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 96}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 96}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.AutoConfig.for_model(
        model_type, **sizes, **tokens, suppress_tokens=None, begin_suppress_tokens=None
    )
    torch.manual_seed(0)
    speech = model_type == "whisper"
    kind = "SpeechSeq2Seq" if speech else "Seq2SeqLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    if speech:
        inputs = {"input_features": torch.randn(2, 16, 64)}
    else:
        mask = torch.ones(2, 14, dtype=torch.long)
        mask[1, :5] = 0
        inputs = {"input_ids": torch.randint(3, 96, (2, 14)), "attention_mask": mask}
    start = torch.tensor([[1, 5, 7], [1, 8, 9]])

    def paged(count=1):
        caches = [package.PagedCache(model.config, 40, block_size=8) for _ in range(count)]
        return transformers.EncoderDecoderCache(*caches) if count == 2 else caches[0]

    def read_on(cache):
        logits = []
        with torch.no_grad():
            for tokens in (start, start[:, :1], start[:, 1:]):
                out = model(**inputs, decoder_input_ids=tokens, past_key_values=cache)
                cache = out.past_key_values
                logits.append(out.logits)
        return torch.cat(logits, dim=1)

    wanted = read_on(None)
    model.set_attn_implementation("jattn")
    torch.testing.assert_close(read_on(paged(2)), wanted, atol=1e-4, rtol=1e-4)
    if speech:  # Whisper then creates two of transformers' own caches instead
        alone = paged()
        torch.testing.assert_close(read_on(alone), wanted, atol=1e-4, rtol=1e-4)
        assert alone.get_seq_length() == 0
    else:
        with pytest.raises(
            jattn.UnsupportedError, match=r"EncoderDecoderCache\(PagedCache\(\.\.\.\),"
        ):
            read_on(paged())
        options = {"num_beams": 2, "max_new_tokens": 6, "do_sample": False}
        model.set_attn_implementation("eager")
        wanted = model.generate(**inputs, **options)
        model.set_attn_implementation("jattn")
        assert torch.equal(model.generate(**inputs, past_key_values=paged(2), **options), wanted)
        inputs = {name: x[:1] for name, x in inputs.items()}
        options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12, "do_sample": False}
        cropped = paged(2)
        found = model.generate(**inputs, past_key_values=cropped, **options)
        model.set_attn_implementation("eager")
        assert torch.equal(found, model.generate(**inputs, **options))
        cropped.batch_repeat_interleave(2)
        cropped.batch_select_indices(torch.tensor([1]))
        assert cropped.cross_attention_cache.layers[0].batch_size == 1


def test_a_step_that_fails_leaves_the_tokens_before_it(libraries, monkeypatch):
    torch, transformers, _ = libraries
    package, module = importlib.import_module(BRIDGE), importlib.import_module(f"{BRIDGE}.cache")
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(14))
    odd = torch.ones(2, 1, 3, 9, dtype=torch.bool)
    odd[..., 2] = False

    def interrupted(layer, make=module._program):
        """Interrupt the program of one layer after the pools were donated to it, like Ctrl-C."""

        def program(structure, *static):
            def step(leaves, *args):
                layers.append(1)
                result = make(structure, *static)(leaves, *args)
                if len(layers) > layer:
                    raise KeyboardInterrupt
                return result

            return step

        layers = []
        return program

    with torch.no_grad():
        wanted = model(text).logits
        package.register(implementation="triton")
        with pytest.raises(jattn.UnsupportedError, match="triton"):  # as the program is traced
            model(text[:, :6], past_key_values=cache)
        package.register()
        found = [model(text[:, :6], past_key_values=cache).logits]
        with pytest.raises(jattn.UnsupportedError, match="query 0 of batch row 0 only 8 of the 9"):
            model(text[:, 6:], attention_mask=odd, past_key_values=cache)
        assert cache.get_seq_length() == 6
        found.append(model(text[:, 6:], past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=2e-5, rtol=2e-5)
        for failing in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(module, "_program", interrupted(failing))
                for layer in cache.layers:
                    layer._programs = {}
                with pytest.raises(KeyboardInterrupt):
                    model(text[:, :1], past_key_values=cache)
                for layer in cache.layers:
                    layer._programs = {}
            error, reason = (
                (jattn.UnsupportedError, r"for the 10 keys in the cache; if .* reset\(\) the")
                if failing
                else (ValueError, "has been deleted or donated")
            )
            with pytest.raises(error, match=reason):
                model(text[:, :1], past_key_values=cache)
            cache.reset()
            found = model(text, past_key_values=cache).logits
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


def test_tokens_that_wait_for_attention_are_cropped_first(libraries):
    torch, transformers, _ = libraries
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(15))
    with torch.no_grad():
        wanted = model(text).logits
        model(text[:, :6], past_key_values=cache)
        new = torch.zeros(2, 2, 3, 16)
        for index in range(2):
            cache.update(new, new, index)
        assert cache.get_seq_length() == 9
        cache.crop(-3)
        assert cache.get_seq_length() == 6
        found = model(text[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(found, wanted[:, 6:], atol=2e-5, rtol=2e-5)


def test_a_prefill_chunk_may_be_all_padding(libraries):
    torch, transformers, _ = libraries
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 13), generator=torch.Generator().manual_seed(16))
    mask = torch.ones_like(text)
    mask[0, :9], mask[1, :5] = 0, 0
    options = {"max_new_tokens": 5, "prefill_chunk_size": 4}
    tokens, logits = generate(torch, model, text, mask, None, **options)
    ours, our_logits = generate(torch, model, text, mask, cache, **options)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(our_logits, logits, atol=2e-5, rtol=2e-5)


def test_a_decoder_that_attends_to_an_encoder_takes_two_paged_caches(libraries):
    """By its configuration, BART's decoder on its own is not an encoder-decoder."""
    torch, transformers, _ = libraries
    package = importlib.import_module(BRIDGE)
    config = transformers.BartConfig(
        vocab_size=96, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForCausalLM._from_config(config, attn_implementation="eager").eval()
    text, sound = torch.randint(3, 96, (2, 6)), torch.randn(2, 8, 64)
    assert not model.config.is_encoder_decoder
    with torch.no_grad():
        wanted = model(text, encoder_hidden_states=sound).logits
        model.set_attn_implementation("jattn")
        caches = [package.PagedCache(model.config, 16) for _ in range(3)]
        both = transformers.EncoderDecoderCache(*caches[:2])
        found = [
            model(text[:, start:end], encoder_hidden_states=sound, past_key_values=both).logits
            for start, end in ((0, 4), (4, 6))
        ]
        torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=2e-5, rtol=2e-5)
        with pytest.raises(jattn.UnsupportedError, match="keys of two attention modules"):
            model(text, encoder_hidden_states=sound, past_key_values=caches[2])
        other = copy.deepcopy(model)
        caches[2].reset()
        wanted = model(text).logits
        found = [model(text[:, :4], past_key_values=caches[2]).logits]
        with pytest.raises(jattn.UnsupportedError, match=r"before another model .*, reset\(\) it"):
            other(text[:, 4:], past_key_values=caches[2])
        del model
        gc.collect()  # the cache outlives it
        found.append(other(text[:, 4:], past_key_values=caches[2]).logits)
        torch.testing.assert_close(torch.cat(found, dim=1), wanted, atol=2e-5, rtol=2e-5)


def test_a_copy_of_a_paged_cache_is_independent(libraries):
    torch, transformers, _ = libraries
    model, prefix = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (3, 8), generator=torch.Generator().manual_seed(20))
    text[:, :5] = text[:1, :5]
    device = jax.devices()[0]
    with torch.no_grad():
        wanted = model(text).logits
        model(text[:1, :5], past_key_values=prefix)
        for row in range(3):
            cache = copy.deepcopy(prefix)
            found = model(text[row : row + 1, 5:], past_key_values=cache).logits
            torch.testing.assert_close(found, wanted[row : row + 1, 5:], atol=2e-5, rtol=2e-5)
            assert prefix.get_seq_length() == 5
            assert all(leaf.devices() == {device} for leaf in cache.layers[0]._leaves)


@pytest.mark.parametrize("way", ["assistant", "prompt lookup", "several", "parts", "two turns"])
def test_ways_to_generate_with_a_paged_cache(way, libraries):
    torch, transformers, _ = libraries
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(21))
    text[:, 6:] = text[:, :6]  # it repeats itself
    turns = (8,)
    options = {
        "assistant": {"assistant_model": copy.deepcopy(model)},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "several": {"num_beams": 4, "num_return_sequences": 3},
        "parts": {"prefill_chunk_size": 5},
        "two turns": {},
    }[way]
    if way == "assistant":
        with torch.no_grad():  # so that some of its tokens are accepted and others are not
            for weight in options["assistant_model"].parameters():
                weight.add_(0.05 * torch.randn_like(weight))
    if way == "two turns":
        turns = 5, 5

    def run(cache):
        tokens = text
        for count in turns:
            tokens = generate(
                torch, model, tokens, torch.ones_like(tokens), cache, max_new_tokens=count,
                **options,
            )[0]  # fmt: skip
            tokens = torch.cat([tokens, text[:, :3].expand(len(tokens), -1)], dim=1)
        return tokens

    found = run(cache)
    assert cache.get_seq_length() >= 12 + 5
    assert torch.equal(found, run(transformers.DynamicCache(config=model.config)))


def test_a_paged_cache_of_narrow_numbers(libraries):
    torch, transformers, _ = libraries
    text = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(12))
    logits = []
    for format in (None, jattn.Int8()):
        model, cache = paged_llama(torch, transformers, format=format)
        with torch.no_grad():
            logits.append(model(text, past_key_values=cache).logits)
    assert isinstance(cache.layers[0].caches[0].format, jattn.Int8)
    error = (logits[0] - logits[1]).square().mean().sqrt() / logits[0].square().mean().sqrt()
    assert 1e-6 < error < 0.05


def test_wrong_use_of_a_paged_cache_is_refused(libraries):
    torch, transformers, bridge = libraries
    package = importlib.import_module(BRIDGE)
    model, cache = paged_llama(torch, transformers)
    text = torch.randint(3, 96, (2, 9))
    with pytest.raises(jattn.UnsupportedError, match=r"under torch\.no_grad"):
        model(text, past_key_values=cache)
    query = torch.zeros(2, 4, 9, 16)
    keys, values = cache.update(query[:, :2], query[:, :2], 0)
    with pytest.raises(jattn.UnsupportedError, match="query has a batch of 1, but must have one"):
        bridge.Attention()(model, query[:1], keys, values, is_causal=True)
    keys, values = cache.update(query[:, :2], query[:, :2], 0)
    for save in (pickle.dumps, copy.copy):
        with pytest.raises(jattn.UnsupportedError, match="cannot be pickled or saved"):
            save(cache.layers[0])
    with pytest.raises(jattn.UnsupportedError, match="cannot be pickled or saved"):
        torch.save(cache, io.BytesIO())
    sinks = torch.zeros(4, requires_grad=True)
    with pytest.raises(jattn.UnsupportedError, match="a PagedCache has no gradients"):
        bridge.Attention()(model, query, keys, values, is_causal=True, s_aux=sinks)
    with torch.no_grad():
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            with pytest.raises(
                jattn.UnsupportedError, match='must have attn_implementation="jattn"'
            ):
                model(text, past_key_values=package.PagedCache(model.config, 64))
        model.set_attn_implementation("jattn")
        small = package.PagedCache(model.config, 10)
        with pytest.raises(ValueError, match="would hold 11 tokens, but must hold at most"):
            model.generate(text, past_key_values=small, max_new_tokens=9, do_sample=False)
        mask = torch.ones_like(text)
        mask[0, :3] = 0
        cache = package.PagedCache(model.config, 64)
        model(text, attention_mask=mask, past_key_values=cache)
        words = "hidden from all queries when they were written"
        with pytest.raises(jattn.UnsupportedError, match=words):
            model(text[:, :1], attention_mask=torch.ones(2, 10), past_key_values=cache)
    with pytest.raises(ValueError, match=r"(?s)max_cache_len.*block_size.*kv_layout"):
        package.PagedCache(model.config, 0, block_size=-1, kv_layout="HDN")
    with pytest.raises(
        ValueError, match=r"(?s)format: .*int8.*jattn\.Int8.*config: a Llama.*model\.config"
    ):
        package.PagedCache(model, 64, format="int8")
