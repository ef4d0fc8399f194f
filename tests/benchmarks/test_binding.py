"""The CPU peer runs with the environment that vLLM gives its workers."""

from benchmarks.cpu import binding


def test_a_thread_on_each_core_is_bound_as_vllm_binds_it():
    gomp = binding.binding([1, 3], "/a/libtcmalloc.so:/b/libgomp.so.1")
    assert gomp == {"OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": "1 3"}
    intel = binding.binding([1, 3], "/b/libiomp5.so")
    assert intel["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[1,3]"
    assert (intel["KMP_BLOCKTIME"], intel["KMP_TPAUSE"]) == ("5", "0")
    other = binding.binding([1, 3], "")
    assert (other["OMP_PLACES"], other["OMP_PROC_BIND"]) == ("{1,3}", "true")


def test_the_last_allowed_processor_of_each_core_is_used(tmp_path):
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    assert binding.one_cpu_per_core(range(4), tmp_path) == [2, 3]
    assert binding.one_cpu_per_core([0, 1, 3], tmp_path) == [0, 3]
    assert binding.one_cpu_per_core([5, 4], tmp_path) == [4, 5]  # without a topology


def test_torchs_openmp_is_preloaded(tmp_path):
    for library in ("torch/lib/libgomp.so.1", "vllm/libs/libtcmalloc.so.4"):
        (tmp_path / library).parent.mkdir(parents=True)
        (tmp_path / library).touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "{tmp_path}/torch\\n{tmp_path}/vllm\\n"\n')
    python.chmod(0o755)
    found = binding.preloads(str(python), "")
    ours = [f"{tmp_path}/vllm/libs/libtcmalloc.so.4", f"{tmp_path}/torch/lib/libgomp.so.1"]
    assert found.split(":") == ours
    assert binding.preloads(str(python), "/x/libiomp5.so").split(":") == [ours[0], "/x/libiomp5.so"]
    assert binding.recorded({"LD_PRELOAD": found, "HOME": "/root"}) == {
        "LD_PRELOAD": "libtcmalloc.so.4:libgomp.so.1"
    }
    assert binding.preloads(str(tmp_path / "none"), "/x/any.so") == "/x/any.so"
