"""How jattn starts inside tpu-inference: hooks, processes and memory.

`test_tpu_inference_refusals.py` tests what is refused at the start, `test_tpu_inference.py` tests
attention, and `test_vllm.py` runs the real host.
"""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import tomllib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.integrations import tpu_inference
from jattn.integrations.tpu_inference import cpu, memory, processes
from tests.support import stand_in_host
from tests.support.processes import ROOT
from tests.support.stand_in_host import Backends, module

host = stand_in_host.host  # the fixture


def test_vllm_finds_the_plugin_by_its_entry_point():
    text = (ROOT / "pyproject.toml").read_text()
    plugins = tomllib.loads(text)["project"]["entry-points"]["vllm.general_plugins"]
    point = importlib.metadata.EntryPoint("jattn", plugins["jattn"], "vllm.general_plugins")
    assert point.load() is tpu_inference.register


def test_the_extra_is_the_version_that_was_tested():
    text = (ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    tested = tpu_inference.TESTED
    assert extras["vllm"] == [f"tpu-inference=={tested}", f"vllm-tpu=={tested}"]


def test_the_plugin_does_nothing_without_its_host(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tpu_inference", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tpu_inference.register()
    assert not caplog.records


def test_the_plugin_only_logs_where_the_host_takes_no_backends(host, caplog):
    host.version = "0.27.0"
    del sys.modules["tpu_inference.layers.common.attention_backend"].register_attention_backend
    tpu_inference.register()
    [record] = caplog.records
    assert "0.27.0" in record.getMessage()
    assert tpu_inference.TESTED in record.getMessage()
    assert not host.told


def test_another_version_is_refused_when_jattn_is_asked_for_and_not_before(host, monkeypatch):
    host.version = "0.33.1"
    tpu_inference.register()
    assert not hasattr(sys.modules["tpu_inference.utils"], "hbm_usage_bytes")
    with pytest.raises(ValueError, match=r"tpu-inference: version 0\.33\.1, but must be 0\.32\.0"):
        host.start()
    monkeypatch.setenv(tpu_inference.ANY_VERSION, "1")
    host.start()


@pytest.mark.parametrize(
    ("platforms", "chips", "hooked"),
    [
        ("", 4, False),
        ("tpu,cpu", 4, False),
        ("proxy", 0, False),
        ("", 0, True),
        ("cpu", 4, True),  # device files of other accelerators are counted as chips
    ],
)
def test_hooks_are_for_machines_without_tpus(host, monkeypatch, platforms, chips, hooked):
    host.chips = chips
    monkeypatch.setattr("tpu_inference.envs.JAX_PLATFORMS", platforms)
    tpu_inference.register()
    utils, info = (sys.modules[f"tpu_inference.{name}"] for name in ("utils", "tpu_info"))
    assert hasattr(utils, "hbm_usage_bytes") == hooked
    if not hooked:
        assert info.get_num_chips() == chips
        return
    assert info.get_num_chips() == 0
    assert info.get_num_cores_per_chip() == 1
    mesh = utils.make_optimized_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    [(used, there)] = utils.hbm_usage_bytes(jax.devices()[:1])
    assert 0 == used < 2**20 < there
    assert utils.get_device_name(2) == "cpu-2"
    options = sys.modules["tpu_inference.models.common.compiler_options"]
    assert options.get_step_fn_compiler_options() == {}
    overwritten = np.zeros(3)
    sent, kept = utils.general_device_put((overwritten, None), sharding=None)
    overwritten[:] = 1
    assert not sent.any()
    assert kept is None
    put = utils.general_device_put
    tpu_inference.enable_cpu()
    assert utils.general_device_put is put  # the second time changes nothing
    t2j = sys.modules["tpu_inference.layers.vllm.quantization.unquantized"].t2j
    assert t2j(SimpleNamespace(clone=lambda: "a copy"), use_dlpack=False) == "a copy"


def test_received_blocks_are_in_the_caches_before_the_step(host):
    tpu_inference.enable_cpu()
    mixin = sys.modules["vllm.v1.worker.kv_connector_model_runner_mixin"]
    step = SimpleNamespace(has_sync_kv_loads=False)
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step, defer_finalize=True):
        assert step.has_sync_kv_loads


def test_runs_of_blocks_are_put_into_every_layer(host):
    tpu_inference.enable_cpu()
    copy = sys.modules["tpu_inference.distributed.kv_transfer"].multi_layer_copy
    blocks = [jnp.zeros((5, 3)) + jnp.arange(1.0, 6.0)[:, None] * layer for layer in (1, 10)]
    found = {}
    for count in (2, None):
        caches = [jnp.zeros((9, 3)) for _ in blocks]
        put = copy(
            src_array=blocks,
            dest_array=caches,
            src_offsets=jnp.array([3, 0, 2], jnp.int32),
            dest_offsets=jnp.array([1, 6, 8], jnp.int32),
            chunk_sizes=jnp.array([2, 2, 1], jnp.int32),
            num_chunks=None if count is None else jnp.array([count], jnp.int32),
            mesh=None,
        )
        assert all(cache.is_deleted() for cache in caches)  # written in place
        np.testing.assert_array_equal(put[1], 10 * put[0])
        found[count] = put[0][:, 0].tolist()
    assert found == {2: [0, 4, 5, 0, 0, 0, 1, 2, 0], None: [0, 4, 5, 0, 0, 0, 1, 2, 3]}


def test_draft_models_are_compiled_without_tpu_options(host):
    modules = "tpu_inference.spec_decode.jax."
    eagle3 = sys.modules[f"{modules}eagle3"].Eagle3Proposer()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        eagle3._propose([jnp.zeros(2)], 3, ())
    tpu_inference.enable_cpu()
    caches = [jnp.zeros(2)]
    steps = {"num_speculative_tokens": 3, "layer_name_to_kvcache_index": (("layer.0", 0),)}
    [found] = eagle3._propose(kv_caches=caches, **steps)
    assert found.tolist() == [3, 3]
    assert caches[0].is_deleted()  # written in place
    caches = [jnp.zeros(2)]
    [found] = sys.modules[f"{modules}dflash"].DFlashProposer()._propose(caches)
    assert found.tolist() == [1, 1]
    assert caches[0].is_deleted()


def test_torch_weights_are_loaded_on_this_process_s_cpu(host, monkeypatch):
    processes.use_local_cpus()
    ours = [jax.devices()[-1]]
    monkeypatch.setattr(jax, "local_devices", lambda *, backend: ours)
    for name in ("models.vllm.vllm_model_wrapper", "layers.vllm.process_weights.cleanup_sharding"):
        seen = sys.modules[f"tpu_inference.{name}"].jax
        assert seen.devices("cpu") is ours
        assert seen.devices() == jax.devices()
        assert seen.default_device is jax.default_device


def test_a_process_that_was_not_forked_finds_the_backend(host):
    path = f"{tpu_inference.__name__}.VllmBackend"
    member = Backends.register("JATTN", path)
    sent = [pickle.dumps(member)]
    tpu_inference.register()
    sent.append(pickle.dumps([member, Backends.FLASH_ATTN]))
    Backends.forget("JATTN")
    with pytest.raises(ValueError, match="is not a valid Backends"):
        pickle.loads(sent[0])
    try:
        found, other = pickle.loads(sent[1])
        assert (found.name, found.value, other) == ("JATTN", path, Backends.FLASH_ATTN)
        assert pickle.loads(sent[1])[0] is found
    finally:
        Backends.forget("JATTN")


def test_the_host_takes_jattn_in_any_process_and_no_other_backend(host):
    tpu_inference.register()
    tpu_inference.register()
    check = sys.modules["tpu_inference.platforms.tpu_platform"].check_attention_backend_config
    check(SimpleNamespace(backend=SimpleNamespace(name="JATTN")))
    with pytest.raises(ValueError, match="forked processes only"):
        check(SimpleNamespace(backend=SimpleNamespace(name="ANOTHER")))


def test_several_machines_without_tpus_get_a_worker_that_connects_them(host, monkeypatch):
    tpu_inference.register()
    platform = sys.modules["tpu_inference.platforms.tpu_platform"].TpuPlatform
    asked = stand_in_host.config()
    asked.backend = SimpleNamespace(name="JATTN")
    platform.check_and_update_config(asked)
    assert asked.parallel_config.worker_cls == "the host's"
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    platform.check_and_update_config(asked)
    path, _, name = asked.parallel_config.worker_cls.rpartition(".")
    joined = []
    monkeypatch.setattr(processes, "join", lambda *given: joined.append(given))
    worker = getattr(sys.modules[path], name)()
    worker.init_device()
    assert hasattr(sys.modules["tpu_inference.models.vllm.vllm_model_wrapper"], "jax")
    assert worker.ready
    assert joined == [("tcp://10.0.0.1:4321", 1, 2)]
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND: 0, but must be 1"):
        platform.check_and_update_config(asked)


def test_processes_agree_on_where_they_meet(monkeypatch):
    kept, asked, started = {}, [], []

    class Store:
        def __init__(self, *where, **options):
            asked.append((where, options["is_master"]))

        def set(self, key, value):
            kept[key] = value.encode()

        def get(self, key):
            return kept[key]

    monkeypatch.setitem(sys.modules, "torch", module("torch", __path__=[]))
    monkeypatch.setitem(
        sys.modules, "torch.distributed", module("torch.distributed", TCPStore=Store)
    )
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda address, **given: started.append((address, given))
    )
    for rank in range(2):
        processes.join("tcp://127.0.0.1:4321", rank, 2)
    assert asked == [(("127.0.0.1", 4321), False)] * 2
    (first, zero), (second, one) = started
    assert first == second
    assert first.startswith("127.0.0.1:")
    assert first != "127.0.0.1:4321"
    assert zero == {"num_processes": 2, "process_id": 0}
    assert one == {"num_processes": 2, "process_id": 1}


def test_other_processes_are_assumed_to_have_as_much_memory_as_this_one():
    here = SimpleNamespace(
        platform="gpu",
        process_index=0,
        memory_stats=lambda: {"bytes_in_use": 3, "bytes_limit": 10},
    )
    there = SimpleNamespace(platform="gpu", process_index=1)
    assert cpu._memory([there, here]) == [(3, 10), (3, 10)]


GIB = 1 << 30


MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"}


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


CONTAINERS = {  # a container's files, and how many GiB are left
    "none": ({}, 32),
    "version 2, unlimited": (
        {
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "max\n",
            f"{V2}/memory.current": f"{3 * GIB}\n",
            f"{V2}/memory.stat": "anon 5\n",
        },
        32,
    ),
    "version 2, limited by the parent group": (
        {
            "proc/self/cgroup": "0::/pods/one\n",
            f"{V2}/pods/memory.max": f"{16 * GIB}\n",
            f"{V2}/pods/memory.current": f"{12 * GIB}\n",
            f"{V2}/pods/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            f"{V2}/pods/one/memory.max": f"{20 * GIB}\n",
            f"{V2}/pods/one/memory.current": f"{GIB}\n",
            f"{V2}/pods/one/memory.stat": "anon 5\n",
        },
        6,
    ),
    "version 1, seen from inside": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/pods\n4:memory:/not/mounted/here\n0::/\n",
            f"{V1}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{V1}/memory.usage_in_bytes": f"{5 * GIB}\n",
            f"{V1}/memory.stat": f"cache 7\ntotal_inactive_file {GIB}\n",
        },
        4,
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_memory_is_what_the_machine_and_the_container_have_left(tmp_path, name):
    files, left = CONTAINERS[name]
    for path, text in {**MACHINE, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert memory.available(tmp_path) == left * GIB


def test_workers_of_one_machine_share_its_memory(host, monkeypatch):
    tpu_inference.register()
    monkeypatch.setattr(memory, "available", lambda: 24 * GIB)
    monkeypatch.setattr(cpu, "local_workers", 1)
    here = SimpleNamespace(platform="cpu", process_index=0)
    shares = {}
    for stages in (1, 3):
        host.start(pipeline_parallel_size=stages, async_scheduling=False)
        shares[stages] = cpu._memory([here, here])
    assert shares == {1: [(0, 6 * GIB)] * 2, 3: [(0, 2 * GIB)] * 2}
    platform = sys.modules["tpu_inference.platforms.tpu_platform"].TpuPlatform
    host.config = stand_in_host.config(data_parallel_size_local=2)
    host.config.backend = SimpleNamespace(name="JATTN")
    platform.check_and_update_config(host.config)  # before each replica gets its own process
    host.told["jattn"]["attention"]()
    assert cpu._memory([here]) == [(0, 6 * GIB)]
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")  # each worker on its own machine
    host.start()
    assert cpu._memory([here]) == [(0, 12 * GIB)]
