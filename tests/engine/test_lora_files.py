"""Files of LoRA adapters: each of PEFT's settings is applied, or refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from safetensors import numpy as safetensors

from examples.engine.mesh import Parameter
from examples.models.lora import read_lora
from tests.support.lora import LINEARS, small_model, write_adapter


def test_settings_of_peft_are_applied(tmp_path):
    """Ranks and scales per layer, chosen by the end of its path or by a regular expression."""
    config = {"lora_alpha": 12, "ranks": {"q_proj": 2}}
    for rslora in (False, True):
        pattern = r"^model\.layers\.0\.mlp\.up_proj" if rslora else r".*\.up_proj"
        config["alpha_pattern"] = {pattern: 5}
        write_adapter(tmp_path, small_model(), use_rslora=rslora, **config)
        lora = read_lora(tmp_path, LINEARS, frozenset())
        write_adapter(tmp_path, small_model(), ranks={"q_proj": 2})
        plain = read_lora(tmp_path, LINEARS, frozenset())
        scales = {}
        for name, (down, up) in lora.factors.items():
            np.testing.assert_array_equal(down, plain.factors[name][0])
            other = plain.factors[name][1] / (2 if name.endswith("q_proj") else 1)
            scales[name] = float(np.mean(up / other))
        expected = (12 / 2**0.5, 5 / 4**0.5) if rslora else (12 / 2, 5 / 4)
        assert list(scales.values()) == pytest.approx([expected[1], expected[0]], rel=1e-5)
        assert lora.rank == 4
        assert lora.digest != plain.digest


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, r"peft_type is 'LOHA', but must be 'LORA'"),
        ({"use_dora": True}, r"use_dora is True, which is not supported here"),
        ({"bias": "lora_only"}, r"bias is 'lora_only', but must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights is 'pissa'"),
        ({"fan_in_fan_out": True, "lora_bias": True}, r"fan_in_fan_out is True.*lora_bias is True"),
        ({"target_parameters": ["experts.up_proj"]}, r"target_parameters is \['experts.up_proj'\]"),
        ({"a_field_of_next_year": 1}, r"a_field_of_next_year is 1"),
        ({"r": 0}, r"r is 0, but must be a number above 0"),
        ({"r": 3}, r"lora_A and lora_B are .*\(4, 8\).*but must be .*\(3, 8\)"),
    ],
)
def test_unsupported_settings_are_refused_by_name(config, words, tmp_path):
    write_adapter(tmp_path, small_model(), **config)
    with pytest.raises(ValueError, match=words):
        read_lora(tmp_path, LINEARS, frozenset())


@pytest.mark.parametrize("size", [np.inf, np.nan, 1e6])
def test_numbers_that_would_reach_other_requests_are_refused(size, tmp_path):
    with np.errstate(invalid="ignore"):
        write_adapter(tmp_path, small_model(), size=size)
    with pytest.raises(ValueError, match=r"q_proj: lora_A or lora_B has NaN or numbers above"):
        read_lora(tmp_path, LINEARS, frozenset())


def test_missing_layers_are_refused_by_name(tmp_path):
    model = dataclasses.replace(
        small_model(), linears={**LINEARS, "layers.0.experts.3.up_proj": (Parameter((6, 8)),) * 2}
    )
    write_adapter(tmp_path, model)
    with pytest.raises(ValueError, match=r"layers.0.experts.3.up_proj.lora_A.weight does not"):
        read_lora(tmp_path, LINEARS, frozenset())
    idle = frozenset({"layers.0.experts.3.up_proj.weight"})
    assert set(read_lora(tmp_path, LINEARS, idle).factors) == set(LINEARS)


def test_broken_files_are_reported(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read"):
        read_lora(tmp_path, LINEARS, frozenset())
    write_adapter(tmp_path, small_model())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        read_lora(tmp_path, LINEARS, frozenset())
    for text in ("{", "[]"):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config.json is not"):
            read_lora(tmp_path, LINEARS, frozenset())
    write_adapter(tmp_path, small_model())
    safetensors.save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapts nothing"):
        read_lora(tmp_path, LINEARS, frozenset())
